"""What ran in a step: the explanation, the trace and the profiler say the same."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from fsdp_dynamo import (
    FSDP,
    MixedPrecisionPolicy,
    events,
    explain,
    fully_shard,
    record_events,
    record_plans,
    register_fsdp_forward_method,
)
from fsdp_dynamo.events import COLLECTIVE_KINDS, COMPUTE_KINDS, EventLog, Step
from fsdp_dynamo.graph_mode import graph_recording
from fsdp_dynamo.observe.explain import reports_of
from fsdp_dynamo.observe.explanation import StepReport
from fsdp_dynamo.observe.timeline import simulated_bars, trace_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def test_a_recording_within_another() -> None:
    with record_events() as outer:
        events.instant("a", "unshard", "forward", 1)
        with record_events() as inner:
            events.instant("b", "unshard", "forward", 1)
            assert inner.keys() == [("unshard", "b", "forward")]
        with record_events() as equal:
            pass
        events.instant("c", "unshard", "forward", 1)
    assert [event.unit for event in outer] == ["a", "b", "c"]
    assert [event.unit for event in inner] == ["b"]
    assert equal == []
    assert inner[0] is outer[1]


# -- real steps ----------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


class _Net(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


COMPILED: dict[str, dict[str, Any]] = {
    "hooks": {"backend": "aot_eager"},
    "graph": {"backend": "fsdp_dynamo_aot_eager", "fullgraph": True, "dynamic": False},
}


def _made(mode: str, num_blocks: int) -> Any:
    torch.manual_seed(0)
    model = FSDP(_Net(num_blocks), auto_wrap_policy=ModuleWrapPolicy({_Block}))
    return torch.compile(model, **COMPILED[mode])


def _step_of(*models: Any, rows: int = 4) -> None:
    x = torch.ones(rows, 8)
    for model in models:
        x = model(x)
    x.square().mean().backward()


def _evaluate(model: Any) -> None:
    with torch.no_grad():
        model(torch.ones(4, 8))


def _before(small: Any, large: Any) -> list[Callable[[], object]]:
    """What people do before a step that they look at: each is in the recording, and not of it."""

    def accumulate() -> None:
        with small.no_sync():
            _step_of(small)
        _step_of(small)

    return [
        lambda: _evaluate(small),
        lambda: _step_of(small, rows=6),
        lambda: _step_of(large),
        lambda: _step_of(small, large),
        lambda: _evaluate(large),
        lambda: small._orig_mod.state_dict(),
        accumulate,
        lambda: [_evaluate(small) for _ in range(3)],
    ]


_Keys = Counter[tuple[str, str, str]]


def _keys(log: EventLog) -> _Keys:
    return Counter(
        (e.kind if e.kind in COLLECTIVE_KINDS else "compute", e.unit, e.phase)
        for e in log
        if e.kind not in ("unshard", "reshard")
    )


def _gathers(names: Counter[str]) -> dict[str, int]:
    return {name: n for name, n in names.items() if name.startswith("all_gather")}


@pytest.mark.parametrize("mode", list(COMPILED))
@on_ranks(2)
def test_all_tools_tell_of_the_same_step(rank: int, mode: str) -> None:
    """A step of a model of two blocks after others: its events, and what every tool says."""
    small, large = _made(mode, 2), _made(mode, 3)
    with record_plans() as plans:
        _step_of(small)
    for before in _before(small, large):
        before()
    with record_events() as log:
        _step_of(small)
    expected = _keys(log)
    names = Counter(
        f"{kind if kind in COLLECTIVE_KINDS else phase} {unit}".strip()
        for kind, unit, phase in expected.elements()
    )

    explained = explain(small, torch.ones(4, 8), loss_fn=lambda y: y.square().mean())
    assert Counter((e.kind, e.unit, e.phase) for e in explained.measured) == expected
    drawn = [e for e in trace_events(explained) if e["ph"] == "X" and e["pid"] == 2]
    assert Counter(e["name"] for e in drawn) == names

    graphs = reports_of(plans, log)
    twice = reports_of(plans, [*log, *log])
    assert twice == tuple(graph for graph in graphs for _ in range(2))
    if mode == "graph":
        simulated = [bar.name for bar in simulated_bars(explained)]
        report = StepReport("hooks", "", "", 2, (), 0, (), graphs, ())
        assert simulated == [bar.name for bar in simulated_bars(report)]
        assert _gathers(Counter(name.strip() for name in simulated)) == _gathers(names)

    with profile() as profiler:
        _step_of(small)
    counted = Counter(e.name for e in profiler.events() if e.name.startswith("FSDP::"))
    by_unit: Counter[tuple[str, str]] = Counter()
    for (kind, unit, _), count in expected.items():
        if kind in COLLECTIVE_KINDS:
            by_unit[kind, unit] += count
    for (kind, unit), count in by_unit.items():
        assert counted[f"FSDP::{kind} {unit or '(root)'}"] == count


class _Twice(_Net):
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x))


def _collectives_of(log: EventLog) -> list[Counter[str]]:
    """Of each step in a recording, in order."""
    found: dict[Step, Counter[str]] = {}
    for event in log:
        if event.step is not None and event.kind in COLLECTIVE_KINDS | COMPUTE_KINDS:
            kinds = found.setdefault(event.step, Counter())
            kinds.update([event.kind] if event.kind in COLLECTIVE_KINDS else [])
    return [*found.values()]


def _fail(grad: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a hook")


@pytest.mark.parametrize("mode", list(COMPILED))
@on_ranks(2)
def test_what_belongs_to_a_step(rank: int, mode: str) -> None:
    model = _made(mode, 2)
    x = torch.ones(4, 8)

    def failing() -> None:
        output = model(x)
        output.register_hook(_fail)
        with pytest.raises(RuntimeError, match="a hook"):
            output.sum().backward()
        _step_of(model)

    def recomputed() -> None:
        checkpoint(model, x.clone().requires_grad_(), use_reentrant=False).sum().backward()

    def of_inputs() -> None:
        given = x.clone().requires_grad_()
        torch.autograd.grad(model(given).sum(), given)
        model._orig_mod.state_dict()

    def of_two() -> None:
        (model(x) + model(2 * x)).sum().backward()

    found = {}
    for done in (failing, recomputed, of_inputs, of_two):
        with record_events() as log:
            done()
        found[done.__name__] = _collectives_of(log)
        lost = [e.kind for e in log if e.step is None and e.kind == "reduce_scatter"]
        assert not lost, done.__name__
        model.zero_grad()
    first, after = found["failing"]
    assert "reduce_scatter" not in first
    assert after == {"all_gather": 5, "reduce_scatter": 3}
    (again,) = found["recomputed"]
    assert again["reduce_scatter"] == 3
    (inputs,) = found["of_inputs"]
    assert ("reduce_scatter" in inputs) is (mode == "graph"), "its backward is one graph"
    assert [step["reduce_scatter"] > 0 for step in found["of_two"]][1]


@on_ranks(2)
def test_reductions_behind_a_backward_are_of_its_step(rank: int) -> None:
    """And so are the forwards that a method calls."""
    model = _Twice(2)
    fully_shard(model, policy=ModuleWrapPolicy({_Block}))
    register_fsdp_forward_method(model, "twice")
    with record_events() as log:
        model.twice(torch.ones(4, 8)).sum().backward()
        with model.no_sync():
            _step_of(model)
        model.clip_grad_norm_(1.0)
    twice, accumulated = _collectives_of(log)
    assert twice["reduce_scatter"] == 3
    assert twice["all_gather"] >= 6
    assert accumulated["reduce_scatter"] == 3


def test_an_inner_recording_is_read_while_it_is_open() -> None:
    class Stopped:
        """Its times are there once it has been waited for."""

        is_there = False

        def now(self) -> Callable[[], int]:
            def read() -> int:
                assert self.is_there
                return 7

            return read

        def stop(self) -> None:
            self.is_there = True

    with record_events() as outer:
        outer.clock = Stopped()
        with record_events() as inner:
            events.instant("a", "unshard", "forward", 1)
            inner.read_clock()
            assert inner[0].issued_ns == 7


@on_ranks(2)
def test_compute_before_the_first_collective_begins_with_the_graph(rank: int) -> None:
    """A pause before the backward is no compute of it."""
    model = _made("graph", 2)
    _step_of(model)
    loss = model(torch.ones(4, 8)).square().mean()
    with record_events() as log:
        begin_ns = time.perf_counter_ns()
        time.sleep(0.2)
        loss.backward()
    assert isinstance(graph_recording.current(), graph_recording.NoRecording)
    assert min(e.issued_ns for e in log) - begin_ns >= 0.2e9


@on_ranks(2)
def test_a_cast_of_a_reduced_gradient_is_no_compute_of_a_unit(rank: int) -> None:
    """Each unit's backward is one event; reductions in bfloat16 are cast after their waits."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model:
        fully_shard(layer, mp_policy=low)
    run = in_mode(fully_shard(model, mp_policy=low), "graph")
    for _ in range(2):
        with record_events() as log:
            run(torch.ones(2, 8)).sum().backward()
    units = [event.unit for event in log if event.key[::2] == ("backward", "backward")]
    assert units == ["2", "1", "0"]
