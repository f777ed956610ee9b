"""The plan: what was decided, as data that can be saved, compared, edited and given back.

    {"version": 2,
     "inputs": {...},                  what the decisions follow from, the same on all ranks
     "kept": ["layers.7"],             units that stay unsharded between forward and backward
     "graphs": [{"phase": "backward", "digest": "...", "num_steps": 210, "transfers": [
         {"unit": "layers.6", "kind": "all_gather", "ordinal": 0, "issue": 0, "wait": 14,
          "launch": 3, "wire": ""}, ...]}]}

``issue`` and ``wait`` are gaps between steps of compute (see ``problem``). Transfers are in order
of issue; equal ``launch`` numbers share a launch. ``wire`` is the format in which the collective
travels (``WireFormat.encode``), ``""`` for none. A plan contains no rank number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import fx

from graph_passes.graph_utils import is_backward, is_gather, is_wait, num_bytes, op_name
from graph_passes.markers import mark_of
from graph_passes.scheduling.problem import Dissection, Problem, Transfer
from graph_passes.scheduling.simulation import Placement, Schedule

VERSION = 2
"""Version of the JSON format, the only one that ``Plan.from_json`` reads."""


class PlanError(ValueError):
    """A plan that cannot be read, or does not fit the graph."""


@dataclass(frozen=True)
class PlannedTransfer:
    """Place of one collective.

    Attributes:
        unit: FQN of the unit, from the mark.
        kind: kind of the collective, from the mark.
        ordinal: ordinal of the flat parameter, from the mark.
        issue: gap between steps of compute in which it is issued, from 0.
        wait: gap in which it is waited for.
        launch: collectives of a graph with the same number are launched together.
        wire: format in which it travels, as text; ``""`` for none.
    """

    unit: str
    kind: str
    ordinal: int
    issue: int
    wait: int
    launch: int
    wire: str = ""

    @property
    def name(self) -> str:
        """Describe the collective, for messages."""
        return f"{self.kind} of unit '{self.unit}', flat parameter {self.ordinal}"


@dataclass(frozen=True)
class GraphPlan:
    """Places of all collectives of one graph.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        digest: digest of the graph; the plan applies to this graph only.
        num_steps: steps of compute in it.
        transfers: collectives in order of issue.
    """

    phase: str
    digest: str
    num_steps: int
    transfers: tuple[PlannedTransfer, ...]

    @property
    def short_digest(self) -> str:
        """Return the digits that tell graphs apart in labels of collectives."""
        return self.digest[:12]


@dataclass(frozen=True)
class Plan:
    """Decisions for the graphs of a compiled model.

    Attributes:
        inputs: what the decisions follow from, for the reader.
        kept: FQNs of units that stay unsharded between forward and backward.
        graphs: places of collectives.
    """

    inputs: Mapping[str, Any]
    kept: tuple[str, ...]
    graphs: tuple[GraphPlan, ...]

    def to_json(self) -> str:
        """Return the plan as text, the same for equal plans."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what ``to_json`` returned.

        Raises:
            PlanError: not a plan of this version.
        """
        try:
            data = json.loads(text)
            version = data.pop("version")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"plan: expected a JSON object with a version, got {error}") from error
        if version != VERSION:
            raise PlanError(f"plan: expected version {VERSION}, got {version!r}. Make it anew.")
        try:
            graphs = tuple(graph_from(graph) for graph in data["graphs"])
            return Plan(data["inputs"], tuple(data["kept"]), graphs)
        except (KeyError, TypeError) as error:
            raise PlanError(f"plan: expected the fields of version {VERSION}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write ``to_json()`` to a file."""
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a file.

        Raises:
            PlanError: not a plan of this version.
            OSError: the file cannot be read.
        """
        try:
            return Plan.from_json(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise PlanError(f"plan: expected a JSON text, got {error}") from error

    def digest(self) -> str:
        """Return a hash that is equal for equal plans."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def graph_from(data: Mapping[str, Any]) -> GraphPlan:
    """Read what ``dataclasses.asdict`` made of a ``GraphPlan``."""
    names = {field.name for field in fields(PlannedTransfer)}
    transfers = []
    for item in data["transfers"]:
        if set(item) != names:
            raise TypeError(f"a transfer needs {sorted(names)}, got {sorted(item)}")
        for number in ("ordinal", "issue", "wait", "launch"):
            if not isinstance(item[number], int):
                raise TypeError(f"{number} of {item['unit']!r} must be an integer")
        if not isinstance(item["wire"], str):
            raise TypeError(f"wire of {item['unit']!r} must be a text")
        transfers.append(PlannedTransfer(**item))
    return GraphPlan(data["phase"], data["digest"], data["num_steps"], tuple(transfers))


def digest_of(parts: Dissection) -> str:
    """Return a hash of a graph's steps and collectives that ignores the order of collectives."""
    hashed = hashlib.sha256()
    for node in parts.steps:
        shape = tuple(getattr(node.meta.get("val"), "shape", ()))
        hashed.update(f"{op_name(node) or node.target} {shape}\n".encode())
    marks = [f"{mark_of(c.collective)} {num_bytes(c.collective)}" for c in parts.chains]
    hashed.update("\n".join(sorted(marks)).encode())
    return hashed.hexdigest()


def phase_of(parts: Dissection) -> str:
    """Return ``"forward"`` or ``"backward"``."""
    nodes = [*parts.placeholders, *parts.steps]
    return "backward" if nodes and is_backward(nodes[0].graph) else "forward"


def plan_of(
    parts: Dissection, problem: Problem, schedule: Schedule, launches: Mapping[int, int]
) -> GraphPlan:
    """Return a schedule as data; ``launches`` maps the index of a transfer to its launch."""
    transfers = []
    for placement in schedule:
        transfer = problem.transfers[placement.transfer]
        mark, launch = transfer.mark, launches[placement.transfer]
        places = (placement.issue, placement.wait)
        transfers.append(
            PlannedTransfer(mark.unit, mark.kind, mark.ordinal, *places, launch, transfer.wire)
        )
    return GraphPlan(phase_of(parts), digest_of(parts), problem.num_steps, tuple(transfers))


def indices_by_name(problem: Problem) -> dict[tuple[str, str, int], list[int]]:
    """Return the indices of transfers by unit, kind and ordinal, in their order."""
    found: dict[tuple[str, str, int], list[int]] = {}
    for index, transfer in enumerate(problem.transfers):
        mark = transfer.mark
        found.setdefault((mark.unit, mark.kind, mark.ordinal), []).append(index)
    return found


def schedule_from(plan: GraphPlan, problem: Problem) -> tuple[Schedule, dict[int, int]]:
    """Return a plan's places for a problem, checked, and the launch of each transfer.

    Raises:
        PlanError: a collective is missing, unknown, listed twice or in another format; it is placed
            before its input is ready or after its result is needed; or collectives of one launch
            cannot be launched together.
    """
    left = indices_by_name(problem)
    schedule = []
    launches = {}
    for planned in plan.transfers:
        indices = left.get((planned.unit, planned.kind, planned.ordinal))
        if not indices:
            raise PlanError(f"plan: {planned.name}: expected a collective of the graph, got none")
        index = indices.pop(0)
        _check_gaps(planned, problem, index)
        _check_wire(planned, problem.transfers[index])
        schedule.append(Placement(index, planned.issue, planned.wait))
        launches[index] = planned.launch
    for (unit, kind, ordinal), indices in left.items():
        if indices:
            raise PlanError(
                f"plan: expected every collective of the graph, got none for {kind} of unit "
                f"'{unit}', flat parameter {ordinal}"
            )
    _check_launches(plan, problem, schedule)
    return tuple(schedule), launches


def _check_launches(plan: GraphPlan, problem: Problem, schedule: Sequence[Placement]) -> None:
    """Check that transfers of one launch follow each other in one gap, and are alike."""
    ended: set[int] = set()
    for position, planned in enumerate(plan.transfers[1:], 1):
        before = plan.transfers[position - 1]
        if planned.launch != before.launch:
            ended.add(before.launch)
        one, other = (problem.transfers[schedule[i].transfer] for i in (position - 1, position))
        apart = planned.launch in ended
        if planned.launch == before.launch:
            apart = not one.may_share_launch(other) or planned.issue != before.issue
        if apart:
            raise PlanError(
                f"plan: {planned.name}: expected transfers of launch {planned.launch} to be of one "
                "kind, group, dtype and format, to follow one another with the same issue, and not "
                f"to need another one, got it after {before.name}. Give it a launch of its own."
            )


def _check_wire(planned: PlannedTransfer, transfer: Transfer) -> None:
    if planned.wire != transfer.wire:
        raise PlanError(
            f"plan: {planned.name}: expected format '{transfer.wire or 'none'}' as the unit's "
            f"collective_precision says, got '{planned.wire or 'none'}'. Correct the plan; only "
            "where collective_precision is only_where_exposed does a plan decide."
        )


def _check_gaps(planned: PlannedTransfer, problem: Problem, index: int) -> None:
    transfer = problem.transfers[index]
    if not transfer.ready <= planned.issue <= planned.wait <= transfer.need:
        raise PlanError(
            f"plan: {planned.name}: expected {transfer.ready} (its input is ready) <= issue <= "
            f"wait <= {transfer.need} (its result is used), got issue {planned.issue} and wait "
            f"{planned.wait}: the graph would be cyclic. Correct the two numbers."
        )


# -- shared gathers --------------------------------------------------------------------------------
# One all-gather for all calls of a unit in a graph.
#
# In the joint graph of a unit that is called twice, in checkpointed code, before the partition::
#
#     shard -> all_gather -> wait -> first call
#     shard -> all_gather -> wait -> second call
#
# and after it::
#
#     shard -> all_gather -> wait -> first call, second call
#
# Since torch 2.14, torch's elimination of common subexpressions merges only the all-gathers,
# because a wait has an effect: one collective would be waited for twice.


def share_gathers(graph: fx.Graph) -> None:
    """Merge equal all-gathers of a joint graph, with the casts before them and their waits."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not _leads_to_parameters(node):
            continue
        key = (node.target, node.args, tuple(sorted(node.kwargs.items())))
        same = first.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _leads_to_parameters(node: fx.Node) -> bool:
    """Whether a node is an all-gather, its wait, or computes its input."""
    if node.op != "call_function":
        return False
    source = node.args[0] if is_wait(node) else node
    return is_gather(source) or any(map(is_gather, node.users))  # type: ignore[arg-type]


__all__ = ["VERSION", "GraphPlan", "Plan", "PlanError", "PlannedTransfer"]
