"""Costs of operators that have no formula of torch's: FlexAttention, Triton kernels, the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch.fx import traceback
from torch.nn.attention import flex_attention as flex
from torch.utils.flop_counter import flop_registry

from graph_passes.cost_model import CostModel, Device, num_flops
from graph_passes.graph_utils import is_compute

B, H, HKV, M, N, E, V = 2, 4, 2, 8, 16, 4, 6
HOPS = torch.ops.higher_order


def _graphs(function: Callable[..., Any], *inputs: torch.Tensor) -> list[fx.Graph]:
    """The forward and backward graph of a function."""
    graphs: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    anywhere = mock.patch.object(flex, "_validate_device", _accept)
    with anywhere, traceback.preserve_node_meta():
        torch.compile(function, backend=backend, fullgraph=True)(*inputs).sum().backward()
    return graphs


def _accept(*tensors: torch.Tensor) -> None:
    """On a CPU too: torch's operator refuses gradients there, for want of a kernel."""


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return flex.flex_attention(query, key, value, enable_gqa=True)  # type: ignore[return-value]


def _sparse(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with traceback.annotate({"sparsity_hint": 0.75}):
        return _flex(query, key, value)


@pytest.mark.parametrize(("function", "share"), [(_flex, 1.0), (_sparse, 0.25)])
def test_flex_attention(function: Callable[..., Any], share: float) -> None:
    """Two products forward, five backward; fewer where the model says what its mask leaves out."""
    shapes = (B, H, M, E), (B, HKV, N, E), (B, HKV, N, V)
    graphs = _graphs(function, *[torch.rand(shape, requires_grad=True) for shape in shapes])
    names = HOPS.flex_attention, HOPS.flex_attention_backward
    pair = [next(n for n in g.nodes if n.target is op) for g, op in zip(graphs, names, strict=True)]
    scores = 2 * B * H * M * N
    assert [num_flops(node) for node in pair] == [
        share * scores * (E + V),
        share * scores * (3 * E + 2 * V),
    ]
    slow = CostModel(Device(flops_per_ms=1.0, bytes_per_ms=1e9))
    assert [slow.compute_ms(node) for node in pair] == [num_flops(node) for node in pair]
    assert all(CostModel(Device(bytes_per_ms=1.0)).compute_ms(n) > 4 * B * H * M * V for n in pair)


def _tensor(graph: fx.Graph, name: str, numel: int) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(numel, device="meta")
    return node


class _Kernel:
    """A ``JITFunction``, or what tunes one."""

    def __init__(self, fn: Any = None) -> None:
        if fn is not None:
            self.fn = fn


def _launch(kernel: Any) -> fx.Node:
    """A node that launches a Triton kernel, which reads 100 elements and writes 10."""
    graph = fx.Graph()
    tensors = {"x": _tensor(graph, "x", 100), "out": _tensor(graph, "out", 10)}
    number = kernel_side_table.add_kernel(kernel)
    return graph.call_function(
        HOPS.triton_kernel_wrapper_mutation,
        (),
        {
            "kernel_idx": number,
            "constant_args_idx": 0,
            "grid": [(1, 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": tensors,
        },
    )


def test_triton_kernels() -> None:
    """Bytes, and the user's formula where there is one, also below what tunes the kernel."""
    cost = CostModel(Device(flops_per_ms=1.0, bytes_per_ms=4.0))
    counted = _Kernel()
    try:
        plain, tuned = _launch(_Kernel()), _launch(_Kernel(counted))
        assert is_compute(plain)
        assert cost.compute_ms(plain) == cost.compute_ms(tuned) == 110.0

        def formula(*, kwargs: Any, out_val: Any, **_: Any) -> int:
            return 7 * int(kwargs["x"].numel())

        with mock.patch.dict(flop_registry, {counted: formula}):
            assert cost.compute_ms(plain) == 110.0
            assert cost.compute_ms(tuned) == 700.0
    finally:
        kernel_side_table.reset_table()


def test_an_operator_that_nobody_knows() -> None:
    """Bytes that it reads and writes, unless the user says more."""
    graph = fx.Graph()
    with torch.library._scoped_library("costs_of_unknown", "DEF") as library:
        library.define("mix(Tensor x, Tensor y) -> Tensor")
        packet = torch.ops.costs_of_unknown.mix
        node = graph.call_function(
            packet.default, (_tensor(graph, "x", 10), _tensor(graph, "y", 20))
        )
        node.meta["val"] = torch.empty(30, device="meta")
        cost = CostModel(Device(flops_per_ms=1.0, bytes_per_ms=4.0))
        assert cost.compute_ms(node) == 60.0
        with mock.patch.dict(
            flop_registry, {packet: lambda x, y, out_val: 5 * x.numel() * y.numel()}
        ):
            assert cost.compute_ms(node) == 1000.0
