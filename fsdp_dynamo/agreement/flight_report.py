"""What records of ranks say together, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdp_dynamo.comm.collective_log import Entry
from fsdp_dynamo.errors import RankFailedError

Record = Mapping[str, Any]

_FOUND_OUT = RankFailedError.__name__


def explained(records: Sequence[Record]) -> str:
    """Who failed first or left nothing, and where the ranks' collectives part.

    Args:
        records: what ranks have written, in any order.
    """
    by_rank = {record["rank"]: record for record in records}
    size = max(record["world_size"] for record in records)
    lines = [f"{len(by_rank)} of {size} ranks have left a record."]
    missing = [rank for rank in range(size) if rank not in by_rank]
    if missing:
        lines.append(
            f"{_ranks(missing)} left none: killed (kill -9, no memory, a machine that is gone), "
            "ended without an error, or their records are on another machine."
        )
    for rank in sorted(by_rank):
        lines.append(f"rank {rank}: {by_rank[rank]['reason'].splitlines()[0]}")
    for ranks, logs in _groups(by_rank):
        lines += _about(ranks, logs)
    causes = [r for r in sorted(by_rank) if not _is_consequence(by_rank[r]["reason"])]
    if causes and not missing:
        lines.append(f"Look first at rank {causes[0]}:")
        lines += [line.rstrip() for line in by_rank[causes[0]]["stack"]]
    return "\n".join(lines)


def _is_consequence(reason: str) -> bool:
    """Whether a rank has only found out that another one failed."""
    return reason == "SIGTERM" or reason.startswith(_FOUND_OUT) or "Connection" in reason


Logs = dict[int, tuple[int, list[Entry]]]


def _groups(by_rank: Mapping[int, Record]) -> Iterator[tuple[tuple[int, ...], Logs]]:
    """Each group's ranks, and of each rank how many collectives it issued, and the last ones.

    Groups of the same ranks are told apart by the order in which they were first used.
    """
    found: dict[tuple[tuple[int, ...], int], Logs] = {}
    for rank, record in sorted(by_rank.items()):
        seen: dict[tuple[int, ...], int] = {}
        for group in record["groups"]:
            ranks = tuple(group["ranks"])
            position = seen[ranks] = seen.get(ranks, -1) + 1
            entries = [Entry(*entry) for entry in group["entries"]]
            found.setdefault((ranks, position), {})[rank] = (group["count"], entries)
    for (ranks, _), logs in found.items():
        yield ranks, logs


def _about(ranks: tuple[int, ...], logs: Logs) -> list[str]:
    """Where the ranks of one group part, or who is behind."""
    if len(logs) < 2:
        return []
    known = {r: {entry.number: entry for entry in entries} for r, (_, entries) in logs.items()}
    first = min(known)
    for number in sorted(set.intersection(*(set(entries) for entries in known.values()))):
        mine = known[first][number]
        other = next((r for r in sorted(known) if known[r][number].what != mine.what), None)
        if other is not None:
            return [
                f"Among {_ranks(ranks)}, collective {number}: rank {first} issued "
                f"{mine.described()}, rank {other} {known[other][number].described()}. They went "
                "apart here: a unit left out or run once more, another branch, another wrap."
            ]
    least, most = min(c for c, _ in logs.values()), max(c for c, _ in logs.values())
    if least == most:
        return [f"Among {_ranks(ranks)}, all have issued the same {most} collectives."]
    behind = [rank for rank, (count, _) in logs.items() if count == least]
    ahead = next(rank for rank, (count, _) in logs.items() if count == most)
    following = known[ahead].get(least)
    what = "the next" if following is None else following.described()
    return [
        f"Among {_ranks(ranks)}, {_ranks(behind)} issued {least} collectives, rank {ahead} {most}: "
        f"{_ranks(behind)} did not come to {what}."
    ]


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
