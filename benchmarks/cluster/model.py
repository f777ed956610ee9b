"""Model of a cluster: duration of a collective, and bytes that a rank sends.

The model is hierarchical. N ranks sit on M nodes of L ranks each (N = M * L). Ranks of a node talk
over the *intra* link, nodes talk over the *inter* link; ``bytes_per_s`` of a link is one rank's
share of it, in each direction. Let ``shard = payload / N``.

All-gather: shards cross the network once per node and are passed on inside it. Each rank receives
M - 1 shards (those of its counterparts on the other nodes) over its share of the inter link and the
other N - M shards over the intra link. Both go on at the same time (pipelined), so the slower one
counts::

    inter_s   = (M - 1) * shard / inter.bytes_per_s
    intra_s   = (N - M) * shard / intra.bytes_per_s
    latency_s = intra.latency_s * ceil(log2(L)) + inter.latency_s * ceil(log2(M))
    seconds   = latency_s + max(inter_s, intra_s)

The other operations, with the same latency unless said:

========================  ==========================  ==========================  ================
operation                 bytes over inter            bytes over intra            phases
========================  ==========================  ==========================  ================
all_gather                (M - 1) * shard             (N - M) * shard             1
reduce_scatter            as an all-gather, mirrored                              1 (gloo: 2)
all_reduce                a reduce-scatter, then an all-gather                    2
all_to_all                (N - L) * shard             (L - 1) * shard             1
gather, scatter           as an all-to-all: what passes through the root          1
broadcast, reduce         payload, if M > 1           payload, if L > 1           1
send, recv                payload, if M > 1           payload, if M = 1           1, one latency
barrier                   0                           0                           2
========================  ==========================  ==========================  ================

A rank sends as many bytes as it receives, except that only the root of a scatter sends and the root
of a gather does not: this rank is taken to be the root. Point-to-point transfers are taken to cross
nodes where there are several.

``collectives="gloo"`` differs from ``"ring"`` in one point, which was measured: gloo's
reduce-scatter sends as many bytes as an all-reduce.

What the model leaves out: contention with other jobs, protocol overhead, slow ranks, the choice of
algorithm by message size, and several groups of one cluster using different links at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

MAX_WORLD_SIZE = 4096

Collectives = Literal["ring", "gloo"]
Op = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
]

_BYTES_PER_GBIT = 125e6


class _Traffic(NamedTuple):
    """Traffic of one collective: bytes per link and phase, phases, latency per phase."""

    intra_bytes: float
    inter_bytes: float
    num_phases: int
    latency_s: float


@dataclass(frozen=True)
class LinkModel:
    """One rank's share of a link.

    Attributes:
        latency_s: seconds that a message needs besides its bytes, 0 or more.
        bytes_per_s: bytes per second in each direction, more than 0.
        burst_bytes: bytes that pass at once after an idle while, 0 or more: the size of a token
            bucket. Simulated for CPU tensors; ``ClusterModel.seconds`` is without it.

    Raises:
        ValueError: a number outside those bounds.
    """

    latency_s: float
    bytes_per_s: float
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.burst_bytes) and self.burst_bytes >= 0):
            raise ValueError(
                f"burst_bytes: expected a finite number, 0 or more, got {self.burst_bytes!r}"
            )
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(
                f"latency_s: expected a finite number of seconds, 0 or more, got {self.latency_s!r}"
            )
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise ValueError(
                f"bytes_per_s: expected a finite rate above 0, got {self.bytes_per_s!r}"
            )


@dataclass(frozen=True)
class ClusterModel:
    """A cluster of equal nodes. The formulas are in the module's docstring.

    Attributes:
        world_size: ranks in all, 1 to 4096.
        ranks_per_node: ranks on a node; divides ``world_size`` unless that is smaller (then all
            ranks sit on one node).
        intra: one rank's share of the link inside a node.
        inter: one rank's share of the link between nodes.
        collectives: whose algorithms: ``"ring"`` (as NCCL) or ``"gloo"``.

    Raises:
        ValueError: a number or name outside those bounds.
    """

    world_size: int
    ranks_per_node: int
    intra: LinkModel
    inter: LinkModel
    collectives: Collectives

    def __post_init__(self) -> None:
        if not _is_int(self.world_size) or not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ValueError(
                f"world_size: expected an integer from 1 to {MAX_WORLD_SIZE}, "
                f"got {self.world_size!r}"
            )
        if not _is_int(self.ranks_per_node) or self.ranks_per_node < 1:
            raise ValueError(
                f"ranks_per_node: expected an integer above 0, got {self.ranks_per_node!r}"
            )
        if self.world_size > self.ranks_per_node and self.world_size % self.ranks_per_node:
            raise ValueError(
                f"world_size: expected a multiple of ranks_per_node ({self.ranks_per_node}) or "
                f"less than one node, got {self.world_size}"
            )
        for name in ("intra", "inter"):
            if not isinstance(getattr(self, name), LinkModel):
                raise ValueError(f"{name}: expected a LinkModel, got {getattr(self, name)!r}")
        if self.collectives not in get_args(Collectives):
            raise ValueError(
                f"collectives: expected one of {list(get_args(Collectives))}, "
                f"got {self.collectives!r}"
            )

    @property
    def num_node_ranks(self) -> int:
        """Ranks per node in use (L)."""
        return min(self.world_size, self.ranks_per_node)

    @property
    def num_nodes(self) -> int:
        """Nodes in use (M)."""
        return self.world_size // self.num_node_ranks

    def seconds(self, op: Op, payload_bytes: int) -> float:
        """Seconds of one collective on otherwise idle links; 0 for a single rank.

        Args:
            op: an operation of the table above.
            payload_bytes: the unsharded (large) side of an all-gather, reduce-scatter, all-to-all,
                gather or scatter; the tensor itself otherwise.

        Raises:
            ValueError: an unknown operation or a negative payload.
        """
        traffic = self._traffic(op, payload_bytes)
        moving_s = max(
            traffic.intra_bytes / self.intra.bytes_per_s,
            traffic.inter_bytes / self.inter.bytes_per_s,
        )
        return traffic.num_phases * (traffic.latency_s + moving_s)

    def wire_bytes(self, op: Op, payload_bytes: int) -> int:
        """Bytes that this rank sends for one collective; arguments and errors as ``seconds``."""
        traffic = self._traffic(op, payload_bytes)
        if op in ("gather", "recv"):
            return 0
        return round(traffic.num_phases * (traffic.intra_bytes + traffic.inter_bytes))

    @property
    def burst_s(self) -> float:
        """Seconds of transfer that the link between nodes (or inside the only one) saves up."""
        link = self.inter if self.num_nodes > 1 else self.intra
        return link.burst_bytes / link.bytes_per_s

    def of_ranks(self, ranks: Sequence[int]) -> ClusterModel:
        """The model of a subgroup: the same links, only these global ranks.

        Raises:
            ValueError: no ranks, or one outside the cluster.
            NotImplementedError: the ranks are spread unevenly over their nodes.
        """
        if not ranks or not all(0 <= rank < self.world_size for rank in ranks):
            raise ValueError(
                f"ranks: expected at least one, from 0 to {self.world_size - 1}, got {list(ranks)}"
            )
        counts = set(Counter(rank // self.ranks_per_node for rank in ranks).values())
        if len(counts) != 1:
            raise NotImplementedError(
                f"a group needs equally many ranks on each of its nodes of {self.ranks_per_node} "
                f"ranks, got {list(ranks)}"
            )
        return ClusterModel(len(ranks), counts.pop(), self.intra, self.inter, self.collectives)

    def _traffic(self, op: Op, payload_bytes: int) -> _Traffic:
        if op not in get_args(Op):
            raise ValueError(f"op: expected one of {list(get_args(Op))}, got {op!r}")
        if payload_bytes < 0:
            raise ValueError(f"payload_bytes: expected 0 or more, got {payload_bytes!r}")
        num_ranks, num_nodes, num_local = self.world_size, self.num_nodes, self.num_node_ranks
        if num_ranks == 1:
            return _Traffic(0, 0, 0, 0.0)
        shard = payload_bytes / num_ranks
        latency_s = self.intra.latency_s * math.ceil(math.log2(num_local))
        latency_s += self.inter.latency_s * math.ceil(math.log2(num_nodes))
        if op in ("all_gather", "reduce_scatter", "all_reduce"):
            twice = op == "all_reduce" or (op == "reduce_scatter" and self.collectives == "gloo")
            intra, inter = (num_ranks - num_nodes) * shard, (num_nodes - 1) * shard
            return _Traffic(intra, inter, 2 if twice else 1, latency_s)
        if op in ("all_to_all", "gather", "scatter"):
            return _Traffic((num_local - 1) * shard, (num_ranks - num_local) * shard, 1, latency_s)
        if op in ("broadcast", "reduce"):
            intra = payload_bytes if num_local > 1 else 0
            return _Traffic(intra, payload_bytes if num_nodes > 1 else 0, 1, latency_s)
        if op == "barrier":
            return _Traffic(0, 0, 2, latency_s)
        if num_nodes > 1:  # send, recv
            return _Traffic(0, payload_bytes, 1, self.inter.latency_s)
        return _Traffic(payload_bytes, 0, 1, self.intra.latency_s)


def two_hosts(gbit_per_s: float = 1.0, burst_bytes: float = 2 * 2**20) -> ClusterModel:
    """The cluster of ``benchmarks/link.py``: two hosts, gloo, a token bucket (2 MiB by default)."""
    cluster = ethernet_cluster(2, gbit_per_s)
    return replace(cluster, inter=replace(cluster.inter, burst_bytes=burst_bytes))


def ethernet_cluster(world_size: int, gbit_per_s: float = 10.0) -> ClusterModel:
    """Machines with one rank each, gloo over Ethernet; 50 us of latency, as TCP has."""
    memory = LinkModel(latency_s=1e-6, bytes_per_s=10e9)  # unused while a node holds one rank
    wire = LinkModel(latency_s=50e-6, bytes_per_s=gbit_per_s * _BYTES_PER_GBIT)
    return ClusterModel(world_size, 1, intra=memory, inter=wire, collectives="gloo")


def gpu_cluster(world_size: int) -> ClusterModel:
    """Nodes of 8 GPUs: 450e9 B/s inside a node (as NVLink 4), 50e9 B/s per GPU between nodes.

    The rates are those of data sheets; a real collective reaches some 80 % of them.
    """
    nvlink = LinkModel(latency_s=2e-6, bytes_per_s=450e9)
    network = LinkModel(latency_s=5e-6, bytes_per_s=50e9)
    return ClusterModel(world_size, 8, intra=nvlink, inter=network, collectives="ring")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
