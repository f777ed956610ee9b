"""Versions of torch: refused, warned of, accepted, and the same in all that names them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from fsdp_dynamo.version import NEWEST, OLDEST, check_torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import matrix  # noqa: E402
from setup_env import TORCH  # noqa: E402


@pytest.mark.parametrize("version", ["1.13.0+cu117", "2.9.0", "unknown"])
def test_older_ones_are_refused(version: str) -> None:
    with pytest.raises(ImportError, match=r"expected torch 2\.11 or newer, got .*pip install"):
        check_torch(version)


def test_newer_ones_are_warned_of() -> None:
    for version in ("2.16.0", "2.100.0a0+git1234", "3.0.0"):
        with pytest.warns(UserWarning, match="expected torch .* with which it is tested, got"):
            check_torch(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("2.11.0", "2.13.0+cpu", "2.15.0.dev20260101", torch.__version__):
            check_torch(version)


def test_a_build_without_distributed_is_refused() -> None:
    program = "import torch; del torch._C._c10d_init; import fsdp_dynamo"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: fsdp_dynamo: expected a torch with torch.distributed" in done.stderr
    assert "USE_DISTRIBUTED=1" in done.stderr


def test_the_package_declares_what_is_checked() -> None:
    oldest, newest = (".".join(map(str, minor)) for minor in (OLDEST, NEWEST))
    above = f"{NEWEST[0]}.{NEWEST[1] + 1}"
    assert f'dependencies = ["torch>={oldest},<{above}"' in (ROOT / "pyproject.toml").read_text()
    assert [v.rpartition(".")[0] for v in (matrix.VERSIONS[0], matrix.VERSIONS[-1])] == [
        oldest,
        newest,
    ]
    assert TORCH in matrix.VERSIONS
    ci = (ROOT / ".ci" / "run").read_text()
    assert f"for version in {matrix.VERSIONS[0]} {matrix.VERSIONS[-1]}; do" in ci
