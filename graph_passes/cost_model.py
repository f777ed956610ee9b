"""Cost model: a roofline for compute, latency and bandwidth for collectives, in milliseconds.

It serves the schedule, the choice of units that stay unsharded, and the reports. All ranks agree on
its rates; nothing here measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from graph_passes.graph_utils import (
    group_of,
    hint,
    is_compute,
    is_gather,
    num_bytes,
    payload_bytes,
    payload_numel,
    values_of,
    world_size_of,
)
from graph_passes.markers import wire_of
from graph_passes.wire_format import (
    Coding,
    WireFormat,
    coding_of_all_reduce,
    coding_of_gather,
    coding_of_reduction,
)


@dataclass(frozen=True)
class Link:
    """One rank's share of the link of a process group.

    Attributes:
        latency_ms: time of a collective besides its bytes, 0 or more.
        bytes_per_ms: bytes that a rank sends per millisecond of an all-gather while it receives,
            more than 0.
        name: groups with equal names share a link; ``""``: the group has a link of its own.
        node_ranks: ranks of the group on each node, where collectives are rings over several nodes;
            else 1. An all-to-all sends this many times more bytes between nodes than a ring.

    Raises:
        ValueError: a number outside those bounds.
    """

    latency_ms: float = 0.05
    bytes_per_ms: float = 1e6
    name: str = ""
    node_ranks: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_ms) and self.latency_ms >= 0):
            raise ValueError(f"latency_ms: expected 0 or more, got {self.latency_ms!r}")
        if not (math.isfinite(self.bytes_per_ms) and self.bytes_per_ms > 0):
            raise ValueError(f"bytes_per_ms: expected more than 0, got {self.bytes_per_ms!r}")
        if self.node_ranks < 1:
            raise ValueError(f"node_ranks: expected 1 or more, got {self.node_ranks!r}")


@dataclass(frozen=True)
class Device:
    """Rates of the device that a rank computes on.

    Attributes:
        flops_per_ms: floating-point operations of matrix products, more than 0.
        bytes_per_ms: bytes read and written from memory, more than 0.
        flops_by_dtype: ``flops_per_ms`` in other dtypes, by name, such as ``"bfloat16"``.
        encode_bytes_per_ms: ``bytes_per_ms`` of encoding, by wire format (``WireFormat.encode``, or
            its name alone).
        decode_bytes_per_ms: ``bytes_per_ms`` of decoding, by wire format.

    Raises:
        ValueError: a number outside those bounds.
    """

    flops_per_ms: float = 5e7
    bytes_per_ms: float = 5e6
    flops_by_dtype: Mapping[str, float] = field(default_factory=dict)
    encode_bytes_per_ms: Mapping[str, float] = field(default_factory=dict)
    decode_bytes_per_ms: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {"flops_per_ms": self.flops_per_ms, "bytes_per_ms": self.bytes_per_ms}
        for table in ("flops_by_dtype", "encode_bytes_per_ms", "decode_bytes_per_ms"):
            given |= {f"{table}[{name!r}]": one for name, one in getattr(self, table).items()}
        for name, value in given.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: expected more than 0, got {value!r}")

    def flops_per_ms_in(self, dtype: torch.dtype | None) -> float:
        """Return ``flops_per_ms`` of products in a dtype."""
        name = str(dtype).removeprefix("torch.")
        return self.flops_by_dtype.get(name, self.flops_per_ms)

    def coding_ms(self, wire: WireFormat, coding: Coding) -> tuple[float, float]:
        """Return the milliseconds of encoding and of decoding in a format."""
        tables = (self.encode_bytes_per_ms, self.decode_bytes_per_ms)
        rates = [
            table.get(wire.encode(), table.get(wire.name, self.bytes_per_ms)) for table in tables
        ]
        return coding.encode_bytes / rates[0], coding.decode_bytes / rates[1]


@dataclass(frozen=True)
class CostModel:
    """Milliseconds of the nodes of a graph.

    Attributes:
        device: device that computes.
        link: link that collectives use.
        links: links by process group name, where they differ from ``link``.
        receives_apart: whether a reduction receives into a buffer besides its input and output, as
            with gloo.
    """

    device: Device = field(default_factory=Device)
    link: Link = field(default_factory=Link)
    links: Mapping[str, Link] = field(default_factory=dict)
    receives_apart: bool = True

    def link_of(self, collective: fx.Node) -> Link:
        """Return the link of a collective."""
        return self.links.get(group_of(collective), self.link)

    def compute_ms(self, node: fx.Node) -> float:
        """Return the time of a node that computes: the slower of arithmetic and memory traffic."""
        if not is_compute(node):
            return 0.0
        traffic = sum(num_bytes(n) for n in (node, *node.all_input_nodes))
        flops_per_ms = self.device.flops_per_ms_in(_dtype_of(node))
        return max(num_flops(node) / flops_per_ms, traffic / self.device.bytes_per_ms)

    def collective_ms(self, node: fx.Node) -> float:
        """Return the time of a collective that has its link to itself."""
        link = self.link_of(node)
        ring_bytes = wire_bytes(node) * _ring_share(node, link.node_ranks)
        return link.latency_ms + ring_bytes / link.bytes_per_ms

    def coding_ms(self, node: fx.Node) -> tuple[float, float]:
        """Return the time of encoding at the issue and of decoding at the wait.

        In a compiled graph both delay the compute, on an accelerator too.
        """
        wire, size = wire_of(node), world_size_of(node)
        if wire is None:
            return 0.0, 0.0
        if size is None:
            payload, message = payload_bytes(node), _message_bytes(node, 1)
            return self.device.coding_ms(wire, coding_of_all_reduce(payload, message))
        coding = coding_of_gather if is_gather(node) else coding_of_reduction
        return self.device.coding_ms(
            wire, coding(payload_bytes(node), _message_bytes(node, size), size)
        )


def _dtype_of(node: fx.Node) -> torch.dtype | None:
    return next((one.dtype for one in values_of(node) if hasattr(one, "dtype")), None)


def wire_bytes(node: fx.Node) -> int:
    """Return the bytes that a rank sends: ``(N-1)/N`` of the unsharded side; all-reduces twice."""
    size = world_size_of(node)
    message = _message_bytes(node, size or 1)
    if not message:
        return tensor_bytes(node)
    return message * (2 if size is None else size - 1)


def _ring_share(node: fx.Node, node_ranks: int) -> float:
    """Return the bytes of a ring that take as long as one byte that a rank sends.

    Reductions in a format are all-to-alls: on M nodes of L ranks, (M - 1) * L of a rank's messages
    go to other nodes; a ring passes on M - 1.
    """
    if wire_of(node) is None or is_gather(node):
        return 1.0
    is_all_reduce = world_size_of(node) is None  # an all-to-all, and a gather of the sums
    return (node_ranks + 1) / 2 if is_all_reduce else float(node_ranks)


def tensor_bytes(node: fx.Node) -> int:
    """Return the bytes that one rank would send without a format."""
    size = world_size_of(node)
    if size is None:
        return 2 * payload_bytes(node)
    return payload_bytes(node) * (size - 1) // max(size, 1)


def messages_bytes(node: fx.Node) -> int:
    """Return the bytes of all messages that a collective holds; 0 without a format."""
    size = world_size_of(node)
    if size is None:  # to the ranks that sum, and back
        return 2 * _message_bytes(node, 1)
    return _message_bytes(node, size) * (size + 1 if is_gather(node) else 2 * size - 1)


def _message_bytes(node: fx.Node, size: int) -> int:
    """Return the bytes of one rank's message; 0 without a format."""
    wire = wire_of(node)
    return 0 if wire is None else wire.num_bytes(payload_numel(node) // max(size, 1))


def num_flops(node: fx.Node) -> int:
    """Return the floating-point operations of a node; 0 without metadata."""
    try:
        if _formula_of(node.target, node.kwargs) is None:
            return 0
        args, kwargs = pytree.tree_map_only(fx.Node, _value, (node.args, node.kwargs))
        flops = operator_flops(node.target, args, kwargs, _value(node))
    except (AttributeError, TypeError, ValueError):  # no metadata
        return 0
    return int(flops * (1 - _masked_share(node)))


def _masked_share(node: fx.Node) -> float:
    """Return the part of attention that a mask leaves out, 0 to 1, as the model's code states it.

    The mask itself is not read: it may differ between ranks, and their plans must be equal.
    """
    if node.target not in (_OPS.flex_attention, _OPS.flex_attention_backward):
        return 0.0
    said = (node.meta.get("custom") or {}).get("sparsity_hint", 0.0)
    return max(0.0, min(1.0, float(said)))


def operator_flops(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> int:
    """Return the floating-point operations of a matrix product, convolution or attention, else 0.

    Source: ``torch.utils.flop_counter``, which lacks attention on CPUs (two products forward, five
    backward). Users add formulas with ``register_flop_formula``.

    Args:
        operator: the operator that is called.
        args: its tensors, or their metadata, and other arguments.
        kwargs: its keyword arguments.
        output: its result.
    """
    formula = _formula_of(operator, kwargs)
    return 0 if formula is None else hint(formula(*args, **kwargs, out_val=output))


_Formula = Callable[..., Any]
_OPS = torch.ops.higher_order
_ON_CPUS = "_scaled_dot_product_flash_attention_for_cpu"


def _formula_of(operator: Any, kwargs: Mapping[str, Any]) -> _Formula | None:
    if operator in _FORMULAS:
        return _FORMULAS[operator]
    counted = getattr(operator, "overloadpacket", None)
    if counted in _FORMULAS:
        return _FORMULAS[counted]
    if operator in (_OPS.triton_kernel_wrapper_functional, _OPS.triton_kernel_wrapper_mutation):
        counted = _counted_kernel(kwargs["kernel_idx"])
    formula: _Formula | None = flop_registry.get(counted)
    return formula


def _attention_on_cpus(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_on_cpus_backward(grad: Any, *args: Any, **kwargs: Any) -> Any:
    return hint(_attention_on_cpus(*args)) * 5 // 2


def _flex_attention_flops(
    query: Any, key: Any, value: Any, *_: Any, products: tuple[int, int], **__: Any
) -> int:
    """Return the operations of FlexAttention without a mask.

    Args:
        query: ``(B, H, M, E)``.
        key: ``(B or 1, H or fewer, N, E)``.
        value: ``(B or 1, H or fewer, N, V)``.
        products: number of products over or of ``E``, and over or of ``V``.
    """
    scores = hint(query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2])
    widths = products[0] * hint(query.shape[3]) + products[1] * hint(value.shape[3])
    return 2 * scores * widths


_FORMULAS: dict[Any, _Formula] = {
    getattr(torch.ops.aten, _ON_CPUS): _attention_on_cpus,
    getattr(torch.ops.aten, f"{_ON_CPUS}_backward"): _attention_on_cpus_backward,
    _OPS.flex_attention: partial(_flex_attention_flops, products=(1, 1)),
    _OPS.flex_attention_backward: partial(_flex_attention_flops, products=(3, 2)),
}


def _counted_kernel(number: int) -> Any:
    """Return the kernel of a Triton call, without its autotuning and heuristics."""
    # Private: a graph holds only the kernel's number in a table.
    from torch._higher_order_ops.triton_kernel_wrap import get_kernel

    kernel: Any = get_kernel(number)
    while kernel not in flop_registry and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


__all__ = [
    "CostModel",
    "Device",
    "Link",
    "messages_bytes",
    "num_flops",
    "operator_flops",
    "tensor_bytes",
    "wire_bytes",
]
