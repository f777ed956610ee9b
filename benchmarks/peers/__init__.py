"""The peers, by key, in the order of tables."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.command_line import BadInputError
from benchmarks.peers import deepspeed, ours, simple_fsdp, upstream
from benchmarks.peers.base import Peer, Setting, Trainee

__all__ = ["FAMILIES", "Peer", "Setting", "Trainee", "all_peers", "named"]

FAMILIES: dict[str, Callable[[str | None], Peer]] = {
    "plain": upstream.plain,
    "ddp": upstream.ddp,
    "fsdp": ours.ours,
    "fsdp1": upstream.fsdp1,
    "fsdp2": upstream.fsdp2,
    "simple_fsdp": simple_fsdp.simple_fsdp,
    "deepspeed": deepspeed.deepspeed,
}
"""Functions from a Dynamo backend (``None``: eager) to a peer, by command-line flag."""


def all_peers() -> dict[str, Peer]:
    """Every peer there is, by key."""
    everyone = (*upstream.PEERS, *simple_fsdp.peers(), *deepspeed.PEERS, *ours.PEERS)
    return {peer.key: peer for peer in everyone}


def named(keys: list[str]) -> list[Peer]:
    """The peers of these keys.

    Raises:
        BadInputError: one of them is unknown.
    """
    known = all_peers()
    for key in keys:
        if key not in known:
            raise BadInputError(f"peer: expected some of {', '.join(known)}, got {key!r}")
    return [known[key] for key in keys]
