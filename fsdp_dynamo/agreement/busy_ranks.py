"""Announcement of busy ranks: while a rank compiles, the others do not count it as late."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch._dynamo.callback import callback_handler  # no public API reports compilations

from fsdp_dynamo.agreement.store import PREFIX, default_store
from fsdp_dynamo.untraced import UNDER_LOCK, untraced

_num_reasons = 0


def _key(rank: int) -> str:
    return f"{PREFIX}/busy/{rank}"


def _publish(is_busy: bool) -> None:
    store = default_store()
    if store is None:
        return
    with suppress(RuntimeError):  # a store that is gone is no reason to fail a compilation
        store.set(_key(dist.get_rank()), "1" if is_busy else "0")


def publish_state() -> None:
    """Write to the store whether this rank is busy, and which process it is."""
    _publish(is_busy=_num_reasons > 0)
    store = default_store()
    if store is not None:
        process = f"process {os.getpid()} on {socket.gethostname()}"
        store.set(f"{PREFIX}/process/{dist.get_rank()}", process)


def process_of(rank: int) -> str:
    """The process and the host of a rank, in words."""
    store, key = default_store(), f"{PREFIX}/process/{rank}"
    return store.get(key).decode() if store.check([key]) else "of an unknown process"


@untraced(UNDER_LOCK)
def _begin(_: object = None) -> None:
    global _num_reasons
    _num_reasons += 1
    if _num_reasons == 1:
        _publish(is_busy=True)


@untraced(UNDER_LOCK)
def _end(_: object = None) -> None:
    global _num_reasons
    _num_reasons = max(0, _num_reasons - 1)
    if _num_reasons == 0:
        _publish(is_busy=False)


def announce_compilations() -> None:
    """Announce all compilations of this rank, until ``torch.compiler.reset`` ends that."""
    if _end not in callback_handler.end_callbacks:
        callback_handler.register_start_callback(_begin)
        callback_handler.register_end_callback(_end)


def announce_this_compilation() -> None:
    """Announce the compilation in progress, if it is not announced yet."""
    if _end not in callback_handler.end_callbacks:
        announce_compilations()
        _begin()


@contextmanager
def busy() -> Iterator[None]:
    """This rank is busy while the context is open: ranks that wait for it keep waiting."""
    _begin()
    try:
        yield
    finally:
        _end()


@contextmanager
def waiting() -> Iterator[None]:
    """This rank waits for others and so is not busy, even while it compiles.

    Otherwise two ranks that wait for each other would both count as making progress.
    """
    if _num_reasons:
        _publish(is_busy=False)
    try:
        yield
    finally:
        if _num_reasons:
            _publish(is_busy=True)


def is_busy(rank: int) -> bool:
    """Whether a rank has announced that it is busy."""
    store = default_store()
    key = _key(rank)
    return bool(store.check([key])) and store.get(key) == b"1"
