"""Bucketing: neighbouring small collectives are launched as one.

Before::

    ag(a) ag(b) ag(c)            three launches, three latencies

After::

    ag([a, b, c])                one launch; each keeps its own buffers, nothing is copied

How small is small follows from the link: merging goes on until the latency costs less than a tenth
of the time. A reduction does not wait for the next one's gradient if that takes longer than the
latency that would be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.simulation import Placement, Schedule

_EFFICIENCY = 0.9


@dataclass(frozen=True)
class Bucketed:
    """A problem of merged transfers.

    Attributes:
        problem: with one transfer a bucket.
        members: by index of a bucket, the transfers of the original problem in it.
    """

    problem: Problem
    members: tuple[tuple[int, ...], ...]


def bucket(problem: Problem) -> Bucketed:
    """Merge neighbours that are alike while they are too small for their link."""
    clock = list(accumulate(problem.compute_ms, initial=0.0))
    merged: list[tuple[Transfer, tuple[int, ...]]] = []
    for index, transfer in enumerate(problem.transfers):
        last = merged[-1] if merged else None
        if last is not None and _belong_together(last[0], transfer, clock):
            merged[-1] = (_merge(last[0], transfer), (*last[1], index))
        else:
            merged.append((transfer, (index,)))
    transfers = tuple(transfer for transfer, _ in merged)
    return Bucketed(replace(problem, transfers=transfers), tuple(m for _, m in merged))


def alone(problem: Problem) -> Bucketed:
    """One bucket a transfer."""
    return Bucketed(problem, tuple((i,) for i in range(len(problem.transfers))))


def is_saturating(transfer: Transfer) -> bool:
    """Whether the latency is at most a tenth of the transfer's time."""
    return transfer.latency_ms <= (1 - _EFFICIENCY) * transfer.ms


def _belong_together(one: Transfer, other: Transfer, clock: Sequence[float]) -> bool:
    """Whether one launch is better: the first is small, and waiting for the second costs less
    than the latency that is saved."""
    same = _kind_of(one) == _kind_of(other)
    if not same or other.is_dependent or is_saturating(one):
        return False
    ready = max(one.ready, other.ready)
    if not one.is_gather and clock[ready] - clock[one.ready] > one.latency_ms:
        return False
    return ready <= min(one.need, other.need)


def _kind_of(transfer: Transfer) -> tuple[str, ...]:
    return transfer.mark.kind, transfer.group, transfer.dtype, transfer.wire


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
    """A schedule of buckets as one of the original transfers, members side by side.

    A gather of a bucket is waited for where it is needed itself.
    """
    return tuple(
        Placement(index, placement.issue, need if gather else placement.wait)
        for placement in schedule
        for index in bucketed.members[placement.transfer]
        for need, gather in [_need_of(problem, index)]
    )


def _need_of(problem: Problem, index: int) -> tuple[int, bool]:
    transfer = problem.transfers[index]
    return transfer.need, transfer.is_gather
