"""Versions of torch: refused, warned of, accepted, and the same in all that names them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from fsdp_dynamo.version import NEWEST, OLDEST, check_torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.10.0", "1.13.0+cu117", "2.9.0", "unknown"])
def test_older_ones_are_refused(version: str) -> None:
    with pytest.raises(ImportError, match=r"expected torch 2\.11 or newer, got .*pip install"):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.16.0", "2.100.0a0+git1234", "3.0.0"])
def test_newer_ones_are_warned_of(version: str) -> None:
    with pytest.warns(UserWarning, match="expected torch .* with which it is tested, got"):
        check_torch(version)


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.13.0+cpu", "2.13.1", "2.15.0.dev20260101", torch.__version__]
)
def test_tested_ones_pass(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch(version)


def test_the_package_declares_what_is_checked() -> None:
    oldest, newest = (".".join(map(str, minor)) for minor in (OLDEST, NEWEST))
    above = f"{NEWEST[0]}.{NEWEST[1] + 1}"
    assert f'dependencies = ["torch>={oldest},<{above}"' in (ROOT / "pyproject.toml").read_text()
    assert f'VERSIONS = ("{oldest}.' in (matrix := (ROOT / "tools" / "matrix.py").read_text())
    assert f'"{newest}.0")' in matrix
