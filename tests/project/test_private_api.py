"""docs/ lists every private name that is used, and tests name only such names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import private_api  # noqa: E402

SOURCE = """
import torch
from torch._inductor import config as settings
from torch.distributed.distributed_c10d import _get_default_group as default

def _own(module):
    return module._parameters, module._mine, torch._C._fft_r2c

class Own(torch.nn.Module):
    _mine = 1

    def _apply(self, fn):
        return getattr(self, "_buffers"), settings.cpp, default(), self._fsdp_tag
"""

MARKED = """
import pytest

@pytest.mark.private("Module._parameters", "torch._C", need="one " "thing", instead="another")
def test_one():
    pass

@pytest.mark.private("Module._nowhere", need="nothing", instead="nothing")
def test_two():
    pass
"""


def test_page_is_that_of_the_code() -> None:
    command = [sys.executable, str(ROOT / "tools" / "private_api.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0


def test_uses_are_found() -> None:
    assert set(private_api.used_names({"a.py": SOURCE})) == {
        "._apply",
        "._buffers",
        "._parameters",
        "torch._C._fft_r2c",
        "torch._inductor.config.cpp",
        "torch.distributed.distributed_c10d._get_default_group",
    }


def test_marks_are_read() -> None:
    first, second = private_api.needs_of(MARKED)
    assert first == (("Module._parameters", "torch._C"), "one thing", "another", "test_one")
    assert second.names == ("Module._nowhere",)


def test_a_name_in_a_mark_that_is_not_used_is_a_fault() -> None:
    found = private_api.faults({"t.py": MARKED}, {"a.py": SOURCE})
    assert found == ["Module._nowhere has a test in tests/private_api, and is not used"]


def test_a_name_without_a_test_is_listed_with_its_users() -> None:
    tested, others = private_api.page({"t.py": MARKED}, {"a.py": SOURCE}).split("## Without a test")
    assert "| `Module._parameters`, `torch._C` | one thing | another | `a.py` |" in tested
    assert [row for row in others.splitlines() if row.startswith("| `")] == [
        "| `._apply` | `a.py` |",
        "| `._buffers` | `a.py` |",
        "| `torch._inductor.config.cpp` | `a.py` |",
        "| `torch.distributed.distributed_c10d._get_default_group` | `a.py` |",
    ]
