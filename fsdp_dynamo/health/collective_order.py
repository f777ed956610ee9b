"""Comparison of the order of collectives between ranks that wait for each other.

In normal operation nothing is exchanged. A rank that waits for longer than a second writes its last
collectives to the store and reads those of several other ranks; of two ranks, the one that writes
last compares. They have diverged at the first number under which they issued different collectives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fsdp_dynamo.comm.collective_log import Entry, recent
from fsdp_dynamo.errors import with_section

CAUSE = (
    "A rank has left a unit out, run one more often, taken another branch, or called alone what "
    "all must call (backward(), state_dict()): make all ranks run the same units in the same "
    "order, then start all ranks again."
)

GRAPHS = "the comparison of compiled graphs"
"""``Entry.use`` where ranks compare a new graph."""

_MAX_EXCHANGED = 128
"""Number of collectives that ranks exchange."""


class Comparison:
    """Comparison of the collectives that the ranks of a group have issued.

    Args:
        name: distinguishes groups; equal on all ranks of the group.

    Attributes:
        requests: key under which ranks count that they have asked all to compare.
        num_requests: value at this rank's last look.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.requests = f"requests/{name}"
        self.num_requests = b"0"
        self._turn = 0
        self._written = 0, 0  # number of collectives, and how many of them were written

    def message(
        self, group: dist.ProcessGroup, store: Any, most: int = _MAX_EXCHANGED
    ) -> str | None:
        """Write this rank's collectives; return an error message if another rank's differ.

        Args:
            store: the job's.
            most: number of collectives that are written and compared.
        """
        own = recent(group, most)
        ranks = dist.get_process_group_ranks(group)
        rank = ranks[group.rank()]
        if own and self._written != (written := (own[-1].number + 1, most)):
            store.set(self._key(rank), json.dumps(own))
            self._written = written
        turn, self._turn = self._turn, self._turn + 1
        for other in _compared_with(ranks, group.rank(), turn):
            found = _first_difference(own, self._issued_by(store, other))
            if found is not None:
                return _message(rank, other, *found)
        return None

    def unseen_before(self, group: dist.ProcessGroup, store: Any) -> int | None:
        """Return the rank before this one, if it has not written this rank's last collective."""
        ranks = dist.get_process_group_ranks(group)
        before = ranks[group.rank() - 1]
        number, _ = self._written
        theirs = self._issued_by(store, before)
        return before if not theirs or theirs[-1].number + 1 < number else None

    def _issued_by(self, store: Any, rank: int) -> list[Entry]:
        """Return the last collectives that a rank has written, oldest first."""
        # One operation, which also returns if there is no value yet.
        value = store.compare_set(self._key(rank), "", "")
        return [Entry(*entry) for entry in json.loads(value)] if value else []

    def _key(self, rank: int) -> str:
        return f"order/{self._name}/{rank}"


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
    is_graph_alone = GRAPHS in (expected.use, got.use)
    return with_section(
        f"step {expected.step}, {expected.subject}: expected rank {second} to issue what rank "
        f"{first} does, {expected.description()}, got {got.description()}. {CAUSE}",
        "another-graph-on-one-rank" if is_graph_alone else "other-units-on-one-rank",
    )
