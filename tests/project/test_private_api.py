"""docs/ lists every private name that is used, and tests name only such names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_page_is_that_of_the_code() -> None:
    command = [sys.executable, str(ROOT / "tools" / "private_api.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0
