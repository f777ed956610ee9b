"""Ranks that diverge get an error on every rank, never a hang."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from test_passes import Builder
from torch import nn
from ways import in_way

from fsdp_dynamo import FSDP, DivergenceError, FSDPValueError, MixedPrecision, set_agreement_timeout
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.fingerprint import SEPARATOR, describe_entry, fingerprint

NUM_STEPS = 4
SHORT_S = 3.0
SLACK_S = 30.0  # a busy machine; a hang lasts as long as the group's timeout, 60 s


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


def run_differently(rank: int, world_size: int, how: str, way: str) -> tuple[str, float]:
    """Some steps in which the last rank differs.

    Returns:
        The error's message, or how many steps went; and the seconds of the step that ended it, less
        those in which this rank compiled.
    """
    differs = rank == world_size - 1
    torch.manual_seed(5)
    plain = Branching(24 if differs and how == "other shape" else 16)
    low = MixedPrecision(param_dtype=torch.bfloat16)
    wrapped = FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        mixed_precision=low if differs and how == "other dtype" else None,
    )
    if differs and how == "other branch":
        plain.order = [1, 0, 2]
    if differs and how == "a unit skipped":
        plain.order = [0, 1]
    model = in_way(wrapped, way)
    set_agreement_timeout(SHORT_S)
    try:
        for step in range(NUM_STEPS):
            began = time.monotonic()
            if differs and step == 2 and how == "an extra recompile":
                plain.order = [0, 2, 1]
            if differs and step == 0 and how == "late":
                time.sleep(SHORT_S / 2)
            longer = differs and step == 2 and how == "a recompile for a shape"
            model(torch.randn(4 if longer else 2, 16)).square().mean().backward()
    except DivergenceError as error:
        return str(error), time.monotonic() - began
    finally:
        set_agreement_timeout(10.0)
    return f"{step + 1} steps", time.monotonic() - began


DIVERGENCES = {
    "other shape": ["collective 0", "unit 'blocks.0'", "136 float32", "204 float32"],
    "other branch": ["collective 0", "unit 'blocks.0'", "unit 'blocks.1'"],
    "other dtype": ["collective 0", "136 float32", "136 bfloat16"],
    "a unit skipped": ["collective 2", "unit 'blocks.2'", "got no further collective"],
    "an extra recompile": ["nothing from rank(s) 0 within 3 s", "set_agreement_timeout"],
}


@pytest.mark.parametrize("how", DIVERGENCES)
def test_every_rank_gets_the_error(ranks: RankPool, how: str) -> None:
    messages = ranks.run(run_differently, 2, how, "graph")
    assert messages[0] == messages[1]
    for words in DIVERGENCES[how]:
        assert words in messages[0]
    if how != "an extra recompile":
        assert "expected rank 1 to issue what rank 0 does" in messages[0]
        assert "ranks 0,1" in messages[0]


@pytest.mark.parametrize("how", ["other branch", "an extra recompile"])
def test_every_rank_gets_the_error_under_inductor(ranks: RankPool, how: str) -> None:
    """The fingerprint is an argument of generated code, so compile caches keep it."""
    messages = ranks.run(run_differently, 2, how, "graph-inductor")
    assert messages[0] == messages[1]
    assert all(words in messages[0] for words in DIVERGENCES[how])


def test_three_ranks_name_the_one_that_differs(ranks: RankPool) -> None:
    messages = set(ranks.run(run_differently, 3, "a unit skipped", "graph"))
    assert len(messages) == 1
    assert "expected rank 2 to issue what rank 0 does" in messages.pop()


@pytest.mark.parametrize("how", ["slow to compile", "a recompile for a shape", "nothing"])
def test_ranks_that_agree_go_on(ranks: RankPool, how: str) -> None:
    """A rank may be late, or compile again as long as its collectives stay the same."""
    assert ranks.run(run_differently, 2, how, "graph") == [f"{NUM_STEPS} steps"] * 2


def count_store_writes(rank: int, world_size: int) -> list[int]:
    """How often a rank has asked the store, after each step."""
    written: list[int] = []
    model = in_way(FSDP(Branching(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential})), "graph")
    store = dist.distributed_c10d._get_default_store()
    for _ in range(3):
        model(torch.randn(2, 16)).sum().backward()
        written.append(sum(store.check([_key(number, rank)]) for number in range(1, 9)))
    return written


def _key(number: int, rank: int) -> str:
    return f"fsdp_dynamo/agreement/0-1/{number}/{rank}"


def test_a_graph_is_compared_once(ranks: RankPool) -> None:
    assert ranks.run(count_store_writes, 2) == [[2, 2, 2]] * 2  # a forward and a backward


def test_fingerprint() -> None:
    builder = Builder()
    shard = builder.input("shard")
    shard.meta["val"] = torch.empty(10, dtype=torch.bfloat16)
    unsharded = builder.gather("blocks.0", shard)
    unsharded.meta["val"] = torch.empty(20)
    builder.graph.output(builder.reduce("", unsharded))
    gather, reduce = fingerprint(builder.graph).split(SEPARATOR)
    assert gather == "all_gather_into_tensor blocks.0#0 bfloat16 10 - g"
    assert reduce == "reduce_scatter_tensor (root)#0 float32 20 avg g"
    assert describe_entry(reduce) == (
        "reduce_scatter_tensor (avg) of unit '(root)', flat parameter 0, 20 float32, ranks g"
    )
    assert describe_entry("") == "no further collective"


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_bad_timeout(seconds: float) -> None:
    with pytest.raises(FSDPValueError, match="a number of seconds above 0"):
        set_agreement_timeout(seconds)
