"""The last recorded step, which the page draws, and the compilation inside it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fsdp_dynamo.events import COLLECTIVE_KINDS, COMPUTE_KINDS, Event

_MIN_FRACTION = 0.05
"""Compilation is cut out if it took more than this fraction of the rest of the step."""


@dataclass(frozen=True)
class Cut:
    """A span of compilation; times are milliseconds from the start of the step."""

    begin_ms: float
    end_ms: float

    @property
    def ms(self) -> float:
        """Its duration."""
        return self.end_ms - self.begin_ms


@dataclass(frozen=True)
class RecordedStep:
    """One step of a recording.

    Attributes:
        events: its collectives and compute, in order of issue.
        num_steps: number of recorded steps; this is the last of them.
        compiled: whether compilation took place in it.
        cuts: spans of that compilation, in order and without overlap.
    """

    events: Sequence[Event]
    num_steps: int
    compiled: bool
    cuts: tuple[Cut, ...]

    @property
    def note(self) -> str:
        """A remark for the reader of the page."""
        if not self.events:
            return ""
        several = self.num_steps > 1
        which = (
            f"The last of {self.num_steps} recorded steps" if several else "The only recorded step"
        )
        if not self.compiled:
            return f"{which}."
        cut_ms = sum(cut.ms for cut in self.cuts)
        cut = f" ({cut_ms / 1e3:.1f} s, cut out where hatched)" if self.cuts else ""
        return f"{which}, with compilation{cut}. Run one more step in the context to avoid it."


def last_step(log: Iterable[Event], made_ns: Iterable[int]) -> RecordedStep:
    """The last step of a recording, which begins at the last forward after a backward.

    Args:
        log: the recorded events.
        made_ns: times at which compilation produced an artifact.
    """
    events = [e for e in log if e.kind in COLLECTIVE_KINDS or e.kind in COMPUTE_KINDS]
    begins = [i for i in range(1, len(events)) if _begins(events[i - 1], events[i])]
    step = events[begins[-1] if begins else 0 :]
    made = sorted(made_ns)
    moments = _moments(step)
    compiled = bool(moments) and bisect_left(made, moments[0]) < bisect_right(made, moments[-1])
    num_steps = len(begins) + bool(events)
    return RecordedStep(step, num_steps, compiled, _cuts(moments, made))


def _begins(before: Event, event: Event) -> bool:
    return event.phase == "forward" and before.phase == "backward"


def _moments(step: Iterable[Event]) -> list[int]:
    """All times at which an event began or ended."""
    return sorted({t for e in step for t in (e.issued_ns, max(e.waited_ns, e.issued_ns))})


def _cuts(moments: Sequence[int], made: Sequence[int]) -> tuple[Cut, ...]:
    """Spans without events in which compilation produced an artifact."""
    if not moments:
        return ()
    spans = [
        Cut((begin - moments[0]) / 1e6, (end - moments[0]) / 1e6)
        for begin, end in pairwise(moments)
        if bisect_left(made, end) > bisect_right(made, begin)
    ]
    rest_ms = (moments[-1] - moments[0]) / 1e6 - sum(span.ms for span in spans)
    return tuple(span for span in spans if span.ms > _MIN_FRACTION * rest_ms)
