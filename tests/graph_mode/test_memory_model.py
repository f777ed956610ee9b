"""The memory model: lifetimes by hand, against execution, and against measured peaks."""

from __future__ import annotations

import operator
from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import on_ranks
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from graph_passes.graph_utils import collectives, is_backward
from graph_passes.markers import COLLECTIVE, CollectiveKind, Mark
from graph_passes.memory import liveness as memory
from graph_passes.memory.liveness import (
    as_generated,
    live_bytes,
    memory_profile,
    storages,
)
from graph_passes.pipeline import Pipeline

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Builder:
    """Builds graphs of nodes with meta tensors; a float32 vector of n has 4n bytes."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def call(self, target: Any, *args: Any, val: Any = None) -> fx.Node:
        name = target.__name__.split(".")[0]
        node = self.graph.create_node("call_function", target, args, name=name)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*values) if val is None else val
        return node

    def issue(self, kind: CollectiveKind, source: fx.Node, unit: str = "u") -> fx.Node:
        numel = source.meta["val"].numel()
        if kind == "all_gather":
            target, rest, numel = c10d.all_gather_into_tensor.default, (2, "g"), numel * 2
        else:
            target, rest, numel = c10d.reduce_scatter_tensor.default, ("avg", 2, "g"), numel // 2
        node = self.call(target, source, *rest, val=torch.empty(numel, device="meta"))
        node.meta["custom"] = {COLLECTIVE: Mark(unit, kind, "forward", 0).encode()}
        return node

    def wait(self, issued: fx.Node) -> fx.Node:
        val = torch.empty_like(issued.meta["val"])  # the functional wait's result looks new
        node = self.call(c10d.wait_tensor.default, issued, val=val)
        node.meta["custom"] = dict(issued.meta["custom"])
        return node

    def output(self, *nodes: fx.Node) -> fx.Graph:
        self.graph.output(nodes)
        return self.graph


def test_results_of_one_operator_die_one_by_one_and_outputs_never() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    norm = b.call(aten.native_layer_norm.default, x, [4], None, None, 1e-5)
    out, mean = b.call(operator.getitem, norm, 0), b.call(operator.getitem, norm, 1)
    add = b.call(aten.add.Tensor, out, out)
    end = b.call(aten.add.Tensor, mean, mean)
    # 64 + 16 + 16 bytes; the third result has no reader, but its tuple lives to the last getitem
    assert live_bytes(b.output(add, end)) == [0, 96, 96, 96, 144, 96, 80]


def backward() -> tuple[fx.Graph, list[str]]:
    """Saved tensors that share a storage, a tangent, and a reduction in flight."""
    b = Builder()
    base = torch.empty(8, 2, device="meta")
    primal = b.input("primals_1", 2)
    saved = b.input("mul", 8)
    saved.meta["val"] = base[:, 0]
    other = b.input("view", 8)
    other.meta["val"] = base[:, 1]  # 64 bytes together
    tangent = b.input("tangents_1", 8)  # 32
    first = b.call(aten.mul.Tensor, tangent, saved)  # 32
    second = b.call(aten.mul.Tensor, tangent, other)  # 32
    flat = b.call(aten.cat.default, [first, second])  # 64
    issued = b.issue("reduce_scatter", flat)  # 32
    busy = b.call(aten.add.Tensor, primal, 1.0)  # 8
    reduced = b.wait(issued)
    return b.output(reduced, busy), [node.name for node in b.graph.nodes]


def test_a_backward_frees_what_was_saved_and_holds_what_is_in_flight() -> None:
    graph, names = backward()
    assert names[-1] == "output"
    #            inputs     mul mul  cat  rs   add  wait out
    boxed = [96] * 4 + [128, 160, 160, 128, 136, 136, 72]
    assert live_bytes(graph) == boxed
    held = [96] * 4 + [128, 160, 224, 192, 200, 200, 136]

    def unboxed(node: fx.Node) -> memory.InputRole:  # the caller keeps all inputs
        role = memory.default_role(node)
        return "held" if role == "freed" else role

    assert live_bytes(graph, role_of=unboxed) == held
    # Of two ranks, the other's part comes into the output; of four, two more need a buffer.
    assert live_bytes(graph, memory.receive_buffer_bytes) == boxed
    scatter = next(collectives(graph))
    profile = memory_profile(graph, lambda node: 32 if node is scatter else 0)
    assert (profile.peak_bytes, names[profile.peak_position]) == (168, "add")
    scatter.args = (scatter.args[0], "avg", 4, "g")
    scatter.meta["val"] = torch.empty(4, device="meta")
    assert memory.receive_buffer_bytes(scatter) == 32
    assert profile.peak_by_category == {
        "unsharded_params": 0,
        "unsharded_grads": 64,
        "sharded_grads": 32,
        "in_flight": 32,
        "activations": 8,
        "other": 32,
    }


def test_an_all_gather_allocates_at_its_issue_and_a_cast_lives_until_its_wait() -> None:
    b = Builder()
    shard = b.input("shard", 4)
    cast = b.call(aten.clone.default, shard)  # 16
    issued = b.issue("all_gather", cast)  # 32
    between = b.call(aten.neg.default, shard)  # 16
    gathered = b.wait(issued)
    view = b.call(aten.view.default, gathered, [2, 4])
    out = b.call(aten.mv.default, view, between)  # 8
    graph = b.output(out)
    assert live_bytes(graph) == [0, 16, 48, 64, 64, 48, 56, 8]
    assert {one.nodes[0].name: one.category for one in storages(graph)} == {
        "clone": "in_flight",
        "all_gather_into_tensor": "unsharded_params",
        "neg": "activations",
        "mv": "activations",
    }


def test_lifetimes_follow_moved_nodes() -> None:
    graph, _ = backward()
    lifetimes = storages(graph, memory.receive_buffer_bytes)
    nodes = {node.name: node for node in graph.nodes}
    nodes["add"].append(nodes["reduce_scatter_tensor"])
    index = {node: i for i, node in enumerate(graph.nodes)}
    after = [memory.moved(one, index) for one in lifetimes if one.nodes[0].op != "placeholder"]
    fresh = storages(graph, memory.receive_buffer_bytes)
    by_begin = [one for one in fresh if one.nodes[0].op != "placeholder"]
    assert sorted(after, key=str) == sorted(by_begin, key=str)


def test_what_inductor_generates_lives_longer() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    first = b.call(aten.mm.default, x, x)  # 64
    norm = b.call(aten.sum.dim_IntList, x, [0, 1])  # 4: a fused kernel
    pieces = [b.call(aten.view.default, first, [16]), b.call(aten.expand.default, norm, [16])]
    flat = b.call(aten.cat.default, pieces)  # 128
    issued = b.issue("reduce_scatter", flat)  # 64
    reduced = b.wait(issued)
    last = b.call(aten.mm.default, x, x)  # 64, not in the stretch of the first
    sums = [b.call(aten.sum.dim_IntList, last, [0, 1])]  # 4
    sums += [b.call(aten.neg.default, sums[0])]  # 4
    again = b.call(aten.mm.default, x, x)  # 64, where the last one was
    graph = b.output(reduced, *sums, again)
    lifetimes = storages(graph)
    spans = {one.nodes[0].name: (one.begin, one.end) for one in lifetimes}
    assert spans == {
        "mm": (1, 5),
        "sum_1": (2, 5),
        "cat": (5, 7),
        "reduce_scatter_tensor": (6, 12),
        "mm_1": (8, 9),
        "sum_2": (9, 12),
        "neg": (10, 12),
        "mm_2": (11, 12),
    }
    generated = as_generated(lifetimes, graph)
    changed = {one.nodes[0].name: (one.begin, one.end) for one in generated}
    assert changed == spans | {"cat": (2, 7), "mm_1": (8, 10)}


# -- against execution ----------------------------------------------------------------------------


def _live_when_run(graph: fx.Graph, values: dict[str, torch.Tensor]) -> list[int]:
    """Run a graph, freeing values after their last use; bytes of live storages at each node."""
    left = {node: len(node.users) for node in graph.nodes}
    env: dict[fx.Node, Any] = {}
    standing = {StorageWeakRef(v.untyped_storage()).cdata for v in values.values()}
    seen: dict[int, tuple[StorageWeakRef, int]] = {}
    live = []
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = values[node.name]
        elif node.op == "call_function":
            env[node] = node.target(*fx.map_arg(node.args, lambda n: env[n]))
        tensors = env.get(node, ())
        for tensor in tensors if isinstance(tensors, (tuple, list)) else [tensors]:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            if reference.cdata not in standing:
                seen[reference.cdata] = (reference, storage.nbytes())
        tensor = tensors = storage = reference = None
        live.append(sum(n for one, n in seen.values() if not one.expired()))
        for source in node.all_input_nodes if node.op != "output" else ():
            left[source] -= 1
            if not left[source]:
                del env[source]
        if not node.users:
            env.pop(node, None)
        seen = {key: one for key, one in seen.items() if not one[0].expired()}
    return live


UNARY = [
    lambda b, x: b.call(aten.relu.default, x),
    lambda b, x: b.call(aten.t.default, x),
    lambda b, x: b.call(aten.reshape.default, x, [4, 4]),
    lambda b, x: b.call(aten.as_strided.default, x, [4, 4], [1, 4], 0),
    lambda b, x: b.call(aten._unsafe_view.default, x, [4, 4]),
    lambda b, x: b.call(aten.mul_.Tensor, x, 0.5),
    lambda b, x: b.call(aten.contiguous.default, x),
    lambda b, x: b.call(operator.getitem, b.call(aten.split.Tensor, x, 4), 0),
    lambda b, x: b.call(aten.view.default, b.call(aten.clone.default, x), [4, 4]),
]
BINARY = [
    lambda b, x, y: b.call(aten.mm.default, x, y),
    lambda b, x, y: b.call(aten.add.Tensor, x, y),
    lambda b, x, y: b.call(aten.add_.Tensor, x, b.call(aten.clone.default, y)),
    lambda b, x, y: b.call(aten.slice.Tensor, b.call(aten.cat.default, [x, y]), 0, 2, 6),
]


@settings(max_examples=100)
@given(st.data())
def test_the_profile_is_what_execution_holds(data: st.DataObject) -> None:
    b = Builder()
    nodes = [b.input("x", 4, 4)]
    for _ in range(data.draw(st.integers(1, 14))):
        pick = st.sampled_from(nodes)
        if data.draw(st.booleans()):
            made = data.draw(st.sampled_from(UNARY))(b, data.draw(pick))
        else:
            made = data.draw(st.sampled_from(BINARY))(b, data.draw(pick), data.draw(pick))
        # What is contiguous may be viewed by any of the operators above.
        nodes.append(made if made.meta["val"].is_contiguous() else b.call(aten.clone.default, made))
    outputs = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique=True))
    graph = b.output(*outputs)
    assert live_bytes(graph) == _live_when_run(graph, {"x": torch.randn(4, 4)})
    lifetimes, count = storages(graph), len(graph.nodes)
    by_hand = [sum(o.num_bytes for o in lifetimes if o.begin <= i <= o.end) for i in range(count)]
    assert by_hand == list(memory.profile_of(lifetimes, count).live_bytes)


# -- against measured peaks -----------------------------------------------------------------------


@on_ranks(2)
def test_the_predicted_peak_is_the_measured_one(rank: int) -> None:
    """Of a decoder's step."""
    from benchmarks.measure.rounds import Comparison
    from benchmarks.peers.base import Setting
    from benchmarks.peers.ours import ours
    from benchmarks.workloads import catalogue
    from benchmarks.workloads.decoder import DecoderSizes

    catalogue.DECODER_SIZES["memory test"] = DecoderSizes(192, 2, 4, 512, 512)
    workload = catalogue.decoder("memory test", batch_size=2, length=64)
    profiles: dict[bool, memory.MemoryProfile] = {}
    run = Pipeline.run

    def watch(self: Pipeline, graph: fx.Graph) -> None:
        run(self, graph)
        profiles[is_backward(graph)] = memory_profile(graph, memory.receive_buffer_bytes)

    peer = ours("fsdp_dynamo_aot_eager")
    comparison = Comparison([peer], Setting(workload, torch.device("cpu")), rank)
    with mock.patch.object(Pipeline, "run", watch):
        comparison.start(warmup=2)
    assert comparison.samples[peer.key].reason is None
    measured = comparison.profile_one(peer.key).peak_bytes
    standing = measured["shards"] + measured["optimizer"]
    saved = profiles[True].live_bytes[0]
    predicted = standing + max(profiles[False].peak_bytes, saved, profiles[True].peak_bytes)
    total = sum(measured.values())
    assert abs(predicted - total) <= 0.1 * (total - standing)
