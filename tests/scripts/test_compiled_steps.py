"""A step that is compiled whole: forward, loss, backward, clipping and the optimizer.

Dynamo then sees the Python that autograd and Dynamo itself call in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import Batch, classification_loss, clip, error_of, examples, make_classifier, shard
from pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import fully_shard

BACKENDS = ("eager", "aot_eager", "fsdp_dynamo_aot_eager")


def _by_module(model: nn.Sequential) -> nn.Module:
    for block in model[:2]:
        fully_shard(block)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "wrapper": shard,
    "fully_shard": _by_module,
}


def _losses(rank: int, world_size: int, wrapper: str, backend: str | None) -> list[float]:
    """Of four steps, each with two backwards, the first without a reduction."""
    model: Any = WRAPPERS[wrapper](make_classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def without_reduction(batch: Batch) -> None:
        if wrapper == "fully_shard":
            model.set_requires_gradient_sync(False)
            classification_loss(model, batch).backward()
            model.set_requires_gradient_sync(True)
        else:
            with model.no_sync():
                classification_loss(model, batch).backward()

    def step(first: Batch, second: Batch) -> torch.Tensor:
        without_reduction(first)
        loss = classification_loss(model, second)
        loss.backward()
        clip(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if backend is None else torch.compile(step, backend=backend)
    return [run(examples(rank, 2 * i), examples(rank, 2 * i + 1)).item() for i in range(4)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrapper", ["wrapper", "fully_shard"])
def test_trains_as_ddp(ranks: RankPool, wrapper: str, backend: str) -> None:
    expected = ranks.run(_losses, 2, "ddp", None)
    for found, wanted in zip(ranks.run(_losses, 2, wrapper, backend), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


# -- with compiled autograd ------------------------------------------------------------------------


def _losses_with_compiled_autograd(rank: int, world_size: int, backend: str) -> Any:
    found: list[float] = []
    with torch._dynamo.config.patch(compiled_autograd=True):
        error = error_of(lambda: found.extend(_losses(rank, world_size, "wrapper", backend)))
    return error or found


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_autograd_is_right_or_refused(ranks: RankPool, backend: str) -> None:
    """Graph mode's backward is a graph already; the other modes' hooks would lose gradients.

    Where torch unpacks saved parameters to trace the backward, autograd refuses before our hooks.
    """
    expected = ranks.run(_losses, 2, "ddp", None)
    found = ranks.run(_losses_with_compiled_autograd, 2, backend)
    for one, wanted in zip(found, expected, strict=True):
        if backend == "fsdp_dynamo_aot_eager":
            assert one == pytest.approx(wanted, rel=1e-5)
        else:
            assert "eager and hooks mode: expected a backward" in one or "inplace" in one
