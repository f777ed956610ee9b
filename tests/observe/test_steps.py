"""What ran in a step: the page, the explanation, the trace and the profiler say the same."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

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
    inspect_graphs,
    record_events,
    record_plans,
    register_fsdp_forward_method,
)
from fsdp_dynamo.dynamo.artifacts import Compilation, record_compilations
from fsdp_dynamo.events import COLLECTIVE_KINDS, Event, EventLog, Kind, Model, Step
from fsdp_dynamo.graph_mode import graph_recording
from fsdp_dynamo.observe.explain import recorded_step, reports_of, steps_in
from fsdp_dynamo.observe.explanation import Cut, StepReport
from fsdp_dynamo.observe.timeline import simulated_bars, trace_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

# -- steps of a recording -------------------------------------------------------------------------


def _step(model: Model) -> Step:
    step = Step()
    step.model, step.number = model, 0
    return step


def _event(step: Step | None, kind: Kind, begin_ms: int, end_ms: int) -> Event:
    phase: Literal["forward", "backward"] = "backward" if kind == "backward" else "forward"
    return Event("", kind, phase, 0, "hook", begin_ms * 10**6, end_ms * 10**6, step=step)


def test_a_step_is_a_forward_and_its_backward() -> None:
    one, other = Model("Encoder"), Model("Decoder")
    first, second, chained, evaluation = map(_step, (one, one, other, one))
    log = [
        _event(first, "forward", 0, 20),
        _event(None, "all_gather", 20, 30),  # of a state dict
        _event(second, "unshard", 100, 100),
        _event(second, "forward", 100, 120),
        _event(chained, "forward", 120, 140),
        _event(chained, "backward", 140, 160),
        _event(second, "backward", 160, 180),
        _event(evaluation, "forward", 200, 210),
    ]
    found = steps_in(log, [])
    assert [[len(step.events) for step in of_model] for of_model in found.values()] == [
        [1, 2, 1],
        [2],
    ]
    assert list(found) == [one, other]
    times = [(e.issued_ms, e.done_ms) for e in found[one][1].measured()]
    assert times == [(0.0, 20.0), (60.0, 80.0)]
    assert steps_in([], []) == {}
    assert recorded_step([], [Compilation(0, 1)]).measured() == ()


def test_the_clock_stands_still_in_compilation() -> None:
    step = _step(Model("m"))
    log = [_event(step, "forward", 100, 1020), _event(step, "backward", 1020, 2040)]
    made = [(0, 50), (90, 110), (115, 1000), (1030, 1040), (2000, 2500)]
    compilations = [Compilation(begin * 10**6, end * 10**6) for begin, end in made]
    found = recorded_step(log, compilations)
    forward, backward = found.measured()
    assert (forward.issued_ms, forward.done_ms) == (0.0, 25.0)
    assert (backward.issued_ms, backward.done_ms) == (25.0, 995.0)
    assert found.cuts() == (Cut(0.0, 895.0), Cut(35.0, 10.0), Cut(995.0, 40.0))
    assert recorded_step(log, compilations[:1]).cuts() == ()


def test_compilations_are_recorded_through_a_reset() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with record_compilations() as outer:
        torch.compile(double, backend="eager")(torch.ones(2))
        assert len(outer) == 1
        torch.compiler.reset()
        with record_compilations() as inner:
            torch.compile(double, backend="eager")(torch.ones(2))
    assert (len(outer), len(inner)) == (2, 1)
    assert all(one.begin_ns < one.end_ns for one in outer)
    torch.compile(double, backend="eager", dynamic=True)(torch.ones(3))
    assert len(outer) == 2


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


def _page(folder: Path) -> dict[str, Any]:
    text = (folder / "index.html").read_text()
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data
    found: dict[str, Any] = json.loads(data[1])
    return found


_Keys = Counter[tuple[str, str, str]]


def _keys(log: EventLog) -> _Keys:
    return Counter(
        (e.kind if e.kind in COLLECTIVE_KINDS else "compute", e.unit, e.phase)
        for e in log
        if e.kind not in ("unshard", "reshard")
    )


def _names(page: dict[str, Any], title: str) -> list[str]:
    """Names of a page's bars in a timeline; none without it."""
    bars = [bar for side in page["timeline"] if side["title"] == title for bar in side["bars"]]
    return [bar["name"] for bar in bars]


def _gathers(names: Counter[str]) -> dict[str, int]:
    return {name: n for name, n in names.items() if name.startswith("all_gather")}


@pytest.mark.parametrize("mode", list(COMPILED))
@on_ranks(2)
def test_all_tools_tell_of_the_same_step(rank: int, tmp_path: Path, mode: str) -> None:
    """A step of a model of two blocks after others: its events, and what every tool says."""
    small, large = _made(mode, 2), _made(mode, 3)
    with inspect_graphs(tmp_path, rank=None):
        with record_plans() as plans:
            _step_of(small)
        for before in _before(small, large):
            before()
        with record_events() as log:
            _step_of(small)
    page, expected = _page(tmp_path / f"rank{rank}"), _keys(log)
    names = Counter(
        f"{kind if kind in COLLECTIVE_KINDS else phase} {unit}"
        for kind, unit, phase in expected.elements()
    )
    measured, simulated = (_names(page, f"_Net {side}") for side in ("measured", "simulated"))
    assert Counter(measured) == names
    notes = [side["note"] for side in page["timeline"] if "measured" in side["title"]]
    assert notes[0] == "The last of 6 recorded steps with a backward."
    assert notes[1].startswith("The last of 2 recorded steps with a backward")

    explained = explain(small, torch.ones(4, 8), loss_fn=lambda y: y.square().mean())
    assert Counter((e.kind, e.unit, e.phase) for e in explained.measured) == expected
    drawn = [e for e in trace_events(explained) if e["ph"] == "X" and e["pid"] == 2]
    assert Counter(e["name"] for e in drawn) == Counter(name.strip() for name in measured)

    graphs = reports_of(plans, recorded_step(log, []))
    twice = reports_of(plans, recorded_step([*log, *log], []))
    assert twice == tuple(graph for graph in graphs for _ in range(2))
    if mode == "graph":
        report = StepReport("hooks", "", "", 2, (), 0, (), graphs, ())
        assert _gathers(Counter(simulated)) == _gathers(names)
        assert simulated == [bar.name for bar in simulated_bars(report)]
        assert simulated == [bar.name for bar in simulated_bars(explained)]

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
    """Of each step of the model in a recording."""
    (steps,) = steps_in(log, []).values()
    return [Counter(e.kind for e in one.events if e.kind in COLLECTIVE_KINDS) for one in steps]


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
