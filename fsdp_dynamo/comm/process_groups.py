"""Process groups of a unit: for sharding, for reductions and for replicas.

With a hybrid strategy, N = R x S ranks hold R replicas of S shards::

    rank        0  1 | 2  3        shard groups      {0, 1} {2, 3}
    shard       0  1 | 0  1        replicate groups  {0, 2} {1, 3}
    replica     0  0 | 1  1

All-gathers and reduce-scatters stay inside a shard group. The results of the reduce-scatters are
averaged over the replicate group. With a hierarchical strategy all N ranks shard, on two levels
(``Hierarchy``).
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_dynamo.comm.collective_log import comparison_tag
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.comm.point_to_point import all_reduce_max
from fsdp_dynamo.comm.watchdog import OnDemand, SideGroup, watched
from fsdp_dynamo.errors import (
    FSDPError,
    FSDPStateError,
    FSDPTypeError,
    FSDPValueError,
)


@dataclass(frozen=True)
class Groups:
    """Process groups of a unit.

    Attributes:
        shard: ranks that share the shards of a flat parameter.
        reduce: the same ranks in the same order, for gradients. A separate group has a communicator
            of its own, so that all-gathers do not queue behind reduce-scatters.
        replicate: ranks that hold the same shard; ``None`` without replicas.
        hierarchy: levels of the shard group; ``None`` if it has one level.
    """

    shard: dist.ProcessGroup
    reduce: dist.ProcessGroup
    replicate: dist.ProcessGroup | None = None
    hierarchy: Hierarchy | None = None

    def shard_of(self, rank: int) -> int:
        """Number of the shard that a rank of the shard group holds."""
        return rank if self.hierarchy is None else self.hierarchy.shards[rank]

    @property
    def communicators(self) -> tuple[dist.ProcessGroup, ...]:
        """All groups that a unit communicates in, perhaps with repetitions."""
        levels = () if self.hierarchy is None else (self.hierarchy.node, self.hierarchy.across)
        return (*self.all, self.reduce, *levels)

    @property
    def all(self) -> tuple[dist.ProcessGroup, ...]:
        """Shard group, then the replicate group if there is one."""
        return (self.shard,) if self.replicate is None else (self.shard, self.replicate)

    @property
    def reductions(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups over which a gradient is averaged, in this order."""
        both = (self.reduce, self.replicate)
        return tuple(group for group in both if group is not None and group.size() > 1)


class _Levels(NamedTuple):
    """Words for a strategy's two dimensions of ranks, for messages."""

    strategy: str
    mesh: str
    pair: str
    default: str


_HYBRID = _Levels("a hybrid strategy", "replicas, shards", "shard, replicate", "is a replica")
_HIERARCHICAL = _Levels(
    "HIERARCHICAL_SHARD", "nodes, ranks in a node", "in a node, across nodes", "is one"
)


def groups_of(
    group: object,
    mesh: DeviceMesh | None,
    reduction_group: object,
    *,
    is_hybrid: bool,
    is_hierarchical: bool = False,
) -> Groups:
    """Return the process groups that a constructor's arguments ask for."""
    default = _default_group()
    if mesh is not None and group is not None:
        raise FSDPValueError(
            "arguments: expected process_group or device_mesh, got both. Pass one of them."
        )
    replicate = None
    if is_hierarchical:
        return _hierarchical_groups(group, mesh, reduction_group, default)
    if is_hybrid:
        shard, replicate = _two_groups(group, mesh, default, _HYBRID)
    else:
        shard = _shard_group(group, mesh, default)
    return Groups(shard, _reduction_group(reduction_group, shard), replicate)


def _default_group() -> dist.ProcessGroup:
    """Return the default group; without a launcher, create one of this process alone."""
    if not dist.is_initialized():
        _initialise_one_rank()
    default = dist.group.WORLD
    assert default is not None
    return default


def _initialise_one_rank() -> None:
    """Create a default group of one rank, for notebooks and experiments."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if num_ranks != "1":
        raise FSDPStateError(
            "argument 'process_group': expected an initialised default process group, got none in "
            f"one of {num_ranks} ranks (WORLD_SIZE). Call torch.distributed.init_process_group() "
            "first.",
            see="no-process-group",
        )
    store = dist.HashStore()  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    warnings.warn(
        "No process group: this process is the only rank, and nothing is sharded. For several "
        "ranks start the script with torchrun and call torch.distributed.init_process_group().",
        stacklevel=2,
    )


def _shard_group(
    group: object, mesh: DeviceMesh | None, default: dist.ProcessGroup
) -> dist.ProcessGroup:
    if mesh is not None:
        if mesh.ndim != 1:
            raise FSDPValueError(
                "argument 'device_mesh' or 'mesh': expected a 1-D device mesh, got "
                f"{mesh.ndim} dimensions. Pass one dimension of it, as mesh['name'], or use "
                "HYBRID_SHARD, whose mesh has two: replicas and shards."
            )
        return mesh.get_group()
    if group is None:
        return default
    if isinstance(group, tuple):
        raise FSDPValueError(
            "argument 'process_group': expected one process group, got a tuple of groups, which is "
            "for HYBRID_SHARD. Pass the first of them, or "
            "sharding_strategy=ShardingStrategy.HYBRID_SHARD."
        )
    return _checked(group, "argument 'process_group'")


def _checked(group: object, where: str) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    raise FSDPTypeError(
        f"{where}: expected a torch.distributed.ProcessGroup, got {group!r}. Pass the result of "
        "torch.distributed.new_group(...)."
    )


def serves_cpu(group: dist.ProcessGroup) -> bool:
    """Whether the group communicates CPU tensors."""
    return any(kind.type == "cpu" for kind in group._device_types)


def served_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return ``device`` if the group communicates there, else the first device of the group."""
    served = [kind.type for kind in group._device_types]
    return device if device.type in served else torch.device(served[0])


def exchange_device(group: dist.ProcessGroup, device: torch.device | None = None) -> torch.device:
    """Device on which a group exchanges values that are not tensors of the model.

    Returns:
        The CPU if the group serves it, else ``device`` if it serves that, else its first device, or
        the one that ``init_process_group(device_id=...)`` names.
    """
    if serves_cpu(group):
        return torch.device("cpu")
    return served_device(group, device or group.bound_device_id or torch.device("cpu"))


# -- two dimensions of ranks -----------------------------------------------------------------------


def _two_groups(
    group: object, mesh: DeviceMesh | None, default: dist.ProcessGroup, levels: _Levels
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Shard and replicate group; for a hierarchy, the groups in a node and across nodes."""
    if mesh is not None:
        if mesh.ndim != 2:
            raise FSDPValueError(
                f"argument 'device_mesh' or 'mesh': expected a 2-D device mesh ({levels.mesh}) for "
                f"{levels.strategy}, got {mesh.ndim} dimension(s). Create it with "
                f"init_device_mesh(device, ({levels.mesh}))."
            )
        return mesh.get_group(1), mesh.get_group(0)
    if group is None:
        return _groups_by_node(default, levels)
    if not isinstance(group, tuple) or len(group) != 2:
        raise FSDPValueError(
            f"argument 'process_group': expected a pair of process groups ({levels.pair}) for "
            f"{levels.strategy}, got {group!r}. Pass both, or a 2-D device_mesh, or neither: then "
            f"each node {levels.default}."
        )
    where = "argument 'process_group', item"
    inner, outer = (_checked(one, f"{where} {i}") for i, one in enumerate(group))
    shared = set(_ranks(inner)) & set(_ranks(outer))
    if shared != {dist.get_rank()}:
        raise FSDPValueError(
            f"argument 'process_group': expected two groups ({levels.pair}) that share this rank "
            f"only, got ranks {_ranks(inner)} and {_ranks(outer)} on rank {dist.get_rank()}. Of R "
            "x S ranks, rank r is in the first with r // S * S + [0..S-1] and in the second with r "
            "% S + S * [0..R-1]."
        )
    return inner, outer


def _hierarchical_groups(
    group: object, mesh: DeviceMesh | None, reduction_group: object, default: dist.ProcessGroup
) -> Groups:
    """Groups of two levels that share one sharding; of one level, if there is one node."""
    if reduction_group is not None:
        raise FSDPValueError(
            "argument 'reduction_group': expected no reduction_group for HIERARCHICAL_SHARD, got "
            f"{reduction_group!r}. Leave it out: gradients are reduced in the groups of the two "
            "levels."
        )
    node, across = _two_groups(group, mesh, default, _HIERARCHICAL)
    if across.size() == 1:
        return Groups(node, node)
    every, hierarchy = hierarchy_of(node, across, default)
    return Groups(every, every, None, hierarchy)


def _groups_by_node(
    default: dist.ProcessGroup, levels: _Levels
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Group of this rank's node, and its group across nodes."""
    where = f"{levels.strategy} without process_group and device_mesh"
    size, num_ranks = _ranks_per_node(), default.size()
    if size is None:
        raise FSDPValueError(
            f"{where}: expected a known number of ranks per node, got no LOCAL_WORLD_SIZE in the "
            "environment, and no accelerator to count. Start with torchrun, or pass a 2-D "
            f"device_mesh ({levels.mesh})."
        )
    if num_ranks % size:
        raise FSDPValueError(
            f"{where}: expected a world size divisible by the {size} rank(s) per node, got "
            f"{num_ranks}. Pass a 2-D device_mesh: init_device_mesh(device, ({levels.mesh}))."
        )
    every, position = range(num_ranks), dist.get_rank() % size
    first = dist.get_rank() - position
    return (
        _subgroup(default, every[first : first + size], "groups of nodes"),
        _subgroup(default, every[position::size], "groups across nodes"),
    )


def _ranks_per_node() -> int | None:
    """Ranks per node as the launcher says, otherwise the number of devices; ``None``: unknown."""
    from_launcher = os.environ.get("LOCAL_WORLD_SIZE")
    if from_launcher is not None:
        return int(from_launcher)
    return torch.accelerator.device_count() if torch.accelerator.is_available() else None


def node_ranks_of(group: dist.ProcessGroup) -> int:
    """Number of a group's ranks on each node if the group spans several nodes, else 1."""
    ranks = dist.get_process_group_ranks(group)
    size = _ranks_per_node() or len(ranks)
    on_nodes = Counter(rank // size for rank in ranks)
    return max(on_nodes.values()) if len(on_nodes) > 1 else 1


def part_of(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Return the subgroup of ``size`` consecutive ranks that contains this rank.

    Every rank of the group must call it. ``size`` divides the group's size.
    """
    first = group.rank() // size * size
    return _subgroup(group, _ranks(group)[first : first + size], "parts of a group")


# -- reductions ------------------------------------------------------------------------------------


def _reduction_group(group: object, shard: dist.ProcessGroup) -> dist.ProcessGroup:
    if group is None:
        return shard
    where = "argument 'reduction_group'"
    reduce = _checked(group, where)
    if _ranks(reduce) != _ranks(shard):
        raise FSDPValueError(
            f"{where}: expected a group of the shard group's ranks, {_ranks(shard)}, in that "
            f"order, got {_ranks(reduce)}. Create it with torch.distributed.new_group(ranks) of "
            "the same ranks."
        )
    return reduce


def is_first_of(groups: Iterable[dist.ProcessGroup]) -> bool:
    """Whether this rank is the first in all of the groups."""
    return all(group.rank() == 0 for group in groups)


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


# -- new groups ------------------------------------------------------------------------------------
# Subgroups, created by their ranks alone.


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Timeout that a group was created with, which no public API returns."""
    backend = group._get_backend(group._device_types[0])
    seconds: float = backend.options._timeout.total_seconds()
    return seconds


class _Subgroups(dict[tuple[int, ...], dist.ProcessGroup]):
    """Subgroups of a group by ranks, shared by all units, since connections cost memory."""


def _subgroup(
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    use: str,
    of: Sequence[dist.ProcessGroup] = (),
) -> dist.ProcessGroup:
    """Return the group of some ranks of a group; see ``new_group``, whose ``of`` is the group."""
    made = state_of(group, _Subgroups)
    key = tuple(ranks)
    if key not in made:
        made[key] = new_group(of or [group], ranks, use)
    return made[key]


def new_group(
    of: Sequence[dist.ProcessGroup],
    ranks: Sequence[int],
    use: str,
    backend: str | None = None,
    timeout: timedelta | None = None,
    *,
    on_demand: bool = False,
) -> dist.ProcessGroup:
    """Create a group of this rank and others, which first meet in existing groups.

    ``dist.new_group()`` alone would wait for a rank that is gone until the timeout; this raises
    ``RankFailedError`` at once.

    Args:
        of: existing groups that connect the new group's ranks; all of their ranks must call this
            function.
        ranks: global ranks of the new group, this rank included.
        use: purpose of the group, for messages.
        backend: ``None``: the default group's.
        timeout: ``None``: that of the first group of ``of``.
        on_demand: whether ranks of a gloo group connect when they first exchange a message.
    """
    for group in of:
        with watched(group, "barrier", use):
            dist.barrier(group)
    timeout = timeout or timedelta(seconds=group_timeout_s(of[0]))
    connecting = _connecting_on_demand() if on_demand else nullcontext()
    with _unbound_default_group() as device, connecting:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout, backend, use_local_synchronization=True
        )
    made.bound_device_id = device  # the device of the group's barriers
    return made


_BESIDE = "the side group"
_MAX_CONNECTING_S = 60.0
_ON_DEMAND = "TORCH_GLOO_LAZY_INIT"


def make_side_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make a gloo group beside one that has no connections to look at; all its ranks must call it.

    A rank connects only to ranks at distances of 1, 2, 4, ..., however many ranks there are. Where
    gloo finds no network on some rank, a warning says so on all, and ranks that are gone are found
    by timeouts.

    Args:
        device: see ``exchange_device``.
    """
    side = state_of(group, SideGroup)
    if side.is_tried or serves_cpu(group) or group.size() == 1:
        return
    side.is_tried = True
    made: list[dist.ProcessGroup] = []
    failure = _first_failure(group, device, _find_network)
    if failure is None:  # on any rank: torch's names of groups stay the same on all
        failure = _first_failure(group, device, partial(_connect_beside, group, made))
    if failure is None:
        (side.group,) = made
        return
    warnings.warn(
        f"no gloo group beside a group of {group.name()}: {failure}. A rank that is killed is "
        "noticed at the process group's timeout. Set GLOO_SOCKET_IFNAME to a network that connects "
        "all ranks.",
        stacklevel=2,
    )


def _first_failure(
    group: dist.ProcessGroup, device: torch.device, act: Callable[[], object]
) -> RuntimeError | None:
    """Act; return the error of this rank, or one that says that another rank has failed."""
    failure: RuntimeError | None = None
    try:
        act()
    except FSDPError:
        raise
    except RuntimeError as error:
        failure = error
    with watched(group, "all_reduce", _BESIDE, 1):
        num_failed = torch.tensor(int(failure is not None), device=exchange_device(group, device))
        dist.all_reduce(num_failed, group=group)
        is_anywhere = bool(num_failed)
    return failure or (RuntimeError("another rank has failed") if is_anywhere else None)


def _find_network() -> None:
    """Raise unless gloo finds an address of this host, where torch lets it look for one."""
    if not dist.is_gloo_available():
        raise RuntimeError("torch was built without gloo")
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for name in filter(None, names.split(",")):
        dist.ProcessGroupGloo.create_device(interface=name)
    if not names:
        dist.ProcessGroupGloo.create_default_device()


def _connect_beside(group: dist.ProcessGroup, made: list[dist.ProcessGroup]) -> None:
    """Add a gloo group of the same ranks to ``made``, and let them exchange messages."""
    limit_s = group_timeout_s(group)
    connecting = timedelta(seconds=min(_MAX_CONNECTING_S, limit_s / 10))  # gloo tries five times
    ranks = dist.get_process_group_ranks(group)
    made.append(new_group([group], ranks, _BESIDE, "gloo", connecting, on_demand=True))
    state_of(made[0], OnDemand).connects = True
    all_reduce_max(torch.zeros(1, device="cpu"), made[0], comparison_tag(_BESIDE))
    made[0].set_timeout(timedelta(seconds=limit_s))


@contextmanager
def _connecting_on_demand() -> Iterator[None]:
    """Let gloo connect two ranks of a group that is made inside when they first need it."""
    before = os.environ.get(_ON_DEMAND)
    os.environ[_ON_DEMAND] = "1"
    try:
        yield
    finally:
        del os.environ[_ON_DEMAND]
        if before is not None:
            os.environ[_ON_DEMAND] = before


@contextmanager
def _unbound_default_group() -> Iterator[torch.device | None]:
    """Hide the device of ``init_process_group(device_id=...)`` inside; yield it.

    While it is set, torch creates a new group by splitting the default group's communicator. A
    split needs every rank of the job, but only the ranks of the new group come here.
    """
    default = dist.group.WORLD
    assert default is not None
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield device
    finally:
        default.bound_device_id = device


# -- hierarchy -------------------------------------------------------------------------------------
# Two levels of ranks that share one sharding. With 2 nodes of 2 ranks::
#
#     rank              0    1   |   2    3       node    {0, 1} {2, 3}
#     secondary shard   A    B   |   A    B       across  {0, 2} {1, 3}
#     shard             A0   B0  |   A1   B1
#
#     a parameter       | A0 A1 | B0 B1 |
#
# Ranks with the same position in their nodes share a secondary shard. An all-gather among them, and
# then one inside the node, must give the flat parameter in order. So shards are numbered by
# position first, by node second.
#
# Source: the secondary partition of ZeRO++ (arXiv:2306.10209).


@dataclass(frozen=True)
class Hierarchy:
    """Two levels of ranks, as this rank sees them.

    Attributes:
        node: ranks of this rank's node.
        across: ranks with this rank's position in all nodes.
        shards: number of the shard that each rank of the whole group holds.
        grid: global ranks by position and node.
    """

    node: dist.ProcessGroup
    across: dist.ProcessGroup
    shards: tuple[int, ...]
    grid: tuple[tuple[int, ...], ...]


def hierarchy_of(
    node: dist.ProcessGroup,
    across: dist.ProcessGroup,
    default: dist.ProcessGroup,
) -> tuple[dist.ProcessGroup, Hierarchy]:
    """Return the group of all ranks of both levels, and the levels; every rank must call it."""
    grid = _grid(node, across)
    ranks = sorted(rank for row in grid for rank in row)
    if len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < default.size():
        raise FSDPValueError(
            "HIERARCHICAL_SHARD: expected nodes of equally many ranks, at equal distances: rank = "
            f"node * ranks in a node + position, got ranks {_ranks(node)} in a node and "
            f"{_ranks(across)} between nodes, on rank {dist.get_rank()}. Create device_mesh "
            "with init_device_mesh(device, (nodes, ranks in a node))."
        )
    number = {
        rank: position * len(grid) + index
        for index, row in enumerate(grid)
        for position, rank in enumerate(row)
    }
    everyone = default
    if len(ranks) < default.size():
        everyone = _subgroup(default, ranks, "the group of all nodes", [node, across])
    shards = tuple(number[rank] for rank in ranks)
    return everyone, Hierarchy(node, across, shards, tuple(zip(*grid, strict=True)))


def _grid(node: dist.ProcessGroup, across: dist.ProcessGroup) -> list[list[int]]:
    """Global ranks by node and position, extrapolated from this rank's row and column."""
    own = dist.get_rank()
    return [[one + other - own for one in _ranks(node)] for other in _ranks(across)]
