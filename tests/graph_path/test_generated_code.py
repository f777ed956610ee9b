"""The order in Inductor's code is the order of the graph: pinned, read back, refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch import fx
from torch._inductor.utils import run_and_get_code

from fsdp_dynamo.graph_path import generated_code, inductor
from fsdp_dynamo.graph_path.generated_code import OrderError, check_order, order_in_code
from graph_passes.text.boundary_labels import Label

_COMPUTE = {"mm", "addmm", "bmm", "mm_into_", "sum_into_", "embedding_into_"}
OURS = "torch.ops.fsdp_dynamo."
HAS_OVERLAP = hasattr(
    torch._inductor.config.aten_distributed_optimizations, "enable_simple_overlap"
)
SETTING = "aten_distributed_optimizations.enable_simple_overlap"
needs_overlap = pytest.mark.skipif(not HAS_OVERLAP, reason="Inductor has it since torch 2.14")


def _in_graph(graph: fx.Graph) -> list[str]:
    """Our operators, with the numbers in their labels, and products, in the order of a graph."""
    lines = []
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        name = target.name().split("::")[1].split(".")[0]
        if target.namespace == "fsdp_dynamo":
            texts = [a for arg in node.args for a in (arg if isinstance(arg, list) else [arg])]
            labels = [t for t in texts if isinstance(t, str) and t.count("|") > 2]
            lines.append(f"{name} {[Label.decode(label).number for label in labels]}")
        elif name in _COMPUTE:
            lines.append(name)
    return lines


def _in_code(source: str, others: set[str] = _COMPUTE) -> list[str]:
    return [
        f"{call.name} {[label.number for label in call.labels]}" if call.labels else call.name
        for call in order_in_code(source)
        if call.labels or call.name in others
    ]


@contextmanager
def _without_graph_caches(**settings: Any) -> Iterator[None]:
    """Graphs are compiled anew; kernels, which take a C++ compiler, may be known."""
    no_joint = torch._functorch.config.patch(enable_autograd_cache=False)
    with no_joint, torch._inductor.config.patch({"fx_graph_cache": False, **settings}):
        yield


def _orders(
    rank: int, world_size: int, bucket: bool, overlap: bool | None
) -> list[tuple[list[str], list[str]]]:
    """Of every graph, the order handed over and the order in the code.

    Inductor's own overlap pass is on or off; ``None`` leaves it as it is.
    """
    planned: list[list[str]] = []
    generated: list[list[str]] = []
    lower, check = inductor.lower_to_operators, generated_code.check_order

    def watch_lower(graph: fx.Graph) -> None:
        lower(graph)
        planned.append(_in_graph(graph))

    def watch_check(source: str) -> None:
        check(source)
        generated.append(_in_code(source))

    inductor.lower_to_operators, generated_code.check_order = watch_lower, watch_check
    options = {"bucket": bucket, "link": {"latency_ms": 5.0, "bytes_per_ms": 1e6}}
    options |= {"memory_budget_bytes": 10**9, "max_in_flight": 64}
    try:
        with _without_graph_caches(**({} if overlap is None else {SETTING: overlap})):
            wrapped = wrap(make_transformer(num_blocks=2))
            model = torch.compile(wrapped, fullgraph=True, backend="fsdp_dynamo", options=options)
            loss_of(model, batch(rank, 0)).backward()
    finally:
        inductor.lower_to_operators, generated_code.check_order = lower, check
    return list(zip(planned, generated, strict=True))


@pytest.mark.parametrize(
    ("bucket", "overlap"),
    [
        (False, None),
        pytest.param(True, None, marks=pytest.mark.slow),
        pytest.param(False, True, marks=needs_overlap),
        pytest.param(False, False, marks=needs_overlap),
    ],
)
def test_order_in_code_is_the_planned_one(
    ranks: RankPool, bucket: bool, overlap: bool | None
) -> None:
    """Forward and backward, collectives among the products around them."""
    for graphs in ranks.run(_orders, 2, bucket, overlap):
        assert len(graphs) == 2
        for planned, generated in graphs:
            assert planned == generated
            assert any(line in _COMPUTE for line in planned)
            assert any(line.startswith("wait_") for line in planned)
        gathers = [line for line in graphs[0][1] if line.startswith("all_gather")]
        assert len(gathers) == (1 if bucket else 3)


def _fusible(x: torch.Tensor, matrix: torch.Tensor, shard: torch.Tensor) -> Any:
    """Fused with the first line, the last one would pull the wait up before the product."""
    texts = [Label("u", "all_gather", "forward", (), (), i, 2).encode() for i in range(2)]
    name = dist.distributed_c10d._get_default_group().group_name
    early = torch.sin(x)
    gathered = torch.ops.fsdp_dynamo.all_gather(shard, 1, name, texts[0], "")
    product = matrix @ matrix
    torch.ops.fsdp_dynamo.wait_(gathered, shard, texts[1])
    return early, product, early + gathered


def _pinned(rank: int, world_size: int) -> list[list[str]]:
    orders = []
    inputs = (torch.rand(64), torch.rand(8, 8), torch.rand(64))
    for pass_ in (None, generated_code.PinOrder()):
        torch._dynamo.reset()
        settings = {
            **generated_code.SETTINGS,
            "_pre_fusion_custom_pass": pass_,
            "reorder_for_locality": False,
        }
        with _without_graph_caches():
            compiled = torch.compile(_fusible, options=settings)
            result, sources = run_and_get_code(compiled, *inputs)
        assert torch.allclose(result[2], inputs[0].sin() + inputs[2])
        orders.append(_in_code(sources[0]))
    return orders


def test_a_fusion_does_not_move_a_wait(ranks: RankPool) -> None:
    loose, pinned = ranks.run(_pinned, 1)[0]
    assert pinned == ["all_gather [0]", "mm", "wait_ [1]"]
    assert loose == ["all_gather [0]", "wait_ [1]", "mm"]  # else the pass is not needed any more


def _beside_another(x: torch.Tensor, matrix: torch.Tensor, shard: torch.Tensor) -> Any:
    """A collective of tensor parallelism behind one of ours, without data between them."""
    texts = [Label("u", "all_gather", "forward", (), (), i, 2).encode() for i in range(2)]
    name = dist.distributed_c10d._get_default_group().group_name
    product = matrix @ matrix
    gathered = torch.ops.fsdp_dynamo.all_gather(shard, 1, name, texts[0], "")
    other = torch.ops._c10d_functional.all_gather_into_tensor(x, 1, name)
    torch.ops.fsdp_dynamo.wait_(gathered, shard, texts[1])
    whole = torch.ops._c10d_functional.wait_tensor(other)
    return product @ product, gathered + whole


def _overlapped(rank: int, world_size: int) -> list[list[str]]:
    orders = []
    inputs = (torch.rand(64), torch.rand(64, 64), torch.rand(64))
    for pass_ in (None, generated_code.PinOrder()):
        torch._dynamo.reset()
        settings = {
            **generated_code.SETTINGS,
            "_pre_fusion_custom_pass": pass_,
            "reorder_for_locality": False,
            SETTING: True,
        }
        with _without_graph_caches():
            compiled = torch.compile(_beside_another, options=settings)
            _, sources = run_and_get_code(compiled, *inputs)
        orders.append(_in_code(sources[0], _COMPUTE | {"all_gather_into_tensor", "wait_tensor"}))
    return orders


@needs_overlap
def test_inductors_overlap_pass_moves_nothing_past_ours(ranks: RankPool) -> None:
    """It knows torch's collectives only; a graph's order of issue is that of all ranks."""
    loose, pinned = ranks.run(_overlapped, 1)[0]
    other = "all_gather_into_tensor"
    assert pinned == ["mm", "all_gather [0]", other, "wait_ [1]", "wait_tensor", "mm"]
    assert loose == [other, "mm", "all_gather [0]", "wait_ [1]", "mm", "wait_tensor"]


def _reordered(rank: int, world_size: int) -> str:
    """What torch.compile raises if a pass of Inductor's scheduler swaps two all-gathers."""

    def swap(nodes: list[Any]) -> list[Any]:
        issues = [i for i, n in enumerate(nodes) if "all_gather" in _operator(n)]
        if len(issues) > 1:
            first, second = issues[:2]
            nodes[first], nodes[second] = nodes[second], nodes[first]
        return nodes

    wrapped = wrap(make_transformer(num_blocks=2))
    options = {"bucket": False, "max_in_flight": 8, "memory_budget_bytes": 10**9}
    options["link"] = {"latency_ms": 5.0, "bytes_per_ms": 1e6}
    model = torch.compile(wrapped, fullgraph=True, backend="fsdp_dynamo", options=options)
    settings = {"_post_fusion_custom_pass": swap, "fx_graph_cache": False}
    with _without_graph_caches(), torch._inductor.config.patch(settings):
        try:
            loss_of(model, batch(rank, 0))
        except Exception as error:  # noqa: BLE001  # Dynamo wraps it
            return str(error)
    return ""


def _operator(node: Any) -> str:
    return str(getattr(getattr(node, "node", None), "op_overload", ""))


def test_what_inductor_reorders_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(_reordered, 2):
        assert "collective or wait 0 of the graph to be all_gather of unit ''" in message
        assert "got all_gather of unit 'blocks.0'" in message
        assert "Inductor has reordered the graph" in message


def _source(*numbers: int, count: int | None = None) -> str:
    """Code of waits with these numbers, behind a launch of numbers 0 and 1."""
    count = len(numbers) + 2 if count is None else count
    texts = [Label("u", "all_gather", "forward", ("a",), (), i, count).encode() for i in range(99)]
    lines = [f"    b = {OURS}all_gather_together.default([x, y], 2, '0', {texts[:2]}, 'f|g')"]
    lines.append("    extern_kernels.mm(x, y, out=b)")
    lines += [f"    {OURS}wait_.default(b, x, {texts[i]!r})" for i in numbers]
    return "\n".join(
        ["import torch", 'kernel = """torch.ops.fsdp_dynamo.f()"""', "def call():"]
    ) + ("\n" + "\n".join(lines) + "\n")


def test_reading_code() -> None:
    calls = order_in_code(_source(2, 3))
    assert [call.name for call in calls] == ["all_gather_together", "mm", "wait_", "wait_"]
    assert [[label.number for label in call.labels] for call in calls] == [[0, 1], [], [2], [3]]
    check_order(_source(2, 3))
    check_order("import torch")
    with pytest.raises(OrderError, match=r"wait 2 of .* \(number 2\), got .* \(number 3\)\."):
        check_order(_source(3, 2))
    with pytest.raises(OrderError, match="to be none, got"):
        check_order(_source(3))
    with pytest.raises(OrderError, match="to be 5 of them, got no further one"):
        check_order(_source(2, 3, count=5))
