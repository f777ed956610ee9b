"""The migration page has every argument of what it migrates from, and of ours no other name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp as upstream
from models import make_transformer, train, wrap
from pool import RankPool

from fsdp_dynamo import FSDP, FSDPModule, ShardingStrategy, fully_shard

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()


def _rows(heading: str) -> dict[str, str]:
    """By each name in a row's first cell, its second one."""
    section = PAGE.partition(f"## From {heading}\n")[2].partition("\n## ")[0]
    rows: dict[str, str] = {}
    for first, second in re.findall(r"^\| (.*?) \| (.*?) \|", section, re.MULTILINE):
        rows.update(dict.fromkeys(re.findall(r"`(\w+)`", first), second))
    return rows


def _arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


@pytest.mark.parametrize(
    ("heading", "theirs", "ours"),
    [
        ("FSDP1", upstream.FullyShardedDataParallel.__init__, FSDP.__init__),
        ("FSDP2", upstream.fully_shard, fully_shard),
    ],
)
def test_arguments(heading: str, theirs: Any, ours: Any) -> None:
    rows = _rows(heading)
    assert _arguments(theirs) - set(rows) == set()
    for name in _arguments(theirs):
        assert (rows[name] == "same") == (name in _arguments(ours)), name


@pytest.mark.parametrize(
    ("heading", "theirs", "ours"),
    [
        ("FSDP1", upstream.FullyShardedDataParallel, FSDP),
        ("FSDP2", upstream.FSDPModule, FSDPModule),
    ],
)
def test_methods(heading: str, theirs: type, ours: type) -> None:
    rows = {name: second for name, second in _rows(heading).items() if hasattr(theirs, name)}
    assert len(rows) >= 8  # as many methods has FSDP2 of torch 2.11; later ones have more
    for name, second in rows.items():
        assert (second == "same") == hasattr(ours, name), name


def _without_originals(rank: int, world_size: int, strategy: str) -> tuple[Any, Any]:
    model = make_transformer(num_blocks=2)
    kind = ShardingStrategy[strategy]
    wrapped = wrap(model, sharding_strategy=kind, use_orig_params=False)
    expected, _ = train(make_transformer(num_blocks=2), 0)
    return expected, train(wrapped, 0)[0]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_trains_without_original_parameters(ranks: RankPool, strategy: str) -> None:
    """``use_orig_params=False``, upstream's default, trains in eager as one process does."""
    for expected, got in ranks.run(_without_originals, 2, strategy):
        assert got == pytest.approx(expected, rel=1e-6)


def test_fields_of_accelerates_plugin() -> None:
    accelerate = pytest.importorskip("accelerate")
    fields = {f.name for f in dataclasses.fields(accelerate.FullyShardedDataParallelPlugin)}
    rows = _rows("accelerate")
    assert set(rows) == fields
    for name, second in rows.items():
        if second == "same":
            assert name in _arguments(FSDP.__init__) | _arguments(fully_shard), name


def test_fields_of_deepspeeds_config() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    fields = config.DeepSpeedZeroConfig.model_fields
    known = {name for n, f in fields.items() for name in (n, f.alias)}
    others = {"bf16", "fp16", "gradient_clipping", "gradient_accumulation_steps"}
    assert set(_rows("DeepSpeed ZeRO-3")) - known - others == set()
