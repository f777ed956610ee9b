"""Imports go downward only: the layers of both packages, file by file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS: dict[str, dict[str, int]] = {
    "graph_passes": {
        "markers": 0,
        "graph_utils": 0,
        "spec": 1,
        "labels": 1,
        "reshard": 2,
        "simplify": 2,
        "cut_views": 3,
        "prefetch": 2,
        "sink_waits": 2,
        "pipeline": 4,
        "__init__": 5,
    },
    "fsdp_dynamo": {
        "errors": 0,
        "tree": 0,
        "registry": 0,
        "layout": 0,
        "api": 1,
        "training_state": 1,
        "events": 1,
        "collectives": 2,
        "wrap_policy": 1,
        "segments": 1,
        "dynamo_glue": 1,
        "flat_parameter": 2,
        "graph_ops": 3,
        "unit": 3,
        "schedule": 4,
        "traced": 6,
        "lowering": 4,
        "hooks": 5,
        "grad_clip": 5,
        "arguments": 5,
        "build": 6,
        "compile": 6,
        "hooks_path": 6,
        "state_dict": 7,
        "wrapper": 8,
        "__init__": 9,
    },
}


def _imports(path: Path) -> set[tuple[str, str]]:
    """``(package, file)`` of every import of our own packages."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            package, _, module = node.module.partition(".")
            names = [module] if module else [alias.name for alias in node.names]
            found.update((package, name) for name in names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                package, _, module = alias.name.partition(".")
                found.add((package, module or "__init__"))
    return {(p, m) for p, m in found if p in LAYERS}


@pytest.mark.parametrize("package", LAYERS)
def test_every_file_has_a_layer(package: str) -> None:
    files = {path.stem for path in (ROOT / package).glob("*.py")}
    assert files == set(LAYERS[package])


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_downward(package: str) -> None:
    for path in (ROOT / package).glob("*.py"):
        own = LAYERS[package][path.stem]
        for other, module in _imports(path):
            where = f"{package}/{path.name} imports {other}.{module}"
            if other != package:
                assert package == "fsdp_dynamo", f"{where}: graph_passes must not know the wrapper"
            else:
                assert LAYERS[package][module] < own, where


@pytest.mark.parametrize("package", LAYERS)
def test_files_stay_small(package: str) -> None:
    for path in (ROOT / package).glob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path.name


def test_the_leaf_imports_nothing_of_the_wrapper() -> None:
    assert _imports(ROOT / "fsdp_dynamo" / "api.py") == {("fsdp_dynamo", "errors")}
