"""Steps that all ranks take together while a model is wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
import torch.distributed as dist

from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.errors import DivergenceError, RankFailedError
from fsdp_dynamo.health.comparison import (
    difference,
    maximum_over,
    texts_if_different,
    texts_over,
)
from fsdp_dynamo.health.store import PREFIX, Run, default_store, shared_store
from fsdp_dynamo.version import __version__


class _Begun(WeakSet[dist.ProcessGroup]):
    """Groups whose ranks have compared versions."""


def begin_run(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Prepare groups for exchanges; all of their ranks must call it first, and together.

    The run gets a number, since a launcher may keep one store when it restarts the ranks, and keys
    of an earlier run must not be read.

    Args:
        groups: this rank's groups, in the same order on all ranks.
        device: used by groups that do not serve the CPU.

    Raises:
        DivergenceError: on every rank, if versions of torch or of this package differ.
    """
    begun, store = state_of(dist.group.WORLD, _Begun), default_store()
    new = [group for group in groups if group not in begun and shared_store(group) is not None]
    if not new:
        return
    run = state_of(dist.group.WORLD, Run)
    own = run.number or store.add(f"{PREFIX}/runs-of-rank-{dist.get_rank()}", 1)
    number, _ = maximum_over(new, (own, 0), device, "the number of the run")
    run.number = run.number or number
    begun.update(new)
    public = torch.__version__.partition("+")[0]  # builds for other accelerators may be mixed
    text = f"torch {public}, fsdp_dynamo {__version__}"
    texts = texts_if_different(new, "versions", text, device)
    if texts is not None:
        fix = "Install the same versions for all ranks, then start all ranks again."
        raise DivergenceError(str(difference("versions", texts, fix)))


@contextmanager
def together(
    groups: Iterable[dist.ProcessGroup], device: torch.device, what: str
) -> Iterator[None]:
    """Run a block on all ranks of some groups; an error on one rank is raised on all.

    Costs one exchange of 16 bytes per group with a shared store; other groups are left out.

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
    if any(maximum_over(shared, (int(failure is not None), 0), device, what)):
        own = "" if failure is None else f"{type(failure).__name__}: {failure}"
        texts = texts_over(shared, what, own)
        if failure is None:
            lines = [f"{what}: rank {rank} failed: {text}" for rank, text in texts.items() if text]
            raise RankFailedError("\n".join([*lines, "Correct it, then start all ranks again."]))
        raise failure
