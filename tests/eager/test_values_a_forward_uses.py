"""A forward computes with what the shards hold when it begins, and with later in-place writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modes import in_mode
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, ShardingStrategy, fully_shard, record_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

KEPT = "unsharded from forward to backward"  # on request, until a write that leaves a trace
FRONTS: dict[str, Callable[[nn.Module], Any]] = {
    "wrapper": lambda model: FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
    KEPT: lambda model: FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    ),
    "fully_shard": lambda model: fully_shard(model, policy=ModuleWrapPolicy({nn.Linear})),
}


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "lerp_": lambda mine, other: mine.lerp_(other, 0.5),
    "copy_": lambda mine, other: mine.copy_(other),
    "foreach": lambda mine, other: torch._foreach_lerp_([mine], [other], 0.5),
    "in place through data": lambda mine, other: mine.data.copy_(other),
}


class _Distilled(nn.Module):
    """A teacher that follows its student between their forwards."""

    def __init__(self, write: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = (
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)
        )
        self.write = write

    def update(self, scale: float = 1.0) -> None:
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        with torch.no_grad():
            for mine, other in pairs:
                WRITES[self.write](mine, other if scale == 1.0 else other * scale)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        out = self.student(x)
        for _ in range(times):
            self.update()
        with torch.no_grad():
            target = self.teacher(x)
        return (out - target).square().mean()


@pytest.mark.parametrize(
    ("front", "mode", "write"),
    [
        ("wrapper", "eager", "lerp_"),
        ("wrapper", "eager", "copy_"),
        (KEPT, "eager", "lerp_"),
        ("fully_shard", "eager", "copy_"),
        ("wrapper", "hooks", "foreach"),  # leaves no trace in DTensors in eager mode
        ("wrapper", "hooks", "copy_"),
    ],
)
@on_ranks(2)
def test_parameters_written_inside_a_forward(rank: int, front: str, mode: str, write: str) -> None:
    plain, model = _Distilled(write), FRONTS[front](_Distilled(write))
    step = in_mode(model, mode)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
    for _ in range(3):  # units are prefetched from the second step on
        x = torch.randn(4, 8)  # the same on both ranks
        for run, optimizer in zip((plain, step), optimizers, strict=True):
            optimizer.zero_grad()
            loss = run(x, 1)
            loss.backward()
            optimizer.step()
            if run is plain:
                expected = loss
        torch.testing.assert_close(loss, expected)


@on_ranks(2)
def test_ranks_gather_alike_whatever_is_replaced_inside_a_forward(rank: int) -> None:
    """A rank without elements of a parameter cannot see that its storage was replaced."""
    first, second, third = nn.Linear(2, 2), nn.Linear(4, 4), nn.Linear(4, 2)
    model = FSDP(
        nn.Sequential(second, nn.Sequential(third, first)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
    )
    unit = model.module[1]

    def replace(module: nn.Module, args: Any) -> None:
        weight = unit.module[0].weight
        if weight._local_tensor.numel():
            weight._local_tensor = weight._local_tensor * 2

    model.module[0].register_forward_pre_hook(replace)
    for _ in range(3):  # the unit is prefetched from the second on
        with record_events() as log:
            model(torch.randn(3, 4)).sum().backward()
        gathers = [event.unit for event in log if event.kind == "all_gather"]
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, gathers)
        assert everyone[0] == everyone[1]


@pytest.mark.parametrize(
    ("front", "write"),
    [("wrapper", "lerp_"), ("fully_shard", "foreach"), ("wrapper", "in place through data")],
)
@on_ranks(2)
def test_graph_mode_refuses_writes_before_a_gather(rank: int, front: str, write: str) -> None:
    model = FRONTS[front](_Distilled(write))
    with pytest.raises(Exception, match=r"UnsupportedError: parameter 'teacher\.0\."):
        in_mode(model, "graph")(torch.randn(4, 8), 1)


@pytest.mark.parametrize(
    ("front", "mode"),
    [*((front, "eager") for front in FRONTS), ("wrapper", "hooks"), ("fully_shard", "graph")],
)
@on_ranks(2)
def test_parameters_written_between_forwards(rank: int, front: str, mode: str) -> None:
    """No backward comes in between, so that the root, or all units, were left unsharded."""
    plain, model = _Distilled("lerp_"), FRONTS[front](_Distilled("lerp_"))
    step, inner = in_mode(model, mode), getattr(model, "module", model)
    x = torch.randn(4, 8)
    for write in WRITES:
        if front == KEPT and "data" in write:
            continue
        for scale in (1.0, 2.0):  # so that each write changes something
            torch.testing.assert_close(step(x, 0), plain(x, 0))
            for one in (plain, inner):
                one.write = write
                one.update(scale)
        torch.testing.assert_close(step(x, 0), plain(x, 0))


@on_ranks(2)
def test_parameters_written_while_a_backward_leaves_them_unsharded(rank: int) -> None:
    """As an optimizer does that runs in the backward."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    model.set_reshard_after_backward(False)
    for used in (plain, model):
        for param in used.parameters():
            param.register_post_accumulate_grad_hook(_descend)
    for _ in range(2):
        x = torch.randn(3, 4)  # the same on both ranks
        out, expected = model(x), plain(x)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        expected.sum().backward()


def _descend(param: torch.Tensor) -> None:
    assert param.grad is not None
    with torch.no_grad():
        param.sub_(param.grad)
    param.grad = None
