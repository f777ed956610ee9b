"""kill -9 while a checkpoint is being written: a restarted run continues bitwise."""

from __future__ import annotations

import random
import re
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch.nn import functional as F

from fsdp_dynamo import FSDP, checkpoint
from fsdp_dynamo.core.dtensors import local_of

RANKS = 2
SURVIVORS_SAY = re.compile(
    r"errors\.(CheckpointError: rank \d: expected all 2 ranks to take part, got "
    r"|RankFailedError: rank \d: expected its part of the )"
)
"""In the saving, or in the step after it."""
Record = dict[int, tuple[float, int]]
"""By step: loss of the step, and a checksum of all states after it."""


def _checksum(model: FSDP, optimizer: torch.optim.Optimizer) -> int:
    """Of this rank's parameters and states."""
    tensors: list[torch.Tensor] = [p.detach() for p in model.parameters()]
    for param in model.parameters():
        states = optimizer.state.get(param, {})
        tensors += [torch.as_tensor(states[name]) for name in sorted(states)]
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(local_of(tensor).numpy().tobytes(), crc)
    return crc


def _train(rank: int, world_size: int, folder: str, steps: int, background: bool) -> Record:
    """Go on from the newest checkpoint up to ``steps``, saving after every step.

    A record of each step is appended to a file, before it is saved; what was loaded must be what a
    run had then.
    """
    torch.manual_seed(rank)
    model = wrap(make_transformer(num_blocks=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out = Path(folder)
    loaded = checkpoint.load(out / "saved", model, optimizer, missing_ok=True)
    first = loaded.step if loaded else 0
    with (out / f"records-{rank}").open("a") as records:
        records.write(f"loaded {first} 0 {_checksum(model, optimizer)}\n")
        for step in range(first, steps):
            noise = F.dropout(torch.ones(1), 0.5)
            loss = loss_of(model, batch(rank, step)) * (1 + noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            content = f"{step + 1} {loss.item()!r} {_checksum(model, optimizer)}"
            records.write(f"trained {content}\n")
            records.flush()
            (out / f"saving-{step + 1}").touch()
            arguments: dict[str, Any] = {"step": step + 1, "keep_last": 2}
            if background:
                saving = checkpoint.async_save(out / "saved", model, optimizer, **arguments)
            else:
                checkpoint.save(out / "saved", model, optimizer, **arguments)
            (out / f"saved-{step + 1}").touch()
        if background:
            saving.result()
    return {}


def _records(folder: Path, rank: int) -> list[tuple[str, int, float, int]]:
    """Complete lines."""
    lines = (folder / f"records-{rank}").read_text().split("\n")[:-1]
    split = [line.split() for line in lines]
    return [(what, int(step), float(loss), int(crc)) for what, step, loss, crc in split]


def _save_s(folder: Path, step: int) -> float:
    """Duration of a save."""
    begin, end = (folder / f"{what}-{step}" for what in ("saving", "saved"))
    return end.stat().st_mtime - begin.stat().st_mtime


def _until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.001)


def _kill_and_go_on(
    ranks: RankPool,
    folder: Path,
    moments: Sequence[tuple[float | None, list[int]]],
    background: bool,
) -> None:
    """Start the run, kill it in the saving of one step, and start it again, for each moment.

    Args:
        moments: fractions of the time that a save takes, or ``None`` for the moment when its
            files appear; and who is killed.
    """
    straight = folder / "straight"
    straight.mkdir()
    ranks.run(_train, RANKS, str(straight), 6, False)
    save_s = statistics.median(_save_s(straight, step) for step in range(1, 7))
    killed = folder / "killed"
    killed.mkdir()
    newest = torn = 0
    for fraction, victims in moments:
        # One is saved before; in the background the one before may not be complete yet.
        marker = killed / f"saving-{newest + (3 if background else 2)}"

        def in_the_saving(marker: Path = marker, fraction: float | None = fraction) -> None:
            _until(marker.exists)
            if fraction is None:
                _until(lambda: any((killed / "saved").glob("*.part")))
            else:
                time.sleep(fraction * save_s)

        answers = ranks.run_and_kill(
            _train, RANKS, str(killed), newest + 20, background, victims=victims, when=in_the_saving
        )
        for returned, text in answers.values():
            assert not returned
            assert SURVIVORS_SAY.search(text), text
        there = [step for step, _ in checkpoint.complete(killed / "saved")]
        assert there[-1] >= newest + 1
        torn += any((killed / "saved").glob("*.part"))
        for path in killed.glob("sav*-*"):
            path.unlink()
        newest = there[-1]
    assert torn  # some were killed while files were being written
    ranks.run(_train, RANKS, str(killed), newest + 1, False)
    trained = max(step for rank in range(RANKS) for _, step, *_ in _records(killed, rank))
    ranks.run(_train, RANKS, str(straight), trained, False)
    for rank in range(RANKS):
        expected = {
            s: (loss, crc) for w, s, loss, crc in _records(straight, rank) if w == "trained"
        }
        found = _records(killed, rank)
        assert sum(what == "loaded" for what, *_ in found) == len(moments) + 1
        for what, step, loss, crc in found:
            if what == "trained":
                assert (loss, crc) == expected[step]
            elif step:
                assert crc == expected[step][1]


def _moments(number: int) -> list[tuple[float | None, list[int]]]:
    """Every second when files are there, others random; every third kills all ranks, others one."""
    draw = random.Random(number)
    victims = [[0, 1], [0], [1]]
    return [(draw.random() if i % 2 else None, victims[i % 3]) for i in range(number)]


@pytest.mark.parametrize("background", [False, True])
def test_killed_at_some_moments(ranks: RankPool, tmp_path: Path, background: bool) -> None:
    _kill_and_go_on(ranks, tmp_path, _moments(4), background)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_killed_at_fifty_moments(ranks: RankPool, tmp_path: Path, background: bool) -> None:
    """The checkpoint that is loaded is the one before or the new one, as it was saved; losses are
    those of an uninterrupted run."""
    _kill_and_go_on(ranks, tmp_path, _moments(50), background)
