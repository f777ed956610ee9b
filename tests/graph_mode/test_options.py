"""Options of graph mode: each decision on and off, budgets, plans, a user's own pass."""

from __future__ import annotations

import inspect
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compile_caches import Layer, losses_of, make_compiled_products, using_cache
from loops import error_of
from pool import on_ranks
from torch import fx, nn

from fsdp_dynamo import (
    FSDP,
    DivergenceError,
    FSDPTypeError,
    FSDPValueError,
    record_events,
    record_plans,
)
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.graph_mode import calibration, planning
from fsdp_dynamo.graph_mode.options import GraphOptions
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.graph_pass import GraphPass
from graph_passes.pipeline import OPTIONAL_PASSES, default_passes
from graph_passes.scheduling.planner import Planner
from graph_passes.scheduling.simulation import BudgetError

EAGER = "fsdp_dynamo_aot_eager"
GIVEN = {
    "link": {"latency_ms": 0.3, "bytes_per_ms": 2e4},
    "device": {"flops_per_ms": 4e7, "bytes_per_ms": 1e7},
}
"""Numbers that make communication matter; nothing is measured."""
WIDTH = 32


def _loss(model: Any, rank: int) -> torch.Tensor:
    x = torch.full((4, WIDTH), rank + 1.0, requires_grad=True)
    return model(x).square().mean()


def _compiled(options: dict[str, Any], num_layers: int = 2) -> Any:
    torch._dynamo.reset()
    layers = (Layer(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
    torch.manual_seed(7)
    wrapped = FSDP(nn.Sequential(*layers), auto_wrap_policy=ModuleWrapPolicy({Layer}))
    return wrapped, torch.compile(
        wrapped, fullgraph=True, backend=EAGER, options={**GIVEN, **options}
    )


# -- parsed ----------------------------------------------------------------------------------------


def own_pass(graph: fx.Graph) -> None:
    """A user's own pass."""


class _Scaled(GraphPass):
    """A user's own pass with a setting."""

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    def __call__(self, graph: fx.Graph) -> None:
        pass

    def cache_key(self) -> str:
        return f"factor {self.factor}"


def test_passes_are_left_out_by_name() -> None:
    names = [pass_.name for pass_ in OPTIONAL_PASSES]
    given: dict[str, Any] = {"passes": [_Scaled(), own_pass]}
    own = ["_Scaled", "own_pass"]
    every = ["inline_regions", "absent_gradients", *names[:-1], *own, names[-1], "planner"]
    for left_out in ([], ["cut_views"], ["grad_buffer", "group_writes", "_Scaled"], every[2:-1]):
        options = GraphOptions.parse({**given, "disabled_passes": left_out})
        passes = default_passes(Planner(), True, options.passes, options.left_out)
        assert [pass_.name for pass_ in passes] == [name for name in every if name not in left_out]
    assert not GraphOptions.parse({"disabled_passes": ["bucket"]}).bucket
    assert not GraphOptions.parse({"disabled_passes": ["selective_unshard"]}).selective_unshard


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"prefetsch": True}, FSDPTypeError, "'prefetsch'"),
        ({"inductor": {}}, FSDPTypeError, "or a setting of torch._inductor.config, got 'inductor'"),
        ({"max_autotune": 1}, FSDPTypeError, "expected True or False, got 1"),
        ({"prefetch": 1}, FSDPTypeError, "expected True or False"),
        ({"regions": "yes"}, FSDPTypeError, "expected True or False"),
        ({"plan": 3}, FSDPTypeError, "a Plan or a path"),
        ({"plan": "/nowhere/plan.json"}, FSDPValueError, "a plan that can be read"),
        ({"memory_budget_bytes": -1}, FSDPValueError, "memory_budget_bytes"),
        ({"max_in_flight": 0}, FSDPValueError, "max_in_flight"),
        ({"link": "fast"}, FSDPTypeError, "'measured' or a dict"),
        ({"link": {"bytes_per_ms": 0}}, FSDPValueError, "bytes_per_ms"),
        ({"device": {"flops": 1}}, FSDPValueError, "fields of Device"),
        ({"passes": [3]}, FSDPTypeError, "a list of callables"),
        ({"disabled_passes": ["buckets"]}, FSDPValueError, r"some of \['bucket', .*got 'buckets'"),
        ({"disabled_passes": ["planner"]}, FSDPValueError, "cannot be left out: it alone keeps"),
        ({"disabled_passes": ["absent_gradients"]}, FSDPValueError, "without it parameters"),
        ({"disabled_passes": ["tag_reshard_after_forward"]}, FSDPValueError, "cannot be left out"),
        ({"disabled_passes": "bucket"}, FSDPTypeError, "expected a list of names, got 'bucket'"),
    ],
)
def test_bad_options(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        GraphOptions.parse(options)


class _Evil:
    """Unpickled by somebody careless, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_a_plan_file_runs_no_code(tmp_path: Path) -> None:
    mark, plan = tmp_path / "mark", tmp_path / "plan.json"
    plan.write_bytes(pickle.dumps(_Evil(mark)))
    with pytest.raises(FSDPValueError, match="expected a plan that can be read"):
        GraphOptions.parse({"plan": str(plan)})
    assert not mark.exists()
    pickle.loads(plan.read_bytes())
    assert mark.exists()  # it would have


def test_text_tells_options_apart() -> None:
    """Passes by what they are, and not by their address, which is another one on every rank."""

    def text(**options: Any) -> str:
        return GraphOptions.parse(options).text()

    different: list[dict[str, Any]] = [
        {},
        {"bucket": False},
        {"epilogue_fusion": False},
        {"passes": [own_pass]},
        {"passes": [_Scaled(2)]},
        {"passes": [_Scaled(3)]},
        GIVEN,
    ]
    assert len({text(**options) for options in different}) == len(different)
    assert text(**GIVEN) == text(**GIVEN.copy())
    for make in (partial(partial, own_pass), partial(_Scaled, 2)):
        assert text(passes=[make()]) == text(passes=[make()])
        assert " at 0x" not in text(passes=[make()])


def test_a_planner_is_in_keys_of_caches() -> None:
    """Inductor leaves graphs out of its cache whose passes cannot be pickled."""
    nothing = fx.symbolic_trace(torch.nn.Identity())
    for live_bytes_of in (planning.live_bytes_node_by_node, planning.live_bytes_of_generated):
        planner = planning.planner_for(nothing, GraphOptions(), live_bytes_of)
        assert isinstance(pickle.loads(pickle.dumps(planner)), Planner)


# -- numbers that plans are made from --------------------------------------------------------------


@on_ranks(2)
def test_measured_numbers_are_the_same_everywhere_and_later(rank: int, tmp_path: Path) -> None:
    """Given none, twice: the second rank measures another link, and the first's numbers count."""
    measure, measured = calibration._measure_link, []

    def measure_link(group: Any, device: torch.device) -> dict[str, float]:
        link = measure(group, device)
        measured.append(link["bytes_per_ms"] * (1 + rank))
        return link | {"bytes_per_ms": measured[-1]}

    found: list[Any] = []
    with (
        mock.patch.dict(os.environ, {"FSDP_DYNAMO_PLACE": str(tmp_path)}),
        mock.patch.object(calibration, "measured", inspect.unwrap(calibration.measured)),
        mock.patch.object(calibration, "_measure_link", measure_link),
    ):
        for _ in range(2):
            state_of(dist.group.WORLD, planning.MeasuredRates).clear()  # as in the job's next start
            torch._dynamo.reset()
            model = torch.compile(FSDP(Layer(WIDTH, WIDTH)), backend=EAGER)
            before = torch.get_rng_state()
            with record_plans() as log:
                _loss(model, rank).backward()
            assert torch.equal(before, torch.get_rng_state())
            found.append((log.plan(), {repr(planned.options.cost) for planned in log}))
    state_of(dist.group.WORLD, planning.MeasuredRates).clear()
    assert len(measured) == 1
    assert found[0] == found[1]
    (rates,) = found[0][1]
    assert rank or str(measured[0]) in rates
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, found)
    assert everywhere[0] == everywhere[1]


@on_ranks(2)
def test_damaged_numbers_are_measured_anew(rank: int, tmp_path: Path) -> None:
    measure = inspect.unwrap(calibration.measured)
    group, device = dist.group.WORLD, torch.device("cpu")
    with mock.patch.dict(os.environ, {"FSDP_DYNAMO_PLACE": str(tmp_path)}):
        path = calibration._path_of(group, device)
        found = [measure(group, device)]
        whole = path.read_text() if rank == 0 else ""
        for damaged in (whole[: len(whole) // 2], "3", "{}"):
            if rank == 0:
                path.write_text(damaged)
            dist.barrier()
            found.append(measure(group, device))
        drafts = [name for name in path.parent.iterdir() if name.stem == path.stem]
        assert rank or drafts == [path]
        assert measure(group, device) == found[-1]  # read, not measured
    assert all(one.keys() == {"link", "device"} for one in found)
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, found)
    assert everywhere[0] == everywhere[1]


# -- compiled --------------------------------------------------------------------------------------


def _results(rank: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """Losses of two steps, and gradients."""
    wrapped, model = _compiled(options)
    losses = []
    for step in range(2):
        losses.append(_loss(model, rank + step))
        losses[-1].backward()
    return [*losses, *(p.grad for p in wrapped.parameters() if p.grad is not None)]


@on_ranks(2)
def test_bitwise_passes_are_bitwise(rank: int) -> None:
    """Without all passes that promise it."""
    bitwise = [pass_.name for pass_ in OPTIONAL_PASSES if pass_.is_bitwise]
    assert {pass_.name for pass_ in OPTIONAL_PASSES} - {*bitwise} == {"grad_buffer"}
    expected = _results(rank, {})
    got = _results(rank, {"disabled_passes": [*bitwise, "prefetch", "sink_waits", "bucket"]})
    assert len(got) == len(expected) > 2
    assert all(map(torch.equal, got, expected))


@on_ranks(2)
def test_budgets_and_plans(rank: int, tmp_path: Path) -> None:
    """All layers reshard; with a budget those stay that fit; a plan that is given is followed."""

    def run(**options: Any) -> tuple[Any, int, list[str], torch.Tensor]:
        _, model = _compiled(options, num_layers=3)
        with record_plans() as log, record_events() as events:
            loss = _loss(model, rank)
            loss.backward()
        peak = max(planned.peak_bytes or 0 for planned in log)
        assert peak <= options.get("memory_budget_bytes", peak)
        gathers = [e.unit for e in events if e.kind == "all_gather" and e.phase == "backward"]
        return log.plan(), peak, gathers, loss.detach()

    plan, peak, gathers, expected = run()
    assert gathers == ["2", "1", "0"]

    kept, _, gathers, loss = run(memory_budget_bytes=peak)
    assert {*kept.kept} | {*gathers} == {"2", "1", "0"}
    assert len(kept.kept) + len(gathers) == 3
    assert torch.equal(loss, expected)

    plan.save(tmp_path / f"plan{rank}.json")
    applied, _, _, loss = run(plan=str(tmp_path / f"plan{rank}.json"))
    assert applied.graphs == plan.graphs
    assert torch.equal(loss, expected)

    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, (plan, kept))
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ([{"memory_budget_bytes": 1000}] * 2, BudgetError, "expected at least"),
        ([{"max_in_flight": 1}, {"max_in_flight": 2}], DivergenceError, "options of torch.compile"),
    ],
)
@on_ranks(2)
def test_refused_before_anything_runs(
    rank: int, options: list[Any], kind: type[Exception], message: str
) -> None:
    _, model = _compiled(options[rank])
    with pytest.raises(Exception, match=message) as raised:
        _loss(model, rank)
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), kind)


@on_ranks(2)
def test_inductors_settings_beside_ours(rank: int, tmp_path: Path) -> None:
    seen = set()

    def see(graph: fx.Graph) -> None:
        seen.add(torch._inductor.config.epilogue_fusion)

    given = {"epilogue-fusion": False, "triton.cudagraphs": False, "bucket": False}
    with using_cache(tmp_path / str(rank)):
        without = losses_of(make_compiled_products(), rank)
        losses = losses_of(make_compiled_products(**given, passes=[see]), rank)
        assert losses == pytest.approx(without, rel=1e-5)
        assert seen == {False}
        model = make_compiled_products(max_autotune_pointwise=bool(rank))
        error = error_of(lambda: losses_of(model, rank))
    assert "DivergenceError" in error
    assert "utotune_pointwise" in error


@pytest.mark.parametrize(
    ("name", "value", "backend", "reason"),
    [
        ("triton.cudagraphs", True, "fsdp_dynamo", "captures collectives, too"),
        ("post_grad_custom_post_pass", None, "fsdp_dynamo", "has one of its own there"),
        ("epilogue_fusion", False, "fsdp_dynamo_aot_eager", "nothing is compiled by Inductor"),
    ],
)
def test_inductors_settings_that_are_refused(
    name: str, value: bool, backend: str, reason: str
) -> None:
    step = torch.compile(torch.nn.Linear(2, 2), backend=backend, options={name: value})
    with pytest.raises(Exception, match=reason) as raised:
        step(torch.ones(1, 2))
    assert name in str(raised.value)
    torch._dynamo.reset()
