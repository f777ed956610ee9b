"""Ranks that diverge get an error, never a hang; those that are late are waited for."""

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

import pytest
import torch
import torch.distributed as dist
from graphs import Builder
from models import batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch._dynamo.callback import callback_handler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_dynamo import (
    FSDP,
    DivergenceError,
    RankFailedError,
    ShardingStrategy,
)
from fsdp_dynamo.comm import collective_log, collectives, watchdog
from fsdp_dynamo.health import notices
from fsdp_dynamo.health.comparison import require_same, share_from_first
from fsdp_dynamo.health.graph_agreement import require_agreement
from fsdp_dynamo.health.notices import link_groups
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.text.listing import SEPARATOR, describe_entry, fingerprint

NUM_STEPS = 4
PERIOD_S = 0.2  # of the watcher
LIMIT_S = 10.0  # the promise
BOUND_S = 45.0  # on a busy machine; a hang would last as long as the group's timeout, 60 s


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def outcome(action: Callable[[], object], *others: type[Exception]) -> str:
    """The result of an action, or the message of its divergence error or of one of the others."""
    try:
        return str(action())
    except (DivergenceError, *others) as error:
        return str(error)


# -- graphs ----------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Three blocks, in an order that a rank may have for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def run_differently(rank: int, world_size: int, order: list[int], mode: str) -> str:
    """The error of a step in which the last rank calls other blocks."""
    torch.manual_seed(5)
    plain = Branching()
    replicas: dict[str, Any] = {}
    if world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        replicas = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    wrapped = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **replicas)
    if rank == world_size - 1:
        plain.order = order
    model = in_mode(wrapped, mode, bucket=False)
    return outcome(lambda: model(torch.randn(2, 16)).square().mean().backward())


OTHER = ([1, 0, 2], ["collective 0", "unit 'blocks.0'", "unit 'blocks.1'"])
FEWER = ([0, 1], ["collective 2", "unit 'blocks.2'", "got no further collective"])


@pytest.mark.parametrize(
    ("mode", "world_size", "order", "words"),
    [
        ("graph", 2, *OTHER),
        ("graph", 3, *FEWER),
        ("graph", 4, *OTHER),  # replicas: ranks 0 and 3 have no group in common
        # The fingerprint is an argument of generated code, so compile caches keep it.
        pytest.param("graph-inductor", 2, *OTHER, marks=pytest.mark.slow),
    ],
    ids=["two ranks", "three ranks", "replicas", "inductor"],
)
def test_every_rank_gets_the_error(
    ranks: RankPool, mode: str, world_size: int, order: list[int], words: list[str]
) -> None:
    messages = ranks.run(run_differently, world_size, order, mode)
    assert messages == messages[:1] * world_size
    first = 2 if world_size == 4 else 0  # of the last one's group
    for part in (f"expected rank {world_size - 1} to issue what rank {first} does", *words):
        assert part in messages[0]


@on_ranks(2)
def test_ranks_that_agree_go_on(rank: int) -> None:
    """A rank may be late, or compile again as long as its collectives stay the same.

    A graph is compared once: a forward and a backward.
    """
    model = in_mode(FSDP(Branching(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential})), "graph")
    for step in range(NUM_STEPS):
        if rank and step == 0:
            time.sleep(0.5)
        model(torch.randn(4 if rank and step == 2 else 2, 16)).square().mean().backward()
        if step < 2:
            uses = [entry.use for entry in collective_log.recent(world(), 100)]
            assert uses.count("the comparison of compiled graphs") == 2


@on_ranks(2)
def test_groups_of_one_rank_and_destroyed_groups(rank: int) -> None:
    """The former have nobody to agree with; the latter live on with their model."""
    gone, own = dist.new_group([0, 1]), [dist.new_group([one]) for one in range(2)][rank]
    link_groups([gone, world()])
    dist.destroy_process_group(gone)
    entries = [f"all_gather x#0 float32 1 - - {one.group_name}" for one in (world(), own)]
    require_agreement(world(), SEPARATOR.join(entries))
    uses = [entry.use for entry in collective_log.recent(world(), 100)]
    assert uses == ["the comparison of compiled graphs"]


def test_fingerprint() -> None:
    builder = Builder()
    shard = builder.input("shard")
    shard.meta["val"] = torch.empty(10, dtype=torch.bfloat16)
    unsharded = builder.gather("blocks.0", shard)
    unsharded.meta["val"] = torch.empty(20)
    builder.graph.output(builder.reduce("", unsharded))
    gather, reduce = fingerprint(builder.graph).split(SEPARATOR)
    assert gather == "all_gather_into_tensor blocks.0#0 bfloat16 10 - - g"
    assert reduce == "reduce_scatter_tensor (root)#0 float32 20 avg - g"
    assert describe_entry(reduce) == (
        "reduce_scatter_tensor (avg) of unit '(root)', flat parameter 0, 20 float32, ranks g"
    )
    assert describe_entry("") == "no further collective"


# -- texts -----------------------------------------------------------------------------------------


@on_ranks(3)
def test_texts_are_compared(rank: int) -> None:
    text = "aaaa" * 100
    for _ in range(2):
        require_same(world(), "plan", f"{text}b")
    odd = f"{text}{'x' if rank == 1 else 'b'}"
    with pytest.raises(DivergenceError, match="the same plan on all ranks") as raised:
        require_same(world(), "plan", odd)
    assert re.search(r"got '.*aaax' on rank\(s\) 1", str(raised.value))


@on_ranks(2)
def test_ranks_that_compare_different_things(rank: int) -> None:
    """Of which the texts are equal."""
    link_groups([world()])
    text = "plan 0: expected rank 1 to issue what rank 0 does, the all-reduce for plan 0"
    with pytest.raises(DivergenceError, match=text):
        require_same(world(), f"plan {rank}", "")


def wrap_with(rank: int, world_size: int, odd: str) -> str:
    """What wrapping raises where the last rank has another version of torch installed."""
    version = odd if rank == world_size - 1 else "2.13.0+cu130"
    replicas: dict[str, Any] = {}
    if world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        replicas = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    module = nn.Linear(4, 4)
    with mock.patch.object(torch, "__version__", version):
        error = outcome(lambda: type(FSDP(module, **replicas)).__name__)
    assert isinstance(module.weight, DTensor) == (error == FSDP.__name__)  # else unchanged
    return error


@pytest.mark.parametrize(("odd", "size"), [("2.13.1+cu130", 3), ("2.13.0.dev20261101", 4)])
def test_every_rank_is_told_of_another_torch(ranks: RankPool, odd: str, size: int) -> None:
    """Also, of replicas, the ranks that share no group with the one that differs."""
    errors = ranks.run(wrap_with, size, odd)
    for error in errors:
        assert f"torch {odd.partition('+')[0]}, fsdp_dynamo" in error
    if size == 3:
        assert len(set(errors)) == 1
        assert "the same versions on all ranks, 'torch 2.13.0, fsdp_dynamo" in errors[0]
        assert "on rank(s) 2" in errors[0]


def test_builds_for_other_accelerators_agree(ranks: RankPool) -> None:
    assert ranks.run(wrap_with, 3, "2.13.0+cpu") == [FSDP.__name__] * 3


@pytest.mark.parametrize("how", ["slow", "fails"])
@on_ranks(3)
def test_the_first_rank_decides(rank: int, how: str) -> None:
    """It may be slow, or fail once, when all raise once."""
    calls = 0

    def make() -> str:
        nonlocal calls
        calls += 1
        if how == "fails" and calls == 1:
            raise ValueError("no such budget")
        if how == "slow":
            time.sleep(2 * PERIOD_S)
        return f"made by {rank}"

    def decide() -> str:
        return outcome(lambda: share_from_first(world(), "plan", make), ValueError)

    failed = "plan: rank 0 failed: ValueError: no such budget" if rank else "no such budget"
    assert decide() == (failed if how == "fails" else "made by 0")
    assert decide() == "made by 0"


def test_without_a_shared_store(tmp_path: Path) -> None:
    """A group of one rank compares nothing."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert share_from_first(world(), "plan", lambda: "own") == "own"
        require_same(world(), "plan", "own")
        require_agreement(world(), "a fingerprint of no format at all")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["gather", "reduce", "never"])
@on_ranks(3)
def test_long_waits(rank: int, how: str) -> None:
    """Rank 1 comes after some periods, or leaves a notice instead; the others are blocked.

    A long wait is not torn apart, and one that would never end does end. Rank 2 looks for notices
    when rank 0 has seen them and closed its connections.
    """
    group = world()
    store = dist.distributed_c10d._get_default_store()
    with mock.patch.object(watchdog, "PERIOD_S", PERIOD_S * (8 if rank == 2 else 1)):
        require_agreement(group, f"all_gather x#0 float32 1 - - {group.group_name}")
        output = torch.ones(3)
        if rank == 1:
            time.sleep(4 * PERIOD_S)
            if how == "never":
                with pytest.raises(DivergenceError):
                    notices.raise_on_all_ranks(DivergenceError("rank 1 does not come"))
                store.wait(["ended/0", "ended/2"], timedelta(seconds=BOUND_S))  # connected
                return
        if how == "reduce":  # on a thread of gloo's, not by sends and receives
            waits = collectives.issue_reduce_mean(output, output, group)
        else:
            waits = collectives.issue_all_gather(output, torch.ones(1), group)
        said = outcome(lambda: waits.wait() or output.tolist())
        store.set(f"ended/{rank}", "")
    assert said == ("rank 1 does not come" if how == "never" else "[1.0, 1.0, 1.0]")


@on_ranks(2)
def test_two_groups_of_the_same_ranks(rank: int) -> None:
    """Groups of the same ranks share a store; their exchanges are kept apart."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for number in range(3):
        for group in groups:
            require_same(group, "plan", f"text {number}")


# -- late, and no more than that -------------------------------------------------------------------


def _come_late(rank: int, world_size: int) -> list[str]:
    """Rank 1 comes when a warning has named it; returns each rank's warnings."""
    store = dist.distributed_c10d._get_default_store()
    entry = f"all_gather x#0 float32 1 - - {world().group_name}"
    told: list[str] = []

    def tell(message: object, *_: object) -> None:
        told.append(str(message))
        if "rank 1 has not reported it" in told[-1]:
            store.set("warned", "")

    with mock.patch.object(watchdog, "PERIOD_S", PERIOD_S / 2), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = tell  # type: ignore[assignment]
        link_groups([world()])
        if rank == 1:
            store.wait(["warned"], timedelta(seconds=BOUND_S))
        require_agreement(world(), entry)
    return told


def test_a_late_rank_is_named_and_waited_for(ranks: RankPool) -> None:
    """By the rank behind it, with no other timeout than the group's."""
    first, late, behind = ranks.run(_come_late, 3)
    assert late == []
    # On a busy machine rank 2 may report later than rank 0 asks, and be named, too.
    assert not any("rank 1 has not reported it" in one for one in first)
    (told,) = behind
    assert told.startswith("rank 2 has waited 12 s for the all-reduce for the comparison of ")
    assert "rank 1 has not reported it" in told


# -- one that does something else ------------------------------------------------------------------


def _issue_another(rank: int, world_size: int) -> str:
    """Rank 0 gathers; rank 1 is about to run a new graph first."""
    group = world()
    link_groups([group])
    entry = f"all_gather x#0 float32 1 - - {group.group_name}"

    def act() -> object:
        if rank == 1:
            return require_agreement(group, entry)
        output = torch.zeros(world_size)
        return collectives.issue_all_gather(output, torch.ones(1), group, None, "blocks.0").wait()

    began = time.monotonic()
    with mock.patch.object(watchdog, "PERIOD_S", PERIOD_S):
        message = outcome(act)
    assert time.monotonic() - began < LIMIT_S
    return message


def test_a_rank_that_issues_another_collective(ranks: RankPool) -> None:
    """As one that compiles again while the other goes on."""
    message, other = ranks.run(_issue_another, 2)
    assert message == other
    assert "expected rank 1 to issue what rank 0 does, the all-gather of unit 'blocks.0'" in message
    assert "got the all-reduce for the comparison of compiled graphs" in message


@on_ranks(2)
def test_a_rank_that_has_ended(rank: int) -> None:
    """Also where nothing is in flight between the two."""
    if rank == 1:
        return
    began = time.monotonic()
    text = "^rank 1: expected its part of the all-reduce for plan .*, got a closed connection"
    with pytest.raises(RankFailedError, match=text):
        require_same(world(), "plan", "one")
    assert time.monotonic() - began < LIMIT_S


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
    assert "rank 1: expected its part of the all-reduce for options of torch.compile" in message
    assert "got a closed connection. It has ended or was killed" in message
    assert seconds < BOUND_S


# -- errors that were caught -----------------------------------------------------------------------


@on_ranks(3)
def test_an_error_that_was_caught_is_not_raised_again(rank: int) -> None:
    """All ranks raise and catch; then one is late in a collective, and all raise once more."""
    group = world()
    link_groups([group])
    with pytest.raises(DivergenceError, match="plan: expected the same plan"):
        require_same(group, "plan", f"of {rank}")
    output, store = torch.zeros(3), dist.distributed_c10d._get_default_store()
    look = notices._monitor.look

    def look_and_tell(*args: Any) -> None:
        try:
            look(*args)
        finally:
            store.set(f"looked{rank}", "")

    with (
        mock.patch.object(watchdog, "PERIOD_S", PERIOD_S),
        mock.patch.object(notices._monitor, "look", look_and_tell),
    ):
        if rank == 1:
            store.wait(["looked0", "looked2"], timedelta(seconds=BOUND_S))
        collectives.issue_all_gather(output, torch.ones(1), group).wait()
    assert output.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(DivergenceError, match="budget: expected the same budget"):
        require_same(group, "budget", f"of {rank}")
