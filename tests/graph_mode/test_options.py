"""Options of graph mode: each decision on and off, budgets, plans, a user's own pass."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch import fx

from fsdp_dynamo import DivergenceError, FSDPTypeError, FSDPValueError, record_events, record_plans
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.graph_mode import calibration, planning
from fsdp_dynamo.graph_mode.options import GraphOptions
from graph_passes.gradients.grad_buffer import grad_buffer
from graph_passes.graph_pass import GraphPass
from graph_passes.graph_utils import op_name
from graph_passes.pipeline import OPTIONAL_PASSES, Pipeline, default_passes
from graph_passes.scheduling.plan import Plan, PlanError
from graph_passes.scheduling.planner import Planner
from graph_passes.scheduling.simulation import BudgetError
from graph_passes.views import drop_noop_views

EAGER = "fsdp_dynamo_aot_eager"
GIVEN = {
    "link": {"latency_ms": 0.3, "bytes_per_ms": 2e4},
    "device": {"flops_per_ms": 4e7, "bytes_per_ms": 1e7},
}
"""Numbers that make communication matter; nothing is measured."""


def _compiled(options: dict[str, Any], num_blocks: int = 3, backend: str = EAGER) -> Any:
    torch._dynamo.reset()
    wrapped = wrap(make_transformer(num_blocks=num_blocks, dim=32))
    return wrapped, torch.compile(
        wrapped, fullgraph=True, backend=backend, options={**GIVEN, **options}
    )


def _grads(rank: int, options: dict[str, Any]) -> list[Any]:
    wrapped, model = _compiled(options, num_blocks=2)
    losses = []
    for step in range(2):
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in wrapped.parameters() if p.grad is not None)]


def _each_off(rank: int, world_size: int) -> list[str]:
    """Decisions whose absence changes a bit of the losses or gradients."""
    expected = _grads(rank, {})
    changed = []
    for name in ("prefetch", "sink_waits", "bucket", "grad_buffer"):
        got = _grads(rank, {name: False})
        assert len(got) == len(expected)
        if not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
            changed.append(name)
    return changed


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_are_bitwise_the_same_without_each_decision(
    ranks: RankPool, world_size: int
) -> None:
    assert ranks.run(_each_off, world_size) == [[]] * world_size


def _bitwise_off(rank: int, world_size: int) -> bool:
    """Whether losses and gradients are bitwise the same without all passes that promise it."""
    bitwise = [pass_.name for pass_ in OPTIONAL_PASSES if pass_.is_bitwise]
    expected = _grads(rank, {})
    got = _grads(rank, {"disabled_passes": [*bitwise, "prefetch", "sink_waits", "bucket"]})
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


def test_bitwise_passes_are_bitwise(ranks: RankPool) -> None:
    assert ranks.run(_bitwise_off, 2) == [True] * 2
    assert {pass_.name for pass_ in OPTIONAL_PASSES if not pass_.is_bitwise} == {"grad_buffer"}


class _Watching(GraphPass):
    """Keep the names of the operators."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen += [op_name(node) for node in graph.nodes]


def test_passes_are_left_out_by_name() -> None:
    names = [pass_.name for pass_ in OPTIONAL_PASSES]
    given: dict[str, Any] = {"passes": [_Watching(), count_products]}
    every = [
        "inline_regions",
        "absent_gradients",
        *names[:-1],
        "_Watching",
        "count_products",
        names[-1],
        "planner",
    ]
    for left_out in ([], ["cut_views"], ["grad_buffer", "group_writes", "_Watching"], every[2:-1]):
        options = GraphOptions.parse({**given, "disabled_passes": left_out})
        passes = default_passes(Planner(), True, options.passes, options.left_out)
        assert [pass_.name for pass_ in passes] == [name for name in every if name not in left_out]
    assert not GraphOptions.parse({"disabled_passes": ["bucket"]}).bucket
    assert not GraphOptions.parse({"disabled_passes": ["selective_unshard"]}).selective_unshard


@pytest.mark.parametrize(
    ("disabled", "kind", "message"),
    [
        (["buckets"], FSDPValueError, r"expected some of \['bucket', 'cut_views', .*got 'buckets'"),
        (["planner"], FSDPValueError, "'planner', which cannot be left out: it alone keeps the"),
        (["absent_gradients"], FSDPValueError, "without it parameters that no loss touches"),
        (["tag_reshard_after_forward"], FSDPValueError, "which cannot be left out: the sharding"),
        ("bucket", FSDPTypeError, "expected a list of names, got 'bucket'"),
    ],
)
def test_passes_that_cannot_be_left_out(disabled: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        GraphOptions.parse({"disabled_passes": disabled})


def test_a_pass_says_what_it_is() -> None:
    text = Pipeline([drop_noop_views, grad_buffer, _Watching()]).text().splitlines()
    assert text[0].startswith("drop_noop_views  bitwise  Remove identities")
    assert text[1].startswith("grad_buffer      numeric  Write gradients")
    assert text[2] == "_Watching        numeric  Keep the names of the operators."


def _backward_gathers(model: Any, rank: int) -> tuple[list[str], torch.Tensor]:
    with record_events() as log:
        loss = loss_of(model, batch(rank, 0))
        loss.backward()
    events = [e for e in log if e.kind == "all_gather" and e.phase == "backward"]
    return [e.unit for e in events], loss.detach()


def _with_budget(rank: int, world_size: int, budget: int | None) -> Any:
    _, model = _compiled({} if budget is None else {"memory_budget_bytes": budget})
    with record_plans() as log:
        gathers, loss = _backward_gathers(model, rank)
    assert budget is None or all((planned.peak_bytes or 0) <= budget for planned in log)
    return log.plan().kept, gathers, loss


def test_a_budget_keeps_units_unsharded(ranks: RankPool) -> None:
    """Without one all blocks reshard; a large one keeps all; in between, some."""
    _, gathers, expected = ranks.run(_with_budget, 2, None)[0]
    assert gathers == ["blocks.2", "blocks.1", "blocks.0"]
    sizes = []
    for budget in (170_000, 230_000, 10_000_000):
        results = ranks.run(_with_budget, 2, budget)
        kept, gathers, loss = results[0]
        assert results[1][0] == kept
        assert not set(kept) & set(gathers)
        assert len(kept) + len(gathers) == 3
        assert torch.equal(loss, expected)
        sizes.append(len(kept))
    assert sizes[0] < sizes[2] == 3
    assert sizes == sorted(sizes)


def _raised(action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        return type(inner).__name__, str(inner)
    return "", ""


def _too_small(rank: int, world_size: int) -> tuple[str, str]:
    _, model = _compiled({"memory_budget_bytes": 1000}, num_blocks=1)
    return _raised(lambda: loss_of(model, batch(rank, 0)))


def test_a_budget_too_small_is_refused_before_anything_runs(ranks: RankPool) -> None:
    for name, message in ranks.run(_too_small, 2):
        assert name == BudgetError.__name__
        assert "expected at least" in message


def _round_trip(rank: int, world_size: int, path: str) -> Any:
    """A plan, the same plan given back, an edited one, and one for another model."""
    _, model = _compiled({})
    with record_plans() as log:
        loss_of(model, batch(rank, 0)).backward()
    plan = log.plan()
    if rank == 0:
        plan.save(path)
    torch.distributed.barrier()
    applied = []
    for given in (path, _with_all_gathers_first(plan)):
        _, model = _compiled({"plan": given})
        with record_plans() as log:
            loss = loss_of(model, batch(rank, 0))
            loss.backward()
        applied.append(log.plan().graphs)
    _, model = _compiled({"plan": path}, num_blocks=1)
    return plan, applied, _raised(lambda: loss_of(model, batch(rank, 0)))


def _with_all_gathers_first(plan: Plan) -> Plan:
    def edited(transfers: Any) -> Any:
        return tuple(replace(t, issue=0) if t.kind == "all_gather" else t for t in transfers)

    graphs = tuple(replace(g, transfers=edited(g.transfers)) for g in plan.graphs)
    return replace(plan, graphs=graphs)


def test_plans_are_given_back(ranks: RankPool, tmp_path: Any) -> None:
    results = ranks.run(_round_trip, 2, str(tmp_path / "plan.json"))
    (plan, applied, refused), (other, _, _) = results
    assert plan == other
    assert applied[0] == plan.graphs
    assert applied[1] == _with_all_gathers_first(plan).graphs != plan.graphs
    assert refused[0] == PlanError.__name__
    assert "expected a plan for this forward graph" in refused[1]


def _differently(rank: int, world_size: int) -> tuple[str, str]:
    _, model = _compiled({"max_in_flight": 1 + rank}, num_blocks=1)
    return _raised(lambda: loss_of(model, batch(rank, 0)))


def test_ranks_with_other_options(ranks: RankPool) -> None:
    for name, message in ranks.run(_differently, 2):
        assert name == DivergenceError.__name__
        assert "options of torch.compile" in message


def count_products(graph: fx.Graph) -> None:
    """A user's own pass."""
    COUNTED.append(sum("mm" in op_name(node) for node in graph.nodes))


COUNTED: list[int] = []


def _own_pass(rank: int, world_size: int) -> list[int]:
    COUNTED.clear()
    _, model = _compiled({"passes": [count_products]}, num_blocks=1)
    loss_of(model, batch(rank, 0)).backward()
    return COUNTED


def test_a_pass_of_the_user(ranks: RankPool) -> None:
    for counted in ranks.run(_own_pass, 2):
        forward, backward = counted
        assert 0 < forward < backward


def _measured(rank: int, world_size: int, place: str) -> tuple[list[Plan], set[str], int]:
    """Options without given numbers, twice: plans, rates they are made from, measurements.

    The second rank finds another link than the first, whose numbers count.
    """
    found: list[float] = []
    measure = calibration._measure_link

    def measure_link(group: Any, device: torch.device) -> dict[str, float]:
        link = measure(group, device)
        found.append(link["bytes_per_ms"] * (1 + rank))
        return link | {"bytes_per_ms": found[-1]}

    plans, rates = [], set()
    with (
        mock.patch.dict(os.environ, {"FSDP_DYNAMO_PLACE": place}),
        mock.patch.object(calibration, "measured", inspect.unwrap(calibration.measured)),
        mock.patch.object(calibration, "_measure_link", measure_link),
    ):
        for _ in range(2):
            torch._dynamo.reset()
            state_of(
                dist.group.WORLD, planning.MeasuredRates
            ).clear()  # as in the next start of the job
            wrapped = wrap(make_transformer(num_blocks=1))
            model = torch.compile(wrapped, fullgraph=True, backend=EAGER)
            before = torch.get_rng_state()
            with record_plans() as log:
                loss_of(model, batch(rank, 0)).backward()
            assert torch.equal(before, torch.get_rng_state())
            plans.append(log.plan())
            rates |= {repr(planned.options.cost) for planned in log}
    state_of(dist.group.WORLD, planning.MeasuredRates).clear()
    if rank == 0:
        assert f"{found[0]}" in rates.copy().pop()
    return plans, rates, len(found)


def test_measured_numbers_are_the_same_everywhere_and_later(ranks: RankPool, tmp_path: Any) -> None:
    first, second = ranks.run(_measured, 2, str(tmp_path))
    assert first == second
    plans, rates, measurements = first
    assert plans[0].inputs == plans[1].inputs
    assert len(rates) == 1
    assert measurements == 1


def _damaged(rank: int, world_size: int, place: str) -> list[dict[str, Any]]:
    measure = inspect.unwrap(calibration.measured)
    group, device = torch.distributed.group.WORLD, torch.device("cpu")
    with mock.patch.dict(os.environ, {"FSDP_DYNAMO_PLACE": place}):
        path = calibration._path_of(group, device)
        found = [measure(group, device)]
        whole = path.read_text() if rank == 0 else ""
        for damaged in (whole[: len(whole) // 2], "3", "{}"):
            if rank == 0:
                path.write_text(damaged)
            torch.distributed.barrier()
            found.append(measure(group, device))
        drafts = [name for name in path.parent.iterdir() if name.stem == path.stem]
        assert rank or drafts == [path]
        assert measure(group, device) == found[-1]  # read, not measured
    return found


def test_damaged_numbers_are_measured_anew(ranks: RankPool, tmp_path: Any) -> None:
    first, second = ranks.run(_damaged, 2, str(tmp_path))
    assert first == second
    assert all(one.keys() == {"link", "device"} for one in first)


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


@pytest.mark.parametrize("protocol", [0, 4])
def test_a_plan_file_runs_no_code(tmp_path: Path, protocol: int) -> None:
    mark, plan = tmp_path / "mark", tmp_path / "plan.json"
    plan.write_bytes(pickle.dumps(_Evil(mark), protocol))
    with pytest.raises(FSDPValueError, match="expected a plan that can be read"):
        GraphOptions.parse({"plan": str(plan)})
    assert not mark.exists()
    pickle.loads(plan.read_bytes())
    assert mark.exists()  # it would have


INDUCTORS = {"epilogue-fusion": False, "triton.cudagraphs": False, "bucket": False}


def _with_inductors(rank: int, world_size: int) -> tuple[Any, ...]:
    """Losses without and with them, what Inductor saw, and the error of ranks that differ."""
    torch._dynamo.reset()
    seen: set[Any] = set()

    def see(graph: fx.Graph) -> None:
        seen.add(torch._inductor.config.epilogue_fusion)

    losses, given = [], {**INDUCTORS, "passes": [see]}
    for options in ({}, given):
        model = wrap(make_transformer(num_blocks=2))
        step = torch.compile(model, fullgraph=True, backend="fsdp_dynamo", options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for number in range(2):
            loss = loss_of(step, batch(rank, number))
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch._dynamo.reset()
    given = {"max_autotune_pointwise": bool(rank)}
    step = torch.compile(
        wrap(make_transformer(num_blocks=2)), fullgraph=True, backend="fsdp_dynamo", options=given
    )
    return losses[0], losses[1], seen, _raised(lambda: loss_of(step, batch(rank, 0)))


@pytest.mark.slow
def test_inductors_settings_beside_ours(ranks: RankPool) -> None:
    for without, got, seen, error in ranks.run(_with_inductors, 2):
        assert got == pytest.approx(without, rel=1e-5)
        assert seen == {False}
        assert error[0] == DivergenceError.__name__
        assert "utotune_pointwise" in error[1]


@pytest.mark.parametrize(
    ("name", "value", "backend", "reason"),
    [
        ("triton.cudagraphs", True, "fsdp_dynamo", "CUDA graphs do not go with collectives"),
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


def test_text_tells_options_apart() -> None:
    texts = {
        GraphOptions.parse(options).text()
        for options in (
            {},
            {"bucket": False},
            {"epilogue_fusion": False},
            {"passes": [count_products]},
            GIVEN,
        )
    }
    assert len(texts) == 5
    assert GraphOptions.parse(GIVEN).text() == GraphOptions.parse(dict(GIVEN)).text()


class _Scaled:
    """A pass with a setting."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def cache_key(self) -> str:
        return f"factor {self.factor}"


def test_passes_are_compared_by_what_they_are() -> None:
    """Not by their address, which is another one on every rank."""

    def text(pass_: Any) -> str:
        return GraphOptions.parse({"passes": [pass_]}).text()

    assert text(_Scaled(2)) == text(_Scaled(2)) != text(_Scaled(3))
    assert text(partial(count_products)) == text(partial(count_products))
    assert " at 0x" not in text(partial(count_products)) + text(_Scaled(1))


@pytest.mark.parametrize(
    "live_bytes_of", [planning.live_bytes_node_by_node, planning.live_bytes_of_generated]
)
def test_a_planner_is_in_keys_of_caches(live_bytes_of: Any) -> None:
    """Inductor leaves graphs out of its cache whose passes cannot be pickled."""
    nothing = fx.symbolic_trace(torch.nn.Identity())
    planner = planning.planner_for(nothing, GraphOptions(), live_bytes_of)
    assert isinstance(pickle.loads(pickle.dumps(planner)), Planner)
