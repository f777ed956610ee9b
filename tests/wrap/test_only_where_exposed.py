"""``only_where_exposed`` on ranks: what travels, what the losses are, who refuses it."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loops import error_of
from models import batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import RankPool

from fsdp_dynamo import FSDP, CollectivePrecision, explain, record_events, record_plans
from fsdp_dynamo.comm import wire_codec
from fsdp_dynamo.events import COLLECTIVE_KINDS
from fsdp_dynamo.graph_mode import calibration
from graph_passes.scheduling.plan import Plan

ALWAYS = CollectivePrecision("int8", "int8", stochastic_rounding=False)
EXPOSED = replace(ALWAYS, only_where_exposed=True)
DEVICE = {"flops_per_ms": 1e7, "bytes_per_ms": 1e7}
SLOW = {"link": {"latency_ms": 0.0, "bytes_per_ms": 1e3}, "device": DEVICE}
MIDDLE = {"link": SLOW["link"] | {"bytes_per_ms": 1e5}, "device": DEVICE | {"flops_per_ms": 1e6}}
FAST = {"link": {"latency_ms": 0.0, "bytes_per_ms": 1e12}, "device": DEVICE}


def _model(precision: Any) -> FSDP:
    return wrap(make_transformer(num_blocks=2, dim=32), collective_precision=precision)


class Trained(NamedTuple):
    """Two steps by SGD on one rank.

    Attributes:
        losses: of each step.
        num_collectives: of the last step.
        num_formatted: those of them that travelled in a format.
        is_same: whether ranks saw bitwise equal parameters: their outputs for one batch are.
    """

    losses: list[float]
    num_collectives: int
    num_formatted: int
    is_same: bool


def _trained(rank: int, options: dict[str, Any], precision: Any, mode: str) -> Trained:
    torch._dynamo.reset()
    model = _model(precision)
    compiled = in_mode(model, mode, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        with record_events() as log:
            loss = loss_of(compiled, batch(rank, step))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    collectives = [event for event in log if event.kind in COLLECTIVE_KINDS]
    formatted = [event for event in collectives if event.message_bytes < event.num_bytes]
    assert all(event.message_bytes < 0.3 * event.num_bytes for event in formatted)
    same = loss_of(compiled, batch(0, 9)).detach()
    first = same.clone()
    dist.broadcast(first, 0)
    return Trained(losses, len(collectives), len(formatted), torch.equal(same, first))


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "never": (SLOW, None),
    "always": (SLOW, ALWAYS),
    "slow": (SLOW, EXPOSED),
    "middle": (MIDDLE, EXPOSED),
    "fast": (FAST, EXPOSED),
}


def _by_case(rank: int, world_size: int, mode: str, *names: str) -> dict[str, Trained]:
    return {name: _trained(rank, *CASES[name], mode) for name in names}


@pytest.mark.slow
def test_chosen_formats_in_generated_code(ranks: RankPool) -> None:
    for found in ranks.run(_by_case, 2, "graph-inductor", "always", "slow"):
        assert found["slow"] == found["always"]
        assert found["slow"].num_formatted == found["slow"].num_collectives > 6


def test_the_link_decides(ranks: RankPool) -> None:
    """All collectives have the format on a slow link, some on a faster one, none on a fast one."""
    for found in ranks.run(_by_case, 2, "graph", *CASES):
        never, always, slow, middle, fast = found.values()
        assert fast == never
        assert never.num_formatted == 0
        assert slow == always
        assert slow.num_formatted == slow.num_collectives > 6
        assert 0 < middle.num_formatted < middle.num_collectives
        for chosen in (slow, middle):
            assert chosen.is_same
            assert chosen.losses == pytest.approx(never.losses, rel=0.05)
            assert chosen.losses != never.losses


# -- plans and explanations ------------------------------------------------------------------------


def _given_back(rank: int, world_size: int) -> Any:
    """Plans: as decided, given back, without a format of it, and with one that is not there."""

    def planned(plan: Plan | None) -> Plan:
        torch._dynamo.reset()
        compiled = in_mode(_model(EXPOSED), "graph", plan=plan, **MIDDLE)
        with record_plans() as log:
            loss_of(compiled, batch(rank, 0)).backward()
        return log.plan()

    def edited(plan: Plan, old: bool, wire: str) -> Plan:
        *others, graph = plan.graphs
        index = next(i for i, t in enumerate(graph.transfers) if bool(t.wire) is old)
        transfers = list(graph.transfers)
        transfers[index] = replace(transfers[index], wire=wire)
        return replace(plan, graphs=(*others, replace(graph, transfers=tuple(transfers))))

    plan = planned(None)
    less = edited(plan, True, "")
    wrong = error_of(lambda: planned(edited(plan, False, "float8/64")))
    assert planned(Plan.from_json(plan.to_json())).graphs == plan.graphs
    assert planned(less).graphs == less.graphs
    return plan, plan.diff(less), wrong


def test_plans_hold_formats(ranks: RankPool) -> None:
    (plan, diff, wrong), (other, *_) = ranks.run(_given_back, 2)
    assert plan == other
    assert {t.wire for graph in plan.graphs for t in graph.transfers} == {"", "int8/64"}
    assert len(diff) == 1
    assert "format int8/64 -> none" in diff[0]
    assert "expected format 'none'" in wrong
    assert "got 'float8/64'" in wrong


def _explained(rank: int, world_size: int) -> tuple[str, Any]:
    model = in_mode(_model(EXPOSED), "graph", **MIDDLE)
    explanation = explain(model, batch(rank, 0), loss_fn=lambda out: out.float().pow(2).mean())
    return explanation.text(details=True), explanation.measured


def test_explanations_say_what_has_a_format(ranks: RankPool) -> None:
    for text, measured in ranks.run(_explained, 2):
        assert "ms exposed without" in text
        assert "none: hidden" in text
        collectives = [event for event in measured if event.is_collective]
        assert any(event.message_bytes < event.num_bytes for event in collectives)
        assert any(event.message_bytes == event.num_bytes for event in collectives)


# -- rates -----------------------------------------------------------------------------------------


def _measured(rank: int, world_size: int, place: str) -> tuple[list[Any], int]:
    """Rates of two formats, twice, and how often something was encoded."""
    encode, calls = wire_codec.encode, []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args)
        return encode(*args)

    formats = ("bfloat16/64", "int8/64~")
    measured = inspect.unwrap(calibration.measured_formats)
    group = dist.distributed_c10d._get_default_group()
    with (
        mock.patch.dict(os.environ, {"FSDP_DYNAMO_PLACE": place}),
        mock.patch.object(wire_codec, "encode", counted),
    ):
        found = [measured(group, torch.device("cpu"), formats)]
        num_calls = len(calls)
        found.append(measured(group, torch.device("cpu"), formats))
    assert num_calls == len(calls)
    return found, num_calls


def test_rates_of_formats_are_measured_once(ranks: RankPool, tmp_path: Any) -> None:
    results = ranks.run(_measured, 2, str(tmp_path))
    (first, again), num_calls = results[0]
    assert first == again == results[1][0][0]
    assert num_calls > 0
    assert set(first) == {"encode_bytes_per_ms", "decode_bytes_per_ms"}
    for rates in first.values():
        assert set(rates) == {"bfloat16/64", "int8/64~"}
        assert all(rate > 0 for rate in rates.values())


# -- what is refused -------------------------------------------------------------------------------


def _refused(rank: int, world_size: int) -> dict[str, str]:
    def forward(mode: str) -> str:
        return error_of(lambda: loss_of(in_mode(_model(EXPOSED), mode), batch(rank, 0)))

    nothing = CollectivePrecision(only_where_exposed=True)
    return {
        "eager": forward("eager"),
        "hooks": forward("hooks"),
        "nothing": error_of(lambda: _model(nothing)),
    }


def test_refused(ranks: RankPool) -> None:
    for errors in ranks.run(_refused, 2):
        for mode in ("eager", "hooks"):
            assert "expected graph mode" in errors[mode]
            assert 'backend="fsdp_dynamo"' in errors[mode]
        assert "a format for one of all_gather, reduce_scatter" in errors["nothing"]


def _differ(rank: int, world_size: int, precisions: list[Any], options: dict[str, Any]) -> str:
    compiled = in_mode(_model(precisions[rank]), "graph", **options)
    return error_of(lambda: loss_of(compiled, batch(rank, 0)).backward())


@pytest.mark.parametrize("other", [ALWAYS, None], ids=["always", "never"])
@pytest.mark.parametrize("options", [SLOW, FAST], ids=["slow", "fast"])
def test_ranks_that_differ(ranks: RankPool, other: Any, options: dict[str, Any]) -> None:
    """Also where the plan comes to the same."""
    for error in ranks.run(_differ, 2, [EXPOSED, other], options):
        assert "DivergenceError" in error
        assert "int8/64?" in error
