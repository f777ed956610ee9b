"""Ranks that begin a save too late, or not at all: all of them get an error, and the next works."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from loops import error_of
from models import batch, loss_of, make_transformer
from pool import RankPool

from fsdp_dynamo import checkpoint, fully_shard
from fsdp_dynamo.checkpoint import coordination

WAIT_S = 2.0


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _late(rank: int, world_size: int, folder: str, way: str) -> tuple[list[str], list[int]]:
    """Errors of one save after the other, the last rank's first being late, and what is there."""
    model = fully_shard(make_transformer(num_blocks=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batch(rank, 0)).backward()
    optimizer.step()
    given_up = Path(folder) / "given up"
    is_late = rank == world_size - 1

    def save(step: int) -> str:
        return error_of(lambda: checkpoint.save(Path(folder) / "run", model, optimizer, step=step))

    errors = [save(1)] if way != "first" else []
    if is_late:
        _wait_for(given_up)
    else:
        checkpoint.set_arrival_timeout(WAIT_S)
    if not (is_late and way == "left out"):
        errors.append(save(2))
    given_up.touch()
    checkpoint.set_arrival_timeout(300)
    errors.append(save(3))
    if way != "left out":
        errors.append(save(2 if way == "again" else 4))
    loss_of(model, batch(rank, 1)).backward()  # the model's own group is as it was
    return errors, [step for step, _ in checkpoint.complete(Path(folder) / "run")]


def test_a_rank_that_is_late(ranks: RankPool, tmp_path: Path) -> None:
    *others, late = ranks.run(_late, 3, str(tmp_path), "late")
    for (first, given_up, *rest), found in others:
        assert (first, rest) == ("", ["", ""])
        assert "does not save or load" in given_up
        assert "set_arrival_timeout" in given_up
        assert found == [1, 3, 4]
    first, error, *rest = late[0]
    assert (first, rest) == ("", ["", ""])
    assert "got this rank after the other ranks had given up" in error


def _groups_after_failures(rank: int, world_size: int) -> tuple[list[int], str]:
    """Number of the next group after each failure; the last rank notices none of them itself."""
    ranks = dist.group.WORLD
    assert ranks is not None
    numbers = []
    for step in range(2):
        group = coordination._group_of(ranks, f"save {step}")
        dist.barrier()
        if rank < world_size - 1:
            for _ in range(2):  # a failed operation may fail again while it cleans up
                coordination._give_up(ranks, group, f"save {step}")
        dist.barrier()
        if step == 0:
            coordination._group_of(ranks, "save 1")
        numbers.append(coordination.STATE.channels[ranks].number)
    late = error_of(lambda: coordination._group_of(ranks, "save 1"))
    coordination._group_of(ranks, "save 2")
    numbers.append(coordination.STATE.channels[ranks].number)
    return numbers, late


def test_all_ranks_use_the_same_group_after_a_failure(ranks: RankPool) -> None:
    *others, (numbers, late) = ranks.run(_groups_after_failures, 3)
    assert others == [([1, 2, 2], "")] * 2
    assert numbers == [1, 1, 2]
    assert "got this rank after the other ranks had given up" in late


def test_the_same_step_again(ranks: RankPool, tmp_path: Path) -> None:
    for (first, given_up, *rest), _ in ranks.run(_late, 2, str(tmp_path), "again"):
        assert (first, rest) == ("", ["", ""])
        assert given_up.startswith("CheckpointError")


def test_a_rank_that_leaves_a_save_out(ranks: RankPool, tmp_path: Path) -> None:
    (others, found), (left_out, _) = ranks.run(_late, 2, str(tmp_path), "left out")
    assert left_out == ["", ""]
    assert (others[0], others[2]) == ("", "")
    assert "does not save or load" in others[1]
    assert found == [1, 3]


def test_the_time_must_be_a_number() -> None:
    for wrong in (0, -1, "a minute", None):
        error = error_of(lambda given=wrong: checkpoint.set_arrival_timeout(given))  # type: ignore[misc]
        assert "expected a number of seconds above 0" in error
