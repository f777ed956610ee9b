"""The checker of programs for a device, on programs of a few steps."""

from __future__ import annotations

import pytest

from benchmarks.streams.order import unordered
from benchmarks.streams.program import (
    COMPUTING,
    Allocate,
    Free,
    HostAccess,
    HostWait,
    Launch,
    Program,
    Record,
    Wait,
)

SIDE = "side"


def _launch(name: str, stream: str, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()):
    return Launch(name, stream, reads, writes)


WRITE = _launch("write", COMPUTING, writes=(1,))
READ_BESIDE = _launch("read", SIDE, reads=(1,))
RECORD, WAIT = Record(1, COMPUTING), Wait(SIDE, 1)

ORDERED: dict[str, Program] = {
    "one stream": [WRITE, _launch("read", COMPUTING, reads=(1,))],
    "an event": [WRITE, RECORD, WAIT, READ_BESIDE],
    "two reads": [WRITE, RECORD, WAIT, READ_BESIDE, _launch("read", COMPUTING, reads=(1,))],
    "an event of a later time": [WRITE, _launch("other", COMPUTING), RECORD, WAIT, READ_BESIDE],
    "over a third stream": [WRITE, RECORD, Wait("third", 1), Record(2, "third"), Wait(SIDE, 2),
                            READ_BESIDE],
    "the host in between": [WRITE, RECORD, HostWait(1, "synchronize"), READ_BESIDE],
    "the host waits for all": [WRITE, HostWait(None, "item"), HostAccess("add", (1,))],
    "freed after its reader": [Allocate(1, COMPUTING, 4), WRITE, RECORD, WAIT, READ_BESIDE,
                               Record(2, SIDE), Wait(COMPUTING, 2), Free(1)],
    "allocated beside": [_launch("busy", COMPUTING), RECORD, WAIT, Allocate(1, COMPUTING, 4),
                         _launch("write", SIDE, writes=(1,))],
}  # fmt: skip

UNORDERED: dict[str, Program] = {
    "no event": [WRITE, READ_BESIDE],
    "an event too early": [RECORD, WRITE, WAIT, READ_BESIDE],
    "a wait of another stream": [WRITE, RECORD, Wait("third", 1), READ_BESIDE],
    "a wait too late": [WRITE, RECORD, READ_BESIDE, WAIT],
    "written while it is read": [WRITE, RECORD, WAIT, READ_BESIDE, WRITE],
    "written by both": [WRITE, _launch("write", SIDE, writes=(1,))],
    "freed before its reader": [Allocate(1, COMPUTING, 4), WRITE, RECORD, WAIT, READ_BESIDE,
                                Free(1)],
    "read by the host": [WRITE, RECORD, HostAccess("add", (1,))],
    "allocated of memory in use": [_launch("busy", COMPUTING), Allocate(1, COMPUTING, 4),
                                   _launch("write", SIDE, writes=(1,))],
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERED)
def test_ordered(name: str) -> None:
    assert unordered(ORDERED[name]) == []


@pytest.mark.parametrize("name", UNORDERED)
def test_unordered(name: str) -> None:
    assert len(unordered(UNORDERED[name])) == 1
