"""The import rules in ``pyproject.toml`` find what they forbid; ``make lint`` applies them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("fsdp_dynamo", "graph_passes", "benchmarks")
CHECK = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
CHECK += ["--no-cache"]
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
    done = subprocess.run(CHECK, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    for file in UPWARD:
        assert file.removesuffix(".py").replace("/", ".") in done.stdout
