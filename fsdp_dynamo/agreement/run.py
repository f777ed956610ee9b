"""The beginning of a run of ranks: exchanges of its own, and the same versions everywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from fsdp_dynamo.agreement import busy_ranks
from fsdp_dynamo.agreement.comparison import difference, late_message
from fsdp_dynamo.agreement.exchange import exchange_texts
from fsdp_dynamo.agreement.store import agree_on_run_id, exchange_device, shared_store
from fsdp_dynamo.errors import DivergenceError
from fsdp_dynamo.version import __version__


def begin_run(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Prepare groups for exchanges; all of their ranks call it together, before any other.

    Exchanges are kept apart from those of an earlier run (see ``agree_on_run_id``).

    Args:
        groups: this rank's, in the same order on all ranks.
        device: one of the groups', used by those that do not serve the CPU.

    Raises:
        DivergenceError: on every rank, if versions of torch or of this package differ.
    """
    new = [group for group in groups if agree_on_run_id(group, device)]
    if new:
        busy_ranks.publish_state()
        _require_same_versions(new, device)


def _require_same_versions(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """A collective of 16 bytes a group; texts are exchanged only where these find a difference.

    What is known is carried from group to group, so that all ranks of a mesh raise, not only those
    that share a group with the one that differs.
    """
    public = torch.__version__.partition("+")[0]  # builds for other accelerators may be mixed
    text = f"torch {public}, fsdp_dynamo {__version__}"
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    ends = [number, -number]
    for group in groups:
        values = torch.tensor(ends, device=exchange_device(group, device))
        dist.all_reduce(values, dist.ReduceOp.MAX, group)
        ends = values.tolist()
    if ends[0] == -ends[1]:
        return
    texts = {dist.get_rank(): text}
    for group in groups:
        known = json.dumps(list(texts.items()))
        store = shared_store(group)
        late = late_message("versions")
        for one in exchange_texts(group, store, "versions", known, late).values():
            texts.update(json.loads(one))
    fix = "Install the same versions for all ranks, then start all ranks again."
    raise DivergenceError(str(difference("versions", dict(sorted(texts.items())), fix)))
