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
from pool import on_ranks

from fsdp_dynamo import (
    FSDP,
    CollectivePrecision,
    FSDPError,
    explain,
    record_events,
    record_plans,
)
from fsdp_dynamo.comm import wire_codec
from fsdp_dynamo.events import COLLECTIVE_KINDS
from fsdp_dynamo.graph_mode import calibration
from graph_passes.scheduling.plan import Plan

ALWAYS = CollectivePrecision("int8", "int8", stochastic_rounding=False)
EXPOSED = replace(ALWAYS, only_where_exposed=True)
DEVICE = {"flops_per_ms": 1e7, "bytes_per_ms": 1e7}
SLOW = {"link": {"latency_ms": 0.0, "bytes_per_ms": 1e3}, "device": DEVICE}
MIDDLE = {"link": SLOW["link"] | {"bytes_per_ms": 1e6}, "device": DEVICE | {"flops_per_ms": 1e6}}
FAST = {"link": {"latency_ms": 0.0, "bytes_per_ms": 1e12}, "device": DEVICE}


def _model(precision: Any) -> FSDP:
    return wrap(make_transformer(num_blocks=1, dim=32), collective_precision=precision)


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


@on_ranks(2)
def test_the_link_decides(rank: int) -> None:
    """All collectives have the format on a slow link, some on a faster one, none on a fast one."""
    never, always, slow, middle, fast = (_trained(rank, *case, "graph") for case in CASES.values())
    assert fast == never
    assert never.num_formatted == 0
    assert slow == always
    assert slow.num_formatted == slow.num_collectives == 5
    assert 0 < middle.num_formatted < middle.num_collectives
    for chosen in (slow, middle):
        assert chosen.is_same
        assert chosen.losses == pytest.approx(never.losses, rel=0.05)
        assert chosen.losses != never.losses


# -- plans and explanations ------------------------------------------------------------------------


@on_ranks(2)
def test_plans_hold_formats(rank: int) -> None:
    """A plan is followed as given; removing a format is allowed, adding another format is not."""

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
    assert {t.wire for graph in plan.graphs for t in graph.transfers} == {"", "int8/64"}
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, plan.to_json())
    assert of_ranks[0] == of_ranks[1]
    assert planned(Plan.from_json(plan.to_json())).graphs == plan.graphs
    less = edited(plan, True, "")
    assert planned(less).graphs == less.graphs
    wrong = error_of(lambda: planned(edited(plan, False, "float8/64")))
    assert "expected format 'none'" in wrong
    assert "got 'float8/64'" in wrong


@on_ranks(2)
def test_explanations_say_what_has_a_format(rank: int) -> None:
    model = in_mode(_model(EXPOSED), "graph", **MIDDLE)
    explanation = explain(model, batch(rank, 0), loss_fn=lambda out: out.float().pow(2).mean())
    text = explanation.text(details=True)
    assert "ms exposed without" in text
    assert "none: hidden" in text
    collectives = [event for event in explanation.measured if event.is_collective]
    assert any(event.message_bytes < event.num_bytes for event in collectives)
    assert any(event.message_bytes == event.num_bytes for event in collectives)


# -- rates -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_rates_of_formats_are_measured_once(rank: int, tmp_path: Any) -> None:
    formats = ("bfloat16/64", "int8/64~")
    measured = inspect.unwrap(calibration.measured_formats)
    group = dist.distributed_c10d._get_default_group()
    with (
        mock.patch.dict(os.environ, {"FSDP_DYNAMO_PLACE": str(tmp_path)}),
        mock.patch.object(wire_codec, "encode", wraps=wire_codec.encode) as encode,
    ):
        first = measured(group, torch.device("cpu"), formats)
        num_calls = encode.call_count
        assert num_calls > 0
        assert measured(group, torch.device("cpu"), formats) == first
        assert encode.call_count == num_calls
    assert set(first) == {"encode_bytes_per_ms", "decode_bytes_per_ms"}
    for rates in first.values():
        assert set(rates) == set(formats)
        assert all(rate > 0 for rate in rates.values())
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, first)
    assert of_ranks[0] == of_ranks[1]


# -- what is refused -------------------------------------------------------------------------------


@on_ranks(2)
def test_refused(rank: int) -> None:
    for mode in ("eager", "hooks"):
        error = error_of(lambda mode=mode: loss_of(in_mode(_model(EXPOSED), mode), batch(rank, 0)))
        assert "expected graph mode" in error
        assert 'backend="fsdp_dynamo"' in error
    with pytest.raises(FSDPError, match="a format for one of all_gather, reduce_scatter"):
        _model(CollectivePrecision(only_where_exposed=True))


@on_ranks(2)
def test_ranks_that_differ(rank: int) -> None:
    """Options that differ are refused, even where both lead to the same plan."""
    compiled = in_mode(_model(None if rank else EXPOSED), "graph", **FAST)
    error = error_of(lambda: loss_of(compiled, batch(rank, 0)).backward())
    assert "DivergenceError" in error
    assert "int8/64?" in error
