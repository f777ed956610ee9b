"""What ``explain`` has found out, as data that can be saved and read back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fsdp_dynamo.events import COLLECTIVE_KINDS, COMPUTE_KINDS, Event
from fsdp_dynamo.observe.graph_breaks import GraphBreak, Recompile
from graph_passes.report import GraphReport, TransferReport

VERSION = 2

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class UnitFacts:
    """One unit.

    Attributes:
        unit: its FQN, ``""`` for the root.
        strategy: name of its sharding strategy.
        num_parameters: original parameters in it.
        unsharded_bytes: of its flat parameters.
        sharded_bytes: this rank's part of them.
    """

    unit: str
    strategy: str
    num_parameters: int
    unsharded_bytes: int
    sharded_bytes: int


@dataclass(frozen=True)
class Measured:
    """One recorded event; milliseconds from the first event of the step.

    Attributes:
        unit: FQN, ``""`` for the root.
        kind: ``"compute"``, or that of the collective.
        phase: ``"forward"`` or ``"backward"``.
        num_bytes: of the unsharded tensor; 0 for compute.
        issued_ms: when it was issued or began.
        done_ms: when it was known to be complete.
        exposed_ms: how long the rank was blocked for it.
    """

    unit: str
    kind: str
    phase: str
    num_bytes: int
    issued_ms: float
    done_ms: float
    exposed_ms: float

    @property
    def is_collective(self) -> bool:
        """A collective, as opposed to compute."""
        return self.kind in COLLECTIVES


@dataclass(frozen=True)
class Findings:
    """One training step without its update: what was planned and what was measured.

    Attributes:
        path: ``"graph"`` or ``"hooks"``; on the hooks path there are no ``graphs``.
        backend: name of the backend of torch.compile.
        device: what was computed on.
        world_size: ranks of the first unit's group.
        units: outermost first.
        num_graphs: that Dynamo has captured.
        graph_breaks: how often, by reason, as Dynamo counts.
        breaks: where graphs ended, with the user's line.
        recompiles: graphs that were compiled again, with the guard that failed.
        graphs: what was planned, in order of compilation: forward, then backward.
        measured: one step, in order of issue.
    """

    path: Literal["graph", "hooks"]
    backend: str
    device: str
    world_size: int
    units: tuple[UnitFacts, ...]
    num_graphs: int
    graph_breaks: Mapping[str, int]
    graphs: tuple[GraphReport, ...]
    measured: tuple[Measured, ...]
    breaks: tuple[GraphBreak, ...] = ()
    recompiles: tuple[Recompile, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As what JSON can hold."""
        return {"version": VERSION, **asdict(self)}

    def to_json(self) -> str:
        """As text, the same for equal findings."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Any:
        """Back from ``to_json``.

        Raises:
            ValueError: not findings of this version.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("version", None) != VERSION:
            raise ValueError(f"explanation: expected JSON of version {VERSION}. Make it anew.")
        data["units"] = tuple(UnitFacts(**unit) for unit in data["units"])
        data["graphs"] = tuple(GraphReport.from_dict(graph) for graph in data["graphs"])
        data["measured"] = tuple(Measured(**event) for event in data["measured"])
        data["breaks"] = tuple(GraphBreak(**one) for one in data["breaks"])
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
        """For how many milliseconds nothing was computed because of a collective."""
        return sum(event.exposed_ms for event in self.measured if event.is_collective)

    @property
    def simulated_ms(self) -> float:
        """Simulated milliseconds of all graphs, one after the other."""
        return sum(graph.simulated_ms for graph in self.graphs)

    def pairs(self) -> Iterator[tuple[GraphReport, TransferReport, Measured | None]]:
        """Every planned collective, and the event that is the same one.

        Yields:
            The graph, the collective, and the event; ``None`` for one that was not recorded.
        """
        left: dict[tuple[str, str, str], list[Measured]] = {}
        for event in self.measured:
            left.setdefault((event.phase, event.kind, event.unit), []).append(event)
        for graph in self.graphs:
            for transfer in graph.transfers:
                events = left.get((graph.phase, transfer.kind, transfer.unit))
                yield graph, transfer, events.pop(0) if events else None


def most_exposed(findings: Findings, num: int = 3) -> Sequence[tuple[GraphReport, TransferReport]]:
    """The planned collectives that cost most, the worst first."""
    exposed = [(g, t) for g, t, _ in findings.pairs() if t.exposed_ms > 0]
    return sorted(exposed, key=lambda pair: -pair[1].exposed_ms)[:num]


def measured_of(events: Iterable[Event]) -> tuple[Measured, ...]:
    """Collectives and compute of a recording, on a clock that begins with the first of them."""
    kept = [e for e in events if e.kind in COLLECTIVE_KINDS or e.kind in COMPUTE_KINDS]
    start = min((event.issued_ns for event in kept), default=0)
    return tuple(_measured(event, start) for event in kept)


def _measured(event: Event, start: int) -> Measured:
    return Measured(
        unit=event.unit,
        kind=event.kind if event.kind in COLLECTIVE_KINDS else "compute",
        phase=event.phase,
        num_bytes=event.num_bytes,
        issued_ms=(event.issued_ns - start) / 1e6,
        done_ms=(max(event.waited_ns, event.issued_ns) - start) / 1e6,
        exposed_ms=event.exposed_ns / 1e6,
    )


__all__ = ["Findings", "Measured", "UnitFacts"]
