"""What the planner and the fingerprint know of collectives that travel in fewer bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from graph_passes.cost_model import CostModel, Device, Link, messages_bytes, wire_bytes
from graph_passes.markers import (
    COLLECTIVE,
    CollectiveKind,
    Mark,
    choose_format,
    has_optional_format,
    wire_of,
)
from graph_passes.text.listing import describe_entry, fingerprint
from graph_passes.wire_format import WireFormat

NUMEL, RANKS = 4096, 4


def _collective(kind: CollectiveKind, wire: str) -> fx.Node:
    """One collective of fp32, among four ranks, in a graph of its own."""
    graph = fx.Graph()
    ops = torch.ops._c10d_functional
    sent = graph.placeholder("sent")
    if kind == "all_gather":
        node = graph.call_function(ops.all_gather_into_tensor.default, (sent, RANKS, "g"))
        sizes = (NUMEL // RANKS, NUMEL)
    elif kind == "all_reduce":
        node = graph.call_function(ops.all_reduce.default, (sent, "avg", "g"))
        sizes = (NUMEL, NUMEL)
    else:
        arguments = (sent, "avg", RANKS, "g")
        node = graph.call_function(ops.reduce_scatter_tensor.default, arguments)
        sizes = (NUMEL, NUMEL // RANKS)
    with FakeTensorMode():
        sent.meta["val"], node.meta["val"] = (torch.empty(size) for size in sizes)
    node.meta["custom"] = {COLLECTIVE: Mark("u", kind, "forward", 0, wire=wire).encode()}
    graph.output(node)
    return node


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_bytes_and_milliseconds(kind: CollectiveKind) -> None:
    exact = _collective(kind, "")
    assert wire_bytes(exact) == (RANKS - 1) * NUMEL // RANKS * 4
    half = _collective(kind, WireFormat("bfloat16").encode())
    assert wire_bytes(half) * 2 == wire_bytes(exact)
    quarter = _collective(kind, WireFormat("int8").encode())
    assert wire_bytes(quarter) == (RANKS - 1) * WireFormat("int8").num_bytes(NUMEL // RANKS)
    message, parts = wire_bytes(quarter) // (RANKS - 1), {"all_gather": 5, "reduce_scatter": 7}
    assert messages_bytes(quarter) == parts[kind] * message
    assert messages_bytes(exact) == 0
    cost = CostModel(link=Link(latency_ms=1.0, bytes_per_ms=100.0))
    assert cost.collective_ms(half) == 1 + wire_bytes(half) / 100


def test_an_all_reduce_travels_twice() -> None:
    exact, quarter = (_collective("all_reduce", wire) for wire in ("", "int8/64"))
    message = WireFormat("int8").num_bytes(NUMEL)
    assert (wire_bytes(exact), wire_bytes(quarter)) == (2 * 4 * NUMEL, 2 * message)
    assert (messages_bytes(exact), messages_bytes(quarter)) == (0, 2 * message)
    cost = CostModel(device=Device(bytes_per_ms=100.0))
    assert cost.coding_ms(exact) == (0, 0)
    once = (4 * NUMEL + message) / 100
    assert cost.coding_ms(quarter) == pytest.approx((once, 3 * once))


def test_fingerprint() -> None:
    exact, other = (fingerprint(_collective("all_gather", w).graph) for w in ("", "int8/256"))
    assert exact != other
    assert "1024 float32~int8/256" in describe_entry(other)


def test_an_optional_format_counts_where_it_was_chosen() -> None:
    wire = WireFormat("int8", 64, is_stochastic=True, is_optional=True)
    assert WireFormat.decode(wire.encode()) == wire
    assert WireFormat.decode(wire.chosen().encode()) == replace(wire, is_optional=False)
    exact, fixed, node = (
        _collective("reduce_scatter", text) for text in ("", wire.chosen().encode(), wire.encode())
    )
    assert has_optional_format(node)
    assert not has_optional_format(fixed)
    assert (wire_of(node), wire_bytes(node)) == (None, wire_bytes(exact))
    prints = {fingerprint(one.graph) for one in (exact, fixed, node)}
    choose_format(node, True)
    assert (wire_of(node), wire_bytes(node)) == (wire_of(fixed), wire_bytes(fixed))
    assert len(prints | {fingerprint(node.graph)}) == 4


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_time_of_coding(kind: CollectiveKind) -> None:
    """An unsharded tensor of 16384 bytes, messages of 1104.

    Of a gather: a shard in, a message out; four in, all out. Of a reduction: three parts in, three
    messages out; three in, and the own part is read and written.
    """
    cost = CostModel(Device(bytes_per_ms=10.0))
    assert cost.coding_ms(_collective(kind, "")) == (0.0, 0.0)
    of_gather = (4096 + 1104, 4 * 1104 + 16384)
    of_reduction = (3 * 4096 + 3 * 1104, 3 * 1104 + 2 * 4096)
    expected = of_gather if kind == "all_gather" else of_reduction
    found = cost.coding_ms(_collective(kind, "int8/64"))
    assert found == tuple(num_bytes / 10 for num_bytes in expected)
