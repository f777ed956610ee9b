"""Neighbouring small collectives are one launch: nothing is copied, no result changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from graphs import Even, forward_graph, render
from loops import classification_loss, examples, fit, make_classifier, shard
from models import nothing_cached
from modes import in_mode
from pool import on_ranks
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_dynamo import MixedPrecision, record_events
from fsdp_dynamo.comm import collectives
from fsdp_dynamo.comm.gather_plan import one_slice
from fsdp_dynamo.graph_mode import backends, stretch_compiler
from fsdp_dynamo.graph_mode.operators import GraphOperators
from graph_passes.graph_utils import collectives as collectives_of
from graph_passes.graph_utils import op_name
from graph_passes.markers import launch_of, set_launch
from graph_passes.scheduling.plan import Plan, PlanError
from graph_passes.scheduling.planner import Planned, Planner
from graph_passes.scheduling.schedule import Options
from graph_passes.spec import SpecError, verify_graph
from graph_passes.text.listing import Label

SLOW_LINK: dict[str, Any] = {
    "link": {"latency_ms": 5.0, "bytes_per_ms": 1e6},
    "device": {"flops_per_ms": 1e7, "bytes_per_ms": 1e6},
    "memory_budget_bytes": 10**9,
    "selective_unshard": False,
    "max_in_flight": 64,
}


@contextmanager
def _launches() -> Iterator[dict[str, list[int]]]:
    """How many tensors each launch takes, by function."""
    sizes: dict[str, list[int]] = {}

    def counting(name: str, issue: Callable[..., Any]) -> Callable[..., Any]:
        def count(outputs: Any, *args: Any, **named: Any) -> Any:
            sizes.setdefault(name, []).append(len(outputs))
            return issue(outputs, *args, **named)

        return count

    with ExitStack() as stack:
        for name in ("issue_all_gathers", "issue_reduce_means"):
            counted = counting(name, getattr(collectives, name))
            stack.enter_context(mock.patch.object(collectives, name, counted))
        yield sizes


@contextmanager
def _operators() -> Iterator[list[Counter[str]]]:
    """Of each lowered graph."""
    found: list[Counter[str]] = []

    def watching(original: Callable[[fx.Graph], None]) -> Callable[[fx.Graph], None]:
        def lower(graph: fx.Graph) -> None:
            original(graph)
            found.append(Counter(op_name(n) for n in graph.nodes if "aten" in op_name(n)))

        return lower

    functions = watching(backends.lower_to_functions)
    boundaries = watching(stretch_compiler.lower_boundaries)
    with (
        mock.patch.object(backends, "lower_to_functions", functions),
        mock.patch.object(stretch_compiler, "lower_boundaries", boundaries),
    ):
        yield found


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("graph", torch.bfloat16),
        pytest.param("graph-inductor", None, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_fewer_launches_same_results(rank: int, mode: str, dtype: torch.dtype | None) -> None:
    numbers, sizes, operators = [], [], []
    for bucket in (False, True):
        precision = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
        wrapped = shard(make_classifier(), mixed_precision=precision)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        torch._dynamo.reset()
        model = in_mode(wrapped, mode, bucket=bucket, **SLOW_LINK)
        with nothing_cached(), _operators() as lowered:
            losses = fit(model, optimizer, rank, range(2))
        with _launches() as launches, record_events() as log:
            classification_loss(model, examples(rank, 2)).backward()
        grads = [p.grad for p in wrapped.parameters() if p.grad is not None]
        numbers.append([torch.tensor(losses), *grads, *wrapped.parameters()])
        sizes.append(launches)
        operators.append(lowered)
    assert len(numbers[0]) == len(numbers[1])
    assert all(map(torch.equal, *numbers))
    assert operators[0] == operators[1]  # no copy, no concatenation, no cast is added
    apart, together = sizes
    for name in ("issue_all_gathers", "issue_reduce_means"):
        assert {*apart[name]} == {1}
        assert len(together[name]) < sum(together[name]) == len(apart[name])
    assert together["issue_all_gathers"] == [3, 1]
    _check_events(list(log))


def _check_events(events: list[Any]) -> None:
    """One event a member, in order, all completed; unsharded memory is given back."""
    forward, backward = (
        [e.unit for e in events if (e.kind, e.phase) == ("all_gather", phase)]
        for phase in ("forward", "backward")
    )
    assert forward == ["", "0", "1"]
    assert backward == ["1"]  # no input of the first block needs a gradient
    assert sorted(e.unit for e in events if e.kind == "reduce_scatter") == ["", "0", "1"]
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


_COALESCED = [
    "c10d::allgather_into_tensor_coalesced_",
    "c10d::allreduce_coalesced_",
    "c10d::reduce_scatter_tensor_coalesced_",
]


def _copies(names: list[str]) -> int:
    return sum(name in ("aten::copy_", "aten::clone", "aten::cat") for name in names)


@pytest.mark.parametrize("library", [False, True])
@on_ranks(3)
def test_one_launch_does_what_several_do(rank: int, library: bool) -> None:
    with ExitStack() as stack:
        if library:  # gloo has the calls that NCCL has
            transport = mock.patch.object(collectives, "transport_of", return_value="library")
            stack.enter_context(transport)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            apart, ran_apart = _launched(False, dtype)
            as_one, ran = _launched(True, dtype)
            # gloo's own all-reduce groups a sum by where a tensor lies among the others.
            tolerance = 2e-3 if library and dtype is torch.float16 else 0.0
            torch.testing.assert_close(as_one, apart, rtol=tolerance, atol=0.0)
            if library:
                assert sorted(name for name in ran if name.startswith("c10d::")) == _COALESCED
            else:
                assert _copies(ran) == _copies(ran_apart)


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
