"""Gradients that steps under ``no_sync()`` leave unsharded, as all ways of running know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Accumulation:
    """What a root's units share. Compiled code is guarded by both flags.

    Attributes:
        sync: whether the step that runs reduces its gradients.
        has_sums: whether a flat parameter holds a sum of unsharded gradients.
    """

    def __init__(self, flats: Sequence[Any] = ()) -> None:
        self.sync = True
        self.has_sums = False
        self._flats = tuple(flats)

    def refresh(self) -> None:
        """Look again, after sums came or went."""
        self.has_sums = any(flat.unsharded_grad_sum is not None for flat in self._flats)
