"""One plan for all ranks, also where their batches have different sizes.

Places follow from the time that a graph computes, and so from the size of this rank's batch. Ranks
whose batches differ in length would launch collectives in different orders. They also compile at
different times, each when a length is new to it, so nobody can be asked: the rank that is the first
to plan a graph of some units writes its plan to the store, and all follow it from then on::

    rank 0, 480 tokens   decides, is the first: its plan
    rank 1, 512 tokens   decides, and takes rank 0's order where its own differs

Code from a cache has been planned before. Its plan counts as a decision, too: if it is not the one
that the ranks of this run follow, the code is compiled for that one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import torch

from fsdp_dynamo.agreement.store import PREFIX, default_store
from fsdp_dynamo.graph_path.cache_keys import source_key
from graph_passes.scheduling.following import launches_of
from graph_passes.scheduling.plan import GraphPlan, graph_from


class SharedPlans:
    """The plans that ranks follow in the graphs that are made of one of Dynamo's.

    Args:
        marks: of the collectives; graphs with the same ones share their plans.
        decided_by: what plans follow from besides it, the same on all ranks.
    """

    def __init__(self, marks: Sequence[str], decided_by: str) -> None:
        parts = (*marks, decided_by, source_key(), str(torch.is_grad_enabled()))
        self._key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        self._others: dict[str, str] = {}

    def __call__(self, plan: GraphPlan) -> GraphPlan:
        """The plan of the rank that was first; it may be this one's."""
        store = default_store()
        if store is None:
            return plan
        key, own = f"{PREFIX}/plan/{self._key}/{plan.phase}", _digest(plan)
        first = store.get(key).decode() if store.check([key]) else ""
        if not first:
            store.set(f"{key}/{own}", json.dumps(asdict(replace(plan, digest=""))))
            first = store.compare_set(key, "", own).decode()
        if first == own:
            return plan
        return graph_from(json.loads(store.get(f"{key}/{first}").decode()))

    def cache_key(self) -> str:
        """Of plans that code from the cache did not have."""
        return json.dumps(self._others, sort_keys=True) if self._others else ""

    def are_followed(self, plans: Iterable[GraphPlan]) -> bool:
        """Whether these are the ranks' plans; if not, ``cache_key`` is another one from now on."""
        agreed = [(plan, _digest(self(plan))) for plan in plans]
        others = {plan.phase: digest for plan, digest in agreed if digest != _digest(plan)}
        self._others |= others
        return not others


def _digest(plan: GraphPlan) -> str:
    """Of what ranks must have in common."""
    return hashlib.sha256(repr(launches_of(plan)).encode()).hexdigest()[:32]


__all__ = ["SharedPlans"]
