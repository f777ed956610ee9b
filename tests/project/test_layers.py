"""Imports go downward only, as ``pyproject.toml`` says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("fsdp_dynamo", "graph_passes", "benchmarks")
CHECK = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]


def _check(folder: Path) -> tuple[int, str]:
    """Exit code and output of import-linter in a folder."""
    command = [*CHECK, "--no-cache"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_imports_go_downward() -> None:
    code, output = _check(ROOT)
    assert code == 0, output


UPWARD = {
    "fsdp_dynamo/comm/collectives.py": "from fsdp_dynamo.core import unit",
    "fsdp_dynamo/api.py": "import fsdp_dynamo.wrap.wrapper",
    "fsdp_dynamo/wrap/build.py": "from fsdp_dynamo.observe.explain import explain",
    "graph_passes/markers.py": "from fsdp_dynamo import errors",
    "fsdp_dynamo/eager/hooks.py": "def late():\n    from fsdp_dynamo.hooks_mode import leaves",
}


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, line in UPWARD.items():
        changed = tmp_path / file
        changed.write_text(f"{changed.read_text()}\n{line}\n")
    code, output = _check(tmp_path)
    assert code == 1, output
    for file in UPWARD:
        assert file.removesuffix(".py").replace("/", ".") in output
