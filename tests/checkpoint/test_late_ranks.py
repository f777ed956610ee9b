"""Ranks that begin a save too late, or not at all: all of them get an error, and the next works."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from loops import error_of
from models import make_transformer
from pool import on_ranks
from shardings import fit_tokens

from fsdp_dynamo import checkpoint, fully_shard

WAIT_S = 2.0


@pytest.mark.parametrize("left_out", [False, True])
@on_ranks(3)
def test_a_rank_that_is_late(rank: int, tmp_path: Path, left_out: bool) -> None:
    """For one save, which it may leave out; the ones after it work, also at the same step."""
    model = fully_shard(make_transformer(num_blocks=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run, given_up = tmp_path / "run", tmp_path / "given up"

    def save(step: int) -> str:
        return error_of(lambda: checkpoint.save(run, model, optimizer, step=step))

    assert save(1) == ""
    if rank < 2:
        checkpoint.set_arrival_timeout(WAIT_S)
        error = save(2)
        assert error.startswith("CheckpointError")
        assert "does not save or load" in error
        assert "set_arrival_timeout" in error
        given_up.touch()
    else:
        while not given_up.exists():
            time.sleep(0.01)
        if not left_out:
            assert "got this rank after the other ranks had given up" in save(2)
    checkpoint.set_arrival_timeout(300)
    assert [save(3), save(4 if left_out else 2)] == ["", ""]
    assert [step for step, _ in checkpoint.complete(run)] == [1, 3, 4 if left_out else 2]
    fit_tokens(model, optimizer, rank)  # the model's own group is as it was


def test_the_time_must_be_a_number() -> None:
    for wrong in (0, "a minute"):
        error = error_of(lambda given=wrong: checkpoint.set_arrival_timeout(given))  # type: ignore[misc]
        assert "expected a number of seconds above 0" in error
