"""Ranks whose hosts run ahead of their devices: what goes apart is noticed, what is late is not."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Block, Branching, batch, loss_of
from modes import in_mode
from pool import RankPool
from running_ahead import Device, running_ahead

from fsdp_dynamo import FSDP, DivergenceError, RankFailedError
from fsdp_dynamo.comm import watchdog
from fsdp_dynamo.comm.watchdog import DeviceWaits
from fsdp_dynamo.events import num_steps
from fsdp_dynamo.health import flight_recorder, notices
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

PERIOD_S = 0.1
LIMIT_S = 20.0


@contextmanager
def _on_device(mode: str) -> Iterator[tuple[Device, Any, Any]]:
    """A device, a model that has made a step there, and what runs it."""
    torch.manual_seed(7)
    with running_ahead() as device, mock.patch.object(watchdog, "PERIOD_S", PERIOD_S):
        model: Any = FSDP(Branching(num_blocks=3), auto_wrap_policy=ModuleWrapPolicy({Block}))
        run = in_mode(model, mode)
        loss_of(run, batch(dist.get_rank(), 0)).backward()
        assert device.synchronize()
        yield device, model, run


def _wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _has_failed() -> bool:
    return watchdog._watchdog.on_devices._failure is not None


def _step_unseen(device: Device, run: Any, rank: int) -> None:
    """A step during which nothing is noticed: it is over before the device stands still."""
    device.is_watched = False
    loss_of(run, batch(rank, 1)).backward()
    device.is_watched = True


def _error_of_a_step(run: Any, rank: int, step: int) -> tuple[str, str]:
    try:
        loss_of(run, batch(rank, step)).backward()
    except DivergenceError as error:
        return type(error).__name__, str(error)
    return "", ""


def _skip(rank: int, world_size: int, mode: str) -> tuple[tuple[str, str], int]:
    """The error of a step, and the number of the one before, in which a rank left a unit out."""
    with _on_device(mode) as (device, model, run):
        model.module.skipped = frozenset({1}) if rank == 1 else frozenset()
        _step_unseen(device, run, rank)
        step = num_steps()
        _wait_until(_has_failed)
        model.module.skipped = frozenset()
        return _error_of_a_step(run, rank, 2), step


@pytest.mark.parametrize("mode", ["eager", "hooks"])
def test_a_unit_left_out(ranks: RankPool, mode: str) -> None:
    (one, step), (two, _) = ranks.run(_skip, 2, mode)
    assert one == two
    kind, message = one
    assert kind == DivergenceError.__name__
    for part in ("unit 'blocks.1'", f"step {step}", "rank 1", "rank 0"):
        assert part in message


def _blocked(rank: int, world_size: int, folder: str) -> tuple[bool, list[str], str, str]:
    """Whether the host's wait for its device ends, what is told meanwhile, and the error then."""
    printed: list[str] = []
    recorder = flight_recorder._Recorder(Path(folder))
    with (
        _on_device("eager") as (device, model, run),
        mock.patch.object(flight_recorder, "_recorder", recorder),
        mock.patch.object(flight_recorder, "_print_error", printed.append),
    ):
        model.module.skipped = frozenset({1}) if rank == 1 else frozenset()
        _step_unseen(device, run, rank)
        is_done = device.synchronize(until=recorder.path.exists)
        _wait_until(recorder.path.exists)
        _, message = _error_of_a_step(run, rank, 2)
    return is_done, printed, json.loads(recorder.path.read_text())["reason"], message


def test_a_host_that_its_device_blocks(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(_blocked, 2, str(tmp_path))
    assert not answers[0][0]  # it stands still behind the gather of the unit left out on the other
    for rank, (_, printed, reason, message) in enumerate(answers):
        assert "unit 'blocks.1'" in message
        assert reason == f"{DivergenceError.__name__}: {message}"
        told = [line for line in printed if message in line]
        assert len(told) == 1
        assert told[0].startswith(f"rank {rank}: ")


def _die(rank: int, world_size: int) -> tuple[str, str, int]:
    """The error of the others, and the step after which one rank fails."""
    store: Any = dist.distributed_c10d._get_default_store()
    with _on_device("eager") as (device, _, run):
        before = num_steps()
        if rank == 1:
            store.wait(["stepped"], timedelta(seconds=LIMIT_S))  # or the step itself would raise
            error = ValueError("no more data")
            sys.excepthook(type(error), error, None)  # as the interpreter does
            store.wait(["learned"], timedelta(seconds=LIMIT_S))
            return "", "", before
        _step_unseen(device, run, rank)
        store.set("stepped", "")
        _wait_until(_has_failed)
        found = _error_of_a_step(run, rank, 2)
        store.set("learned", "")
        return *found, before


def test_a_rank_that_dies(ranks: RankPool) -> None:
    (kind, message, _), (*_, step) = ranks.run(_die, 2)
    assert kind == RankFailedError.__name__
    assert "rank 1" in message
    assert "no more data" in message
    assert f"step {step}" in message


def _late(rank: int, world_size: int) -> tuple[int, tuple[str, str], bool]:
    """Comparisons of this rank, its error, and whether its device has done everything."""
    store: Any = dist.distributed_c10d._get_default_store()
    compare, compared = notices.find_order_mismatch, []

    def compare_and_tell(*args: Any) -> str | None:
        result = compare(*args)
        compared.append(result)
        if len(compared) == 2:
            store.set("compared", "")
        return result

    with (
        _on_device("eager") as (device, _, run),
        mock.patch.object(notices, "find_order_mismatch", compare_and_tell),
    ):
        if rank == 1:
            store.wait(["compared"], timedelta(seconds=LIMIT_S))
        found = _error_of_a_step(run, rank, 1)
        is_done = device.synchronize()
    return len(compared), found, is_done


def test_a_late_rank_is_waited_for(ranks: RankPool) -> None:
    answers = ranks.run(_late, 2)
    assert answers[0][0] >= 2
    for _, error, is_done in answers:
        assert error == ("", "")
        assert is_done


class _Point:
    is_reached = False


def test_what_is_overdue() -> None:
    waits, group, first, second = DeviceWaits(), mock.Mock(), _Point(), _Point()
    waits.add(group, first)
    waits.add(group, second)
    assert [waits.look() for _ in range(4)] == [[(group, late)] for late in (False,) * 3 + (True,)]
    first.is_reached = True
    assert waits.look() == [(group, False)]  # it moves: another one may take as long
    assert waits
    second.is_reached = True
    assert waits.look() == [(group, False)]
    assert not waits


def test_a_group_is_not_kept() -> None:
    waits, group = DeviceWaits(), mock.Mock()
    waits.add(group, _Point())
    assert waits
    del group
    assert not waits
