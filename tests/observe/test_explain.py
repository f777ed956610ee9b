"""explain(): reports, text, JSON, trace, and a real step that changes nothing."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, batch, loss_of, make_transformer, wrap
from modes import in_mode
from planned_graphs import Place, make_planned
from pool import on_ranks

from fsdp_dynamo import FSDPStateError, FSDPTypeError, FSDPValueError, record_events
from fsdp_dynamo.observe.explain import Explanation, explain
from fsdp_dynamo.observe.explanation import MeasuredEvent, UnitSummary
from fsdp_dynamo.observe.timeline import simulated_bars, trace_events
from fsdp_dynamo.observe.training_step import GraphBreak, Recompile
from graph_passes.report import GraphReport, report_of


def _forward() -> GraphReport:
    return report_of(
        make_planned(
            ("u0", "all_gather", 1.0, 0, 0, 0, 0),
            ("u1", "all_gather", 1.0, 0, 1, 0, 1),
            ("u3", "all_gather", 5.0, 0, 3, 1, 3),
        )
    )


def test_report_numbers() -> None:
    graph = _forward()
    assert (graph.compute_ms, graph.communication_ms) == (8.0, 7.0)
    assert (graph.exposed_ms, graph.simulated_ms, graph.unscheduled_ms) == (2.0, 10.0, 15.0)
    assert (graph.bound_ms, graph.peak_bytes, graph.budget_bytes) == (9.0, 1234, 10**9)
    last = graph.transfers[-1]
    assert (last.moved_steps, last.moved_across, last.wire_bytes) == (2, ("u1", "u2"), 100)
    assert (last.issued_ms, last.begin_ms, last.end_ms) == (3.0, 3.0, 8.0)
    assert (last.wait_ms, last.exposed_ms) == (7.0, 1.0)
    assert [(u.unit, u.compute_ms, u.exposed_ms) for u in graph.units] == [
        ("u0", 2.0, 1.0),
        ("u1", 2.0, 0.0),
        ("u2", 2.0, 0.0),
        ("u3", 2.0, 1.0),
    ]
    spans = [(s.unit, s.begin_ms, s.end_ms) for s in graph.spans]
    assert spans[0] == ("u0", 1.0, 3.0)
    assert spans[3] == ("u3", 8.0, 10.0)


def test_one_launch_has_one_latency() -> None:
    places: list[Place] = [
        ("u0", "all_gather", 1.0, 0, 0, 0, 0),
        ("u1", "all_gather", 1.0, 0, 1, 0, 1),
    ]
    together = report_of(make_planned(*places, launches=(0, 0)))
    assert [t.ms for t in together.transfers] == [1.0, 0.5]
    assert [t.launch for t in together.transfers] == [0, 0]
    assert together.unscheduled_ms == report_of(make_planned(*places)).unscheduled_ms


def _explanation() -> Explanation:
    backward = report_of(
        make_planned(
            ("u1", "all_gather", 3.0, 0, 1, 0, 1),
            ("u3", "reduce_scatter", 2.0, 1, 4, 1, 2),
            ("u0", "reduce_scatter", 1.0, 4, 4, 4, 4),
            phase="backward",
        )
    )
    return Explanation(
        mode="graph",
        backend="fsdp_dynamo",
        device="cpu",
        world_size=2,
        units=(
            UnitSummary("", "FULL_SHARD", 3, 4000, 2000, 80),
            UnitSummary("u0", "FULL_SHARD", 1, 8, 4, 0),
        ),
        num_graphs=1,
        graph_breaks=(GraphBreak("train.py", 7, "print(x)", "no print", "u0"),),
        recompiles=(Recompile("u1", "x.size()[0] == 3"),),
        graphs=(_forward(), backward),
        measured=(
            MeasuredEvent("u0", "all_gather", "forward", 200, 0.0, 2.0, 2.0),
            MeasuredEvent("u0", "compute", "forward", 0, 2.0, 5.0, 0.0),
            MeasuredEvent("u3", "reduce_scatter", "backward", 200, 6.0, 9.0, 0.5),
            MeasuredEvent("u0", "reduce_scatter", "backward", 200, 8.0, 9.5, 0.25),
        ),
    )


def test_events_that_no_plan_has() -> None:
    """A gather of a secondary shard, before the graph is called, is not the graph's."""
    found = _explanation()
    before = MeasuredEvent("u0", "all_gather", "forward", 100, 0.0, 1.0, 0.0, is_planned=False)
    with_it = replace(found, measured=(before, *found.measured))
    matched = [[event for _, _, event in one.pairs()] for one in (found, with_it)]
    assert matched[0] == matched[1]


def test_text() -> None:
    """Rows of the step and of its collectives, what to change first, and graph breaks."""
    explanation = _explanation()
    lines = str(explanation).splitlines()
    for line in (
        "graph mode, fsdp_dynamo, cpu, 2 ranks: 2 units, 1 graph, 1 graph break",
        "flat parameters: 4.0 kB unsharded, 2.0 kB per rank, 80 B of padding",
        "graph     compute   comm  bound   sim.  unsched.  exposed  measured  exposed"
        "   sent    peak  budget",
        "forward      8.00   7.00   9.00  10.00     15.00     2.00      5.00     2.00"
        "  300 B  1.2 kB  1.0 GB",
        "step        16.00  13.00  18.00  20.00     29.00     4.00      9.50     2.75"
        "  600 B  1.2 kB  1.0 GB",
        "backward reduce_scatter u3  1 over u1      2.000    0.000     0.500  100 B  hidden",
        "2. forward all_gather of u3: 1.000 ms",
        "   not planned: moving it by one unit would save 1.000 ms",
        "  train.py:7 in u0: print(x)",
        "    no print",
        "  u1: x.size()[0] == 3",
    ):
        assert line in lines
    detailed = explanation.text(details=True).splitlines()
    assert len(detailed) == len(lines) + 10
    assert any(
        line.split()[:5] == ["u0", "forward", "2.000", "1.000", "1.000"] for line in detailed
    )
    places: list[Place] = [(f"u{i}", "all_gather", 1.0, 0, i, i, i) for i in range(60)]
    graph = report_of(make_planned(*places, compute=(2.0,) * 60))
    deep = replace(explanation, graphs=(graph,))
    assert "... and 36 that are less exposed" in str(deep)
    assert len(str(deep).splitlines()) < 60 < len(deep.text(details=True).splitlines())


def test_json(tmp_path: Path) -> None:
    explanation = _explanation()
    explanation.save(tmp_path / "explanation.json")
    saved = json.loads((tmp_path / "explanation.json").read_text())
    assert saved["version"] == 9
    assert [one["unit"] for one in saved["measured"]] == [e.unit for e in explanation.measured]
    assert saved["graphs"][0]["phase"] == explanation.graphs[0].phase


def _check_trace(explanation: Explanation) -> None:
    events = trace_events(explanation)
    assert {event["pid"] for event in events} == ({1, 2} if explanation.graphs else {2})
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= set(event)
        assert event["ph"] in "MX"
        assert event["ts"] >= 0
        assert event["ph"] == "M" or event["dur"] >= 0
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            lanes.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(spans))


def test_trace(tmp_path: Path) -> None:
    explanation = _explanation()
    _check_trace(explanation)
    explanation.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["traceEvents"] == trace_events(explanation)
    lanes = [bar.lane for bar in simulated_bars(explanation)]
    assert (lanes.count("compute"), lanes.count("link g")) == (8, 6)


# -- a real step ----------------------------------------------------------------------------------


class Noisy(Block):
    """Draws random numbers and writes to a buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        return super().forward(torch.nn.functional.dropout(x, 0.1, self.training))


def _model() -> Any:
    model = make_transformer(num_blocks=0, dim=32)
    model.blocks.extend(Noisy(32) for _ in range(2))
    return wrap(model)


def _state(wrapped: Any) -> list[torch.Tensor]:
    grads = [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]
    return [*grads, *(b.clone() for b in wrapped.buffers()), torch.get_rng_state()]


def _explained(rank: int, mode: str) -> Explanation:
    """The explanation, which changes nothing, and tells of the collectives of a step."""
    wrapped = _model()
    model = in_mode(wrapped, mode)
    loss_of(model, batch(rank, 0)).backward()
    holders = [p.grad for p in wrapped.parameters()]
    before = _state(wrapped)
    found = explain(model, batch(rank, 0), loss_fn=lambda out: out.float().square().mean())
    assert all(torch.equal(a, b) for a, b in zip(before, _state(wrapped), strict=True))
    assert all(a is b for a, b in zip(holders, (p.grad for p in wrapped.parameters()), strict=True))
    assert wrapped.training
    with record_events() as log:
        loss_of(model, batch(rank, 0)).backward()
    measured = [(m.kind, m.unit, m.phase) for m in found.measured if m.is_collective]
    assert sorted(measured) == sorted(log.keys("all_gather", "reduce_scatter"))
    _check_trace(found)
    return found


@on_ranks(2)
def test_graph_mode(rank: int) -> None:
    found = _explained(rank, "graph")
    planned = [(t.kind, t.unit, g.phase) for g, t, _ in found.pairs()]
    measured = [(m.kind, m.unit, m.phase) for m in found.measured if m.is_collective]
    assert sorted(planned) == sorted(measured)
    assert all(event is not None for _, _, event in found.pairs())
    assert (found.mode, found.backend) == ("graph", "fsdp_dynamo_aot_eager")
    assert (found.num_graphs, found.graph_breaks) == (1, ())
    assert [g.phase for g in found.graphs] == ["forward", "backward"]
    for graph in found.graphs:
        assert graph.exposed_ms >= 0
        assert graph.bound_ms <= graph.simulated_ms + 1e-9
        assert graph.peak_bytes
        assert graph.peak_bytes > 0
    assert [unit.unit for unit in found.units] == ["", "blocks.0", "blocks.1"]
    assert json.loads(found.to_json())["mode"] == "graph"
    assert "most exposed" in str(found)
    assert [found.compiled_alone[f"blocks.{i}"] for i in range(2)] == ["it writes to an input"] * 2
    alone = replace(found, compiled_alone={"blocks.1": "a shape is dynamic", "": "of none"})
    assert "  blocks.1: a shape is dynamic\n  (root): of none" in alone.text(details=True)
    plans: list[Any] = [None, None]
    plan = [(t.unit, t.moved_steps, t.reason) for _, t, _ in found.pairs()]
    dist.all_gather_object(plans, plan)
    assert plans[0] == plans[1]


@on_ranks(2)
def test_hooks_mode(rank: int) -> None:
    found = _explained(rank, "hooks")
    assert (found.mode, found.graphs) == ("hooks", ())
    assert "so there is no plan" in str(found)


@on_ranks(2)
def test_options_and_errors(rank: int) -> None:
    wrapped = _model()
    tokens = batch(rank, 0)
    options = {
        "max_in_flight": 1,
        "link": {"latency_ms": 0.1, "bytes_per_ms": 1e4},
        "device": {"flops_per_ms": 1e6, "bytes_per_ms": 1e6},
    }
    wrapped.eval()
    with record_events() as log:
        found = explain(wrapped, tokens, options=options)
    assert found.measured
    assert log == []
    assert (found.graphs[0].max_in_flight, found.backend) == (1, "fsdp_dynamo_aot_eager")
    assert not wrapped.training
    assert all(p.grad is None for p in wrapped.parameters())
    hooks = in_mode(wrapped, "hooks")
    no_loss = {"loss_fn": lambda out: out}
    with pytest.raises(FSDPValueError, match="expected a model with a unit, got none"):
        explain(make_transformer(), tokens)
    with pytest.raises(FSDPTypeError, match="expected no options in hooks mode"):
        explain(hooks, tokens, options={})
    with pytest.raises(FSDPValueError, match=r"loss_fn\(output\) to be a scalar"):
        explain(wrapped, tokens, **no_loss)
    with torch.inference_mode(), pytest.raises(FSDPStateError, match="inference_mode"):
        explain(wrapped, tokens)
    wrapped.compile(backend="fsdp_dynamo_aot_eager")
    with pytest.raises(FSDPValueError, match="compiled before it was wrapped"):
        explain(wrapped, tokens)


@on_ranks(2)
def test_sums_of_no_sync_are_put_back(rank: int) -> None:
    wrapped = wrap(make_transformer(num_blocks=1))
    with wrapped.no_sync():
        loss_of(wrapped, batch(rank, 0)).backward()
    flats = [flat for unit in wrapped._fsdp_root.units for flat in unit.flats]
    sums = [flat.grad_sum.total for flat in flats]
    before = [one.clone() for one in sums if one is not None]
    explain(torch.compile(wrapped, backend="eager"), batch(rank, 1))
    assert len(before) == len(flats)
    for flat, total, value in zip(flats, sums, before, strict=True):
        assert flat.grad_sum.total is total
        assert torch.equal(total, value)


@on_ranks(1)
def test_one_rank_has_nothing_to_plan(rank: int) -> None:
    text = str(explain(wrap(make_transformer(num_blocks=1)), batch(rank, 0)))
    assert "1 rank: 2 units, 1 graph" in text
    assert "no collectives in the graph: nothing to plan" in text


def test_errors_without_ranks() -> None:
    with pytest.raises(FSDPTypeError, match="expected a model"):
        explain(3)
    with pytest.raises(FSDPStateError, match="expected a process group, got none"):
        explain(torch.nn.Linear(2, 2))
