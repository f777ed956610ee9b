"""Lower bound of a step's time, from measured compute and counted bytes."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.cluster.model import ClusterModel, LinkModel
from benchmarks.measure.step_profile import Collective


class Bound(NamedTuple):
    """Lower bound of forward and backward, in milliseconds.

    Attributes:
        compute_ms: the step without communication.
        wire_ms: all its bytes at the link's rate.
        first_ms: the first all-gather, before which nothing can be computed.
        last_ms: the last reduction, after which nothing is left to compute.
    """

    compute_ms: float
    wire_ms: float
    first_ms: float
    last_ms: float

    @property
    def total_ms(self) -> float:
        """``max(compute, wire)`` plus what nothing can hide.

        Where the wire is the longer one, the first and the last collective are part of it.
        """
        ends = self.first_ms + self.last_ms
        return max(self.compute_ms + ends, self.wire_ms)


def flat_cluster(world_size: int, bytes_per_s: float, gloo: bool) -> ClusterModel:
    """Hosts of one rank each on links of one rate, without latency."""
    link = LinkModel(0.0, bytes_per_s)
    return ClusterModel(world_size, 1, link, link, "gloo" if gloo else "ring")


def wire_bytes(collectives: list[Collective], cluster: ClusterModel) -> int:
    """Bytes that one rank sends for some collectives."""
    return sum(cluster.wire_bytes(c.op, c.num_bytes) for c in collectives)


def lower_bound(collectives: list[Collective], compute_ms: float, cluster: ClusterModel) -> Bound:
    """The bound of a step that issues these collectives.

    Args:
        collectives: of one step, in order of issue.
        compute_ms: forward and backward without communication.
        cluster: link rates and what each collective sends.
    """
    times_ms = [cluster.seconds(c.op, c.num_bytes) * 1e3 for c in collectives]
    first = next((t for t, c in zip(times_ms, collectives, strict=True) if c.op == "all_gather"), 0)
    last = times_ms[-1] if collectives and collectives[-1].op != "all_gather" else 0.0
    return Bound(compute_ms, sum(times_ms), first, last)
