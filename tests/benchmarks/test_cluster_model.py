"""The simulated cluster's arithmetic, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from benchmarks.cluster.link import CommunicationLog, HostLink, Request
from benchmarks.cluster.simulation import (
    ClusterModel,
    LinkModel,
    two_hosts,
)
from fsdp_dynamo import CollectivePrecision, ShardingStrategy
from fsdp_dynamo.estimator import Cluster, ElementSizes
from fsdp_dynamo.estimator.inventory import Inventory, UnitInventory, Work
from fsdp_dynamo.estimator.transfers import StepTransfers, sharding_of
from graph_passes.cost_model import CostModel, Link
from graph_passes.markers import COLLECTIVE, Mark
from graph_passes.wire_format import WireFormat, text_of

INTRA = LinkModel(latency_s=1e-4, bytes_per_s=1e9)
INTER = LinkModel(latency_s=2e-4, bytes_per_s=1e8)
TWO_NODES = ClusterModel(8, 4, INTRA, INTER, "ring")


@pytest.mark.parametrize(
    ("op", "seconds", "wire_bytes"),
    [
        # 8 MB, shards of 1 MB; latency 2 * 0.1 ms + 1 * 0.2 ms = 0.4 ms.
        ("all_gather", 0.4e-3 + max(1e6 / 1e8, 6e6 / 1e9), 7_000_000),
        ("reduce_scatter", 0.4e-3 + max(1e6 / 1e8, 6e6 / 1e9), 7_000_000),
        ("all_reduce", 2 * (0.4e-3 + 1e6 / 1e8), 14_000_000),
        ("all_to_all", 0.4e-3 + max(4e6 / 1e8, 3e6 / 1e9), 7_000_000),
        ("gather", 0.4e-3 + 4e6 / 1e8, 0),
        ("scatter", 0.4e-3 + 4e6 / 1e8, 7_000_000),
        ("broadcast", 0.4e-3 + 8e6 / 1e8, 16_000_000),
        ("reduce", 0.4e-3 + 8e6 / 1e8, 16_000_000),
        ("send", 0.2e-3 + 8e6 / 1e8, 8_000_000),
        ("recv", 0.2e-3 + 8e6 / 1e8, 0),
        ("barrier", 2 * 0.4e-3, 0),
    ],
)
def test_seconds_and_bytes(op: Any, seconds: float, wire_bytes: int) -> None:
    payload_bytes = 0 if op == "barrier" else 8_000_000
    assert TWO_NODES.seconds(op, payload_bytes) == pytest.approx(seconds)
    assert TWO_NODES.wire_bytes(op, payload_bytes) == wire_bytes


def test_links_by_hand() -> None:
    """The slower one counts; less than a node has one; one rank has none."""
    fast_network = ClusterModel(8, 4, INTRA, LinkModel(0, 1e12), "ring")
    assert fast_network.seconds("all_gather", 8_000_000) == pytest.approx(0.2e-3 + 6e6 / 1e9)
    part = ClusterModel(3, 8, INTRA, INTER, "ring")
    assert part.seconds("all_gather", 3_000_000) == pytest.approx(2 * 0.1e-3 + 2e6 / 1e9)
    assert part.seconds("send", 1_000_000) == pytest.approx(0.1e-3 + 1e6 / 1e9)
    assert part.wire_bytes("broadcast", 1_000_000) == 1_000_000
    alone = ClusterModel(1, 1, INTRA, INTER, "gloo")
    assert alone.seconds("all_reduce", 8_000_000) == 0
    assert alone.wire_bytes("all_reduce", 8_000_000) == 0


def test_gloo_reduce_scatter_sends_as_an_all_reduce() -> None:
    """As measured: 16.8 MB at two ranks, where all-to-all sends 8.4 MB."""
    hosts = two_hosts(gbit_per_s=1.0)
    assert hosts.wire_bytes("reduce_scatter", 16_800_000) == 16_800_000
    assert hosts.wire_bytes("all_to_all", 16_800_000) == 8_400_000
    assert hosts.seconds("reduce_scatter", 16_800_000) == pytest.approx(2 * (50e-6 + 8.4e6 / 125e6))


def test_models_of_subgroups() -> None:
    assert TWO_NODES.of_ranks([0, 4]).num_nodes == 2
    assert TWO_NODES.of_ranks([0, 1, 2]).num_nodes == 1
    with pytest.raises(NotImplementedError, match=r"equally many.*got \[0, 1, 4\]"):
        TWO_NODES.of_ranks([0, 1, 4])


def test_burst_is_saved_up_while_idle_and_refilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """1e8 B/s and a bucket of 1e7 bytes: up to 0.1 s of transfer is free after an idle while."""
    now = [100.0]
    monkeypatch.setattr("benchmarks.cluster.link.time.perf_counter", lambda: now[0])
    log = CommunicationLog()
    link = HostLink(log, ClusterModel(2, 1, INTRA, LinkModel(0, 1e8, 1e7), "ring").burst_s)

    def taken_s(seconds: float) -> float:
        link.issue(Request("all_gather", 1, 1, seconds, [], [], lambda: None))
        record = log.records()[-1]
        return record.done_s - record.starts_s

    assert taken_s(0.5) == pytest.approx(0.4)  # a full bucket
    assert taken_s(0.5) == pytest.approx(0.5)  # queued behind it: nothing was saved up
    now[0] = 101.0
    assert taken_s(0.06) == 0  # full again
    assert taken_s(0.06) == pytest.approx(0.02)  # what the one before left
    now[0] = 101.05
    assert taken_s(0.06) == pytest.approx(0.03)  # idle for 0.03 s since 101.02


NUMEL = 1 << 24
FORMAT = WireFormat("int8", is_stochastic=True)


def _reduction_node(kind: Any, ranks: int, wire: WireFormat | None) -> fx.Node:
    """The reduction of a gradient of ``NUMEL`` elements of bf16, in a graph of its own."""
    graph, ops = fx.Graph(), torch.ops._c10d_functional
    sent = graph.placeholder("sent")
    if kind == "all_reduce":
        node = graph.call_function(ops.all_reduce.default, (sent, "avg", "g"))
    else:
        node = graph.call_function(ops.reduce_scatter_tensor.default, (sent, "avg", ranks, "g"))
    with FakeTensorMode():
        sent.meta["val"] = torch.empty(NUMEL, dtype=torch.bfloat16)
        received = NUMEL if kind == "all_reduce" else NUMEL // ranks
        node.meta["val"] = torch.empty(received, dtype=torch.bfloat16)
    mark = Mark("u", kind, "backward", 0, wire=text_of(wire))
    node.meta["custom"] = {COLLECTIVE: mark.encode()}
    return node


@pytest.mark.parametrize("wire", [None, FORMAT], ids=["exact", "int8"])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("ranks", "node_ranks"), [(64, 8), (8, 4), (8, 1), (8, 8)])
def test_estimator_and_planner_agree(
    ranks: int, node_ranks: int, kind: str, wire: WireFormat | None
) -> None:
    """One collective: as many bytes on each link, and as many milliseconds, in all three models."""
    intra, inter = LinkModel(0, 4e10), LinkModel(0, 1e9)
    model = ClusterModel(ranks, node_ranks, intra, inter, "ring")
    payload = NUMEL * 2 if wire is None else ranks * wire.num_bytes(NUMEL // ranks)
    first = "reduce_scatter" if wire is None else "all_to_all"
    phases = [first] if kind == "reduce_scatter" else [first, "all_gather"]
    expected_ms = sum(model.seconds(op, payload) for op in phases) * 1e3

    cluster = Cluster(ranks, node_ranks, 1.0, float("inf"), 1e6, 4e7, 0.0, 1)
    for op in phases:
        traffic = model._traffic(op, payload)
        pattern = "all_to_all" if op == "all_to_all" else "ring"
        found = cluster.traffic(pattern, payload, ranks, model.num_nodes)
        assert found == pytest.approx((traffic.intra_bytes, traffic.inter_bytes))
    strategy = ShardingStrategy.NO_SHARD if kind == "all_reduce" else ShardingStrategy.FULL_SHARD
    precision = CollectivePrecision(**{kind: None if wire is None else wire.name})
    sizes, sharding = ElementSizes(precision=precision), sharding_of(strategy, cluster)
    inventory = Inventory({"": UnitInventory("", NUMEL)}, [], Work())
    step = StepTransfers(inventory, cluster, sharding, sizes)
    reduction = step.reduction("", 0, 1)
    assert reduction.ms == pytest.approx(expected_ms, rel=1e-3)
    assert reduction.wire_bytes == pytest.approx(
        sum(model.wire_bytes(op, payload) for op in phases),
        rel=1e-3,
    )
    if wire is None:
        between = sum(model._traffic(op, payload).inter_bytes for op in phases)
        sent = reduction.wire_bytes
        assert step.between_nodes(sent) == pytest.approx(between, rel=1e-3)

    gather_ms = model.seconds("all_gather", NUMEL) * 1e3  # what a rank measures
    rate = NUMEL * (ranks - 1) / ranks / gather_ms
    link = Link(0.0, rate, node_ranks=node_ranks if model.num_nodes > 1 else 1)
    planned_ms = CostModel(link=link).collective_ms(_reduction_node(kind, ranks, wire))
    if kind == "all_reduce":
        planned_ms *= (ranks - 1) / ranks  # graphs do not know the number of ranks
    assert planned_ms == pytest.approx(expected_ms, rel=1e-3)
