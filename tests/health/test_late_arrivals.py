"""Ranks that are late are named and waited for; those that will not come are noticed at once."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import RankPool
from torch._dynamo.callback import callback_handler

from fsdp_dynamo import DivergenceError, RankFailedError
from fsdp_dynamo.comm import collectives, watchdog
from fsdp_dynamo.health import late_ranks
from fsdp_dynamo.health.comparison import require_same
from fsdp_dynamo.health.graph_agreement import require_agreement
from fsdp_dynamo.health.notices import link_groups

LIMIT_S = 10.0
PERIOD_S = 0.2  # of the watcher
BOUND_S = 45.0  # of a rank that compiles itself; the group's timeout is 60 s


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _outcome(action: Callable[[], object]) -> tuple[str, str, float]:
    """What an action returns or raises, and how long it takes."""
    began = time.monotonic()
    try:
        kind, text = "", str(action())
    except DivergenceError as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, time.monotonic() - began


# -- late, and no more than that -------------------------------------------------------------------


def _come_late(rank: int, world_size: int) -> tuple[tuple[str, str, float], list[str]]:
    """Rank 1 comes when another has warned; returns each rank's outcome and warnings."""
    late_ranks.publish_state()
    store = dist.distributed_c10d._get_default_store()
    entry = f"all_gather x#0 float32 1 - - {_world().group_name}"
    told: list[str] = []

    def tell(message: object, *_: object) -> None:
        told.append(str(message))
        store.set("warned", "")

    with mock.patch.object(late_ranks, "WARN_S", 0.5), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = tell  # type: ignore[assignment]
        if rank == 1:
            store.wait(["warned"], timedelta(seconds=BOUND_S))
        return _outcome(lambda: require_agreement(_world(), entry)), told


def test_a_late_rank_is_named_and_waited_for(ranks: RankPool) -> None:
    """Before a new graph, with no other timeout than the group's.

    Ranks 0 and 2 wait. The one that came first reads for both, and warns.
    """
    found = ranks.run(_come_late, 3)
    assert [outcome[:2] for outcome, _ in found] == [("", "None")] * 3
    assert found[1][1] == []
    (told,) = (text for _, warned in found for text in warned)
    assert told.startswith("compiled graph that begins with all_gather")
    assert re.search(r"rank [02] has waited \d+ s for rank\(s\) 1 \(process \d+ on ", told)
    assert "at most for 60 s" in told


# -- one that does something else ------------------------------------------------------------------


def _issue_another(rank: int, world_size: int) -> tuple[str, str, float]:
    """Rank 0 gathers; rank 1 is about to run a new graph first."""
    group = _world()
    link_groups([group])
    entry = f"all_gather x#0 float32 1 - - {group.group_name}"

    def act() -> object:
        if rank == 1:
            return require_agreement(group, entry)
        output = torch.zeros(world_size)
        return collectives.issue_all_gather(output, torch.ones(1), group, None, "blocks.0").wait()

    with mock.patch.object(watchdog, "PERIOD_S", PERIOD_S):
        return _outcome(act)


def test_a_rank_that_issues_another_collective(ranks: RankPool) -> None:
    found = ranks.run(_issue_another, 2)
    assert found[0][:2] == found[1][:2]
    kind, message, _ = found[0]
    assert kind == DivergenceError.__name__
    assert "as rank 1 did, got the all-gather of unit 'blocks.0' (2 elements, forward" in message
    assert "on rank 0, which rank 1 has not come to" in message
    assert max(seconds for _, _, seconds in found) < LIMIT_S


def _end_early(rank: int, world_size: int) -> tuple[str, str, float]:
    if rank == 1:
        return "", "", 0.0
    return _outcome(lambda: require_same(_world(), "plan", "one"))


def test_a_rank_that_has_ended(ranks: RankPool) -> None:
    """Also where nothing is in flight between the two."""
    (kind, message, seconds), _ = ranks.run(_end_early, 2)
    assert kind == RankFailedError.__name__
    assert message.startswith("rank 1: expected the plan of rank(s) 1, got a closed connection")
    assert seconds < LIMIT_S


def _die_while_compiling(rank: int, world_size: int, told: Path) -> tuple[str, float]:
    run = in_mode(wrap(make_transformer(num_blocks=1)), "graph")
    if rank == 1:
        kill = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        callback_handler.register_start_callback(kill)
    began = time.monotonic()
    try:
        loss_of(run, batch(rank, 0)).backward()
        return "", 0.0
    except Exception as error:  # Dynamo makes one of its own of what a backend raises
        return str(error), time.monotonic() - began
    finally:
        (told / str(rank)).touch()


def test_a_rank_that_is_killed_while_it_compiles(ranks: RankPool, tmp_path: Path) -> None:
    def wait() -> None:
        until = time.monotonic() + 2 * BOUND_S
        while not (tmp_path / "0").exists() and time.monotonic() < until:
            time.sleep(0.05)

    answers = ranks.run_and_kill(_die_while_compiling, 2, tmp_path, victims=[1], when=wait)
    is_answer, answer = answers[0]
    assert is_answer, answer
    message, seconds = answer
    assert "RankFailedError: rank 1: expected the options of torch.compile" in message
    assert "got a closed connection. It has ended or was killed" in message
    assert seconds < BOUND_S


# -- errors that were caught -----------------------------------------------------------------------


def _go_on(rank: int, world_size: int) -> list[Any]:
    """All ranks raise and catch; then one is late in a collective, and all raise once more."""
    group = _world()
    link_groups([group])
    found: list[Any] = [_outcome(lambda: require_same(group, "plan", f"of {rank}"))[:2]]
    output = torch.zeros(world_size)
    with mock.patch.object(watchdog, "PERIOD_S", PERIOD_S):
        if rank == 1:
            time.sleep(5 * PERIOD_S)
        gather = collectives.issue_all_gather(output, torch.ones(1), group)
        found.append(_outcome(lambda: gather.wait() or output.tolist())[:2])
    found.append(_outcome(lambda: require_same(group, "budget", f"of {rank}"))[:2])
    return found


def test_an_error_that_was_caught_is_not_raised_again(ranks: RankPool) -> None:
    for caught, gathered, again in ranks.run(_go_on, 3):
        assert caught[0] == DivergenceError.__name__
        assert "plan: expected the same plan" in caught[1]
        assert gathered == ("", "[1.0, 1.0, 1.0]")
        assert again[0] == DivergenceError.__name__
        assert "budget: expected the same budget" in again[1]
