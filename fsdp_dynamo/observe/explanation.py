"""Report of one training step, as data that can be saved and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fsdp_dynamo.observe.graph_breaks import GraphBreak, Recompile
from graph_passes.report import GraphReport, TransferReport

VERSION = 8

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class UnitSummary:
    """Sizes of one unit.

    Attributes:
        unit: its FQN, ``""`` for the root.
        strategy: name of its sharding strategy.
        num_parameters: number of its original parameters.
        unsharded_bytes: size of its unsharded flat parameters.
        sharded_bytes: size of this rank's shards of them.
        padding_bytes: what of ``unsharded_bytes`` belongs to no parameter.
    """

    unit: str
    strategy: str
    num_parameters: int
    unsharded_bytes: int
    sharded_bytes: int
    padding_bytes: int


@dataclass(frozen=True)
class Cut:
    """A time that the compiler took out of a step.

    Attributes:
        at_ms: when, on the clock of ``MeasuredEvent``, which stands still meanwhile.
        ms: for how long.
    """

    at_ms: float
    ms: float


@dataclass(frozen=True)
class MeasuredEvent:
    """One recorded event; times are milliseconds from the first one, without compilation.

    Attributes:
        unit: FQN, ``""`` for the root.
        kind: ``"compute"``, or the kind of the collective.
        phase: ``"forward"`` or ``"backward"``.
        num_bytes: size of the unsharded tensor; 0 for compute.
        issued_ms: time of its issue, or of its start.
        done_ms: time when it was known to be complete.
        exposed_ms: time that the rank was blocked on it.
        message_bytes: what travelled for it; ``num_bytes``, or less where shards have a format.
        is_planned: whether it is a graph's: what comes before one (gathers of secondary shards) is
            in no plan.
    """

    unit: str
    kind: str
    phase: str
    num_bytes: int
    issued_ms: float
    done_ms: float
    exposed_ms: float
    message_bytes: int = 0
    is_planned: bool = True

    @property
    def is_collective(self) -> bool:
        """Whether it is a collective rather than compute."""
        return self.kind in COLLECTIVES


@dataclass(frozen=True)
class StepReport:
    """Report of one training step without its update: the plan and the measurements.

    Attributes:
        mode: ``"graph"`` or ``"hooks"``; in hooks mode ``graphs`` is empty.
        backend: name of torch.compile's backend.
        device: device that computed.
        world_size: number of ranks of the first unit's group.
        units: sizes of the units, outermost first.
        num_graphs: number of Dynamo's graphs that ran in the step.
        graph_breaks: places in the user's code where graphs ended.
        graphs: reports of the plans of the graphs that ran in the step, in order.
        measured: events of the step, in order of issue.
        recompiles: graphs that were compiled again, with the guard that failed.
        compiled_alone: by FQN of a unit, why it was not compiled as one of several equal ones.
        model: class of the model.
        cuts: where compilation was taken out of the step.
    """

    mode: Literal["graph", "hooks"]
    backend: str
    device: str
    world_size: int
    units: tuple[UnitSummary, ...]
    num_graphs: int
    graph_breaks: tuple[GraphBreak, ...]
    graphs: tuple[GraphReport, ...]
    measured: tuple[MeasuredEvent, ...]
    recompiles: tuple[Recompile, ...] = ()
    compiled_alone: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    cuts: tuple[Cut, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as data that JSON can hold."""
        return {"version": VERSION, **asdict(self)}

    def to_json(self) -> str:
        """The report as text; equal reports give equal text."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Any:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: not a report of this version.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("version", None) != VERSION:
            raise ValueError(f"explanation: expected JSON of version {VERSION}. Create it again.")
        data["units"] = tuple(UnitSummary(**unit) for unit in data["units"])
        data["graphs"] = tuple(GraphReport.from_dict(graph) for graph in data["graphs"])
        data["measured"] = tuple(MeasuredEvent(**event) for event in data["measured"])
        data["graph_breaks"] = tuple(GraphBreak(**one) for one in data["graph_breaks"])
        data["cuts"] = tuple(Cut(**one) for one in data["cuts"])
        data["recompiles"] = tuple(Recompile(**one) for one in data["recompiles"])
        return cls(**data)

    def save(self, path: str | Path) -> None:
        """Write ``to_json`` to a file."""
        Path(path).write_text(self.to_json() + "\n")

    @property
    def measured_ms(self) -> float:
        """Milliseconds from the first event to the end of the last."""
        return max((event.done_ms for event in self.measured), default=0.0)

    @property
    def measured_exposed_ms(self) -> float:
        """Milliseconds in which the rank computed nothing because of a collective."""
        return sum(event.exposed_ms for event in self.measured if event.is_collective)

    @property
    def simulated_ms(self) -> float:
        """Simulated milliseconds of all graphs, run one after the other."""
        return sum(graph.simulated_ms for graph in self.graphs)

    def pairs(self) -> Iterator[tuple[GraphReport, TransferReport, MeasuredEvent | None]]:
        """Match each planned collective with its recorded event.

        Yields:
            The graph, the collective, and the event or ``None`` if it was not recorded.
        """
        remaining: dict[tuple[str, str, str], list[MeasuredEvent]] = {}
        for event in self.measured:
            if event.is_planned:
                remaining.setdefault((event.phase, event.kind, event.unit), []).append(event)
        for graph in self.graphs:
            for transfer in graph.transfers:
                events = remaining.get((graph.phase, transfer.kind, transfer.unit))
                yield graph, transfer, events.pop(0) if events else None


def most_exposed(report: StepReport, num: int = 3) -> Sequence[tuple[GraphReport, TransferReport]]:
    """The planned collectives with the most exposed time, in descending order."""
    exposed = [(g, t) for g, t, _ in report.pairs() if t.exposed_ms > 0]
    return sorted(exposed, key=lambda pair: -pair[1].exposed_ms)[:num]


__all__ = ["Cut", "MeasuredEvent", "StepReport", "UnitSummary"]
