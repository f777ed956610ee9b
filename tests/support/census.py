"""Counts of the tensors that are alive."""

from __future__ import annotations

import gc

import torch


class Census:
    """Counts the tensors that were made since it began, until another census or job begins.

    Older objects are frozen: collecting among all that a process has imported takes a second.
    """

    def __init__(self) -> None:
        gc.unfreeze()
        self._collect()
        gc.freeze()

    @staticmethod
    def _collect() -> None:
        while gc.collect():  # a finalizer can keep its cycle until the next collection
            pass

    def count(self) -> int:
        self._collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
