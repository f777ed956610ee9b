"""Numbers under compile: precision, randomness, what is not finite, gradients that are missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batch, loss_of, make_transformer, train, wrap
from modes import MODES, in_mode
from pool import RankPool
from torch import nn
from torch.nn import functional as F

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

COMPILED = ("hooks", "graph")
DIM = 6


def _gradients(model: FSDP) -> dict[str, torch.Tensor | None]:
    """Whole gradients by name."""
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        return {
            name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        }


# -- autocast --------------------------------------------------------------------------------------


def _under_autocast(rank: int, world_size: int, mode: str) -> tuple[list[float], list[float], set]:
    def run(mode: str) -> tuple[list[float], FSDP]:
        model = wrap(make_transformer(num_blocks=2))
        compiled = in_mode(model, mode)
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(compiled, batch(rank, step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model

    expected, _ = run("eager")
    losses, model = run(mode)
    return expected, losses, {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", [pytest.param("hooks", marks=pytest.mark.slow), "graph"])
def test_autocast(ranks: RankPool, mode: str) -> None:
    for expected, losses, dtypes in ranks.run(_under_autocast, 2, mode):
        assert losses == pytest.approx(expected, rel=1e-2)  # bfloat16 in another order of sums
        assert dtypes == {"torch.float32"}


# -- dropout ---------------------------------------------------------------------------------------


def _dropped(rank: int, world_size: int, mode: str) -> tuple[list[float], list[float], list[float]]:
    """Losses of two runs from one seed a rank, and of eager from the same."""

    def run(mode: str) -> list[float]:
        plain = make_transformer(num_blocks=2)
        for block in plain.blocks:
            block.down = nn.Sequential(block.down, nn.Dropout(0.5))
        model = in_mode(wrap(plain), mode)
        torch.manual_seed(100 + rank)
        return train(model, 0, steps=3)[0]  # the same tokens on all ranks

    return run(mode), run(mode), run("eager")


@pytest.mark.parametrize("mode", COMPILED)
def test_dropout(ranks: RankPool, mode: str) -> None:
    (first, again, eager), (other, _, _) = ranks.run(_dropped, 2, mode)
    assert first == again
    assert first == pytest.approx(eager, rel=1e-5)
    assert first != other  # each rank has masks of its own


# -- what is not finite ----------------------------------------------------------------------------


def _not_finite(rank: int, world_size: int, mode: str, value: float) -> tuple[bool, float, str]:
    """One rank's loss is not finite: all ranks' gradients are not, and clipping says so."""
    model = wrap(make_transformer(num_blocks=2))
    loss = loss_of(in_mode(model, mode), batch(rank, 0))
    (loss * (value if rank == 1 else 1.0)).backward()
    finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad.numel())
    norm = float(model.clip_grad_norm_(1.0))
    return finite, norm, str(norm)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)]
)
def test_what_is_not_finite_reaches_all_ranks(ranks: RankPool, mode: str, value: float) -> None:
    found = ranks.run(_not_finite, 2, mode, value)
    for finite, norm, _ in found:
        assert not finite
        assert not torch.tensor(norm).isfinite()
    assert found[0][2] == found[1][2]


# -- gradients that are strided, or missing --------------------------------------------------------


class _Layer(nn.Module):
    """Its gradients are transposed, expanded, sliced; one layer is used on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(DIM, DIM))
        self.expanded = nn.Parameter(torch.randn(DIM))
        self.sliced = nn.Parameter(torch.randn(2 * DIM, DIM))
        self.sometimes = nn.Linear(DIM, DIM)
        self.use = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + x @ self.transposed.t() + self.expanded.expand(x.shape)
        x = x + F.linear(x, self.sliced[::2]) + self.expanded.sum()
        return self.sometimes(x) if self.use else x.tanh()


def _layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(_Layer(), _Layer(), nn.Linear(DIM, 1))


def _missing(rank: int, world_size: int, mode: str, users: tuple[int, ...]) -> list[str]:
    """Compare with one process that does what all ranks do; what was wrong."""
    inputs = [torch.randn(4, DIM, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    plain = _layers()
    model = FSDP(_layers(), auto_wrap_policy=ModuleWrapPolicy({_Layer}))
    run = in_mode(model, mode)
    for r, x in enumerate(inputs):
        plain[1].use = r in users
        (plain(x).square().mean() / world_size).backward()
    model.module[1].module.use = rank in users
    for step in range(2):
        run(inputs[rank]).square().mean().backward()
        if step == 0:
            model.zero_grad()
    wrong = []
    for (name, got), want in zip(_gradients(model).items(), plain.parameters(), strict=True):
        if got is None or want.grad is None:
            if got is not want.grad:
                wrong.append(name)
        elif not torch.allclose(got, want.grad, 1e-4, 1e-6):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("users", [(0, 1), (0,), ()])
@pytest.mark.parametrize("mode", MODES)
def test_strided_and_missing_gradients(ranks: RankPool, mode: str, users: tuple[int, ...]) -> None:
    assert ranks.run(_missing, 2, mode, users) == [[], []]


# -- accumulation ----------------------------------------------------------------------------------


def _accumulated(rank: int, world_size: int, mode: str) -> Any:
    def run(mode: str) -> dict[str, torch.Tensor | None]:
        model = wrap(make_transformer(num_blocks=2))
        compiled = in_mode(model, mode)
        for step in range(3):
            loss_of(compiled, batch(rank, step)).backward()
        return _gradients(model)

    expected, got = run("eager"), run(mode)
    return [n for n in got if not torch.allclose(got[n], expected[n], 1e-4, 1e-6)]


@pytest.mark.parametrize("mode", COMPILED)
def test_accumulation_over_backwards(ranks: RankPool, mode: str) -> None:
    assert ranks.run(_accumulated, 2, mode) == [[], []]


# -- views of parameters ---------------------------------------------------------------------------


class Viewed(nn.Module):
    """Parameters seen in other shapes, of which one is left to torch, and as another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(DIM))
        self.matrix = nn.Parameter(torch.rand(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.matrix.reshape(self.gain.size(0), -1)
        exponents = (self.matrix.detach().view(torch.int32) >> 23) / 128
        flat = self.matrix.view(-1).view(-1, 2).sum(1)
        x = x * self.gain.view(1, -1) + self.matrix.view(-1, 1).T[:, :DIM]
        return x @ rows.T * exponents[0] + flat.view(3, -1).sum()


def _views(rank: int, world_size: int, mode: str) -> tuple[Any, Any]:
    def run(mode: str) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        torch.manual_seed(0)
        policy = ModuleWrapPolicy({Viewed})
        model = FSDP(nn.Sequential(Viewed(), Viewed()), auto_wrap_policy=policy)
        loss = in_mode(model, mode)(torch.full((2, DIM), rank + 1.0)).square().sum()
        loss.backward()
        return loss.detach(), _gradients(model)

    return run("eager"), run(mode)


@pytest.mark.parametrize("mode", COMPILED)
def test_views_of_parameters(ranks: RankPool, mode: str) -> None:
    for (loss, gradients), (got, got_gradients) in ranks.run(_views, 2, mode):
        torch.testing.assert_close(got, loss)
        torch.testing.assert_close(got_gradients, gradients)
