"""A language model as small scripts train it: accumulation, decay groups, samples, resume."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import clip
from models import batch, make_transformer, wrap
from modes import in_mode
from pool import on_ranks
from recipes import recipe
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP

MICRO_BATCHES = 2
STEPS = 4


def _decay_groups(plain: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices and embeddings only."""
    matrices = [p for p in plain.parameters() if p.dim() >= 2]
    others = [p for p in plain.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def _learning_rate(step: int) -> float:
    """Linear warmup, then a cosine."""
    if step < 1:
        return 0.05
    return 0.1 * (1 + math.cos(math.pi * step / STEPS))


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The model returns logits; smoothed labels, some of which are left out."""
    logits, targets = model(tokens)[:, :-1], tokens[:, 1:].clone()
    targets[:, -1] = -1
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1, label_smoothing=0.1
    )


@torch.no_grad()
def _sample(model: nn.Module, tokens: torch.Tensor, num_new: int = 4) -> list[list[int]]:
    """Greedy, without a cache: each forward is one token longer."""
    model.eval()
    for _ in range(num_new):
        following = model(tokens)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], dim=1)
    model.train()
    return tokens.tolist()


def _train(
    model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range, accumulate: str
) -> dict[str, list[Any]]:
    """Everything is asked of ``model``, which may be compiled."""
    seen: dict[str, list[Any]] = {"losses": [], "norms": [], "samples": []}
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step)
        if step % 2 == 0:
            seen["samples"].append(_sample(model, batch(rank, 100 + step, length=3)))
        for micro in range(MICRO_BATCHES):
            is_last = micro == MICRO_BATCHES - 1
            if accumulate == "flag":
                model.require_backward_grad_sync = is_last
            with model.no_sync() if accumulate == "no_sync" and not is_last else nullcontext():
                loss = _loss(model, batch(rank, 10 * step + micro)) / MICRO_BATCHES
                loss.backward()
        seen["norms"].append(clip(model, 0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen["losses"].append(loss.item())
    return seen


@pytest.mark.parametrize(("mode", "accumulate"), [("eager", "flag"), ("graph", "no_sync")])
@on_ranks(2)
def test_trains_as_ddp(rank: int, mode: str, accumulate: str) -> None:
    """Losses, norms and samples, with groups made by dimension."""
    reference = DistributedDataParallel(make_transformer(num_blocks=1))
    adamw = torch.optim.AdamW(_decay_groups(reference), betas=(0.9, 0.95))
    expected = _train(reference, adamw, rank, range(STEPS), accumulate)

    wrapped = wrap(make_transformer(num_blocks=1))
    names: dict[str, Any] = {"model": wrapped, "torch": torch}
    exec(recipe("Decay matrices only"), names)
    model = in_mode(wrapped, mode)
    got = _train(model, names["optimizer"], rank, range(STEPS), accumulate)
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert min(got["norms"]) > 0.5  # all steps were clipped
    assert got["samples"] == expected["samples"]


# -- one file, written by rank 0 -------------------------------------------------------------------


def _new_run() -> tuple[FSDP, torch.optim.Optimizer]:
    model = wrap(make_transformer(num_blocks=1))
    return model, torch.optim.AdamW(_decay_groups(model), betas=(0.9, 0.95))


@on_ranks(2)
def test_goes_on_from_the_file_of_rank_0(rank: int, tmp_path: Path) -> None:
    """Bit by bit; and the plain model reads it."""
    file = tmp_path / "checkpoint.pt"
    model, optimizer = _new_run()
    _train(model, optimizer, rank, range(2), "no_sync")
    state = {
        "model": model.state_dict(),
        "optimizer": FSDP.optim_state_dict(model, optimizer),
        "step": 2,
    }
    if rank == 0:
        torch.save(state, file)
    dist.barrier()
    rest = _train(model, optimizer, rank, range(2, STEPS), "no_sync")

    model, optimizer = _new_run()
    state = torch.load(file, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
    assert _train(model, optimizer, rank, range(state["step"], STEPS), "no_sync") == rest

    plain = make_transformer(num_blocks=1)
    plain.load_state_dict(state["model"])
    with torch.no_grad():
        loss = _loss(plain, batch(rank, 21)).item() / MICRO_BATCHES
    assert loss == pytest.approx(rest["losses"][0], rel=1e-5)
