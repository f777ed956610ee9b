"""Neighbouring small collectives are one launch: nothing is copied, no result changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import Builder, Even, forward_graph, render
from models import STEPS, batch, loss_of, make_transformer, nothing_cached, train, wrap
from modes import in_mode
from pool import RankPool
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_dynamo import DivergenceError, MixedPrecision, record_events
from fsdp_dynamo.comm import collectives
from fsdp_dynamo.comm.gather_plan import one_slice
from fsdp_dynamo.graph_mode import backends, stretch_compiler
from fsdp_dynamo.graph_mode.operators import GraphOperators
from fsdp_dynamo.health.graph_agreement import require_agreement
from graph_passes.graph_utils import collectives as collectives_of
from graph_passes.graph_utils import op_name
from graph_passes.markers import launch_of, set_launch
from graph_passes.scheduling.plan import Plan, PlanError
from graph_passes.scheduling.planner import Planned, Planner
from graph_passes.scheduling.schedule import Options
from graph_passes.spec import SpecError, verify_graph
from graph_passes.text.listing import Label

BLOCKS = 3
UNITS = ["", *(f"blocks.{i}" for i in range(BLOCKS))]
SLOW_LINK: dict[str, Any] = {
    "link": {"latency_ms": 5.0, "bytes_per_ms": 1e6},
    "device": {"flops_per_ms": 1e7, "bytes_per_ms": 1e6},
    "memory_budget_bytes": 10**9,
    "selective_unshard": False,
    "max_in_flight": 64,
}


class _Count:
    """How many tensors each launch took, by function."""

    def __init__(self) -> None:
        self.sizes: dict[str, list[int]] = {}
        self.originals = {n: getattr(collectives, n) for n in self.NAMES}

    NAMES = ("issue_all_gathers", "issue_reduce_means")

    def __enter__(self) -> _Count:
        for name in self.NAMES:
            setattr(collectives, name, self._counting(name, self.originals[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self.originals.items():
            setattr(collectives, name, original)

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def issue(outputs: Any, *args: Any, **named: Any) -> Any:
            self.sizes.setdefault(name, []).append(len(outputs))
            return original(outputs, *args, **named)

        return issue


class _Graphs:
    """Operators of all lowered graphs, counted."""

    PLACES = ((backends, "lower_to_functions"), (stretch_compiler, "lower_boundaries"))

    def __init__(self) -> None:
        self.seen: list[Counter[str]] = []
        self.casts: list[tuple[int, int]] = []
        self.originals = [(m, name, getattr(m, name)) for m, name in self.PLACES]

    def __enter__(self) -> _Graphs:
        for module, name, original in self.originals:
            setattr(module, name, self._watching(original))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, original in self.originals:
            setattr(module, name, original)

    def _watching(self, original: Callable[[fx.Graph], None]) -> Callable[[fx.Graph], None]:
        def lower(graph: fx.Graph) -> None:
            gathers = [n for n in collectives_of(graph) if "all_gather" in op_name(n)]
            sent = {n.all_input_nodes[0] for n in gathers}
            casts = [n for n in sent if op_name(n) in _CASTS]
            self.casts.append((len(gathers), len(casts)))
            original(graph)
            self.seen.append(Counter(op_name(n) for n in graph.nodes if "aten" in op_name(n)))

        return lower


_CASTS = ("aten::_to_copy", "prims::convert_element_type")


def _run(rank: int, mode: str, bucket: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    """Losses, gradients, launches, events and operators of a model of tiny units."""
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
    wrapped = wrap(make_transformer(num_blocks=BLOCKS), mixed_precision=precision)
    model = in_mode(wrapped, mode, bucket=bucket, **SLOW_LINK)
    with nothing_cached(), _Graphs() as graphs:
        losses, _ = train(model, rank)
    with _Count() as count, record_events() as log:
        loss_of(model, batch(rank, STEPS)).backward()
    grads = [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]
    weights = [p.detach().clone() for p in wrapped.parameters()]
    return {
        "numbers": [torch.tensor(losses), *grads, *weights],
        "launches": count.sizes,
        "events": list(log),
        "operators": graphs.seen,
        "casts": graphs.casts,
    }


def _on_and_off(rank: int, world_size: int, mode: str, dtype: torch.dtype | None) -> Any:
    off, on = (_run(rank, mode, bucket, dtype) for bucket in (False, True))
    pairs = list(zip(off.pop("numbers"), on.pop("numbers"), strict=True))
    return all(torch.equal(a, b) for a, b in pairs), off, on


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("graph", None),
        pytest.param("graph", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("graph", torch.float16, marks=pytest.mark.slow),
        pytest.param("graph-inductor", None, marks=pytest.mark.slow),
    ],
)
def test_fewer_launches_same_results(ranks: RankPool, mode: str, dtype: torch.dtype | None) -> None:
    for equal, off, on in ranks.run(_on_and_off, 2, mode, dtype):
        assert equal
        assert off["operators"] == on["operators"]  # no copy, no concatenation, no cast is added
        assert {size for sizes in off["launches"].values() for size in sizes} == {1}
        for name, sizes in on["launches"].items():
            assert sum(sizes) == sum(off["launches"][name])
            assert len(sizes) < sum(sizes), name
        assert on["launches"]["issue_all_gathers"] == [BLOCKS + 1, *[1] * BLOCKS]
        for num_gathers, num_casts in on["casts"]:
            assert num_casts == (num_gathers if dtype else 0)
        _check_events(on["events"])


def _check_events(events: list[Any]) -> None:
    """One event a member, in order, all completed; unsharded memory is given back."""
    gathers = [(e.unit, e.phase) for e in events if e.kind == "all_gather"]
    blocks = UNITS[1:]
    assert gathers[: len(UNITS)] == [(unit, "forward") for unit in UNITS]
    assert gathers[len(UNITS) :] == [(unit, "backward") for unit in reversed(blocks)]
    assert [e.unit for e in events if e.kind == "reduce_scatter"] == [*reversed(blocks), ""]
    for event in events:
        if event.kind in ("all_gather", "reduce_scatter"):
            assert event.waited_ns >= event.issued_ns > 0
    unsharded = sum(e.num_bytes for e in events if e.kind == "unshard")
    assert unsharded == sum(e.num_bytes for e in events if e.kind == "reshard")


# -- launches themselves ---------------------------------------------------------------------------


class _Operators(TorchDispatchMode):
    """What runs, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns):
            self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def _texts(kind: Any, number: int) -> list[str]:
    return [Label(f"u{i}", kind, "forward", (), ()).encode() for i in range(number)]


def _launched(together: bool, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[str]]:
    """Gathers, mean scatters and means of three tensors, and the operators that ran."""
    group = dist.distributed_c10d._get_default_group()
    rank, size, name = group.rank(), group.size(), group.group_name
    inputs = [torch.arange(n, dtype=dtype).add_(rank + n) for n in (6, 12, 36)]
    results: list[torch.Tensor] = []
    mode = _Operators()
    of_shards = [one_slice(one.numel()).encode() for one in inputs]
    of_grads = [one_slice(one.numel() // size).encode() for one in inputs]
    operators = GraphOperators()
    for issue, kind, middle, plans in (
        (operators.all_gather, "all_gather", [size], of_shards),
        (operators.reduce_scatter, "reduce_scatter", [size], of_grads),
        (operators.all_reduce, "all_reduce", [], None),
    ):
        texts = _texts(kind, len(inputs))
        each = range(len(inputs))
        with mode:
            for members in [[*each]] if together else [[i] for i in each]:
                own = [[plans[i] for i in members]] if plans else []
                named = [texts[i] for i in members]
                launch = issue([inputs[i] for i in members], *middle, name, *own, named)
                results += [operators.wait(launch, i, text) for i, text in enumerate(named)]
                assert launch == [None] * len(members)
    return results, sorted(mode.names)


def _compare_launches(rank: int, world_size: int, library: bool) -> list[str]:
    """What differs between one launch and several, for all dtypes."""
    wrong = []
    transport_of = collectives.transport_of
    if library:  # gloo has the calls that NCCL has
        collectives.transport_of = lambda group, device: "library"
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            apart, ran_apart = _launched(False, dtype)
            as_one, ran = _launched(True, dtype)
            pairs = zip(apart, as_one, strict=True)
            # gloo's own all-reduce groups a sum by where a tensor lies among the others.
            tolerance = 2e-3 if library and dtype is torch.float16 else 0.0
            same = [torch.allclose(a, b, rtol=tolerance, atol=0.0) for a, b in pairs]
            wrong += [f"{dtype} {i}" for i, is_same in enumerate(same) if not is_same]
            if library:
                calls = sorted(name for name in ran if name.startswith("c10d::"))
                wrong += [] if calls == _COALESCED else [str(calls)]
            elif _copies(ran) != _copies(ran_apart):
                wrong.append(f"{dtype} copies {ran}")
    finally:
        collectives.transport_of = transport_of
    return wrong


_COALESCED = [
    "c10d::allgather_into_tensor_coalesced_",
    "c10d::allreduce_coalesced_",
    "c10d::reduce_scatter_tensor_coalesced_",
]


def _copies(names: list[str]) -> int:
    return sum(name in ("aten::copy_", "aten::clone", "aten::cat") for name in names)


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_launch_does_what_several_do(ranks: RankPool, world_size: int, library: bool) -> None:
    assert ranks.run(_compare_launches, world_size, library) == [[]] * world_size


def _disagree(rank: int, world_size: int) -> str:
    group = dist.distributed_c10d._get_default_group()
    entry = "all_gather_into_tensor blocks.{}#0 float32 10 - {} " + group.group_name
    together = "+" if rank == 1 else "-"
    try:
        require_agreement(group, ";".join([entry.format(0, "-"), entry.format(1, together)]))
    except DivergenceError as error:
        return str(error)
    return ""


def test_ranks_must_launch_the_same_together(ranks: RankPool) -> None:
    for message in ranks.run(_disagree, 2):
        assert "collective 1" in message
        assert "ranks 0,1, launched with the one before it" in message
        assert "'blocks.1'" in message


# -- what must hold of launches --------------------------------------------------------------------


def _planned(graph: fx.Graph, plan: Plan | None = None) -> Plan:
    seen: list[Planned] = []
    Planner(Options(cost=Even(), bucket=False), plan=plan, observe=seen.append)(graph)
    return Plan({}, (), (seen[0].plan,))


def _with(plan: Plan, **changes: list[int]) -> Plan:
    transfers = plan.graphs[0].transfers
    for name, values in changes.items():
        pairs = zip(transfers, values, strict=True)
        transfers = tuple(replace(transfer, **{name: value}) for transfer, value in pairs)
    return replace(plan, graphs=(replace(plan.graphs[0], transfers=transfers),))


def test_a_plan_may_merge() -> None:
    graph = forward_graph(3)
    merged = _with(_planned(forward_graph(3)), issue=[0, 0, 1], launch=[5, 5, 6])
    _planned(graph, merged)
    verify_graph(graph, "planner")
    assert [launch_of(node) for node in collectives_of(graph)] == [5, 5, None]
    gathers = [i for i, line in enumerate(render(graph).splitlines()) if "all_gather u" in line]
    assert gathers[:2] == [1, 3]  # the cast of the second in between


@pytest.mark.parametrize(
    "changes",
    [
        {"issue": [0, 1, 1], "launch": [5, 5, 6]},
        {"issue": [0, 0, 0], "launch": [5, 6, 5]},
    ],
)
def test_a_plan_that_cannot_merge(changes: dict[str, list[int]]) -> None:
    plan = _with(_planned(forward_graph(3)), **changes)
    with pytest.raises(PlanError, match="to follow one another with the same issue"):
        _planned(forward_graph(3), plan)


def test_what_needs_another_is_not_launched_with_it() -> None:
    builder = Builder()
    first = builder.reduce("u1", builder.input("tangents_1"))
    builder.graph.output((builder.reduce("u0", first),))
    Planner(Options(cost=Even()))(builder.graph)
    verify_graph(builder.graph, "planner")
    assert [launch_of(node) for node in collectives_of(builder.graph)] == [None, None]


def test_spec_of_launches() -> None:
    graph = forward_graph(3)
    first, second, third = collectives_of(graph)
    for node in (first, second):
        set_launch(node, 1)
    with pytest.raises(SpecError, match="the collectives of launch 1 side by side"):
        verify_graph(graph, "test")
    set_launch(first, None)
    third.prepend(second)  # past the wait of neither: behind the cast of the third
    second.next.prepend(second)
    wait, compute = second.users, [n for n in graph.nodes if op_name(n) == "aten::mm"][1]
    third.append(next(iter(wait)))
    next(iter(third.users)).append(compute)
    set_launch(third, 1)
    verify_graph(graph, "test")
    third.args = (third.args[0], 2, "other")
    with pytest.raises(SpecError, match="launched with it"):
        verify_graph(graph, "test")
