"""Comparison of the order of collectives between ranks that wait for each other.

In normal operation nothing is exchanged. A rank that waits for longer than a second writes its last
collectives to the store and reads those of several other ranks. Ranks have diverged at the first
number under which two of them issued different collectives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fsdp_dynamo.comm.collective_log import Entry, recent
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.errors import with_section

CAUSE = (
    "A rank has left a unit out, run one more often, taken another branch, or called alone what "
    "all must call (backward(), state_dict()): make all ranks run the same units in the same "
    "order, then start all ranks again."
)

_MAX_EXCHANGED = 128
"""Number of collectives that ranks exchange."""


class _Comparisons:
    """Number of comparisons that this rank has made in a group."""

    count = 0


def find_order_mismatch(
    group: dist.ProcessGroup, store: Any, name: str, most: int = _MAX_EXCHANGED
) -> str | None:
    """Publish this rank's collectives of a group; return an error message if another rank's differ.

    Args:
        name: distinguishes groups of the same ranks; equal on all ranks.
        most: number of collectives that are published and compared.
    """
    own = recent(group, most)
    ranks = dist.get_process_group_ranks(group)
    rank = ranks[group.rank()]
    store.set(f"order/{name}/{rank}", json.dumps(own))
    comparisons = state_of(group, _Comparisons)
    turn, comparisons.count = comparisons.count, comparisons.count + 1
    for other in _compared_with(ranks, group.rank(), turn):
        found = _first_difference(own, issued_by(store, name, other))
        if found is not None:
            return _message(rank, other, *found)
    return None


def issued_by(store: Any, name: str, rank: int) -> list[Entry]:
    """Return the last collectives of a group that a rank has published, oldest first.

    Args:
        name: name of the group, see ``find_order_mismatch``.
        rank: global rank.
    """
    key = f"order/{name}/{rank}"
    if not store.check([key]):
        return []
    return [Entry(*entry) for entry in json.loads(store.get(key))]


def _compared_with(ranks: Sequence[int], position: int, turn: int) -> list[int]:
    """Return a rank's neighbors, and peers at a distance of 2, 4, 8, ..., one distance per turn.

    Neighbors suffice if all ranks wait: where ranks differ, two neighbors differ, and these tell
    all ranks. The larger distances skip ranks that do not wait. Comparing all with all would make
    the traffic grow with the square of the number of ranks.
    """
    size = len(ranks)
    num_distances = max(1, (size - 1).bit_length() - 1)
    distances = 1, 2 << turn % num_distances
    positions = {(position + sign * one) % size for one in distances for sign in (1, -1)}
    return [ranks[i] for i in sorted(positions - {position})]


def _first_difference(own: Sequence[Entry], theirs: Sequence[Entry]) -> tuple[Entry, Entry] | None:
    known = {entry.number: entry for entry in own}
    for entry in theirs:
        mine = known.get(entry.number)
        if mine is not None and mine.signature != entry.signature:
            return mine, entry
    return None


def _message(rank: int, other: int, mine: Entry, theirs: Entry) -> str:
    """Error message, equal on both ranks: the lower rank's collective is the expected one."""
    (first, expected), (second, got) = sorted([(rank, mine), (other, theirs)])
    return with_section(
        f"step {expected.step}, {expected.subject}: expected rank {second} to issue what rank "
        f"{first} does, {expected.description()}, got {got.description()}. {CAUSE}",
        "other-units-on-one-rank",
    )
