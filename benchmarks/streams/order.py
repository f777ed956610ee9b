"""Checks that a program's accesses are ordered, whatever the speed of its streams.

Each stream has a vector clock: how far it knows every other stream to be. Recording an event copies
the clock, waiting for one merges it. Two accesses of a buffer, one of them a write, must be ordered
by the clocks; so must be every access before the free of a buffer and what its stream enqueues
next, because that may be given the same memory, and every access after an allocation and what its
stream had enqueued by then, because that may have used it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.streams.program import (
    Allocate,
    Free,
    HostAccess,
    HostWait,
    Launch,
    Program,
    Record,
    Wait,
)

Clock = dict[str, int]

HOST = "host"


@dataclass
class _Buffer:
    stream: str
    written: tuple[str, int, str] | None = None
    read: dict[str, tuple[int, str]] = field(default_factory=dict)

    def accesses(self, *, with_reads: bool) -> Iterable[tuple[str, int, str]]:
        """Stream, time and operator of the last write, and of each stream's last read."""
        if self.written is not None:
            yield self.written
        if with_reads:
            for stream, (time, name) in self.read.items():
                yield stream, time, name


class _Checker:
    def __init__(self) -> None:
        self.faults: list[str] = []
        self._clocks: dict[str, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}
        self._buffers: dict[int, _Buffer] = {}

    def _clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, {})

    def step(self, step: object) -> None:
        if isinstance(step, Launch):
            _merge(self._clock(step.stream), self._clocks[HOST])
            self._access(step.name, step.stream, step.reads, step.writes)
        elif isinstance(step, Record):
            _merge(self._clock(step.stream), self._clocks[HOST])
            self._events[step.event] = dict(self._clock(step.stream))
        elif isinstance(step, Wait):
            _merge(self._clock(step.stream), self._events.get(step.event, {}))
        elif isinstance(step, HostWait):
            known = self._clocks.values() if step.event is None else [self._events[step.event]]
            for clock in list(known):
                _merge(self._clocks[HOST], clock)
        elif isinstance(step, HostAccess):
            self._access(step.name, HOST, (), step.buffers)
        elif isinstance(step, Allocate):
            _merge(self._clock(step.stream), self._clocks[HOST])
            time = self._clock(step.stream).get(step.stream, 0)
            self._buffers[step.buffer] = _Buffer(step.stream, (step.stream, time, "allocate"))
        elif isinstance(step, Free):
            self._free(step.buffer)

    def _access(self, name: str, stream: str, reads: Iterable[int], writes: Iterable[int]) -> None:
        clock = self._clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        for number in reads:
            buffer = self._buffers.setdefault(number, _Buffer(stream))
            self._require_ordered(number, buffer, name, stream, with_reads=False)
            buffer.read[stream] = (clock[stream], name)
        for number in writes:
            buffer = self._buffers.setdefault(number, _Buffer(stream))
            self._require_ordered(number, buffer, name, stream, with_reads=True)
            buffer.written = (stream, clock[stream], name)
            buffer.read = {}

    def _free(self, number: int) -> None:
        buffer = self._buffers.pop(number, None)
        if buffer is not None:
            _merge(self._clock(buffer.stream), self._clocks[HOST])
            self._require_ordered(number, buffer, "free", buffer.stream, with_reads=True)

    def _require_ordered(
        self, number: int, buffer: _Buffer, name: str, stream: str, *, with_reads: bool
    ) -> None:
        clock = self._clock(stream)
        for other, time, earlier in buffer.accesses(with_reads=with_reads):
            if other != stream and clock.get(other, 0) < time:
                self.faults.append(
                    f"buffer {number}: {name} on stream '{stream}' is not ordered after "
                    f"{earlier} on stream '{other}'"
                )


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def unordered(program: Program) -> list[str]:
    """One sentence for each pair of accesses that nothing orders; empty if all are ordered."""
    checker = _Checker()
    for step in program:
        checker.step(step)
    return checker.faults
