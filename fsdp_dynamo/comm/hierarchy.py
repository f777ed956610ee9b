"""Two levels of ranks that share one sharding: inside nodes, and between them.

With 2 nodes of 2 ranks::

    rank              0    1   |   2    3       node    {0, 1} {2, 3}
    secondary shard   A    B   |   A    B       across  {0, 2} {1, 3}
    shard             A0   B0  |   A1   B1

    a parameter       | A0 A1 | B0 B1 |

Ranks of one position in their nodes hold a secondary shard together. Gathered among them, and then
inside a node, shards become the flat parameter in its order. So shards are numbered by position
first, by node second.

Source: ZeRO++ (arXiv:2306.10209), whose secondary partition this is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_dynamo.comm.new_groups import new_group
from fsdp_dynamo.errors import FSDPValueError


@dataclass(frozen=True)
class Hierarchy:
    """The two levels, as this rank is in them.

    Attributes:
        node: the ranks of its node.
        across: the ranks of its position in all nodes.
        shards: for each rank of the group of all of them, the shard that it holds.
        grid: by position and node, the global ranks.
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
    """The group of all ranks of both levels, and the levels; every rank must call it.

    Args:
        node: the ranks of this rank's node.
        across: those of its position in all nodes.
        default: the default group.

    Raises:
        FSDPValueError: the ranks form no regular grid.
    """
    grid = _grid(node, across)
    ranks = sorted(rank for row in grid for rank in row)
    if len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < default.size():
        raise FSDPValueError(
            expected="nodes of equally many ranks, at equal distances: rank = node * ranks in a "
            "node + position",
            got=f"ranks {_ranks(node)} in a node and {_ranks(across)} between nodes, on rank "
            f"{dist.get_rank()}",
            where="HIERARCHICAL_SHARD",
            fix="Create device_mesh with init_device_mesh(device, (nodes, ranks in a node)).",
        )
    number = {
        rank: position * len(grid) + index
        for index, row in enumerate(grid)
        for position, rank in enumerate(row)
    }
    everyone = _group_of(ranks, default, [node, across])
    shards = tuple(number[rank] for rank in ranks)
    return everyone, Hierarchy(node, across, shards, tuple(zip(*grid, strict=True)))


def _grid(node: dist.ProcessGroup, across: dist.ProcessGroup) -> list[list[int]]:
    """Global ranks by node and position, as this rank's row and column continue."""
    own = dist.get_rank()
    return [[one + other - own for one in _ranks(node)] for other in _ranks(across)]


_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)
"""By default group and ranks: one serves all wrappers, as connections cost memory."""


def _group_of(
    ranks: Sequence[int], default: dist.ProcessGroup, levels: Sequence[dist.ProcessGroup]
) -> dist.ProcessGroup:
    if len(ranks) == default.size():
        return default
    made = _groups.setdefault(default, {})
    if tuple(ranks) not in made:
        made[tuple(ranks)] = new_group(levels, ranks, "the group of all nodes")
    return made[tuple(ranks)]


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)
