"""What ``HIERARCHICAL_SHARD`` costs beside ``FULL_SHARD``: bytes of memory, and between hosts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batch, loss_of, make_transformer, wrap
from namespaces import join_host, needs_link
from pool import RankPool
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import hierarchy_bytes, link
from benchmarks.workloads.catalogue import decoder
from fsdp_dynamo import FSDP, MixedPrecision, ShardingStrategy, record_events

FULL, HIERARCHICAL = ShardingStrategy.FULL_SHARD, ShardingStrategy.HIERARCHICAL_SHARD
NODES, PER_NODE = 2, 2


def _sharded(strategy: ShardingStrategy, model: Any, **kwargs: Any) -> FSDP:
    if strategy is HIERARCHICAL:
        kwargs["device_mesh"] = init_device_mesh("cpu", (NODES, PER_NODE))
    return wrap(model, sharding_strategy=strategy, **kwargs)


# -- memory ----------------------------------------------------------------------------------------


def _memory(rank: int, world_size: int, low: bool) -> list[dict[str, int]]:
    """Bytes of flat parameters, by strategy: what stands, what a step has, what is left."""
    precision = MixedPrecision(param_dtype=torch.bfloat16) if low else None
    found = []
    for strategy in (FULL, HIERARCHICAL):
        model = _sharded(strategy, make_transformer(), mixed_precision=precision)
        flats = [flat for unit in model._fsdp_root.units for flat in unit.flats]
        secondary: list[int] = []
        notes = partial(_note, secondary, flats)
        for block in model.blocks:
            block.register_forward_hook(notes)
        with record_events() as log:
            loss = loss_of(model, batch(rank, 0))
            secondary.append(_kept(flats))
            loss.backward()
        found.append(
            {
                "padded": sum(flat.layout.padded_numel for flat in flats),
                "shards": sum(flat.sharded.nbytes for flat in flats),
                "secondary": max(secondary),
                "least secondary": min(secondary),
                "left": _kept(flats),
                "unsharded": log.peak_unsharded_bytes(),
            }
        )
    return found


def _note(found: list[int], flats: Sequence[Any], *_: object) -> None:
    found.append(_kept(flats))


def _kept(flats: Sequence[Any]) -> int:
    return sum(
        flat.kept_shard.tensor.untyped_storage().nbytes() for flat in flats if flat.kept_shard
    )


@pytest.mark.parametrize("low", [False, True])
def test_memory(ranks: RankPool, low: bool) -> None:
    """The formula of docs/fewer-bytes.md: secondary shards come on top of FULL_SHARD's memory."""
    for full, found in ranks.run(_memory, NODES * PER_NODE, low):
        padded = found["padded"]
        assert padded >= full["padded"]  # rows that do not divide are on each rank
        for each in (full, found):
            assert each["shards"] == 4 * each["padded"] // (NODES * PER_NODE)
        wanted = (2 if low else 4) * padded // PER_NODE
        assert found["secondary"] == found["least secondary"] == wanted
        assert found["left"] == 0
        assert full["unsharded"] <= found["unsharded"] < (2 if low else 4) * padded


# -- bytes between two hosts -----------------------------------------------------------------------


def _bytes_between_hosts(
    rank: int, world_size: int, hosts: Sequence[link.Host], store: Path
) -> list[dict[str, Any]]:
    """The benchmark's rows of a small model."""
    join_host(rank, world_size, hosts[rank // PER_NODE], store, 30.0)
    return hierarchy_bytes.measure(decoder("small"), ["eager"])


@needs_link
def test_bytes_between_hosts(ranks: RankPool, tmp_path: Path) -> None:
    """Two hosts of two ranks, counted by their interfaces. (Graph mode has the same collectives by
    group, as test_hierarchy counts; compiling takes a minute.)"""
    with link.two_hosts(link.Shape()) as hosts:
        found = ranks.run_and_kill(
            _bytes_between_hosts,
            4,
            hosts,
            tmp_path / "store",
            victims=[],
            when=lambda: None,
        )
    for is_answer, rows in found.values():
        assert is_answer, rows
        full, row = rows
        assert (full["strategy"], row["strategy"]) == ("FULL_SHARD", "HIERARCHICAL_SHARD")
        assert row["sent"]["1"] <= 0.40 * full["sent"]["1"], rows
        assert row["sent"]["4"] <= 0.15 * full["sent"]["4"], rows
        assert row["losses"] == pytest.approx(full["losses"], rel=1e-5)
        assert "0.1" in hierarchy_bytes.report(rows)


def test_modes_that_there_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hierarchy_bytes.py", "--modes", "eager,fast"])
    with pytest.raises(SystemExit, match="2"):
        hierarchy_bytes.main()
    assert "expected some of eager, graph, got 'fast'" in capsys.readouterr().err
