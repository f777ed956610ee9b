"""Compiled code in one file of ``torch.compiler.save_cache_artifacts()``, for later jobs."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from compile_caches import WIDTH, losses_of, make_compiled_products, using_cache
from pool import RankPool, on_ranks
from torch._dynamo.utils import counters

from fsdp_dynamo import warmup


def _write(rank: int, folder: Path, path: Path) -> list[float]:
    """What the job computes whose first rank writes the file."""
    with using_cache(folder):
        model = make_compiled_products()
        warmup(model, [torch.rand(4, WIDTH)])
        code, _ = torch.compiler.save_cache_artifacts()
        if rank == 0:
            path.write_bytes(code)
        return losses_of(model, rank)


def _losses(rank: int, folder: Path, path: Path | None) -> tuple[list[float], int, int, int]:
    """Losses, graphs found in caches, and stretches found and compiled."""
    with using_cache(folder):
        if path is not None:
            torch.compiler.load_cache_artifacts(path.read_bytes())
        losses = losses_of(make_compiled_products(), rank)
        stretches = counters["inductor"]
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        return losses, hits, stretches["fxgraph_cache_hit"], stretches["fxgraph_cache_miss"]


@on_ranks(2)
def _write_and_load(rank: int, root: Path) -> None:
    path = root / "code"
    written = _write(rank, root / f"first{rank}", path)
    dist.barrier()
    loaded, hits, _, num_compiled = _losses(rank, root / f"second{rank}", path)
    assert (hits, num_compiled) == (1, 0)
    assert loaded == written


@on_ranks(4)
def _load_with_more_ranks(rank: int, root: Path) -> None:
    loaded, _, *stretches = _losses(rank, root / f"more{rank}", root / "code")
    cold, _, found, num_compiled = _losses(rank, root / f"cold of more{rank}", None)
    assert found == 0 < num_compiled
    assert stretches == [num_compiled, 0]
    assert loaded == cold


def test_every_rank_of_a_later_job_loads(ranks: RankPool, tmp_path: Path) -> None:
    """Nothing is compiled, on the rank that has not written either.

    Units that need no padding have the same stretches, whatever the number of ranks.
    """
    _write_and_load(ranks=ranks, root=tmp_path)
    _load_with_more_ranks(ranks=ranks, root=tmp_path)
