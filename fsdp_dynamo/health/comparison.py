"""Values that must be equal on all ranks: comparison, and decisions by the first rank.

Ranks exchange them in their group, or in the gloo group beside it (``make_side_group``), by
messages whose tags match no other collective. Every rank must call these functions. They are in
the log of the group's collectives, so a rank that does something else meanwhile is found as in any
other wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from fsdp_dynamo.comm.collective_log import comparison_tag
from fsdp_dynamo.comm.collectives import transport_of
from fsdp_dynamo.comm.point_to_point import all_reduce_max
from fsdp_dynamo.comm.process_groups import exchange_device
from fsdp_dynamo.comm.watchdog import beside, watched
from fsdp_dynamo.errors import DivergenceError, RankFailedError
from fsdp_dynamo.health.flight_recorder import listed
from fsdp_dynamo.health.notices import raise_on_all_ranks
from fsdp_dynamo.health.store import shared_store

_MAX_SHOWN = 60
"""Characters of a text that a message shows."""


_END = object()
"""Fill value behind the end of the shorter of two sequences."""


def require_same(
    group: dist.ProcessGroup,
    name: str,
    text: str,
    *,
    fix: str = "Give all ranks the same, then start all ranks again.",
) -> None:
    """Return if all ranks of a group give the same text; every rank must call it.

    Args:
        name: name of the text, for messages.
        text: this rank's text.
        fix: advice for ranks that differ.

    Raises:
        DivergenceError: on every rank; names the ranks whose text differs from the first rank's.
        RankFailedError: a rank has failed, or has not come within the group's timeout.
    """
    texts = texts_if_different([group], name, text)
    message = None if texts is None else difference(name, texts, fix)
    if message is not None:
        raise_on_all_ranks(DivergenceError(message))


def texts_if_different(
    groups: Sequence[dist.ProcessGroup], name: str, text: str, device: torch.device | None = None
) -> dict[int, str] | None:
    """Return the texts of all ranks that groups connect, by rank; ``None`` if they are equal.

    Costs 16 bytes for each group where they are equal. Groups without a shared store are left out.

    Args:
        groups: this rank's groups, in the same order on all ranks.
        device: used by groups that do not serve the CPU.
    """
    shared = [group for group in groups if shared_store(group) is not None]
    named = f"{name}\n{text}"
    number = int.from_bytes(hashlib.sha256(named.encode()).digest()[:7], "big")
    highest, lowest = maximum_over(shared, (number, -number), device, name)
    if highest == -lowest:
        return None
    texts, names = {}, {}
    for rank, answer in texts_over(shared, name, named).items():
        names[rank], _, texts[rank] = answer.partition("\n")
    message = difference("comparison", names, "Let all ranks do the same in the same order.")
    if message is not None:
        raise_on_all_ranks(DivergenceError(message))
    return texts


def texts_over(groups: Sequence[dist.ProcessGroup], name: str, text: str) -> dict[int, str]:
    """Return the texts of all ranks that groups connect, by rank."""
    texts = {dist.get_rank(): text}
    for group in groups:
        answers: list[Any] = [None] * group.size()
        with watched(group, "all_gather", name):
            dist.all_gather_object(answers, texts, group=beside(group))
        texts = {rank: known for answer in answers for rank, known in answer.items()}
    return dict(sorted(texts.items()))


def maximum_over(
    groups: Sequence[dist.ProcessGroup],
    values: tuple[int, int],
    device: torch.device | None,
    what: str,
) -> tuple[int, int]:
    """Return each value's maximum over all ranks that groups connect.

    Each group continues with the previous group's result. So over the shard and the replicate group
    of a mesh the maximum reaches every rank.

    Args:
        groups: this rank's groups, in the same order on all ranks.
        values: always two, as all exchanges of one size match.
        device: used by groups that do not serve the CPU.
        what: what the values are, for messages.
    """
    for group in groups:
        through = beside(group)
        tensor = torch.tensor(values, device=exchange_device(through, device))
        with watched(group, "all_reduce", what, len(values)):
            if transport_of(through, tensor.device) == "point_to_point":
                all_reduce_max(tensor, through, comparison_tag(what))
            else:
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=through)
        values = tuple(tensor.tolist())
    return values


def share_from_first(group: dist.ProcessGroup, name: str, make: Callable[[], str]) -> str:
    """Return the text that the first rank of a group makes; every rank must call it.

    Args:
        group: without a shared store, each rank makes its own text.
        name: name of the text, for messages.
        make: called on the first rank only; the other ranks wait meanwhile.

    Raises:
        RankFailedError: ``make`` raised on the first rank, which raises that error itself.
    """
    if shared_store(group) is None:
        return make()
    first = dist.get_process_group_ranks(group)[0]
    maximum_over([group], (0, 0), None, name)  # whoever is here takes part in the broadcast
    failure: Exception | None = None
    answer: list[Any] = ["", ""]
    if dist.get_rank() == first:
        try:
            answer = [make(), ""]
        except Exception as error:  # noqa: BLE001  # the other ranks wait for the answer
            failure, answer = error, ["", f"{type(error).__name__}: {error}"]
    with watched(group, "broadcast", name):
        dist.broadcast_object_list(answer, first, group=beside(group))
    if failure is not None:
        raise failure
    text, cause = answer
    if cause:
        raise RankFailedError(f"{name}: rank {first} failed: {cause}")
    return str(text)


def difference(name: str, texts: Mapping[int, str], fix: str) -> str | None:
    """Error message for texts that differ between ranks; ``None`` if all are equal.

    Args:
        name: name of the texts.
        texts: texts by rank.
        fix: advice for ranks that differ.
    """
    ranks = list(texts)
    differing = [rank for rank in ranks[1:] if texts[rank] != texts[ranks[0]]]
    if not differing:
        return None
    first, other = _excerpts(texts[ranks[0]], texts[differing[0]])
    return (
        f"{name}: expected the same {name} on all ranks, {first!r} as on rank {ranks[0]}, got "
        f"{other!r} on rank(s) {listed(differing)}. {fix}"
    )


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """First position at which two sequences differ or one has ended; ``None`` if they are equal."""
    pairs = enumerate(zip_longest(one, other, fillvalue=_END))
    return next((i for i, (a, b) in pairs if a != b), None)


def _excerpts(one: str, other: str) -> tuple[str, str]:
    """Cut both texts to a readable length around their first difference."""
    begin = max(0, (first_difference(one, other) or 0) - _MAX_SHOWN // 3)
    return one[begin : begin + _MAX_SHOWN], other[begin : begin + _MAX_SHOWN]
