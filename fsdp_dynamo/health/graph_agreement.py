"""Agreement on compiled graphs: all ranks run the same collectives, or all ranks raise.

Mismatched collectives do not fail: they hang, or exchange the wrong data. So the first collective
of every compiled graph carries the graph's fingerprint. Before a fingerprint is first used, each
rank puts a digest of it into the store. The rank that comes first collects and publishes the
digests, and all ranks compare them.

A rank that alone recompiled waits in vain for the digests of its peers. It posts a notice when it
sees that a peer has issued a collective beyond this rank's last one. Peers that are blocked there
find the notice and raise the same error.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.errors import DivergenceError, with_section
from fsdp_dynamo.health.comparison import exchange_texts, first_difference
from fsdp_dynamo.health.late_ranks import CAUSE, Awaited
from fsdp_dynamo.health.notices import link_groups, linked_stores, raise_on_all_ranks
from fsdp_dynamo.health.store import shared_store
from graph_passes.text.listing import SEPARATOR, alone, describe_entry


class _AgreedGraphs(set[str]):
    """Fingerprints of graphs that the ranks of a group have compared and found equal."""


def require_agreement(group: dist.ProcessGroup, fingerprint: str) -> None:
    """Raise unless all ranks of a group are about to run this graph; compare only new graphs.

    Args:
        group: group of the graph's first collective.
        fingerprint: from ``graph_passes.text.listing``.

    Raises:
        DivergenceError: on every rank, if a rank has another graph or does not arrive.
    """
    agreed = state_of(group, _AgreedGraphs)
    if fingerprint in agreed:
        return
    if shared_store(group) is not None:
        _require_same_graph(fingerprint)
    agreed.add(fingerprint)


def _require_same_graph(fingerprint: str) -> None:
    """Compare a fingerprint within each of the graph's groups in turn."""
    groups_by_ranks = _groups_of(fingerprint)
    for groups in groups_by_ranks.values():
        link_groups(groups)
    stores = linked_stores()
    for ranks in [ranks for ranks in groups_by_ranks if ranks in stores]:
        group, own = groups_by_ranks[ranks][0], _fingerprint_for(ranks, fingerprint)
        _compare(group, stores[ranks], own)


def _compare(group: dist.ProcessGroup, store: Any, own: str) -> None:
    expected = f"all ranks to compile a graph with collectives, as rank {dist.get_rank()} did"
    name = f"compiled graph that begins with {describe_entry(own.split(SEPARATOR)[0])}"
    texts = exchange_texts(group, store, "graph", own, Awaited(name, lambda _: expected))
    ranks = list(texts)
    for rank in ranks[1:]:
        if texts[rank] != texts[ranks[0]]:
            message = _difference_message(ranks[0], rank, texts[ranks[0]], texts[rank])
            raise_on_all_ranks(group, DivergenceError(message))


def _resolve(entry: str) -> tuple[str, dist.ProcessGroup]:
    """Split an entry into its fields and its group; the group's name is local to a rank."""
    fields, _, name = entry.rpartition(" ")
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    return fields, group


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _groups_of(fingerprint: str) -> dict[tuple[int, ...], list[dist.ProcessGroup]]:
    """Groups of a graph by their global ranks, in the order of first use."""
    found: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
    for entry in fingerprint.split(SEPARATOR):
        _, group = _resolve(entry)
        found.setdefault(_ranks(group), []).append(group)
    return {ranks: list(dict.fromkeys(groups)) for ranks, groups in found.items()}


def _fingerprint_for(ranks: tuple[int, ...], fingerprint: str) -> str:
    """Fingerprint as the given ranks must agree on it.

    It contains the global ranks of the group ``ranks``, but only the size of other groups: with
    replicas, two ranks share some groups and rightly differ in others.
    """
    entries = []
    for entry in fingerprint.split(SEPARATOR):
        fields, group = _resolve(entry)
        own = _ranks(group)
        shown = ",".join(map(str, own)) if own == ranks else f"{len(own)} others"
        entries.append(f"{fields} {shown}")
    return SEPARATOR.join(entries)


def _difference_message(first: int, other: int, of_first: str, of_other: str) -> str:
    """Error message for the first collective that differs.

    Launches are compared only if nothing else differs.
    """
    full = of_first.split(SEPARATOR), of_other.split(SEPARATOR)
    bare = [alone(entry) for entry in full[0]], [alone(entry) for entry in full[1]]
    shown = full if bare[0] == bare[1] else bare
    position = first_difference(*shown)
    assert position is not None
    one, two = ("".join(entries[position : position + 1]) for entries in shown)
    return with_section(
        f"compiled graph, collective {position}: expected rank {other} to issue what rank {first} "
        f"does: {describe_entry(one)}, got {describe_entry(two)}. {CAUSE}",
        "another-graph-on-one-rank",
    )
