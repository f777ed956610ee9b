"""Error messages for collectives that failed because of another rank."""

from __future__ import annotations

import re

from fsdp_dynamo.comm.collective_log import FULL_PARAMS, Entry
from fsdp_dynamo.errors import error_message

_LATE = re.compile(r"[Tt]imed? ?out(?: waiting (\d+)ms)?")
_GONE = re.compile(r"closed|reset by peer|Broken pipe|refused|unreachable", re.IGNORECASE)
_FULL_PARAMS_FIX = " All ranks must call state_dict() and summon_full_params()."
_ALONE_FIX = (
    "It may not have called the model at all (if rank == 0: evaluate(model)): all ranks must, as a "
    "forward gathers from all. Or it"
)


def peer_failure_message(error: RuntimeError, peer: int | None, entry: Entry | None) -> str | None:
    """The message for a peer that is late or gone; ``None`` if the error has another cause.

    Args:
        error: of the backend. gloo's errors differ only in their text.
        peer: global rank at the other end, if known.
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
        got = "a closed connection"
        fix = (
            "It has ended or was killed (usually because it ran out of memory), or its machine is "
            "down: look at the end of its output, then start all ranks again."
        )
    return error_message(
        expected=f"its part of {'a collective' if entry is None else entry.description()}",
        got=got,
        where="another rank" if peer is None else f"rank {peer}",
        fix=fix + (_FULL_PARAMS_FIX if is_full_params else ""),
        see="other-units-on-one-rank" if is_full_params else None,
    )
