"""Gradients that wait for a reduction lose nothing that FSDP1's keep, in any mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as upstream
from modes import MODES, in_mode
from pool import RankPool
from torch import nn

import fsdp_dynamo

LOW = torch.bfloat16
NUM_SMALL = 17
SMALL = 2.0**-9  # added to 1, it is lost in bfloat16
TRUE = 1 + NUM_SMALL * SMALL
PRECISIONS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "low reduction": ({"reduce_dtype": LOW}, torch.float32),
    "low reduction kept": ({"reduce_dtype": LOW, "keep_low_precision_grads": True}, torch.float32),
    "low parameters": ({"param_dtype": LOW, "reduce_dtype": torch.float32}, torch.float32),
    "both low": ({"param_dtype": LOW}, LOW),
}
"""Arguments of ``MixedPrecision``, and the dtype that sums shall have."""


def _model(library: Any, precision: dict[str, Any], **arguments: Any) -> Any:
    net = nn.Linear(4, 4, bias=False)
    nn.init.ones_(net.weight)
    low = library.MixedPrecision(**precision)
    return library.FullyShardedDataParallel(
        net, mixed_precision=low, use_orig_params=True, **arguments
    )


def _accumulated(model: Any, run: Any, ends_with_step: bool) -> tuple[set[torch.dtype], float]:
    """Dtypes of ``.grad`` before the reduction; an element of the reduced gradient."""
    scales = [1.0, *[SMALL] * NUM_SMALL]
    x = torch.ones(1, 4)
    waiting = scales[:-1] if ends_with_step else scales
    with model.no_sync():
        for scale in waiting:
            (run(x).float().sum() * scale).backward()
    shown = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    if ends_with_step:
        (run(x).float().sum() * scales[-1]).backward()
    else:
        model.clip_grad_norm_(1e9)
    (grad,) = [p.grad for p in model.parameters()]
    return shown, float(grad.view(-1)[0])


def _sums(rank: int, world_size: int, name: str) -> dict[str, tuple[set[torch.dtype], float]]:
    precision, _ = PRECISIONS[name]
    found = {}
    for mode in MODES:
        model = _model(fsdp_dynamo, precision)
        run = in_mode(model, mode)
        for ends_with_step in (True, False):
            found[f"{mode} {ends_with_step}"] = _accumulated(model, run, ends_with_step)
            model.zero_grad()
    theirs = _model(upstream, precision, device_id=torch.device("cpu"))
    found["upstream"] = _accumulated(theirs, theirs, ends_with_step=True)
    return found


@pytest.mark.parametrize("name", PRECISIONS)
def test_sums_are_as_precise_as_upstreams(ranks: RankPool, name: str) -> None:
    for found in ranks.run(_sums, 2, name):
        _, dtype = PRECISIONS[name]
        _, theirs = found.pop("upstream")
        for case, (shown, grad) in found.items():
            assert shown == {dtype}, case
            assert abs(grad - TRUE) <= abs(theirs - TRUE), case
            if dtype is torch.float32:  # rounded at most once
                assert grad == pytest.approx(TRUE, abs=2.0**-8), case
