"""Log of the collectives that this rank has issued recently, and their ranges in the profiler.

All ranks must issue a group's collectives in the same order. A mismatch does not raise: collectives
of equal size exchange the wrong data, others hang. Two measures make it visible. Each message
carries a tag computed from its collective's signature, so messages of different collectives never
match. Each rank keeps its last collectives, so that ranks that wait can compare them
(``health.collective_order``).
"""

from __future__ import annotations

import zlib
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.profiler import record_function

from fsdp_dynamo.comm.group_state import state_of, states_of
from fsdp_dynamo.errors import unit_name
from fsdp_dynamo.events import is_in_backward, num_steps
from graph_passes.wire_format import WireFormat

MAX_ENTRIES = 1000
"""Number of collectives kept per group."""

FULL_PARAMS = "whole parameters"
"""``Entry.use`` of collectives issued by state dicts and ``summon_full_params``."""

_OF_UNITS = ("", "forward", "backward", FULL_PARAMS)

_COMPARISON_TAG, _ALL_GATHER_TAG, _REDUCE_SCATTER_TAG = 0x0B, 0x0E, 0x0F
_LABEL_BITS = 24
COMPARED_EVERY = 128
"""Two comparisons lie within the ``MAX_ENTRIES`` that tell which collective differs."""
_FACTOR, _MODULUS = 0x9E3779B97F4A7C15, (1 << 61) - 1


class Entry(NamedTuple):
    """Collective that this rank has issued.

    Attributes:
        number: position in the group's order, from 0.
        step: number of outermost forwards that had begun.
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ...
        label: FQN of the unit; empty for the root and for collectives of no unit.
        numel: elements of the unsharded tensor.
        use: ``"forward"``, ``"backward"`` or ``FULL_PARAMS``; for a collective of no unit, its
            purpose.
    """

    number: int
    step: int
    kind: str
    label: str
    numel: int
    use: str = ""

    @property
    def signature(self) -> tuple[str, str, int, str]:
        """Fields that must be equal on all ranks."""
        return self.kind, self.label, self.numel, self.use

    @property
    def subject(self) -> str:
        """Name of the unit, or the purpose of a collective of no unit."""
        return unit_name(self.label) if self.use in _OF_UNITS else self.use

    def description(self) -> str:
        """Description of the collective for messages."""
        kind = self.kind.replace("_", "-")
        if self.use not in _OF_UNITS:
            elements = f"{self.numel} elements, " if self.numel else ""
            return f"the {kind} for {self.use} ({elements}step {self.step})"
        use = f"{self.use}, " if self.use else ""
        return f"the {kind} of {self.subject} ({self.numel} elements, {use}step {self.step})"


class Compare(Protocol):
    """Comparison of what the ranks of a group have issued."""

    def __call__(self, group: dist.ProcessGroup, *, waits: bool) -> None:
        """Start one, and raise ``DivergenceError`` for results that are there.

        With ``waits``, for all results.
        """


class _GroupLog:
    def __init__(self) -> None:
        self.ranks: list[int] = []  # set with the first entry
        self.count = 0
        self.digest = 0  # of the collectives of units, in their order
        self.num_in_digest = 0
        self.compare: Compare | None = None
        self.entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)


_latest: Entry | None = None


def latest() -> Entry | None:
    """Return the last collective that this rank has issued."""
    return _latest


def record(
    group: dist.ProcessGroup,
    kind: str,
    label: str,
    numel: int,
    use: str = "",
    wire: WireFormat | None = None,
) -> Entry:
    """Log a collective that is being issued.

    Args:
        use: ``"forward"`` or ``"backward"``, whichever is running, by default.
        wire: wire format; it becomes part of ``use``, since ranks must agree on it.

    Raises:
        DivergenceError: ranks were compared (``compare_order``) and differ.
    """
    log = state_of(group, _GroupLog)
    if not log.ranks:
        log.ranks = _ranks_of(group)
    global _latest
    use = use or ("backward" if is_in_backward() else "forward")
    is_of_unit = use in _OF_UNITS
    if wire is not None:
        use = f"{use}, {wire.name}"
    if is_of_unit and log.compare is not None:
        log.num_in_digest += 1
        log.digest = (_FACTOR * log.digest + _number_of(kind, label, numel, use)) % _MODULUS
        if log.num_in_digest % COMPARED_EVERY == 0:
            log.compare(group, waits=False)
    _latest = Entry(log.count, num_steps(), kind, label, numel, use)
    log.entries.append(_latest)
    log.count += 1
    return _latest


@lru_cache(maxsize=4096)
def _number_of(kind: str, label: str, numel: int, use: str) -> int:
    return zlib.crc32(f"{kind} {label} {numel} {use}".encode())


def compare_order(group: dist.ProcessGroup, compare: Compare) -> None:
    """Call ``compare`` before every ``COMPARED_EVERY``-th collective of a unit from now on.

    Collectives are counted because all ranks issue them alike; one rank may run forwards alone that
    gather nothing. ``compare`` must not refer to the group. Only the first call has an effect.
    """
    log = state_of(group, _GroupLog)
    log.compare = log.compare or compare


def comparison_of(group: dist.ProcessGroup) -> Compare | None:
    """Return what ``compare_order`` was given for a group, if anything."""
    return state_of(group, _GroupLog).compare


def _ranks_of(group: dist.ProcessGroup) -> list[int]:
    with suppress(ValueError, RuntimeError, KeyError):  # a group that torch does not know
        return dist.get_process_group_ranks(group)
    return list(range(group.size()))


def recent(group: dist.ProcessGroup, most: int) -> list[Entry]:
    """Return the last ``most`` collectives of a group, oldest first."""
    return list(state_of(group, _GroupLog).entries)[-most:]


def count(group: dist.ProcessGroup) -> int:
    """Number of a group's collectives that this rank has issued; the ``number`` of the next one."""
    return state_of(group, _GroupLog).count


def digest(group: dist.ProcessGroup) -> int:
    """Return a number, below 2**61, for a group's collectives since ``compare_order``, in order."""
    return state_of(group, _GroupLog).digest


GroupRecord = tuple[list[int], int, list[Entry]]


def recent_by_group() -> list[GroupRecord]:
    """Ranks, number of collectives and last ``MAX_ENTRIES`` of each group."""
    logs = states_of(_GroupLog)
    return [(log.ranks, log.count, list(log.entries)) for log in logs if log.count]


@lru_cache(maxsize=4096)
def message_tag(kind: str, label: str, numel: int, use: str) -> int:
    """Tag of a collective's messages, equal on all ranks.

    Tags differ from those of the user's messages, and between kinds, units, sizes and uses (except
    for one pair in 16 million). gloo aborts a process that receives more bytes than it expects, so
    messages of different collectives must not match.
    """
    prefix = _ALL_GATHER_TAG if kind == "all_gather" else _REDUCE_SCATTER_TAG
    digest = zlib.crc32(f"{label} {numel} {use}".encode())
    return prefix << _LABEL_BITS | digest >> (32 - _LABEL_BITS)


@lru_cache(maxsize=4096)
def comparison_tag(name: str) -> int:
    """Tag of messages by which ranks compare something; equal on all ranks."""
    return _COMPARISON_TAG << _LABEL_BITS | zlib.crc32(name.encode()) >> (32 - _LABEL_BITS)


def kind_of_tag(tag: int) -> str | None:
    """Kind of collective that a message belongs to; ``None``: not a message of ours."""
    kinds = {_ALL_GATHER_TAG: "all_gather", _REDUCE_SCATTER_TAG: "reduce_scatter"}
    return kinds.get(tag >> _LABEL_BITS)


# -- profiler ranges -------------------------------------------------------------------------------
# Ranges like ``FSDP::all_gather layers.3``. Without a running profiler they cost one check.


_NO_RANGE: AbstractContextManager[None] = nullcontext()


def is_profiling() -> bool:
    """Whether torch's profiler runs in this thread."""
    return torch.autograd._profiler_enabled()  # type: ignore[attr-defined,no-any-return]


def profiler_range(
    operation: str, unit: str, is_wait: bool = False
) -> AbstractContextManager[object]:
    """Return a context that is a range in the profiler's timeline.

    Args:
        operation: for example ``"all_gather"`` or ``"forward"``.
        unit: FQN, ``""`` for the root.
        is_wait: the range is the wait for an operation issued before.
    """
    if not is_profiling():
        return _NO_RANGE
    name = f"{operation} wait" if is_wait else operation
    return record_function(f"FSDP::{name} {unit or '(root)'}")
