"""What a collective that failed says about the rank at the other end."""

from __future__ import annotations

import re

from fsdp_dynamo.errors import error_message

_LATE = re.compile(r"[Tt]imed? ?out(?: waiting (\d+)ms)?")
_GONE = re.compile(r"closed|reset by peer|Broken pipe|refused|unreachable", re.IGNORECASE)


_ALONE = " All ranks must call state_dict() and summon_full_params()."


def message_of_loss(
    error: RuntimeError, peer: int | None, what: str, is_whole: bool = False
) -> str | None:
    """In words; ``None``: it is about something else.

    Args:
        error: of the backend. gloo has no kinds of errors, only texts.
        peer: global rank at the other end, where it is known.
        what: the collective, in words.
        is_whole: it is to give whole parameters, for what all ranks must call.
    """
    text = str(error)
    late = _LATE.search(text)
    if late is None and _GONE.search(text) is None:
        return None
    if late is not None:
        within = f" within {int(late[1]) / 1000:g} s" if late[1] else " within the group's timeout"
        got = f"nothing{within}"
        fix = (
            "It is stopped, stuck, cut off, or waits for something else: see where it stands "
            "(py-spy dump), then start all ranks again. If it is only slow, give the process group "
            "a longer timeout."
        )
    else:
        got = "a closed connection"
        fix = (
            "It has ended or was killed (no memory is the most frequent reason), or its "
            "machine is gone: look at the end of its output, then start all ranks again."
        )
    return error_message(
        expected=f"its part of {what}",
        got=got,
        where="another rank" if peer is None else f"rank {peer}",
        fix=fix + (_ALONE if is_whole else ""),
        see="other-units-on-one-rank" if is_whole else None,
    )
