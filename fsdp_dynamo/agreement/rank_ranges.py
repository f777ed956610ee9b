"""Ranks that have the same text, as ranges: short, however many ranks there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Ranges = Sequence[tuple[int, int]]
"""First and last ranks of those without a gap."""


def ranges_by_text(texts: Mapping[int, str]) -> list[tuple[str, Ranges]]:
    """Each distinct text of ranks once, with the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    return [(text, _ranges(ranks)) for text, ranks in ranks_of.items()]


def _ranges(ranks: Iterable[int]) -> Ranges:
    found: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found
