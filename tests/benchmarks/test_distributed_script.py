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
import torch
import torch.distributed as dist
from pool import RankPool
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import catalogue

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dynamo" / "distributed.py"


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
    """The record of a run on 2 ranks, and what rank 0 has printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    record = folder / "record.json"
    (code, printed), (other, nothing) = ranks.run(
        _run, 2, port, (*arguments, "--json", str(record))
    )
    assert (code, other, nothing) == (0, 0, "")
    data = json.loads(record.read_text())
    assert data["versions"]["torch"] == torch.__version__
    row: dict[str, Any] = data["rows"][0]
    assert row["title"] in printed
    return row | {"printed": printed}


def test_flags(ranks: RankPool, tmp_path: Path) -> None:
    """DDP reduces whole gradients; a checkpoint keeps fewer bytes of activations; losses agree."""
    decoder = ("--decoder", "small", "--sequence_length", "64", "--repeat", "1")
    more = ("--profile", "--verbose", "--trace_file", str(tmp_path / "trace.json"))
    ddp = _row(ranks, tmp_path, *decoder, "--ddp")
    kept = _row(ranks, tmp_path, *decoder, "--fsdp", "--fsdp_wrap", *more)
    again = _row(ranks, tmp_path, *decoder, "--fsdp", "--fsdp_wrap", "--fsdp_checkpoint")
    parameters = sum(p.numel() for p in catalogue.decoder("small").seeded_model().parameters())
    assert (ddp["key"], kept["key"]) == ("ddp", "ours")
    assert ddp["collective_bytes"] == {"all_reduce": 4 * parameters}
    assert ddp["peak_bytes"]["shards"] == 4 * parameters
    assert "all_gather" in kept["collectives"]
    assert kept["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert again["losses"] == kept["losses"]
    assert again["collectives"] == kept["collectives"]
    assert again["most_bytes"]["activations"] < 0.6 * kept["most_bytes"]["activations"]

    assert len(kept["step_ms"]["samples"]) == 1
    assert "losses of rank 0:" in kept["printed"]
    assert "order of issue in one step:" in kept["printed"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
