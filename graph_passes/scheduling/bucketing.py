"""Bucketing: neighbouring small collectives share a launch.

Before::

    ag(a) ag(b) ag(c)            three launches, three latencies

After::

    ag([a, b, c])                one launch; each keeps its own buffers, nothing is copied

Collectives are merged until the latency is less than a tenth of the time on the link. A reduction
does not wait for the next gradient if that takes longer than the latency that it saves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.simulation import Placement, Schedule

_EFFICIENCY = 0.9


@dataclass(frozen=True)
class Bucketed:
    """A problem of merged transfers.

    Attributes:
        problem: problem with one transfer a bucket.
        members: indices of the original transfers in each bucket.
    """

    problem: Problem
    members: tuple[tuple[int, ...], ...]


def bucket(problem: Problem) -> Bucketed:
    """Merge neighbours of one kind while they are too small for their link."""
    merged: list[tuple[Transfer, tuple[int, ...]]] = []
    for index, transfer in enumerate(problem.transfers):
        last = merged[-1] if merged else None
        if last is not None and _belong_together(last[0], transfer, problem.step_starts_ms):
            merged[-1] = (_merge(last[0], transfer), (*last[1], index))
        else:
            merged.append((transfer, (index,)))
    transfers = tuple(transfer for transfer, _ in merged)
    return Bucketed(replace(problem, transfers=transfers), tuple(m for _, m in merged))


def alone(problem: Problem) -> Bucketed:
    """Return one bucket for each transfer."""
    return Bucketed(problem, tuple((i,) for i in range(len(problem.transfers))))


def is_saturating(transfer: Transfer) -> bool:
    """Whether the latency is at most a tenth of the transfer's time."""
    return transfer.latency_ms <= (1 - _EFFICIENCY) * transfer.ms


def _belong_together(one: Transfer, other: Transfer, clock: Sequence[float]) -> bool:
    """Whether one launch is better than two.

    It is if the first is small, and waiting for the second costs less than the latency saved.
    """
    if not one.may_share_launch(other) or is_saturating(one):
        return False
    ready = max(one.ready, other.ready)
    if not one.is_gather and clock[ready] - clock[one.ready] > one.latency_ms:
        return False
    return ready <= min(one.need, other.need)


def _merge(one: Transfer, other: Transfer) -> Transfer:
    return replace(
        one,
        ms=one.ms + other.ms - min(one.latency_ms, other.latency_ms),
        latency_ms=max(one.latency_ms, other.latency_ms),
        wire_bytes=one.wire_bytes + other.wire_bytes,
        tensor_bytes=one.tensor_bytes + other.tensor_bytes,
        encode_ms=one.encode_ms + other.encode_ms,
        decode_ms=one.decode_ms + other.decode_ms,
        ready=max(one.ready, other.ready),
        need=min(one.need, other.need),
        held_bytes=one.held_bytes + other.held_bytes,
    )


def spread(problem: Problem, bucketed: Bucketed, schedule: Schedule) -> Schedule:
    """Return a schedule of buckets as a schedule of the original transfers.

    Members of a bucket share its issue. A gather is waited for where it is needed itself.
    """
    placements = []
    for bucket in schedule:
        for index in bucketed.members[bucket.transfer]:
            transfer = problem.transfers[index]
            wait = transfer.need if transfer.is_gather else bucket.wait
            placements.append(Placement(index, bucket.issue, wait))
    return tuple(placements)


# -- coarsening ------------------------------------------------------------------------------------
# Coarsening: a problem with fewer steps, for a search that tries many places.
#
# A graph has hundreds of steps, but a transfer need not be tried between any two of them::
#
#     steps    . . . . . . | . . . . . . . . . . . | . . . .       unit changes at |
#     coarse   [    ][   ] | [     ][    ][      ] | [  ][ ]       cut at limits, and evenly
#
# A coarse step lasts as long as its steps together, and has as many bytes alive as the largest of
# them. So a schedule takes equally long in both problems and keeps the same limits.


_PARTS = 4
"""Parts of equal time into which each unit's compute is divided."""


@dataclass(frozen=True)
class Coarse:
    """A problem of fewer steps.

    Attributes:
        problem: problem with the same transfers.
        gaps: gap of the original problem, by gap of ``problem``.
    """

    problem: Problem
    gaps: tuple[int, ...]

    def original(self, schedule: Schedule) -> Schedule:
        """Return a schedule of ``problem`` as a schedule of the original problem."""
        return tuple(replace(p, issue=self.gaps[p.issue], wait=self.gaps[p.wait]) for p in schedule)


def coarsen(problem: Problem) -> Coarse:
    """Merge steps between changes of unit, limits of transfers, and even distances in time."""
    gaps = sorted({0, problem.num_steps, *_even_cuts(problem), *_limits(problem)})
    place = {gap: i for i, gap in enumerate(gaps)}
    spans = list(pairwise(gaps))
    transfers = tuple(
        replace(t, ready=place[t.ready], need=place[t.need]) for t in problem.transfers
    )
    coarse = Problem(
        tuple(sum(problem.compute_ms[a:b]) for a, b in spans),
        tuple(problem.units[a] for a, _ in spans),
        tuple(max(problem.base_bytes[a:b]) for a, b in spans),
        transfers,
    )
    return Coarse(coarse, tuple(gaps))


def _limits(problem: Problem) -> Iterator[int]:
    for transfer in problem.transfers:
        yield transfer.ready
        yield transfer.need


def _even_cuts(problem: Problem) -> Iterator[int]:
    """Yield the gaps in which units change, and gaps at even distances in time between them."""
    clock = problem.step_starts_ms
    for begin, end in pairwise([*problem.segment_starts(), problem.num_steps]):
        yield begin
        for piece in range(1, _PARTS):
            at = clock[begin] + (clock[end] - clock[begin]) * piece / _PARTS
            yield min(end, max(begin, bisect_left(clock, at)))
