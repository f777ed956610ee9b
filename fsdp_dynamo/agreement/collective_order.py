"""Ranks that wait for one another compare what they have issued, and say where they part.

Nothing is exchanged while all goes well. A rank that waits for longer than a second writes its last
collectives into the store, and looks for those of the others: of two ranks that issued different
collectives under one number, the earlier number is where they went apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fsdp_dynamo.comm.collective_log import Entry, recent
from fsdp_dynamo.errors import error_message, unit_name

_CAUSE = (
    "A rank has left a unit out, run one more often, taken another branch, or called alone what "
    "all must call (backward(), state_dict()): make all ranks run the same units in the same "
    "order, then start all ranks again."
)


_TOLD = 128
"""Collectives that ranks show each other."""


def difference_of_orders(group: dist.ProcessGroup, store: Any, name: str) -> str | None:
    """Tell the others of a group what this rank has issued; what is said where one differs.

    Args:
        group: whose collectives.
        store: of the group's ranks.
        name: of the group among those of the same ranks, the same on all of them.
    """
    own = recent(group, _TOLD)
    ranks = dist.get_process_group_ranks(group)
    rank = ranks[group.rank()]
    store.set(f"order/{name}/{rank}", json.dumps(own))
    for other in ranks:
        key = f"order/{name}/{other}"
        if other == rank or not store.check([key]):
            continue
        theirs = [Entry(*entry) for entry in json.loads(store.get(key))]
        found = _first_difference(own, theirs)
        if found is not None:
            return _message(rank, other, *found)
    return None


def _first_difference(own: Sequence[Entry], theirs: Sequence[Entry]) -> tuple[Entry, Entry] | None:
    known = {entry.number: entry for entry in own}
    for entry in theirs:
        mine = known.get(entry.number)
        if mine is not None and mine.what != entry.what:
            return mine, entry
    return None


def _message(rank: int, other: int, mine: Entry, theirs: Entry) -> str:
    """The same on both ranks: what the first of them does is what is expected of the other."""
    (first, expected), (second, got) = sorted([(rank, mine), (other, theirs)])
    return error_message(
        expected=f"rank {second} to issue what rank {first} does, {expected.described()}",
        got=got.described(),
        where=f"step {expected.step}, {unit_name(expected.label)}",
        fix=_CAUSE,
        see="other-units-on-one-rank",
    )
