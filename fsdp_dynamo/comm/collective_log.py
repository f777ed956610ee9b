"""What this rank has issued lately: every rank must issue a group's collectives in one order.

Collectives that differ do not fail. Those of one size mix up their data, others wait for ever. So
each message carries a tag made from what it belongs to (another one never matches), and each rank
remembers its last collectives, so that ranks which wait can compare (``order_check``).
"""

from __future__ import annotations

import zlib
from collections import deque
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_dynamo.errors import unit_name

KEPT = 1000
WHOLE = "whole parameters"
"""What a collective is for that state dicts and ``summon_full_params`` issue."""
_GATHERS, _EXCHANGES = 0x0E, 0x0F
_LABEL_BITS = 24


class Entry(NamedTuple):
    """A collective.

    Attributes:
        number: in its group, from 0.
        step: how many outermost forwards had begun.
        kind: of the collective.
        label: FQN of the unit; empty for the root and for what belongs to none.
        numel: elements of the unsharded side.
        use: what it is for: ``"forward"``, ``"backward"`` or ``WHOLE``.
    """

    number: int
    step: int
    kind: str
    label: str
    numel: int
    use: str = ""

    @property
    def what(self) -> tuple[str, str, int, str]:
        """What must be the same on all ranks."""
        return self.kind, self.label, self.numel, self.use

    def described(self) -> str:
        """In words."""
        name = unit_name(self.label)
        kind = self.kind.replace("_", "-")
        use = f"{self.use}, " if self.use else ""
        return f"the {kind} of {name} ({self.numel} elements, {use}step {self.step})"


class _Log:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = list(range(group.size()))
        with suppress(ValueError, RuntimeError, KeyError):  # a group that torch does not know
            self.ranks = dist.get_process_group_ranks(group)
        self.count = 0
        self.entries: deque[Entry] = deque(maxlen=KEPT)


_logs: WeakKeyDictionary[dist.ProcessGroup, _Log] = WeakKeyDictionary()
_step = 0
_newest: Entry | None = None


def begin_step() -> None:
    """An outermost forward begins."""
    global _step
    _step += 1


def current_step() -> int:
    """How many outermost forwards have begun."""
    return _step


NO_GRAPH_TASK = -1


def current_graph_task() -> int:
    """The engine's number of the backward that it runs in this thread, or ``NO_GRAPH_TASK``."""
    task: int = torch._C._current_graph_task_id()
    return task


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return current_graph_task() != NO_GRAPH_TASK


def newest() -> Entry | None:
    """The collective that this rank has issued last."""
    return _newest


def note(group: dist.ProcessGroup, kind: str, label: str, numel: int, use: str = "") -> Entry:
    """A collective is issued; without a ``use``, for the forward or backward that runs."""
    log = _logs.get(group)
    if log is None:
        log = _logs[group] = _Log(group)
    global _newest
    use = use or ("backward" if is_in_backward() else "forward")
    _newest = Entry(log.count, _step, kind, label, numel, use)
    log.entries.append(_newest)
    log.count += 1
    return _newest


def recent(group: dist.ProcessGroup, most: int = KEPT) -> list[Entry]:
    """The last collectives of a group, the newest last."""
    log = _logs.get(group)
    return [] if log is None else list(log.entries)[-most:]


Recent = tuple[list[int], int, list[Entry]]


def all_recent() -> list[Recent]:
    """Of each group, in the order of first use: its ranks, how many, and the last ``KEPT``."""
    return [(log.ranks, log.count, list(log.entries)) for log in list(_logs.values())]


@lru_cache(maxsize=4096)
def tag_of(kind: str, label: str, numel: int, use: str) -> int:
    """A message's tag: the same on all ranks, apart from a user's, and another one for another
    kind, unit, size or use (but for one pair in 16 million). gloo ends a process that gets more
    than it expects."""
    first = _GATHERS if kind == "all_gather" else _EXCHANGES
    digest = zlib.crc32(f"{label} {numel} {use}".encode())
    return first << _LABEL_BITS | digest >> (32 - _LABEL_BITS)


def kind_of_tag(tag: int) -> str | None:
    """Of a message; ``None``: it is none of ours."""
    return {_GATHERS: "all_gather", _EXCHANGES: "reduce_scatter"}.get(tag >> _LABEL_BITS)
