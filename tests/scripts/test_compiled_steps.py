"""A step that is compiled whole: forward, loss, backward, clipping and the optimizer.

Dynamo then sees the Python that autograd and Dynamo itself call in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import Batch, classification_loss, clip, error_of, examples, make_classifier, shard
from pool import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import fully_shard


def _by_module(model: nn.Sequential) -> nn.Module:
    for block in model[:2]:
        fully_shard(block)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "wrapper": shard,
    "fully_shard": _by_module,
}


def _losses(rank: int, wrapper: str, backend: str | None) -> list[float]:
    """Of three steps, each with two backwards, the first without a reduction."""
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
    return [run(examples(rank, 2 * i), examples(rank, 2 * i + 1)).item() for i in range(3)]


@pytest.mark.parametrize(
    ("wrapper", "backend"), [("fully_shard", "aot_eager"), ("wrapper", "fsdp_dynamo_aot_eager")]
)
@on_ranks(2)
def test_trains_as_ddp(rank: int, wrapper: str, backend: str) -> None:
    expected = _losses(rank, "ddp", None)
    assert _losses(rank, wrapper, backend) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "fsdp_dynamo_aot_eager"])
@on_ranks(2)
def test_compiled_autograd_is_right_or_refused(rank: int, backend: str) -> None:
    """Graph mode's backward is a graph already; the other modes' hooks would lose gradients.

    Where torch unpacks saved parameters to trace the backward, autograd refuses before our hooks.
    """
    expected = _losses(rank, "ddp", None)
    got: list[float] = []
    with torch._dynamo.config.patch(compiled_autograd=True):
        error = error_of(lambda: got.extend(_losses(rank, "wrapper", backend)))
    if backend == "fsdp_dynamo_aot_eager":
        assert error == ""
        assert got == pytest.approx(expected, rel=1e-5)
    else:
        assert "eager and hooks mode: expected a backward" in error or "inplace" in error
