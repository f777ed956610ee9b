"""A program for a device: what the host enqueued on which stream, in the host's order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["compute", "copy", "all_gather", "reduce_scatter", "all_reduce"]

COMPUTING = "computing"
"""The stream that is current on the device of all tensors where nobody has chosen another one."""
ELSEWHERE = "computing on another device"
"""The current stream of another device: that of calls which name none, where it is current."""


@dataclass(frozen=True)
class Launch:
    """Work on a stream.

    Attributes:
        name: the operator, or the kind of collective.
        stream: where it runs.
        reads: buffers, by number.
        writes: buffers, by number.
        kind: of work.
        num_bytes: what it reads and writes; of a collective, its unsharded tensor.
        flops: of matrix products.
        group: name of a collective's communicator.
    """

    name: str
    stream: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    kind: Kind = "compute"
    num_bytes: int = 0
    flops: int = 0
    group: str = ""


@dataclass(frozen=True)
class Record:
    """An event that is there when a stream has come this far."""

    event: int
    stream: str


@dataclass(frozen=True)
class Wait:
    """A stream goes on when an event is there."""

    stream: str
    event: int


@dataclass(frozen=True)
class HostWait:
    """The host goes on when an event is there; ``None``: when all streams are done."""

    event: int | None
    name: str


@dataclass(frozen=True)
class HostAccess:
    """The host itself reads or writes buffers in its own memory."""

    name: str
    buffers: tuple[int, ...]


@dataclass(frozen=True)
class Allocate:
    """A buffer from the pool of the stream that is current."""

    buffer: int
    stream: str
    num_bytes: int


@dataclass(frozen=True)
class Free:
    """A buffer goes back to its stream's pool, which may give it to that stream's next work."""

    buffer: int


@dataclass(frozen=True)
class Switch:
    """The host makes a stream current, until it goes back to the one before."""

    stream: str


@dataclass(frozen=True)
class Mark:
    """A phase of the program begins."""

    phase: str


Step = Launch | Record | Wait | HostWait | HostAccess | Allocate | Free | Switch | Mark
Program = list[Step]
