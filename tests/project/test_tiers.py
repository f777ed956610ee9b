"""Tiers of tests: each folder has a smoke test, and the tables name tests that exist."""

from __future__ import annotations

from pathlib import Path

import tiers

ROOT = Path(__file__).parents[2]


def test_tables_name_tests_that_exist(every_test: list[str]) -> None:
    assert tiers.unused(every_test) == []


def test_every_folder_has_a_smoke_test(every_test: list[str]) -> None:
    smoke = [test for test in every_test if "smoke" in tiers.marks_of(test)]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/*/__init__.py")}
    packages = {f for f in folders if f.startswith(("fsdp_dynamo/", "graph_passes/"))}
    assert packages <= tiers.SMOKE.keys()
    assert all(tiers.SMOKE.values())
    tested = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")}
    assert tested == {test.partition("/")[0] for test in smoke}


def test_smoke_tests_are_not_slow(every_test: list[str]) -> None:
    assert [t for t in every_test if {"smoke", "slow"} <= set(tiers.marks_of(t))] == []
