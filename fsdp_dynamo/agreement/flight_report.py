"""Report of a failed run from the flight records of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdp_dynamo.agreement.rank_ranges import listed
from fsdp_dynamo.comm.collective_log import Entry
from fsdp_dynamo.errors import RankFailedError

Record = Mapping[str, Any]
FIELDS = frozenset({"rank", "world_size", "reason", "groups", "stack"})
"""Fields of a record that a report needs."""


def explain_records(records: Sequence[Record]) -> str:
    """The ranks that failed or left no record, and where the ranks' collectives diverged.

    Args:
        records: of the ranks, in any order.
    """
    by_rank = {record["rank"]: record for record in records}
    size = max(record["world_size"] for record in records)
    lines = [f"{len(by_rank)} of {size} ranks have left a record."]
    missing = [rank for rank in range(size) if rank not in by_rank]
    if missing:
        lines.append(
            f"{_ranks(missing)} left none: killed (kill -9, out of memory, machine down), ended "
            "without an error, or the record is on another machine."
        )
    for rank in sorted(by_rank):
        lines.append(f"rank {rank}: {by_rank[rank]['reason'].splitlines()[0]}")
    for ranks, logs in _groups(by_rank):
        lines += _compare_logs(ranks, logs)
    causes = [r for r in sorted(by_rank) if not _is_consequence(by_rank[r]["reason"])]
    if causes and not missing:
        lines.append(f"Look first at rank {causes[0]}:")
        lines += [line.rstrip() for line in by_rank[causes[0]]["stack"]]
    return "\n".join(lines)


def _is_consequence(reason: str) -> bool:
    """Whether a rank ended only because another one failed."""
    return (
        reason == "SIGTERM" or reason.startswith(RankFailedError.__name__) or "Connection" in reason
    )


Logs = dict[int, tuple[int, list[Entry]]]


def _groups(by_rank: Mapping[int, Record]) -> Iterator[tuple[tuple[int, ...], Logs]]:
    """Ranks of each group, with each rank's number of collectives and the last of them.

    Groups of the same ranks are distinguished by the order of their first use.
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


def _compare_logs(ranks: tuple[int, ...], logs: Logs) -> list[str]:
    """The first mismatch between the ranks of a group, or the ranks that are behind."""
    if len(logs) < 2:
        return []
    known = {r: {entry.number: entry for entry in entries} for r, (_, entries) in logs.items()}
    first = min(known)
    for number in sorted(set.intersection(*(set(entries) for entries in known.values()))):
        mine = known[first][number]
        differing = (r for r in sorted(known) if known[r][number].signature != mine.signature)
        other = next(differing, None)
        if other is not None:
            return [
                f"Among {_ranks(ranks)}, collective {number}: rank {first} issued "
                f"{mine.description()}, rank {other} {known[other][number].description()}. They "
                "diverged here: a unit left out or run once more, another branch, another wrap."
            ]
    least, most = min(c for c, _ in logs.values()), max(c for c, _ in logs.values())
    if least == most:
        return [f"Among {_ranks(ranks)}, all have issued the same {most} collectives."]
    behind = [rank for rank, (count, _) in logs.items() if count == least]
    ahead = next(rank for rank, (count, _) in logs.items() if count == most)
    following = known[ahead].get(least)
    what = "the next" if following is None else following.description()
    return [
        f"Among {_ranks(ranks)}, {_ranks(behind)} issued {least} collectives, rank {ahead} {most}: "
        f"{_ranks(behind)} did not come to {what}."
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"
