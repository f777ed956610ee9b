"""Keys of the compile cache: every file that makes or changes a graph is part of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import graph_passes
from fsdp_dynamo.graph_mode import compile_cache
from fsdp_dynamo.graph_mode.stretch_compiler import LowerWrites, Partitioner
from graph_passes import pipeline
from graph_passes.graph_utils import source_digest
from graph_passes.pipeline import Pipeline
from graph_passes.scheduling.planner import Planner

KEYS: dict[str, Callable[[], str]] = {
    "pipeline": lambda: Pipeline().cache_key(),
    "passes": lambda: LowerWrites(Pipeline().cache_key()).uuid(),
    "partition": lambda: Partitioner(Planner(), True).uuid(),
}


def _keys() -> dict[str, str]:
    source_digest.cache_clear()
    return {name: key() for name, key in KEYS.items()}


def _check_every_file(folder: Path, changing: set[str]) -> None:
    """An edit of any file changes exactly these keys."""
    before = _keys()
    assert _keys() == before
    paths = sorted(folder.rglob("*.py"))
    assert len(paths) > 8
    for path in paths:
        text = path.read_text()
        path.write_text(text + "\n# edited\n")
        after = _keys()
        assert {name for name in KEYS if after[name] != before[name]} == changing, path
        path.write_text(text)
    paths[-1].rename(paths[-1].with_name("renamed.py"))
    assert _keys()[min(changing)] != before[min(changing)]


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[ModuleType], Path]:
    def copied(module: ModuleType) -> Path:
        assert module.__file__
        target = tmp_path / "package"
        shutil.copytree(Path(module.__file__).parent, target)
        return target

    return copied


def test_every_file_of_the_passes(
    copy: Callable[[ModuleType], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(graph_passes)
    monkeypatch.setattr(pipeline, "__file__", str(folder / "pipeline.py"))
    monkeypatch.setattr(graph_passes, "__path__", [str(folder)])
    _check_every_file(folder, set(KEYS))


def test_every_file_beside_the_backend(
    copy: Callable[[ModuleType], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(compile_cache)
    monkeypatch.setattr(compile_cache, "__file__", str(folder / "compile_cache.py"))
    _check_every_file(folder, {"passes", "partition"})
