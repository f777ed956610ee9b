"""The step that the page draws: the last that was recorded, and what of it was compilation."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fsdp_dynamo.events import COLLECTIVE_KINDS, COMPUTE_KINDS, Event

_SHORT = 0.05
"""Compilation that took no more than this part of all else in the step is not cut out."""


@dataclass(frozen=True)
class Cut:
    """Time in the step in which was compiled; milliseconds from the start of the step."""

    begin_ms: float
    end_ms: float

    @property
    def ms(self) -> float:
        """How long it is."""
        return self.end_ms - self.begin_ms


@dataclass(frozen=True)
class RecordedStep:
    """One step of a recording.

    Attributes:
        events: its collectives and compute, in order of issue.
        num_steps: how many were recorded; it is the last of them.
        compiled: whether something was compiled in it.
        cuts: where in it; they do not overlap, and are in order.
    """

    events: Sequence[Event]
    num_steps: int
    compiled: bool
    cuts: tuple[Cut, ...]

    @property
    def note(self) -> str:
        """What is to be said of it."""
        if not self.events:
            return ""
        several = self.num_steps > 1
        which = (
            f"The last of {self.num_steps} recorded steps" if several else "The one recorded step"
        )
        if not self.compiled:
            return f"{which}."
        cut_ms = sum(cut.ms for cut in self.cuts)
        cut = f": {cut_ms / 1e3:.1f} s are cut out where it is hatched" if self.cuts else ""
        return f"{which}, with compilation{cut}. Run one step more inside to see it without."


def last_step(log: Iterable[Event], made_ns: Iterable[int]) -> RecordedStep:
    """The last step of a recording: from the last forward that comes after a backward.

    Args:
        log: what was recorded.
        made_ns: when compilation made something.
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
    """When something began or ended."""
    return sorted({t for e in step for t in (e.issued_ns, max(e.waited_ns, e.issued_ns))})


def _cuts(moments: Sequence[int], made: Sequence[int]) -> tuple[Cut, ...]:
    """Spans between two moments of the step, with nothing recorded and something made inside."""
    if not moments:
        return ()
    spans = [
        Cut((begin - moments[0]) / 1e6, (end - moments[0]) / 1e6)
        for begin, end in pairwise(moments)
        if bisect_left(made, end) > bisect_right(made, begin)
    ]
    rest_ms = (moments[-1] - moments[0]) / 1e6 - sum(span.ms for span in spans)
    return tuple(span for span in spans if span.ms > _SHORT * rest_ms)
