"""The migration page has every argument of what it migrates from, and says truly which are here."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from models import Block, batch, loss_of, make_transformer, train, wrap
from pool import on_ranks

from fsdp_dynamo import FSDP, FSDPModule, ShardingStrategy, fully_shard, record_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

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
        ("FSDP1", upstream.FullyShardedDataParallel, FSDP),
        ("FSDP2", upstream.FSDPModule, FSDPModule),
    ],
)
def test_arguments_and_methods(heading: str, theirs: type, ours: type) -> None:
    rows = _rows(heading)
    methods = {name: second for name, second in rows.items() if hasattr(theirs, name)}
    assert len(methods) >= 5  # test_upstream_names compares all methods
    for name, second in methods.items():
        assert (second == "same") == hasattr(ours, name), name
    makers = (theirs.__init__, ours.__init__)
    if heading == "FSDP2":
        makers = (upstream.fully_shard, fully_shard)
    wanted, here = map(_arguments, makers)
    assert wanted - set(rows) == set()
    for name in wanted:
        assert (rows[name] == "same") == (name in here), name


@on_ranks(2)
def test_trains_without_original_parameters(rank: int) -> None:
    """``use_orig_params=False``, upstream's default, trains in eager as one process does."""
    expected, _ = train(make_transformer(num_blocks=1), 0)
    got, _ = train(wrap(make_transformer(num_blocks=1), use_orig_params=False), 0)
    assert got == pytest.approx(expected, rel=1e-6)


def _gathers(action: Callable[[], Any]) -> tuple[int, Any]:
    """Number of all-gathers, of FSDP1 on a CPU or of ours, and what the action returns."""
    with (
        mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as theirs,
        record_events() as log,
    ):
        result = action()
    return theirs.call_count + [e.kind for e in log].count("all_gather"), result


def _accumulates(model: Any, rank: int) -> list[int]:
    """Gathers in each forward and backward, of which the last reduces."""
    loss_of(model, batch(rank, 0)).backward()  # FSDP1 sets itself up
    model.zero_grad()
    found = []
    for step in range(3):
        with model.no_sync() if step < 2 else contextlib.nullcontext():
            forward, loss = _gathers(partial(loss_of, model, batch(rank, step)))
            backward, _ = _gathers(loss.backward)
        found += [forward, backward]
    return found


@pytest.mark.parametrize(
    ("strategy", "theirs", "ours"),
    [
        ("FULL_SHARD", [3, 2, 3, 2, 3, 2], [3, 2, 3, 2, 3, 2]),
        ("SHARD_GRAD_OP", [3, 0, 0, 0, 0, 0], [3, 0, 3, 0, 3, 0]),
    ],
)
@on_ranks(2)
def test_habits_that_are_not_kept(
    rank: int, strategy: str, theirs: list[int], ours: list[int]
) -> None:
    upstreams = upstream.FullyShardedDataParallel(
        make_transformer(num_blocks=2),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=upstream.ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    assert _accumulates(upstreams, rank) == theirs
    own = wrap(make_transformer(num_blocks=2), sharding_strategy=ShardingStrategy[strategy])
    assert _accumulates(own, rank) == ours
    assert all(parameter.grad is not None for parameter in own.parameters())


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
