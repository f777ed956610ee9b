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


@pytest.mark.parametrize(
    ("package", "module", "keys"),
    [
        (graph_passes, pipeline, set(KEYS)),
        (compile_cache, compile_cache, {"passes", "partition"}),
    ],
)
def test_every_file(
    package: ModuleType,
    module: ModuleType,
    keys: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An edit of any file of the passes, or beside the backend, changes exactly these keys."""
    folder = tmp_path / "package"
    shutil.copytree(Path(str(package.__file__)).parent, folder)
    monkeypatch.setattr(module, "__file__", str(folder / Path(str(module.__file__)).name))
    if package is graph_passes:
        monkeypatch.setattr(graph_passes, "__path__", [str(folder)])
    before = _keys()
    assert _keys() == before
    paths = sorted(folder.rglob("*.py"))
    assert len(paths) > 8
    for path in paths:
        text = path.read_text()
        path.write_text(text + "\n# edited\n")
        after = _keys()
        assert {name for name in KEYS if after[name] != before[name]} == keys, path
        path.write_text(text)
    paths[-1].rename(paths[-1].with_name("renamed.py"))
    assert _keys()[min(keys)] != before[min(keys)]
