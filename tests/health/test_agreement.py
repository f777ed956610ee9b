"""Ranks that diverge get an error on every rank, never a hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from graphs import Builder
from modes import in_mode
from pool import RankPool
from torch import nn
from torch._dynamo.callback import callback_handler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_dynamo import (
    FSDP,
    DivergenceError,
    FSDPValueError,
    MixedPrecision,
    ShardingStrategy,
    set_agreement_timeout,
)
from fsdp_dynamo.comm import collectives, watchdog
from fsdp_dynamo.health import late_ranks, notices
from fsdp_dynamo.health.comparison import require_same, share_from_first
from fsdp_dynamo.health.graph_agreement import require_agreement
from fsdp_dynamo.health.store import shared_store
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.text.listing import SEPARATOR, describe_entry, fingerprint

NUM_STEPS = 4
TIMEOUTS_S = {"busy": 1.0, "slow": 1.0, "absent": 1.0}
LONGER_S = 2.0  # than the timeouts above
PERIOD_S = 0.2  # of the watcher
BOUND_S = 45.0  # on a busy machine; a hang would last as long as the group's timeout, 60 s


class Branching(nn.Module):
    """Three blocks; a rank may call others than the rest, or have others."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [(16, width), (width, 16), (16, 16)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in sizes)
        self.order = [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def run_differently(rank: int, world_size: int, how: str, mode: str) -> tuple[str, float]:
    """Some steps in which the last rank differs.

    Returns:
        The error's message, or how many steps went; and the seconds from this rank's last
        compilation, or the begin of the last step, to the end.
    """
    ends: list[float] = []
    callback_handler.register_end_callback(lambda _: ends.append(time.monotonic()))
    differs = rank == world_size - 1
    torch.manual_seed(5)
    plain = Branching(24 if differs and how == "other shape" else 16)
    replicas: dict[str, Any] = {}
    if world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        replicas = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    low = MixedPrecision(param_dtype=torch.bfloat16)
    wrapped = FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        mixed_precision=low if differs and how == "other dtype" else None,
        **replicas,
    )
    if differs and how == "other branch":
        plain.order = [1, 0, 2]
    if differs and how == "a unit skipped":
        plain.order = [0, 1]
    model = in_mode(wrapped, mode, bucket=False)
    late_ranks.announce_compilations()
    dist.barrier()
    try:
        for step in range(NUM_STEPS):
            began = time.monotonic()
            if differs and step == 2 and how == "an extra recompile":
                plain.order = [0, 2, 1]
            if differs and step == 0 and how == "late":
                time.sleep(0.5)
            longer = differs and step == 2 and how == "a recompile for a shape"
            model(torch.randn(4 if longer else 2, 16)).square().mean().backward()
    except DivergenceError as error:
        return str(error), time.monotonic() - max([began, *ends])
    return f"{step + 1} steps", time.monotonic() - max([began, *ends])


DIVERGENCES = {
    "other shape": ["collective 0", "unit 'blocks.0'", "144 float32", "208 float32"],
    "other branch": ["collective 0", "unit 'blocks.0'", "unit 'blocks.1'"],
    "other dtype": ["collective 0", "144 float32", "144 bfloat16"],
    "a unit skipped": ["collective 2", "unit 'blocks.2'", "got no further collective"],
    "an extra recompile": [
        "as rank 1 did, got the all-gather of unit 'blocks.",
        "on rank 0, which rank 1 has not come to",
    ],
}


def check_divergence(ranks: RankPool, how: str, mode: str) -> None:
    (message, first_s), (other, other_s) = ranks.run(run_differently, 2, how, mode)
    assert message == other
    for words in DIVERGENCES[how]:
        assert words in message
    if how != "an extra recompile":
        assert "expected rank 1 to issue what rank 0 does" in message
        assert "ranks 0,1" in message
    assert max(first_s, other_s) < BOUND_S


@pytest.mark.parametrize("how", DIVERGENCES)
def test_every_rank_gets_the_error(ranks: RankPool, how: str) -> None:
    check_divergence(ranks, how, "graph")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["other branch", "an extra recompile"])
def test_every_rank_gets_the_error_under_inductor(ranks: RankPool, how: str) -> None:
    """The fingerprint is an argument of generated code, so compile caches keep it."""
    check_divergence(ranks, how, "graph-inductor")


def test_three_ranks_name_the_one_that_differs(ranks: RankPool) -> None:
    messages = {message for message, _ in ranks.run(run_differently, 3, "a unit skipped", "graph")}
    assert len(messages) == 1
    assert "expected rank 2 to issue what rank 0 does" in messages.pop()


@pytest.mark.parametrize(
    "how", ["other branch", pytest.param("an extra recompile", marks=pytest.mark.slow)]
)
def test_every_rank_of_every_replica_gets_the_error(ranks: RankPool, how: str) -> None:
    """Rank 3 differs; ranks 0 and 3 have no group in common."""
    answers = ranks.run(run_differently, 4, how, "graph")
    messages = [message for message, _ in answers]
    wanted = ["rank 3"] if how == "other branch" else ["on rank 2, which rank 3 has not come to"]
    assert all(words in messages[0] for words in wanted)
    assert messages == messages[:1] * 4
    assert max(seconds for _, seconds in answers) < BOUND_S


@pytest.mark.parametrize("how", ["late", "a recompile for a shape", "nothing"])
def test_ranks_that_agree_go_on(ranks: RankPool, how: str) -> None:
    """A rank may be late, or compile again as long as its collectives stay the same."""
    answers = ranks.run(run_differently, 2, how, "graph")
    assert [text for text, _ in answers] == [f"{NUM_STEPS} steps"] * 2


def count_store_writes(rank: int, world_size: int) -> list[int]:
    """Number of comparisons through the store after each step."""
    written: list[int] = []
    model = in_mode(FSDP(Branching(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential})), "graph")
    store = shared_store(world())
    for _ in range(3):
        model(torch.randn(2, 16)).sum().backward()
        written.append(sum(store.check([_key(number, rank)]) for number in range(1, 9)))
    return written


def _key(number: int, rank: int) -> str:
    return f"graph/{number}/digest/{rank}"


def test_a_graph_is_compared_once(ranks: RankPool) -> None:
    assert ranks.run(count_store_writes, 2) == [[2, 2, 2]] * 2  # a forward and a backward


def outcome(action: Callable[[], object], *others: type[Exception]) -> str:
    """The result of an action, or the message of its divergence error or of one of the others."""
    try:
        return str(action())
    except (DivergenceError, *others) as error:
        return str(error)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def compare_texts(rank: int, world_size: int, how: str) -> list[str]:
    """Three exchanges between ranks of which one differs, is late, or does not come."""
    set_agreement_timeout(TIMEOUTS_S.get(how))
    odd = rank == 1
    if how == "busy" and odd:
        with late_ranks.busy():  # as while a frame is compiled
            with late_ranks.busy():
                time.sleep(0.1)
            time.sleep(LONGER_S)
    text = "aaaa" * 100 + ("x" if odd and how == "differs" else "b")
    try:
        if how == "absent" and odd:
            return ["absent"]
        return [outcome(lambda: require_same(world(), "plan", text)) for _ in range(2)]
    finally:
        dist.barrier()  # who is absent stays until the others have noticed
        set_agreement_timeout(None)


@pytest.mark.parametrize("how", ["equal", "busy"])
def test_equal_texts_agree(ranks: RankPool, how: str) -> None:
    assert ranks.run(compare_texts, 3, how) == [["None", "None"]] * 3


def test_texts_are_compared(ranks: RankPool) -> None:
    differing = ranks.run(compare_texts, 3, "differs")
    assert len({answer[0] for answer in differing}) == 1
    assert "the same plan on all ranks" in differing[0][0]
    assert "on rank(s) 1" in differing[0][0]
    assert "aaax' on" in differing[0][0]
    absent = ranks.run(compare_texts, 3, "absent")
    assert absent[1] == ["absent"]
    for answer in (absent[0], absent[2]):
        assert "the plan of rank(s) 1" in answer[0]
        assert "nothing from rank(s) 1 within 1 s" in answer[0]


def wrap_with(rank: int, world_size: int, odd: str, hybrid: bool) -> tuple[str, bool]:
    """What wrapping raises where the last rank has another version of torch installed."""
    version = odd if rank == world_size - 1 else "2.13.0+cu130"
    kwargs: dict[str, Any] = {}
    if hybrid:
        mesh = init_device_mesh("cpu", (2, 2))
        kwargs = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    module = nn.Linear(4, 4)
    with mock.patch.object(torch, "__version__", version):
        error = outcome(lambda: type(FSDP(module, **kwargs)).__name__)
    return error, not any(isinstance(p, DTensor) for p in module.parameters())


@pytest.mark.parametrize("odd", ["2.15.0", "2.13.1+cu130", "2.13.0.dev20261101"])
def test_every_rank_is_told_of_another_torch(ranks: RankPool, odd: str) -> None:
    errors, unchanged = zip(*ranks.run(wrap_with, 3, odd, False), strict=True)
    assert all(unchanged)
    assert len(set(errors)) == 1
    assert "the same versions on all ranks, 'torch 2.13.0, fsdp_dynamo" in errors[0]
    assert f"got 'torch {odd.partition('+')[0]}, fsdp_dynamo" in errors[0]
    assert "on rank(s) 2" in errors[0]


def test_builds_for_other_accelerators_agree(ranks: RankPool) -> None:
    assert ranks.run(wrap_with, 3, "2.13.0+cpu", False) == [("FullyShardedDataParallel", False)] * 3


def test_replicas_with_another_torch(ranks: RankPool) -> None:
    """Also the ranks that share no group with the one that differs."""
    for error, _ in ranks.run(wrap_with, 4, "2.15.0", True):
        assert "torch 2.15.0" in error


def wait_for_each_other(rank: int, world_size: int) -> str:
    """While both compile, each wants to compare what the other never will."""
    with late_ranks.busy():
        return outcome(lambda: require_same(world(), f"plan {rank}", ""))


def test_ranks_that_wait_for_each_other(ranks: RankPool) -> None:
    began = time.monotonic()
    texts = [
        f"plan {rank}: expected the plan {rank} of rank(s) {1 - rank}, "
        f"got a wait for the plan {1 - rank} on rank {1 - rank}"
        for rank in range(2)
    ]
    for message in ranks.run(wait_for_each_other, 2):  # of the rank that has noticed it first
        assert message.startswith(tuple(texts))
    assert time.monotonic() - began < BOUND_S


def count_announcements(rank: int, world_size: int) -> list[str]:
    """This rank's announcements in the store during and after compilations."""
    store = dist.distributed_c10d._get_default_store()
    seen: list[str] = []

    def backend(gm: Any, inputs: Any) -> Any:
        late_ranks.announce_this_compilation()
        seen.append(store.get(f"fsdp_dynamo/health/busy/{rank}").decode())
        return gm.forward

    for size in (2, 3):  # the second is announced from its begin on
        compiled = torch.compile(torch.neg if size == 2 else torch.abs, backend=backend)
        compiled(torch.ones(size))
        seen.append(store.get(f"fsdp_dynamo/health/busy/{rank}").decode())
    return seen


def test_compilations_are_announced(ranks: RankPool) -> None:
    assert ranks.run(count_announcements, 2) == [["1", "0", "1", "0"]] * 2


def share(rank: int, world_size: int, how: str) -> list[str]:
    """Two texts of the first rank, which may be slow, fail once or not come."""
    is_first = True
    set_agreement_timeout(TIMEOUTS_S.get(how))

    def make() -> str:
        nonlocal is_first
        if how == "fails" and is_first:
            is_first = False
            raise ValueError("no such budget")
        if how != "at once":
            time.sleep(LONGER_S)
        return f"made by {rank}"

    try:
        if how == "absent" and rank == 0:
            return []
        return [
            outcome(lambda: share_from_first(world(), "plan", make), ValueError) for _ in range(2)
        ]
    finally:
        dist.barrier()
        set_agreement_timeout(None)


@pytest.mark.parametrize("how", ["at once", "slow"])
def test_the_first_rank_decides(ranks: RankPool, how: str) -> None:
    assert ranks.run(share, 3, how) == [["made by 0"] * 2] * 3


def test_the_first_rank_fails(ranks: RankPool) -> None:
    """Both raise once; the next decision is waited for, however long it takes."""
    first, second = ranks.run(share, 2, "fails")
    assert first == ["no such budget", "made by 0"]
    assert second == ["plan: rank 0 failed: ValueError: no such budget", "made by 0"]
    _, second = ranks.run(share, 2, "absent")
    assert "the plan of rank(s) 0" in second[0]


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


def wait_for_the_late(rank: int, world_size: int, how: str) -> str:
    """Rank 1 comes after some periods, or leaves a notice instead; the others are blocked.

    Rank 2 looks for notices when rank 0 has seen them and closed its connections.
    """
    with mock.patch.object(watchdog, "PERIOD_S", PERIOD_S * (8 if rank == 2 else 1)):
        return _wait_for_the_late(rank, world_size, how)


def _wait_for_the_late(rank: int, world_size: int, how: str) -> str:
    group = world()
    store = shared_store(group)
    entry = f"all_gather x#0 float32 1 - - {group.group_name}"
    require_agreement(group, entry)
    output = torch.zeros(world_size)
    if rank == 1:
        time.sleep(4 * PERIOD_S)
        if how == "never":
            notices.post_notice(store, DivergenceError("rank 1 does not come"))
            began = time.monotonic()
            while not store.check(["ended/0", "ended/2"]):  # connected until then
                assert time.monotonic() - began < BOUND_S
                time.sleep(PERIOD_S)
            return "rank 1 does not come"
    if how == "reduce":  # on a thread of gloo's, not by sends and receives
        output.fill_(1.0)
        reduce = collectives.issue_reduce_mean(output, output, group)
        return outcome(lambda: reduce.wait() or output.tolist())
    gather = collectives.issue_all_gather(output, torch.ones(1), group)
    said = outcome(lambda: gather.wait() or output.tolist())
    store.set(f"ended/{rank}", "")
    return said


@pytest.mark.parametrize("how", ["gather", "reduce", "never"])
def test_long_waits(ranks: RankPool, how: str) -> None:
    """A long wait is not torn apart, and one that would never end does end."""
    expected = "rank 1 does not come" if how == "never" else "[1.0, 1.0, 1.0]"
    assert ranks.run(wait_for_the_late, 3, how) == [expected] * 3


def in_two_groups(rank: int, world_size: int) -> list[str]:
    """Groups of the same ranks share a store; their exchanges are kept apart."""
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    return [
        outcome(lambda g=group, n=number: require_same(g, "plan", f"text {n}"))
        for number in range(3)
        for group in groups
    ]


def test_two_groups_of_the_same_ranks(ranks: RankPool) -> None:
    assert ranks.run(in_two_groups, 2) == [["None"] * 6] * 2


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


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_bad_timeout(seconds: float) -> None:
    with pytest.raises(FSDPValueError, match="a number of seconds above 0"):
        set_agreement_timeout(seconds)
