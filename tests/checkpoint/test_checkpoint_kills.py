"""kill -9 while a checkpoint is being written: a restarted run continues bitwise."""

from __future__ import annotations

import random
import re
import statistics
import time
import zlib
from collections.abc import Callable
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


def _train(rank: int, world_size: int, out: Path, steps: int, background: bool) -> None:
    """Go on from the newest checkpoint up to ``steps``, saving after every step.

    A record of each step is appended to a file, before it is saved; what was loaded must be what a
    run had then.
    """
    torch.manual_seed(rank)
    model = wrap(make_transformer(num_blocks=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loaded = checkpoint.load(out / "saved", model, optimizer, missing_ok=True)
    first = loaded.step if loaded else 0
    with (out / f"records-{rank}").open("a") as records:
        records.write(f"loaded {first} {_checksum(model, optimizer)}\n")
        for step in range(first, steps):
            noise = F.dropout(torch.ones(1), 0.5)
            loss = loss_of(model, batch(rank, step)) * (1 + noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            crc = _checksum(model, optimizer)
            records.write(f"trained {step + 1} {crc} {loss.item()!r}\n")
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


def _records(folder: Path, rank: int) -> list[tuple[str, int, list[str]]]:
    """Complete lines: "loaded" or "trained", the step, checksum and loss."""
    lines = (folder / f"records-{rank}").read_text().split("\n")[:-1]
    return [(what, int(step), rest) for what, step, *rest in map(str.split, lines)]


def _save_s(folder: Path, step: int) -> float:
    """Duration of a save."""
    begin, end = (folder / f"{what}-{step}" for what in ("saving", "saved"))
    return end.stat().st_mtime - begin.stat().st_mtime


def _until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.001)


def _moments(number: int) -> list[tuple[float | None, list[int], bool]]:
    """When to kill (a fraction of the time that a save takes, or when its files appear), which
    ranks, and whether the run saves in the background; of four moments the last two.
    """
    draw = random.Random(number)
    victims = [[0, 1], [0], [1]]
    return [(draw.random() if i % 2 else None, victims[i % 3], i % 4 > 1) for i in range(number)]


@pytest.mark.parametrize("number", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_some_moments(ranks: RankPool, tmp_path: Path, number: int) -> None:
    """A run is killed in the saving of a step and started again, for each moment.

    The checkpoint that is loaded is the one before or the new one, as it was saved; losses are
    those of an uninterrupted run.
    """
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    ranks.run(_train, RANKS, straight, 6, False)
    save_s = statistics.median(_save_s(straight, step) for step in range(1, 7))
    newest = torn = 0
    for fraction, victims, background in _moments(number):
        # One is saved before; in the background the one before may not be complete yet.
        marker = killed / f"saving-{newest + (3 if background else 2)}"

        def in_the_saving(marker: Path = marker, fraction: float | None = fraction) -> None:
            _until(marker.exists)
            if fraction is None:
                _until(lambda: any((killed / "saved").glob("*.part")))
            else:
                time.sleep(fraction * save_s)

        answers = ranks.run_and_kill(
            _train, RANKS, killed, newest + 20, background, victims=victims, when=in_the_saving
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
    ranks.run(_train, RANKS, killed, newest + 1, False)
    trained = max(step for rank in range(RANKS) for _, step, _ in _records(killed, rank))
    ranks.run(_train, RANKS, straight, trained, False)
    for rank in range(RANKS):
        expected = {step: rest for what, step, rest in _records(straight, rank) if what != "loaded"}
        found = _records(killed, rank)
        assert sum(what == "loaded" for what, *_ in found) == number + 1
        for _, step, rest in found:
            if step:
                assert rest == expected[step][: len(rest)]
