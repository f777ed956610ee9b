"""Any mixture of caches on two ranks: the same numbers, and a reason where one is not used."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from compile_caches import losses_of, make_compiled_products, make_products, using_cache
from pool import RankPool
from torch import fx
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo.graph_mode import backends, compile_cache, stretch_compiler
from graph_passes.graph_utils import op_name


class Outcome(NamedTuple):
    """Of a case, on one rank."""

    losses: list[float]
    hits: int
    num_compiled: int
    warnings: list[str]


def _run(rank: int, folder: Path) -> Outcome:
    with using_cache(folder) as listener:
        losses = losses_of(make_compiled_products(), rank)
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        num_compiled = counters["aot_autograd"]["autograd_cache_miss"]
    return Outcome(losses, hits, num_compiled, listener.texts)


# -- faults ------------------------------------------------------------------------------------


class _Refusals:
    """An audit hook, which no one can remove; it refuses nothing while no folder is set."""

    folder: Path | None = None
    number = 0
    is_set = False

    @classmethod
    def hook(cls, event: str, args: tuple[Any, ...]) -> None:
        if cls.folder is None or event not in ("open", "os.mkdir", "os.rename"):
            return
        if not isinstance(args[0], (str, Path)) or not Path(args[0]).is_relative_to(cls.folder):
            return
        writes = event != "open" or (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        # A disk that gets full while graphs are compiled: our own small files have gone before.
        if writes and not (cls.number == errno.ENOSPC and "fsdp_dynamo" in str(args[0])):
            raise OSError(cls.number, os.strerror(cls.number), str(args[0]))


@contextmanager
def _cannot_be_written(folder: Path, number: int) -> Iterator[None]:
    if not _Refusals.is_set:
        sys.addaudithook(_Refusals.hook)
        _Refusals.is_set = True
    _Refusals.folder, _Refusals.number = folder, number
    try:
        yield
    finally:
        _Refusals.folder = None


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
    with pytest.MonkeyPatch.context() as patch:
        for module in (stretch_compiler, stretch_compiler):
            patch.setattr(module, "source_key", lambda: "older")
        patch.setattr(stretch_compiler, "lower_boundaries", lower_wrongly)
        yield


# -- cases -------------------------------------------------------------------------------------


def _cases(rank: int, world_size: int, root: str) -> dict[str, Any]:
    mine = Path(root) / f"rank{rank}"
    mine.mkdir()
    used, fresh = mine / "used", mine / "fresh"
    found: dict[str, Any] = {"reference": losses_of(DistributedDataParallel(make_products()), rank)}

    def case(name: str, run: Callable[[], Outcome]) -> None:
        dist.barrier()
        found[name] = run()

    case("cold", lambda: _run(rank, used))
    case("warm", lambda: _run(rank, used))
    case("one cold", lambda: _run(rank, used if rank else fresh))
    case("swapped", lambda: _run(rank, Path(root) / f"rank{1 - rank}" / "used"))
    case("shared", lambda: _run(rank, Path(root) / "shared"))

    def faulty(name: str, folder: Path, fault: AbstractContextManager[None]) -> None:
        """On rank 0; the other has what it had."""

        def run() -> Outcome:
            if rank:
                return _run(rank, used)
            with fault:
                return _run(rank, folder)

        case(name, run)

    entries, code, read_only, full = (mine / name for name in ("entries", "code", "ro", "full"))
    for folder in (entries, code, read_only):
        shutil.copytree(used, folder)
    full.mkdir()
    faulty("damaged entries", entries, _truncated(entries / "aotautograd", "*"))
    faulty("damaged code", code, _truncated(code, "*.py"))
    faulty("read-only", read_only, _cannot_be_written(read_only, errno.EROFS))
    faulty("full", full, _cannot_be_written(full, errno.ENOSPC))
    with _older_passes():
        case("older passes", lambda: _run(rank, mine / "old"))
    case("after older passes", lambda: _run(rank, mine / "old"))
    return found


@pytest.fixture(scope="module")
def outcomes(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Outcome | Any]]:
    """Of every case, on both ranks."""
    return ranks.run(_cases, 2, str(tmp_path_factory.mktemp("caches")))


HITS = {
    "cold": (0, 0),
    "warm": (1, 1),
    "one cold": (0, 1),
    "swapped": (1, 1),
    "damaged entries": (0, 1),
    "damaged code": (0, 1),
    "read-only": (1, 1),
    "full": (0, 1),
    "after older passes": (0, 0),
}
REASONS = {
    "damaged code": "no attribute 'call'|Failed to import",  # torch 2.11 says the latter
    "read-only": "Read-only",
    "full": "No space",
}


@pytest.mark.parametrize("case", [*HITS, "shared"])
def test_any_mixture_of_caches(outcomes: list[dict[str, Any]], case: str) -> None:
    for rank, found in enumerate(outcomes):
        torch.testing.assert_close(found["cold"].losses, found["reference"])
        outcome: Outcome = found[case]
        assert outcome.losses == found["cold"].losses
        if case in HITS:
            assert outcome.hits == HITS[case][rank]
        reason = REASONS.get(case) if rank == 0 else None
        assert len(outcome.warnings) == (reason is not None), outcome.warnings
        if reason is not None:
            assert re.search(reason, outcome.warnings[0])
            assert "temporary folder" in outcome.warnings[0]


def test_a_graph_is_compiled_once_for_all_ranks(outcomes: list[dict[str, Any]]) -> None:
    """Its forward and backward in one."""
    apart, shared = (
        sum(found[case].num_compiled for found in outcomes) for case in ("cold", "shared")
    )
    assert (apart, shared) == (2, 1)


def test_older_passes_computed_something_else(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        assert found["older passes"].losses != found["cold"].losses


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """It is left before anything is compiled."""
    (tmp_path / "file").touch()
    with using_cache(tmp_path / "file" / "cache") as listener:
        compile_cache.require_usable_folder()
        assert compile_cache.own_folder().parent.is_dir()
        compile_cache.require_usable_folder()
    (warning,) = listener.texts
    assert "Not a directory" in warning
    assert str(tmp_path) in warning


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


def test_an_error_that_is_not_the_folders_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a temporary folder does not mend is raised, and the folder is the old one again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    calls = []

    def fail() -> None:
        calls.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        raise RuntimeError(f"call {len(calls)}: no compiler for {tmp_path}/a.cpp")

    with pytest.raises(RuntimeError, match="call 1"):
        compile_cache.compile_once("key", fail)
    assert calls[0] == str(tmp_path)
    assert calls[1] != str(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)


# -- lines about what takes long -----------------------------------------------------------------


class _Stderr(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.has_line = threading.Event()

    def flush(self) -> None:
        self.has_line.set()


def _told(seconds: float, body: Callable[[_Stderr], object]) -> str:
    stderr = _Stderr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_AFTER_S", seconds)
        patch.setattr(sys, "stderr", stderr)
        with backends.told("compiling the backward"):
            body(stderr)
    return stderr.getvalue()


def test_what_takes_long_is_told_meanwhile() -> None:
    text = _told(0.001, lambda stderr: stderr.has_line.wait(60))
    first, last = text.splitlines()
    assert first == "fsdp_dynamo: compiling the backward ..."
    assert last.startswith("fsdp_dynamo: compiling the backward: ")


def test_what_takes_no_time_is_not_told() -> None:
    assert not _told(3600, lambda stderr: None)
