"""Inputs of the planner, from a traced graph and the user's options.

All ranks must reach the same plan. So options are compared between ranks, measured rates are the
first rank's, and a plan follows from these and the graph alone. If graphs differ, because batches
do, ranks follow one rank's plan (``compile_cache``). Before its first run, ranks compare the graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fsdp_dynamo.comm.collectives import transport_of
from fsdp_dynamo.comm.group_state import group_named, state_of
from fsdp_dynamo.comm.process_groups import node_ranks_of
from fsdp_dynamo.graph_mode import calibration
from fsdp_dynamo.graph_mode.compile_cache import SharedPlans
from fsdp_dynamo.graph_mode.options import GraphOptions
from fsdp_dynamo.graph_mode.unshard_operators import collectives_of, unshard_nodes
from fsdp_dynamo.health.comparison import require_same, share_from_first
from graph_passes.cost_model import CostModel, Device, Link
from graph_passes.memory.liveness import (
    as_generated,
    live_bytes,
    message_bytes,
    profile_of,
    receive_buffer_bytes,
    storages,
)
from graph_passes.scheduling.plan import Plan
from graph_passes.scheduling.planner import Planned, Planner

_Rates = dict[str, dict[str, Any]]


class _AgreedOptions(set[str]):
    """Options that the ranks of a group have compared and found equal."""


class MeasuredRates(dict[Any, list[_Rates]]):
    """Rates of the groups of graphs whose first group this is, by the ranks of all groups."""


class PlanLog(list[Planned]):
    """Decisions for every graph that was compiled while the log was open.

    Attributes:
        kept: units that stay unsharded between forward and backward.
        compiled_alone: reasons why units share no region with equal units, by FQN.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []
        self.compiled_alone: dict[str, str] = {}

    def plan(self) -> Plan:
        """Return all decisions as one plan, which users save and give back in ``options``."""
        inputs = {"options": sorted({repr(planned.options) for planned in self})}
        return Plan(inputs, tuple(self.kept), tuple(planned.plan for planned in self))


_logs: list[PlanLog] = []


@contextmanager
def record_plans() -> Iterator[PlanLog]:
    """Record what is decided for graphs compiled in the context; compile caches are off.

    Yields:
        The log, which grows as graphs are compiled and stays readable afterwards. Contexts nest:
        each log gets what is compiled inside.
    """
    log = PlanLog()
    _logs.append(log)
    try:
        yield log
    finally:
        _logs[:] = [other for other in _logs if other is not log]  # by identity: logs are lists


def is_recording() -> bool:
    """Whether a log is open. Then no decision may come from a cache."""
    return bool(_logs)


def record_kept(units: Sequence[str]) -> None:
    """Record units that stay unsharded."""
    for log in _logs:
        log.kept.extend(unit for unit in units if unit not in log.kept)


def record_compiled_alone(reasons: Iterable[tuple[str, str]]) -> None:
    """Record units that share no region, with reasons."""
    found = dict(reasons)
    for log in _logs:
        log.compiled_alone.update(found)


def _observe(planned: Planned) -> None:
    for log in _logs:
        log.append(planned)


InFlightBytes = Callable[[fx.Node], int]


def live_bytes_node_by_node(graph: fx.Graph, in_flight: InFlightBytes) -> Sequence[int]:
    """Return the bytes alive at every node of a graph that is run node by node."""
    return live_bytes(graph, in_flight)


def live_bytes_of_generated(graph: fx.Graph, in_flight: InFlightBytes) -> Sequence[int]:
    """Return the bytes alive at every node of a graph that Inductor compiles."""
    lifetimes = as_generated(storages(graph, in_flight), graph)
    return profile_of(lifetimes, len(graph.nodes)).live_bytes


def planner_for(
    gm: fx.GraphModule,
    options: GraphOptions,
    live_bytes_of: Callable[..., Sequence[int]],
) -> Planner:
    """Return the planner of a graph that Dynamo has traced.

    Every rank of the groups in the graph must call this for its first graph.

    Args:
        gm: the graph.
        options: the user's.
        live_bytes_of: bytes alive at every node, given a graph and the bytes that a collective in
            flight holds besides its tensors (``in_flight``).

    Raises:
        DivergenceError: ranks were given different options, or one has not come.
    """
    cost = CostModel()
    names, formats, marks = collectives_of(gm)
    if names:
        group = group_named(names[0])
        text = f"{options.text()}, formats of collectives: {' '.join(formats) or 'none'}"
        agreed = state_of(group, _AgreedOptions)
        if text not in agreed:
            require_same(group, "options of torch.compile", text)
            agreed.add(text)
        cost = _cost_model(names, options, _device_of(gm), formats)
    observe = _observe if is_recording() else None
    in_flight = receive_buffer_bytes if cost.receives_apart else message_bytes
    live = partial(live_bytes_of, in_flight=in_flight)  # picklable: it is part of cache keys
    agree = None
    if names and options.plan is None and options.memory_budget_bytes is None:
        agree = SharedPlans(marks, f"{options.text()} {live_bytes_of.__name__}")
    return Planner(options.scheduling(cost=cost), live, options.plan, observe, agree)


def _cost_model(
    names: Sequence[str], options: GraphOptions, device: torch.device, formats: Sequence[str]
) -> CostModel:
    """Return the cost model: rates as given or measured. Groups of the same ranks share a link."""
    distinct: dict[tuple[int, ...], str] = {}
    for name in names:
        distinct.setdefault(tuple(dist.get_process_group_ranks(group_named(name))), name)
    firsts = list(distinct.values())
    given = options.link is not None and options.device is not None
    groups = [group_named(name) for name in firsts]
    rates = None if given else _measured_for(groups, device)
    links: dict[str, Link] = {}
    for name in names:
        first = distinct[tuple(dist.get_process_group_ranks(group_named(name)))]
        link = options.link or Link(**rates[firsts.index(first)]["link"])  # type: ignore[index]
        is_ring = transport_of(group_named(name), device) == "library"
        node_ranks = node_ranks_of(group_named(name)) if is_ring else link.node_ranks
        links[name] = replace(link, name=first, node_ranks=node_ranks)
    computes = options.device
    if computes is None:
        assert rates is not None  # measured
        of_formats: dict[str, Any] = _measured_formats_for(groups, rates, device, formats)
        computes = Device(**rates[0]["device"], **of_formats)
    apart = any(transport_of(group_named(name), device) != "library" for name in names)
    return CostModel(computes, links[names[0]], links, apart)


def _measured_for(groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[_Rates]:
    """Return the rates of each group, which each replica measures, the same on all ranks."""
    known = state_of(groups[0], MeasuredRates)
    key = _ranks_of(groups)
    if key not in known:
        rates = [calibration.measured(group, device) for group in groups]
        known[key] = _shared(groups, "measured rates", rates)
    return known[key]


def _shared(groups: Sequence[dist.ProcessGroup], what: str, rates: Any) -> Any:
    """Return the rates of the first rank of the first replica.

    It sends its rates across replicas, and each receiver sends them to its own replica.
    """
    text = json.dumps(rates)
    for group in reversed(groups if len(groups) > 1 else ()):
        text = share_from_first(group, what, partial(str, text))
    return json.loads(text)


_FORMATS = "formats"


def _measured_formats_for(
    groups: Sequence[dist.ProcessGroup],
    rates: list[_Rates],
    device: torch.device,
    formats: Sequence[str],
) -> _Rates:
    wanted = sorted({text.rstrip("?") for text in formats})
    known = rates[0].setdefault(_FORMATS, {})
    key = " ".join(wanted)
    if wanted and key not in known:
        measured = calibration.measured_formats(groups[0], device, wanted)
        known[key] = _shared(groups, "measured rates of formats", measured)
    found: _Rates = known.get(key, {})
    return found


def _ranks_of(groups: Sequence[dist.ProcessGroup]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)


def _device_of(gm: fx.GraphModule) -> torch.device:
    device: torch.device = next(unshard_nodes(gm)).meta["example_value"].device
    return device
