"""The tests' own tools: what fails or hangs in a rank, a thread or a destructor fails its test."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from pool import RankFailedError, RankPool, on_ranks


class _BadEnd:
    def __del__(self) -> None:
        raise ValueError("as asked in a destructor")


def _fail_unhandled(rank: int, world_size: int, where: str) -> None:
    def fail() -> None:
        raise ValueError("as asked in a thread")

    if rank == 1 and where == "thread":
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    if rank == 1 and where == "destructor":
        _BadEnd()


def _nothing(rank: int, world_size: int) -> int:
    return rank


@pytest.mark.parametrize("where", ["thread", "destructor"])
def test_what_nobody_handles_in_a_rank_fails_the_job(ranks: RankPool, where: str) -> None:
    with pytest.raises(RankFailedError, match=rf"(?s)^rank 1:.*ValueError: as asked in a {where}"):
        ranks.run(_fail_unhandled, 2, where)
    assert ranks.run(_nothing, 2) == [0, 1]


def _begin(rank: int, world_size: int, told: Path, then: str) -> None:
    """Rank 0 is the survivor."""
    (told / str(rank)).touch()
    if rank == 0 and then == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


@pytest.mark.parametrize(
    ("then", "message"),
    [("hangs", "^rank 0: no answer within 1 s$"), ("dies", "^rank 0: the process died$")],
)
def test_a_survivor_without_an_answer(
    ranks: RankPool, tmp_path: Path, then: str, message: str
) -> None:
    def all_have_begun() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)

    with pytest.raises(RankFailedError, match=message):
        ranks.run_and_kill(_begin, 2, tmp_path, then, victims=[1], when=all_have_begun, timeout=1.0)
    assert ranks.run(_nothing, 2) == [0, 1]


@on_ranks(2)
def _fails_on_the_second_rank(rank: int) -> None:
    assert [rank, 7] == [0, 7]


def test_an_assertion_in_one_rank(ranks: RankPool) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1:(.|\n)*assert \[1, 7\] == \[0, 7\]"):
        _fails_on_the_second_rank(ranks)
