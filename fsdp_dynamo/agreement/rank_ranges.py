"""Ranks as ranges, in records and in messages: short, however many ranks there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Ranges = Sequence[tuple[int, int]]
"""First and last ranks of those without a gap."""

_MOST_LISTED = 12


def ranges_by_text(texts: Mapping[int, str]) -> list[tuple[str, Ranges]]:
    """Each distinct text of ranks once, with the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    return [(text, _ranges(ranks)) for text, ranks in ranks_of.items()]


def listed(ranks: Iterable[int]) -> str:
    """Ranks for a message, ``0, 1, 4 to 9``; of many pieces the first, and how many ranks more."""
    pieces: list[str] = []
    left = 0
    for first, last in _ranges(ranks):
        if len(pieces) >= _MOST_LISTED:
            left += last - first + 1
        elif last - first > 1:
            pieces.append(f"{first} to {last}")
        else:
            pieces += map(str, range(first, last + 1))
    return ", ".join(pieces) + (f" and {left} more" if left else "")


def _ranges(ranks: Iterable[int]) -> Ranges:
    found: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found
