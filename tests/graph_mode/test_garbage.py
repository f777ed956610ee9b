"""Python looks for garbage seldom while a graph is traced and compiled, and only then."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fsdp_dynamo.dynamo.private_api import collected_seldom


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    """Those of the test run are there again behind each test."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_are_higher_inside_and_put_back() -> None:
    gc.set_threshold(700, 10, 10)
    seen = []

    @collected_seldom()
    def fail() -> None:
        seen.append(gc.get_threshold())
        with collected_seldom():
            seen.append(gc.get_threshold())
        seen.append(gc.get_threshold())
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert gc.get_threshold()[:2] == (700, 10)
    assert seen == [seen[0]] * 3
    assert seen[0][0] > 700
    assert seen[0][1] > 10


def test_what_the_user_has_set_stays() -> None:
    gc.set_threshold(10_000_000, 10, 10)
    with collected_seldom():
        assert gc.get_threshold()[0] == 10_000_000
    gc.set_threshold(0)  # off
    with collected_seldom():
        assert gc.get_threshold()[0] == 0
