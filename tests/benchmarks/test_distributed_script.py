"""Flags of ``benchmarks/dynamo/distributed.py`` do their work: runs of it on the pool's ranks."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import runpy
import socket
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from pool import RankPool
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import catalogue

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dynamo" / "distributed.py"
TOY = ("--toy_model", "--model_size", "small", "--repeat", "1")
DECODER = ("--decoder", "small", "--sequence_length", "64", "--repeat", "1")


def _run(rank: int, world_size: int, port: int, arguments: tuple[str, ...]) -> tuple[Any, str]:
    """The script as one rank under torchrun; its exit code, and what it has printed."""
    destroy = dist.destroy_process_group
    destroy()  # it makes one of its own

    def destroyed() -> None:
        """Its reducer would join gloo's threads with Python's lock held: now and then a hang."""
        assert not any(type(one) is DistributedDataParallel for one in gc.get_objects())
        destroy()

    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    place = {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    printed = io.StringIO()
    command = [str(SCRIPT), "--device", "cpu", *arguments]
    with (
        mock.patch.dict(os.environ, place),
        mock.patch.object(sys, "argv", command),
        mock.patch.object(dist, "destroy_process_group", destroyed),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(printed),
    ):
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as left:
            return left.code, printed.getvalue()
    return "no exit", printed.getvalue()


def _row(ranks: RankPool, folder: Path, *arguments: str) -> dict[str, Any]:
    """The record of a run on 2 ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    record = folder / "record.json"
    (code, printed), (other, nothing) = ranks.run(
        _run, 2, port, (*arguments, "--json", str(record))
    )
    assert (code, other, nothing) == (0, 0, "")
    row: dict[str, Any] = json.loads(record.read_text())["rows"][0]
    assert row["title"] in printed
    return row


def test_ddp(ranks: RankPool, tmp_path: Path) -> None:
    """Whole gradients are reduced, and losses are those of units."""
    ddp = _row(ranks, tmp_path, *TOY, "--ddp")
    ours = _row(ranks, tmp_path, *TOY, "--fsdp", "--fsdp_wrap")
    parameters = sum(p.numel() for p in catalogue.toy(20, True).seeded_model().parameters())
    assert (ddp["key"], ours["key"]) == ("ddp", "ours")
    assert ddp["collective_bytes"] == {"all_reduce": 4 * parameters}
    assert ddp["peak_bytes"]["shards"] == 4 * parameters
    assert "all_gather" in ours["collectives"]
    assert len(ddp["losses"]) == 3
    assert ours["losses"] == pytest.approx(ddp["losses"], rel=1e-5)


def test_fsdp_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    """Fewer bytes of activations, the same losses and collectives."""
    arguments = (*DECODER, "--fsdp", "--fsdp_wrap")
    kept = _row(ranks, tmp_path, *arguments)
    computed_again = _row(ranks, tmp_path, *arguments, "--fsdp_checkpoint")
    assert computed_again["losses"] == kept["losses"]
    assert computed_again["collectives"] == kept["collectives"]
    activations = [row["most_bytes"]["activations"] for row in (computed_again, kept)]
    assert activations[0] < 0.6 * activations[1]
