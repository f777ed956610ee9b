"""Steps that all ranks take together while a model is wrapped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fsdp_dynamo.errors import DivergenceError, RankFailedError
from fsdp_dynamo.health import late_ranks
from fsdp_dynamo.health.comparison import awaited, difference, maximum_over, texts_over
from fsdp_dynamo.health.store import agree_on_run_id, shared_store
from fsdp_dynamo.version import __version__


def begin_run(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Prepare groups for exchanges; all of their ranks must call it first, and together.

    Exchanges are kept apart from those of an earlier run (see ``agree_on_run_id``).

    Args:
        groups: this rank's groups, in the same order on all ranks.
        device: used by groups that do not serve the CPU.

    Raises:
        DivergenceError: on every rank, if versions of torch or of this package differ.
    """
    new = [group for group in groups if agree_on_run_id(group, device)]
    if new:
        late_ranks.publish_state()
        _require_same_versions(new, device)


def _require_same_versions(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Compare versions by a collective of 16 bytes per group; exchange texts if they differ."""
    public = torch.__version__.partition("+")[0]  # builds for other accelerators may be mixed
    text = f"torch {public}, fsdp_dynamo {__version__}"
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    highest, lowest = maximum_over(groups, [number, -number], device, "versions")
    if highest == -lowest:
        return
    texts = texts_over(groups, "versions", text, awaited("versions"))
    fix = "Install the same versions for all ranks, then start all ranks again."
    raise DivergenceError(str(difference("versions", texts, fix)))


@contextmanager
def together(
    groups: Iterable[dist.ProcessGroup], device: torch.device, what: str
) -> Iterator[None]:
    """Run a block on all ranks of some groups; an error on one rank is raised on all.

    Costs one collective of 8 bytes per group with a shared store; other groups are left out.

    Args:
        groups: this rank's groups, in the same order on all ranks.
        device: used by groups that do not serve the CPU.
        what: what the block does, for messages.

    Raises:
        RankFailedError: another rank's block raised; that rank raises its own error.
    """
    shared = [group for group in groups if shared_store(group) is not None]
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # other ranks wait for this rank's answer below
        failure = error
    if any(maximum_over(shared, [int(failure is not None)], device, what)):
        own = "" if failure is None else f"{type(failure).__name__}: {failure}"
        texts = texts_over(shared, what, own, awaited(what))
        if failure is None:
            lines = [f"{what}: rank {rank} failed: {text}" for rank, text in texts.items() if text]
            raise RankFailedError("\n".join([*lines, "Correct it, then start all ranks again."]))
        raise failure
