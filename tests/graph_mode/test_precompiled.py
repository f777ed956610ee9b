"""Code in one file, for every rank of later jobs."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_caches import (
    WIDTH,
    Layer,
    losses_of,
    make_compiled_products,
    make_products,
    using_cache,
)
from loops import error_of
from pool import RATES, RankPool, on_ranks
from torch import nn
from torch._dynamo.utils import counters

from fsdp_dynamo import load_precompiled, precompile
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.graph_mode import calibration, planning

OTHER_RATES = {**RATES, "link": {"latency_ms": 0.2, "bytes_per_ms": 2e6}}


def _rewrite(path: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The file with another manifest."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(target, "w") as copy:
        for name in archive.namelist():
            content = archive.read(name)
            if name == "manifest.json":
                manifest = json.loads(content)
                change(manifest["facts"])
                content = json.dumps(manifest).encode()
            copy.writestr(name, content)
    return target


def _write(rank: int, folder: Path, path: Path) -> list[float]:
    """What the job that writes the file computes afterwards."""
    with pytest.MonkeyPatch.context() as patch, using_cache(folder):
        patch.setattr(calibration, "measured", lambda group, device: OTHER_RATES)
        model = make_compiled_products()
        precompile(model, [torch.rand(4, WIDTH)], path)
        losses = losses_of(model, rank)
    state_of(dist.group.WORLD, planning.MeasuredRates).clear()  # it was another job's
    return losses


def _require_refused(rank: int, folder: Path, path: Path) -> None:
    """Files that are not good for the model, and models that compile nothing."""
    mine = folder / f"files{rank}"
    mine.mkdir()
    damaged = mine / "damaged"
    damaged.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def other(key: str, value: str) -> Path:
        return _rewrite(path, mine / key, lambda facts: facts.update({key: value}))

    good = make_compiled_products()
    torch.manual_seed(7)
    wide = nn.Sequential(Layer(WIDTH, WIDTH, bias=False), Layer(WIDTH, 16, bias=False))
    old_torch, old_passes = (
        other("version of torch", "2.0.0"),
        other("version of fsdp_dynamo", "0.0.1, sources abc"),
    )
    one_lacks_it = damaged if rank else path
    refused = "FSDPValueError: "
    for model, file, *expected in (
        (make_compiled_products(bucket=False), path, refused, "options:", '"bucket": "False"'),
        (
            make_compiled_products(wide),
            path,
            refused,
            "units: unit '1': weight 16x8",
            "weight 8x8",
        ),
        (good, old_torch, refused, f"version of torch: {torch.__version__}", "got 2.0.0"),
        (good, old_passes, refused, "version of fsdp_dynamo:", "0.0.1, sources abc"),
        (good, damaged, refused, "a file of precompile()", "BadZipFile"),
        (good, one_lacks_it, "DivergenceError: ", "precompiled file"),
        (make_products(), path, refused, "torch.compile(model, fullgraph=True", "Sequential"),
    ):
        error = error_of(partial(load_precompiled, model, file))
        assert all(part in error for part in expected), error


def _losses(rank: int, folder: Path, path: Path | None) -> tuple[list[float], int, int, int]:
    """Losses, graphs found in caches, and stretches found and compiled."""
    with using_cache(folder):
        model = make_compiled_products()
        if path is not None:
            load_precompiled(model, path)
        losses = losses_of(model, rank)
        stretches = counters["inductor"]
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        return losses, hits, stretches["fxgraph_cache_hit"], stretches["fxgraph_cache_miss"]


@on_ranks(2)
def _write_and_load(rank: int, root: Path) -> None:
    path = root / "code.zip"
    written = _write(rank, root / f"first{rank}", path)
    dist.barrier()
    with using_cache(root / f"refused{rank}"):
        _require_refused(rank, root, path)
    loaded, hits, _, num_compiled = _losses(rank, root / f"second{rank}", path)
    assert (hits, num_compiled) == (1, 0)
    cold, *_ = _losses(rank, root / f"cold{rank}", None)
    assert loaded == written == cold


@on_ranks(4)
def _load_with_more_ranks(rank: int, root: Path) -> None:
    loaded, _, *stretches = _losses(rank, root / f"more{rank}", root / "code.zip")
    cold, _, found, num_compiled = _losses(rank, root / f"cold of more{rank}", None)
    assert found == 0 < num_compiled
    assert stretches == [num_compiled, 0]
    assert loaded == cold


def test_every_rank_of_a_later_job_loads(ranks: RankPool, tmp_path: Path) -> None:
    """Nothing is compiled, on the rank that has not written either, and rates are the file's.

    Units that need no padding have the same stretches, whatever the number of ranks. What does not
    fit is refused with what differs.
    """
    _write_and_load(ranks=ranks, root=tmp_path)
    _load_with_more_ranks(ranks=ranks, root=tmp_path)
