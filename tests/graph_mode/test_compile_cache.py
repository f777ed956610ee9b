"""Any mixture of caches on two ranks: the same numbers, and a reason where one is not used."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compile_caches import WIDTH, losses_of, make_compiled_products, make_products, using_cache
from pool import on_ranks
from torch import fx
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo.dynamo import progress
from fsdp_dynamo.graph_mode import compile_cache, stretch_compiler
from graph_passes.graph_utils import op_name

# -- faults ------------------------------------------------------------------------------------


@contextmanager
def _truncated(folder: Path, pattern: str) -> Iterator[None]:
    paths = [path for path in folder.rglob(pattern) if path.is_file()]
    assert paths
    for path in paths:
        os.truncate(path, path.stat().st_size // 2)
    yield


@contextmanager
def _older_passes() -> Iterator[None]:
    """A version of ours whose last pass leaves the first product of each graph out."""

    def lower_wrongly(graph: fx.Graph) -> None:
        first = next(node for node in graph.nodes if op_name(node) == "aten::mm")
        for source in first.all_input_nodes:
            if source.meta["val"].shape == first.meta["val"].shape:
                first.replace_all_uses_with(source)
        lower(graph)

    lower = stretch_compiler.lower_boundaries
    with (
        mock.patch.object(stretch_compiler, "source_key", return_value="older"),
        mock.patch.object(stretch_compiler, "lower_boundaries", lower_wrongly),
    ):
        yield


# -- cases -------------------------------------------------------------------------------------


@on_ranks(2)
def test_any_mixture_of_caches(rank: int, tmp_path: Path) -> None:
    """On rank 0 of some cases there is a fault; rank 1 has what it had."""
    mine = tmp_path / f"rank{rank}"
    mine.mkdir()
    used = mine / "used"
    reference = losses_of(DistributedDataParallel(make_products()), rank)
    expected: list[float] = []

    def run(
        folder: Path,
        hits: tuple[int, int] | None,
        fault: AbstractContextManager[None] | None = None,
    ) -> int:
        """Train; compare losses and hits on either rank. Returns the number of compiled graphs."""
        is_faulty = fault is not None and rank == 0
        dist.barrier()
        with fault if fault and is_faulty else nullcontext(), using_cache(folder):
            losses = losses_of(make_compiled_products(), rank)
            found = counters["aot_autograd"]["autograd_cache_hit"]
            num_compiled = int(counters["aot_autograd"]["autograd_cache_miss"])
        expected[:] = expected or losses
        assert losses == expected
        assert hits is None or found == hits[rank]
        return num_compiled

    assert run(used, (0, 0)) == 1
    torch.testing.assert_close(expected, reference)
    run(used, (1, 1))
    run(used if rank else mine / "fresh", (0, 1))
    run(tmp_path / f"rank{1 - rank}" / "used", (1, 1))
    num_compiled = torch.tensor(run(tmp_path / "shared", None))
    dist.all_reduce(num_compiled)
    assert num_compiled == 1  # once for all ranks, forward and backward in one

    entries = mine / "entries"
    shutil.copytree(used, entries)
    run(used if rank else entries, (0, 1), _truncated(entries / "aotautograd", "*"))
    with _older_passes(), using_cache(mine / "old"):
        assert losses_of(make_compiled_products(), rank) != expected  # they compute something else
    run(mine / "old", (0, 0))


def test_ranks_whose_devices_have_other_names_do_not_wait_for_each_other() -> None:
    """Generated code names its device, so that one cannot load what the other compiles."""
    graph = fx.symbolic_trace(lambda x: x @ x)
    keys = [
        compile_cache.graph_key(graph, [torch.empty(2, 2, device=device)])
        for device in ("cpu", "cpu", "meta")
    ]
    assert keys[0] == keys[1] != keys[2]


# -- one of several processes compiles -----------------------------------------------------------


def test_one_compiles_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others begin when it has ended, and then side by side."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    log: list[str] = []
    compiling, go_on = threading.Event(), threading.Event()
    both_load = threading.Barrier(2)

    def compile_first() -> None:
        compiling.set()
        assert go_on.wait(60)
        log.append("compiled")

    def load() -> None:
        log.append("loaded")
        both_load.wait(60)

    first = threading.Thread(target=compile_cache.compile_once, args=("key", compile_first))
    first.start()
    assert compiling.wait(60)
    others = [threading.Thread(target=compile_cache.compile_once, args=("key", load)) for _ in "ab"]
    for thread in others:
        thread.start()
    go_on.set()
    for thread in [first, *others]:
        thread.join(60)
    assert log == ["compiled", "loaded", "loaded"]


def test_after_one_that_failed_the_next_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def fail() -> None:
        raise ValueError("no graph of ours")

    with pytest.raises(ValueError, match="no graph of ours"):
        compile_cache.compile_once("key", fail)
    assert compile_cache.compile_once("key", lambda: 3) == 3


# -- lines about what takes long -----------------------------------------------------------------


def test_what_takes_long_is_told_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.told("compiling the backward"):  # takes no time
        pass
    monkeypatch.setattr(progress, "_AFTER_S", 0.001)
    with progress.told("compiling the backward"):
        while not (text := capsys.readouterr().err):
            time.sleep(0.01)
    assert text == "fsdp_dynamo: compiling the backward ...\n"
    assert capsys.readouterr().err.startswith("fsdp_dynamo: compiling the backward: ")


# -- stances ---------------------------------------------------------------------------------------


STANCES = (
    "default",
    "force_eager",
    "eager_on_recompile",
    "eager_then_compile",
    "aot_eager_then_compile",
    "fail_on_recompile",
)


@on_ranks(2)
def test_losses_in_a_stance_are_those_of_ddp(rank: int, tmp_path: Path) -> None:
    """``torch.compiler.set_stance`` around graph mode."""
    expected = losses_of(DistributedDataParallel(make_products()), rank)
    with using_cache(tmp_path):
        for stance in STANCES:
            torch._dynamo.reset()
            model = make_compiled_products()
            if stance == "fail_on_recompile":
                model(torch.rand(4, WIDTH)).square().mean().backward()
            with torch.compiler.set_stance(stance):
                assert losses_of(model, rank) == pytest.approx(expected, rel=1e-5), stance
