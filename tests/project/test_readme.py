"""Snippets of the README, the recipes and the page on checkpoints, run as they stand."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import VOCABULARY, Block, batch
from pool import RankPool
from torch import nn
from torch.nn import functional as F

from fsdp_dynamo import checkpoint

README = Path(__file__).parents[2] / "README.md"
RECIPES = README.parent / "docs" / "recipes.md"
CHECKPOINTS = README.parent / "docs" / "checkpoints.md"


def _snippets(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def _ten_lines() -> str:
    found = re.search(r"## Ten lines\n\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def _recipe(name: str) -> str:
    (found,) = (text for text in _snippets(RECIPES.read_text()) if name in text)
    return found


def _loss(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    assert out.dtype == torch.float32
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())


def _names(rank: int) -> dict[str, Any]:
    """What the snippets leave to the reader."""
    tokens = batch(rank, 0)
    return {"Block": Block, "batch": tokens[:, :-1], "targets": tokens[:, 1:]}


def _after_ten_lines(names: dict[str, Any]) -> dict[str, Any]:
    """What they leave. They train, and every rank holds a part only."""
    losses = []

    def noted(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses.append(_loss(out, targets))
        return losses[-1]

    names |= {"loss_fn": noted}
    with mock.patch.object(dist, "init_process_group"):  # the ranks of the pool have one
        exec(_ten_lines().replace('"fsdp_dynamo"', '"fsdp_dynamo_aot_eager"'), names)
    after = _loss(names["step"](names["batch"]).float(), names["targets"])
    assert after < losses[0]
    held = sum(p.to_local().numel() for p in names["model"].parameters())
    assert held < 0.6 * sum(p.numel() for p in _transformer().parameters())
    return names | {"loss_fn": _loss}


# -- the recipes -----------------------------------------------------------------------------------


def _transformer() -> nn.Module:
    """All of it can be made on the meta device; every rank's values differ."""
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), Block(16), nn.Linear(16, VOCABULARY))


def _left_by(code: str, names: dict[str, Any]) -> dict[str, Any]:
    own = {**names}
    exec(code, own)
    if "saving" in own:
        own["saving"].result()
    return own


def _run_recipes(rank: int, world_size: int, folder: str, *recipes: str) -> dict[str, Any]:
    torch.manual_seed(rank)
    names = {**_names(rank), "MyTransformer": _transformer, "orthogonalized": torch.zeros_like}
    names = _after_ten_lines(names | {"batches": [names["batch"]] * 3})
    matrices = [(n, p) for n, p in names["model"].named_parameters() if p.dim() == 2]
    names["momenta"] = {name: torch.ones_like(param) for name, param in matrices}
    before = Path.cwd()
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(world_size)):
            left = [_left_by(code, names) for code in recipes]
    finally:
        os.chdir(before)
    changes = left[1]["changes"]
    assert changes.keys() == names["momenta"].keys()
    assert not any(change.any() for change in changes.values())
    state = names["model"].state_dict()
    return {name: tensor.numpy() for name, tensor in state.items()}


def test_the_recipes_run(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the ten lines, all but the one with tensor parallelism, and those that tests/scripts
    run; a plain model reads what they have saved."""
    marks = ["HYBRID_SHARD", "update_whole", "async_save", "record_events", "inspect_graphs"]
    recipes = [_recipe(mark) for mark in (*marks, "print_products")]
    recipes[-1] = recipes[-1].replace('"fsdp_dynamo"', '"fsdp_dynamo_aot_eager"')
    saved, _ = ranks.run(_run_recipes, 2, str(tmp_path), *recipes)
    assert (tmp_path / "out" / "_whole.backward.after_planner.py").is_file()

    monkeypatch.chdir(tmp_path)
    section = CHECKPOINTS.read_text().partition("## Into a plain model\n")[2].partition("\n## ")[0]
    ours, torchs = _snippets(section)
    ((_, folder),) = checkpoint.complete("run")
    torchs = torchs.replace("run/000002-step-200", str(folder))
    (line,) = re.findall(r"`(checkpoint\.load\(.*?\))`", RECIPES.read_text())
    for code in (ours, f"plain = Model()\n{torchs}", f"plain = Model()\n{line}"):
        names: dict[str, Any] = {"torch": torch, "checkpoint": checkpoint, "Model": _transformer}
        exec(code, names)
        for name, tensor in names["plain"].state_dict().items():
            assert torch.equal(tensor, torch.from_numpy(saved[name]))
        assert "loaded" not in names or names["loaded"].step == 100
