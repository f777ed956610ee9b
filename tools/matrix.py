"""Tests on every supported torch and Python, and ``docs/versions.md`` with what came of them.

    python tools/matrix.py ENVIRONMENTS [--only 2.11.0 2.15.0] [--tiers private check test]

On every torch: the tests of private names and the check tier; on the oldest and the newest also
what ``make test`` runs. The check tier runs on the default torch with every other Python that is
found, too. Each environment is made below ENVIRONMENTS where it is missing (up to 5 GB) and used
again. Cells of the page that were not run stay as they are.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

from setup_env import TORCH

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TIERS: dict[str, tuple[str, ...]] = {
    "private": ("--confcutdir", "tests/private_api", "tests/private_api"),
    "check": ("tests", "-m", "smoke"),
    "test": ("tests",),
}
NOT_RUN = "not run"

Table = dict[tuple[str, str], dict[str, str]]
"""Cells by tier and Python, then by torch."""


class Run(NamedTuple):
    """One cell of the table: a tier with a torch and an interpreter (``major.minor``)."""

    tier: str
    version: str
    python: str


def interpreter(minor: str) -> str | None:
    """A Python of that version: this one, on the path or one of pyenv; ``None``: there is none."""
    if minor == platform.python_version().rpartition(".")[0]:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{minor}")
    for one in [on_path, *map(str, sorted(pyenv.glob(f"{minor}.*/bin/python")))]:
        # What is on the path may be a shim that runs nothing.
        if one is not None and subprocess.run([one, "-c", ""], capture_output=True).returncode == 0:
            return one
    return None


def planned(versions: list[str], tiers: list[str], pythons: list[str]) -> list[Run]:
    """All runs, of which the first Python gets every torch, and the others the default one."""
    runs = [Run(tier, version, pythons[0]) for version in versions for tier in tiers]
    ends = (VERSIONS[0], VERSIONS[-1])
    runs = [run for run in runs if run.tier != "test" or run.version in ends]
    if TORCH in versions and "check" in tiers:
        runs += [Run("check", TORCH, python) for python in pythons[1:]]
    return runs


@functools.cache
def environment(folder: Path, version: str, minor: str, starter: str) -> Path:
    """The Python of an environment, made or completed by the interpreter ``starter``."""
    own = platform.python_version().startswith(f"{minor}.")
    venv = folder / (f"torch-{version}" + ("" if own else f"-python-{minor}"))
    setup = [starter, str(ROOT / "tools" / "setup_env.py"), str(venv), "--torch", version]
    subprocess.run(setup, check=True)
    return venv / "bin" / "python"


def outcome(python: Path, tier: str) -> tuple[bool, str]:
    """Whether all tests of a tier passed, and a cell that says how many did."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        command = [str(python), "-m", "pytest", *TIERS[tier], f"--junitxml={found}"]
        subprocess.run(command, cwd=ROOT, check=False)
        if not found.exists():
            return False, f"did not run<br>{datetime.date.today()}"
        suite = ET.parse(found).getroot().find("testsuite")
    assert suite is not None
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    numbers = f"{passed} passed, {failed} failed, {count['skipped']} skipped"
    return failed == 0, f"{numbers}<br>{datetime.date.today()}"


def table_of(page: str) -> Table:
    """The cells of a page that ``with_table`` wrote."""
    table: Table = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].strip("`") in TIERS and len(cells) == len(VERSIONS) + 2:
            table[cells[0].strip("`"), cells[1]] = dict(zip(VERSIONS, cells[2:], strict=True))
    return table


def with_table(page: str, table: Table) -> str:
    """The page with this table in the place of its own."""
    lines = page.splitlines()
    kept = [line for line in lines if not line.startswith("|")]
    at = next(i for i, line in enumerate(lines) if line.startswith("|"))
    head = [f"| tier | Python | {' | '.join(VERSIONS)} |", "|---" * (len(VERSIONS) + 2) + "|"]
    tiers = list(TIERS)
    rows = sorted(table, key=lambda key: (tiers.index(key[0]), key[1]))
    body = [
        f"| `{tier}` | {python} | "
        + " | ".join(table[tier, python].get(version, NOT_RUN) for version in VERSIONS)
        + " |"
        for tier, python in rows
    ]
    return "\n".join([*kept[:at], *head, *body, *kept[at:]]) + "\n"


def main() -> int:
    """Run the tests; the exit code is 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("environments", type=Path)
    parser.add_argument("--only", nargs="+", choices=VERSIONS, default=VERSIONS)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=[*TIERS])
    asked = parser.parse_args()
    own = platform.python_version().rpartition(".")[0]
    found = {minor: path for minor in (own, *PYTHONS) if (path := interpreter(minor))}
    missing = [minor for minor in PYTHONS if minor not in found]
    print(f"Python found: {', '.join(found)}; not found: {', '.join(missing) or 'none'}")
    all_passed = True
    for run in planned(list(asked.only), list(asked.tiers), list(found)):
        folder = asked.environments.resolve()
        python = environment(folder, run.version, run.python, found[run.python])
        passed, cell = outcome(python, run.tier)
        all_passed &= passed
        page = PAGE.read_text()
        table = table_of(page)
        table.setdefault((run.tier, run.python), {})[run.version] = cell
        PAGE.write_text(with_table(page, table))
        print(f"{run.tier} on torch {run.version}, Python {run.python}: {cell}", flush=True)
    return int(not all_passed)


if __name__ == "__main__":
    sys.exit(main())
