"""The order of collectives in the code that Inductor generates: pinned, and read back.

Inductor keeps the order of a graph's nodes only as far as data flows between them. A fused kernel
stands where its first part stood and pulls up what its last part needs::

    graph        a = sin(x)   mm   wait(w)   b = a + w     code, if a and b are fused
                                                           wait(w)   a, b   mm

So before it fuses, every call of code that is not Inductor's own (collectives, waits, matrix
products, users' Triton kernels) and every template (products again, FlexAttention) is made to
depend on the one before it; a fusion that would reorder them is then a cycle, which Inductor does
not make. Afterwards the calls are read from the generated code (``code_order``), and their numbers
compared. Code from a compile cache is read too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fsdp_dynamo.dynamo import artifacts
from fsdp_dynamo.errors import FSDPError
from fsdp_dynamo.graph_path.code_order import CodeCall, order_in_code
from fsdp_dynamo.torch_features import SchedulerPass
from graph_passes.text.boundary_labels import Label


class OrderError(FSDPError):
    """Generated code whose collectives are not in the order that was planned."""


def check_order(source: str) -> None:
    """Return if collectives and waits stand in generated code as they were planned.

    Each carries its number and how many there are, so the code itself says what was planned.

    Args:
        source: Python code of a graph, as Inductor generates it.

    Raises:
        OrderError: naming the first one that is out of place, or missing.
    """
    calls = [call for call in order_in_code(source) if call.labels]
    placed = [(label, call) for call in calls for label in call.labels]
    for position, (label, call) in enumerate(placed):
        if label.number != position:
            by_number = {other.number: other for other, _ in placed}
            wanted = by_number.get(position)
            raise _wrong(position, "none" if wanted is None else _name(wanted), _name(label), call)
    if placed and len(placed) != placed[0][0].count:
        raise _wrong(len(placed), f"{placed[0][0].count} of them", "no further one", placed[-1][1])


def _name(label: Label) -> str:
    return f"{label.kind} of unit '{label.unit}' or its wait (number {label.number})"


def _wrong(position: int, expected: str, got: str, call: CodeCall) -> OrderError:
    return OrderError(
        expected=f"collective or wait {position} of the graph to be {expected}",
        got=got,
        where=f"code that Inductor generated, line {call.line}, {call.name}",
        fix="Inductor has reordered the graph: leave its options that reorder nodes off. With "
        "all of them off this is a bug of fsdp_dynamo.",
    )


def checking(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """``compile_fx``'s inner compiler, with ``check_order`` of what it returns.

    Code from Inductor's cache of graphs is checked as well. The cache in front of it, of
    whole joint graphs, holds only what has once passed here.
    """

    def compile_and_check(*args: Any, **kwargs: Any) -> Any:
        compiled = inner_compile(*args, **kwargs)
        source = getattr(compiled, "source_code", "")
        phase = "backward" if kwargs.get("is_backward") else "forward"
        artifacts.emit(f"{artifacts.PREFIX}{phase}.inductor", lambda: source)
        if source and "torch.ops.fsdp_dynamo." in source:
            check_order(source)
        return compiled

    return compile_and_check


class PinOrder(SchedulerPass):  # type: ignore[misc]
    """Inductor's calls of foreign code, and its templates, run in the order of the graph.

    Before::

        mm_1 -> pointwise    wait    mm_2         in this order by chance

    After::

        mm_1 -> wait -> mm_2                      each depends on the one before it
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        # Private: there is no public way to order two nodes between which no data flows.
        from torch._inductor.dependencies import WeakDep
        from torch._inductor.scheduler import ExternKernelSchedulerNode

        pinned = [n for n in nodes if isinstance(n, ExternKernelSchedulerNode) or n.is_template()]
        pinned = [node for node in pinned if node.get_outputs()]
        if not any(_is_ours(node) for node in pinned):
            return nodes
        for before, node in pairwise(pinned):
            buffer = before.get_outputs()[0].get_name()
            # It names no buffer that the node mutates: no reason to fuse, or to keep memory.
            node.add_fake_dep(WeakDep(buffer, mutating_buf=node.get_name(), is_fake=True))
        nodes[0].scheduler.compute_ancestors()
        return nodes

    def uuid(self) -> str:
        """Changes with this file."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _is_ours(node: Any) -> bool:
    overload = getattr(node.node, "op_overload", None)
    return getattr(overload, "namespace", "") == "fsdp_dynamo"


SETTINGS: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "triton.reorder_for_reducing_graph_partitions": False,
    "_pre_fusion_custom_pass": PinOrder(),
}
"""Inductor's own reordering is off, what is left keeps the order.

Its overlap pass, ``enable_simple_overlap``, is on by default since torch 2.14 and stays as it is.
It moves torch's own collectives, tensor parallelism's say, and the pinned order holds those too.
"""


__all__: Sequence[str] = ["CodeCall", "OrderError", "PinOrder", "check_order", "order_in_code"]
