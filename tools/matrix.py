"""Tests on every supported version of torch, and ``docs/versions.md`` with what came of them.

    python tools/matrix.py ENVIRONMENTS [--only 2.11.0 2.15.0] [--quick]

Each version has an environment of its own below ENVIRONMENTS, made where it is missing (about 5 GB
each) and used again. All run the check tier; the oldest and the newest also what ``make test``
runs, unless ``--quick`` leaves that out. Rows of versions that were not run stay as they are.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TIERS = {"check": ("-m", "smoke"), "test": ()}
_ROW = re.compile(r"^\| (\S+) \| (\S+) \| (?:check|test) \| .*\|$", re.MULTILINE)

Key = tuple[str, str, str]


def environment(folder: Path, version: str) -> Path:
    """The Python of a version's environment, made or completed."""
    venv = folder / f"torch-{version}"
    setup = [sys.executable, str(ROOT / "tools" / "setup_env.py"), str(venv), "--torch", version]
    subprocess.run(setup, check=True)
    return venv / "bin" / "python"


def run(python: Path, tier: str) -> dict[str, int]:
    """Numbers of tests that passed, failed and were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        command = [str(python), "-m", "pytest", "tests", f"--junitxml={found}", *TIERS[tier]]
        subprocess.run(command, cwd=ROOT, check=False)
        suite = ET.parse(found).getroot().find("testsuite")
    assert suite is not None
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    return {
        "passed": count["tests"] - failed - count["skipped"],
        "failed": failed,
        "skipped": count["skipped"],
    }


def row(version: str, python: str, tier: str, found: dict[str, int]) -> str:
    """A line of the table."""
    today = datetime.date.today().isoformat()
    numbers = " | ".join(str(found[name]) for name in ("passed", "failed", "skipped"))
    return f"| {version} | {python} | {tier} | {today} | {numbers} |"


def merged(page: str, new: str) -> str:
    """The page with a row added, or put in the place of that of the same version and tier."""
    rows = {_key(text): text for text in [*(m[0] for m in _ROW.finditer(page)), new]}
    head = "|---|---|---|---|---|---|---|\n"
    before, _, rest = page.partition(head)
    after = _ROW.sub("", rest).lstrip("\n")
    return before + head + "".join(rows[key] + "\n" for key in sorted(rows)) + "\n" + after


def _key(text: str) -> Key:
    version, python, tier = (cell.strip() for cell in text.split("|")[1:4])
    return version, python, tier


def main() -> int:
    """Run the tests; the exit code is 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("environments", type=Path)
    parser.add_argument("--only", nargs="+", choices=VERSIONS, default=VERSIONS)
    parser.add_argument("--quick", action="store_true", help="the check tier only")
    asked = parser.parse_args()
    failed = 0
    for version in asked.only:
        python = environment(asked.environments.resolve(), version)
        ends = version in (VERSIONS[0], VERSIONS[-1]) and not asked.quick
        for tier in ("check", "test") if ends else ("check",):
            found = run(python, tier)
            failed += found["failed"]
            line = row(version, platform.python_version(), tier, found)
            PAGE.write_text(merged(PAGE.read_text(), line))
            print(line)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
