"""Counts of the tensors that are alive."""

from __future__ import annotations

import gc
import weakref

import torch


class Census:
    """Counts the tensors that were made since it began.

    Older ones do not count: what earlier jobs of this process left in caches goes when it goes.
    """

    def __init__(self) -> None:
        self._old = [weakref.ref(tensor) for tensor in self._all()]

    @staticmethod
    def _all() -> list[torch.Tensor]:
        while gc.collect():  # a finalizer can keep its cycle until the next collection
            pass
        return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]

    def count(self) -> int:
        present = self._all()
        old = {id(tensor) for tensor in (reference() for reference in self._old)}
        return sum(id(tensor) not in old for tensor in present)
