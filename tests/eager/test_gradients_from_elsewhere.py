"""Gradients that reach a unit's parameters other than through the tensors that it returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda out: out,
    "squeeze": lambda out: out.unsqueeze(0).squeeze(0),
    "flatten": lambda out: out.view(-1, 2, 4).flatten(1),
    "slice": lambda out: out[:, :],
}


class _Block(nn.Module):
    """Returns a view, and stores what a loss of its own may use."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.first, self.second, self.router = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.view = view
        self.stored: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out = VIEWS[self.view](self.second(hidden))
        if self.view == "none":
            self.stored = self.router(hidden).square().mean()
        return out


class _Model(nn.Module):
    def __init__(self, view: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_Block(view) for _ in range(3))

    def forward(self, x: torch.Tensor, in_place: bool) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            out = block(x)
            if in_place:
                out += x
                x = out.relu_()
            else:
                x = out + x
        return x


def _check(rank: int, mode: str, view: str, loss: Callable[[Any, torch.Tensor], Any]) -> None:
    plain, inner = _Model(view), _Model(view)
    model = FSDP(inner, auto_wrap_policy=ModuleWrapPolicy({_Block}))
    step = in_mode(model, mode)
    for seed in range(2):  # units are prefetched from the second step on
        batches = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed))
        for used in (plain, model):
            used.zero_grad()
        for batch in batches:
            (loss(plain, plain(batch, view != "none")) / 2).backward()
        loss(inner, step(batches[rank], view != "none")).backward()
        with FSDP.summon_full_params(model, with_grads=True):
            for expected, got in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(got.grad, expected.grad)


@pytest.mark.parametrize("view", ["squeeze", "flatten", "slice"])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_views_changed_in_place_by_the_caller(rank: int, mode: str, view: str) -> None:
    _check(rank, mode, view, lambda model, out: out.square().mean())


@pytest.mark.parametrize("mode", ["hooks", "graph"])
@on_ranks(2)
def test_a_loss_on_a_stored_tensor_compiled(rank: int, mode: str) -> None:
    _check(
        rank,
        mode,
        "none",
        lambda model, out: out.square().mean() + sum(block.stored for block in model.blocks),
    )


@pytest.mark.parametrize("with_output", [False, True])
@on_ranks(2)
def test_a_loss_on_a_stored_tensor_in_eager_mode(rank: int, with_output: bool) -> None:
    """Autograd refuses: the router's weights are needed before the unit's backward begins."""
    inner = _Model("none")
    model = FSDP(inner, auto_wrap_policy=ModuleWrapPolicy({_Block}))
    for _ in range(2):
        out = model(torch.randn(4, 8), False)
        loss = sum(block.stored for block in inner.blocks) + with_output * out.sum()
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()
        for param in model.parameters():
            assert param.grad is None


@on_ranks(2)
def test_the_check_of_saved_views(rank: int) -> None:
    """Views can be unpacked from the end of a gather to the reshard, and not otherwise."""
    model = FSDP(
        nn.Sequential(nn.Linear(4, 4, bias=False)), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    saved: list[Any] = []
    model.module[0].module.register_forward_hook(
        lambda module, args, out: saved.append(module.weight.square())
    )
    out = model(torch.randn(2, 4))
    node = saved[0].grad_fn
    with pytest.raises(RuntimeError, match="inplace"):
        _ = node._saved_self
    seen: list[bool] = []
    out.register_hook(lambda grad: seen.append(node._saved_self is not None))
    out.sum().backward()
    assert seen == [True]
    with pytest.raises(RuntimeError, match="inplace"):
        _ = node._saved_self
