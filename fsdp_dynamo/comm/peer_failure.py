"""Ranks that are gone, and error messages for collectives that failed because of another rank."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
import torch.distributed as dist

from fsdp_dynamo.comm.collective_log import FULL_PARAMS, Entry
from fsdp_dynamo.errors import error_message

_LATE = re.compile(r"[Tt]imed? ?out(?: waiting (\d+)ms)?")
_GONE = re.compile(r"closed|reset by peer|Broken pipe|refused|unreachable", re.IGNORECASE)
_PROBE_TAG = 0x0D000002

GONE = "a closed connection"
GONE_FIX = (
    "It has ended or was killed (usually because it ran out of memory), or its machine is down: "
    "look at the end of its output, then start all ranks again."
)
_FULL_PARAMS_FIX = " All ranks must call state_dict() and summon_full_params()."
_ALONE_FIX = (
    "It may not have called the model at all (if rank == 0: evaluate(model)): all ranks must, as a "
    "forward gathers from all. Or it"
)


def gone_ranks(group: dist.ProcessGroup, ranks: Iterable[int]) -> list[int]:
    """Those of some ranks to which a gloo group's connection is closed; of other groups none.

    gloo notices at once when the process at the other end has ended, and says so to the next
    operation. Here that is a receive for which nothing is ever sent, and nothing waits.

    Args:
        group: the connections are its own.
        ranks: global ones, of the group, without this one.
    """
    return [rank for rank in ranks if _is_closed(group, dist.get_group_rank(group, rank))]


def _is_closed(group: dist.ProcessGroup, rank: int) -> bool:
    try:
        group.recv([torch.empty(1)], rank, _PROBE_TAG)
    except RuntimeError as error:
        return _GONE.search(str(error)) is not None
    return False


def _only_one_gone(group: dist.ProcessGroup) -> int | None:
    """The only rank of a group that is gone; ``None`` if there are others, or none."""
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    gone = gone_ranks(group, others)
    return gone[0] if len(gone) == 1 else None


def peer_failure_message(
    error: RuntimeError, group: dist.ProcessGroup, peer: int | None, entry: Entry | None
) -> str | None:
    """The message for a peer that is late or gone; ``None`` if the error has another cause.

    Args:
        error: of the backend. gloo's errors differ only in their text.
        group: of the collective.
        peer: global rank at the other end; ``None``: all others are at the other end.
        entry: the collective, if known.
    """
    is_full_params = entry is not None and entry.use == FULL_PARAMS
    text = str(error)
    late = _LATE.search(text)
    if late is None and _GONE.search(text) is None:
        return None
    if late is not None:
        within = f" within {int(late[1]) / 1000:g} s" if late[1] else " within the group's timeout"
        got = f"nothing{within}"
        begin = _ALONE_FIX if entry is not None and entry.use == "forward" else "It"
        fix = (
            f"{begin} is stopped, stuck, cut off, or waits for something else: look at its stack "
            "(py-spy dump), then start all ranks again. If it is only slow, give the process group "
            "a longer timeout."
        )
    else:
        got, fix = GONE, GONE_FIX
        peer = _only_one_gone(group) if peer is None else peer
    return error_message(
        expected=f"its part of {'a collective' if entry is None else entry.description()}",
        got=got,
        where="another rank" if peer is None else f"rank {peer}",
        fix=fix + (_FULL_PARAMS_FIX if is_full_params else ""),
        see="other-units-on-one-rank" if is_full_params else None,
    )
