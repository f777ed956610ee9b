"""Code in one file, for every rank of later jobs."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
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
from pool import RATES, RankPool
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


def _error_of(model: nn.Module, path: Path) -> str:
    try:
        load_precompiled(model, path)
    except Exception as error:  # noqa: BLE001  # the test asks which
        return f"{type(error).__name__}: {error}"
    return "none"


def _refusals(rank: int, folder: Path, path: Path) -> dict[str, str]:
    """Messages for files that are not good for the model, and for models that compile nothing."""
    mine = folder / f"files{rank}"
    mine.mkdir()
    damaged = mine / "damaged"
    damaged.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def other(key: str, value: str) -> Path:
        return _rewrite(path, mine / key, lambda facts: facts.update({key: value}))

    good = make_compiled_products()
    torch.manual_seed(7)
    wide = nn.Sequential(Layer(WIDTH, WIDTH, bias=False), Layer(WIDTH, 16, bias=False))
    cases: dict[str, tuple[nn.Module, Path]] = {
        "options": (make_compiled_products(bucket=False), path),
        "model": (make_compiled_products(wide), path),
        "torch": (good, other("version of torch", "2.0.0")),
        "passes": (good, other("version of fsdp_dynamo", "0.0.1, sources abc")),
        "damaged": (good, damaged),
        "one lacks it": (good, mine / "damaged" if rank else path),
        "uncompiled": (make_products(), path),
    }
    return {name: _error_of(model, file) for name, (model, file) in cases.items()}


def _write_and_load(rank: int, world_size: int, root: str) -> dict[str, Any]:
    folder = Path(root)
    path = folder / "code.zip"
    found: dict[str, Any] = {"written": _write(rank, folder / f"first{rank}", path)}
    dist.barrier()
    with using_cache(folder / f"refused{rank}"):
        found["refusals"] = _refusals(rank, folder, path)
    with using_cache(folder / f"second{rank}"):
        model = make_compiled_products()
        load_precompiled(model, path)
        found["loaded"] = losses_of(model, rank)
        found["hits"] = counters["aot_autograd"]["autograd_cache_hit"]
        found["compiled"] = counters["inductor"]["fxgraph_cache_miss"]
    with using_cache(folder / f"cold{rank}"):
        found["cold"] = losses_of(make_compiled_products(), rank)
    return found


def _load_with_more_ranks(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """The file of two ranks, and what is compiled where there is none."""
    folder = Path(root)
    found: dict[str, Any] = {}
    for name in ("loaded", "cold"):
        with using_cache(folder / f"{world_size}.{name}{rank}"):
            model = make_compiled_products()
            if name == "loaded":
                load_precompiled(model, folder / "code.zip")
            found[name] = losses_of(model, rank)
            found[f"{name}: hits"] = counters["inductor"]["fxgraph_cache_hit"]
            found[f"{name}: compiled"] = counters["inductor"]["fxgraph_cache_miss"]
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("precompiled"))


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool, root: str) -> list[dict[str, Any]]:
    """Of both ranks."""
    return ranks.run(_write_and_load, 2, root)


def test_every_rank_of_a_later_job_loads(outcomes: list[dict[str, Any]]) -> None:
    """Nothing is compiled, on the rank that has not written either, and rates are the file's."""
    for found in outcomes:
        assert (found["hits"], found["compiled"]) == (1, 0)
        assert found["loaded"] == found["written"] == found["cold"]


@pytest.mark.usefixtures("outcomes")
def test_more_ranks_load_what_holds_no_number_of_ranks(ranks: RankPool, root: str) -> None:
    """Units that need no padding have the same stretches, whatever the number of ranks."""
    for found in ranks.run(_load_with_more_ranks, 4, root):
        assert found["cold: hits"] == 0 < found["cold: compiled"]
        assert found["loaded: hits"] == found["cold: compiled"]
        assert found["loaded: compiled"] == 0
        assert found["loaded"] == found["cold"]


REFUSALS = {
    "options": ("FSDPValueError", "options:", '"bucket": "False"'),
    "model": ("FSDPValueError", "units: unit '1': weight 16x8", "weight 8x8"),
    "torch": ("FSDPValueError", f"version of torch: {torch.__version__}", "got 2.0.0"),
    "passes": ("FSDPValueError", "version of fsdp_dynamo:", "0.0.1, sources abc"),
    "damaged": ("FSDPValueError", "a file of precompile()", "BadZipFile"),
    "one lacks it": ("DivergenceError", "precompiled file"),
    "uncompiled": ("FSDPValueError", "torch.compile(model, fullgraph=True", "Sequential"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_what_differs(outcomes: list[dict[str, Any]], case: str) -> None:
    for found in outcomes:
        for part in REFUSALS[case]:
            assert part in found["refusals"][case]
