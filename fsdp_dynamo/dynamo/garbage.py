"""Garbage collection while a graph is traced and compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 50, 100)


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Let Python look for garbage seldom.

    Tracing and compiling make a graph of objects of which nearly all stay, and a full collection
    visits each of them: with 64 blocks that took 1.5 s. Thresholds that are higher already stay,
    and so does a collector that is off.
    """
    before = gc.get_threshold()
    if before[0] == 0:
        yield
        return
    gc.set_threshold(*(max(pair) for pair in zip(before, _THRESHOLDS, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)


__all__ = ["collected_seldom"]
