"""A clock for programs: when each step of a program would run on a device.

The host enqueues steps one after the other and goes on, unless it waits. Work begins when the host
has enqueued it, its stream has come there, and, of a collective, its communicator has done what was
issued before. A wait holds back a stream, not the host. Source: CUDA's programming guide, "Streams"
and "Events"; NCCL's user guide, "Using NCCL with CUDA streams".
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from benchmarks.streams.program import (
    COMPUTING,
    HostWait,
    Launch,
    Program,
    Record,
    Wait,
)


@dataclass(frozen=True)
class Rates:
    """Of a device, its host and its links.

    Attributes:
        flops_per_s: of matrix products.
        memory_bytes_per_s: of everything else, read and written.
        link_bytes_per_s: that a rank sends in a collective while it receives.
        collective_s: what a collective takes besides its bytes.
        launch_s: the host's time for a launch.
        num_ranks: of each collective.
        scale: by which each dimension of the recorded model was divided: products have its third
            power less to do, memory and links its second.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    collective_s: float
    launch_s: float
    num_ranks: int
    scale: float = 1

    def seconds(self, step: Launch) -> float:
        """How long a launch runs."""
        num_bytes = step.num_bytes * self.scale**2
        if step.group:
            rounds = 2 if step.kind == "all_reduce" else 1
            sent = rounds * num_bytes * (self.num_ranks - 1) / self.num_ranks
            return self.collective_s + sent / self.link_bytes_per_s
        flops = step.flops * self.scale**3
        return max(flops / self.flops_per_s, num_bytes / self.memory_bytes_per_s)


@dataclass
class Timeline:
    """When a program ran.

    Attributes:
        total_s: until the host and all streams are done.
        busy_s: by stream, how long it worked.
        intervals: of each launch, in the program's order: name, stream, begin and end.
        events: when each event was there.
    """

    total_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    intervals: list[tuple[str, str, float, float]] = field(default_factory=list)
    events: dict[int, float] = field(default_factory=dict)

    @property
    def exposed_s(self) -> float:
        """How long the stream that computes had nothing to do."""
        return self.total_s - self.busy_s.get(COMPUTING, 0.0)

    @property
    def communication_s(self) -> float:
        """How long the busiest communicator worked; with the computation, a lower bound."""
        return max((s for name, s in self.busy_s.items() if name.startswith("comm")), default=0.0)


def run(program: Program, rates: Rates) -> Timeline:
    """Give a program a clock; an event that was recorded before it begins is there."""
    host = 0.0
    streams: dict[str, float] = defaultdict(float)
    communicators: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    timeline = Timeline()
    events = timeline.events
    for step in program:
        if isinstance(step, Launch):
            host += rates.launch_s
            ready = communicators[step.group] if step.group else 0.0
            begin = max(host, streams[step.stream], ready)
            end = begin + rates.seconds(step)
            streams[step.stream] = end
            busy[step.group or step.stream] += end - begin
            if step.group:
                communicators[step.group] = end
            timeline.intervals.append((step.name, step.stream, begin, end))
        elif isinstance(step, Record):
            events[step.event] = streams[step.stream]
        elif isinstance(step, Wait):
            streams[step.stream] = max(streams[step.stream], events.get(step.event, 0.0))
        elif isinstance(step, HostWait):
            known = streams.values() if step.event is None else [events.get(step.event, 0.0)]
            host = max([host, *known])
    timeline.total_s = max([host, *streams.values()])
    timeline.busy_s = dict(busy)
    return timeline
