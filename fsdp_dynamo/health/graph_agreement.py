"""Agreement on compiled graphs: all ranks run the same collectives, or all ranks raise.

Mismatched collectives do not fail: they hang, or exchange the wrong data. So the first collective
of every compiled graph carries the graph's fingerprint, and ranks compare a fingerprint before they
first use it. A rank that alone has compiled again waits for that in vain, while the others wait in
the next collective: ranks that wait compare what they have issued, and find the difference.
"""

from __future__ import annotations

import torch.distributed as dist

from fsdp_dynamo.comm.group_state import group_named, state_of
from fsdp_dynamo.errors import DivergenceError, with_section
from fsdp_dynamo.health.collective_order import GRAPHS
from fsdp_dynamo.health.comparison import first_difference, texts_if_different
from fsdp_dynamo.health.notices import link_groups, linked_groups, raise_on_all_ranks
from fsdp_dynamo.health.store import shared_store
from graph_passes.text.listing import SEPARATOR, alone, describe_entry

_CAUSE = (
    "Ranks took different branches, or models, shapes or dtypes differ between ranks: make them "
    "the same on all ranks, then start all ranks again."
)


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
    for ranks, groups in _groups_of(fingerprint).items():
        link_groups(groups)
        own = _fingerprint_for(ranks, fingerprint)
        # Not the graph's first one: ranks whose graphs begin in different groups must meet.
        first = [one for one in linked_groups() if _ranks(one) == ranks][:1]
        texts = texts_if_different(first, GRAPHS, own)  # none of one rank is linked
        if texts is not None:
            other = next(rank for rank in ranks if texts[rank] != texts[ranks[0]])
            message = _difference_message(ranks[0], other, texts[ranks[0]], texts[other])
            raise_on_all_ranks(DivergenceError(message))


def _resolve(entry: str) -> tuple[str, dist.ProcessGroup]:
    """Split an entry into its fields and its group; the group's name is local to a rank."""
    fields, _, name = entry.rpartition(" ")
    return fields, group_named(name)


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
        f"does: {describe_entry(one)}, got {describe_entry(two)}. {_CAUSE}",
        "another-graph-on-one-rank",
    )
