"""The ten lines of the README, copied as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import Block, batch, make_transformer
from pool import RankPool
from torch.nn import functional as F

README = Path(__file__).parent.parent / "README.md"


def _ten_lines() -> str:
    found = re.search(r"## Ten lines\n\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def _run(rank: int, world_size: int, code: str) -> tuple[float, float, bool]:
    """The loss before the step and after it, and whether every rank holds a part only."""
    tokens = batch(rank, 0)
    names: dict[str, Any] = {
        "MyTransformer": lambda: make_transformer(num_blocks=1),
        "Block": Block,
        "batch": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_fn": lambda out, targets: F.cross_entropy(
            out.flatten(0, 1).float(), targets.flatten()
        ),
    }
    losses = []
    loss_fn = names["loss_fn"]

    def noted(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses.append(loss_fn(out, targets))
        return losses[-1]

    names["loss_fn"] = noted
    with mock.patch.object(dist, "init_process_group"):  # the ranks of the pool have one
        exec(code, names)
    held = sum(p.numel() for p in names["model"].parameters())
    whole = sum(p.numel() for p in make_transformer(num_blocks=1).parameters())
    after = loss_fn(names["step"](names["batch"]), names["targets"])
    return losses[0].item(), after.item(), held < 0.6 * whole


def test_the_ten_lines_train(ranks: RankPool) -> None:
    for before, after, is_part in ranks.run(_run, 2, _ten_lines()):
        assert after < before
        assert is_part
