"""Numbers under compile: randomness, what is not finite, gradients that are missing.

Autocast: test_checkpointing.py, beside FSDP2.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from loops import classification_loss, examples, fit, make_classifier, shard
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.nn import functional as F

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

DIM = 6


def _gradients(model: FSDP) -> dict[str, torch.Tensor | None]:
    """Whole gradients by name."""
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        return {
            name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        }


def _everywhere(value: float) -> list[float]:
    """A number of each rank."""
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@on_ranks(2)
def test_dropout(rank: int) -> None:
    """Two runs from one seed a rank, and eager from the same; each rank has masks of its own."""
    losses = []
    for mode in ("graph", "graph", "eager"):
        plain = make_classifier()
        for block in plain[:2]:
            block.append(nn.Dropout(0.5))
        model = shard(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(100 + rank)
        losses.append(fit(in_mode(model, mode), optimizer, 0, range(3)))  # the same batches
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
    first, other = _everywhere(losses[0][0])
    assert first != other


@pytest.mark.parametrize(
    ("mode", "value"), [("eager", float("inf")), ("hooks", float("inf")), ("graph", float("nan"))]
)
@on_ranks(2)
def test_what_is_not_finite_reaches_all_ranks(rank: int, mode: str, value: float) -> None:
    """One rank's loss is not finite: all ranks' gradients are not, and clipping says so."""
    model = shard(make_classifier())
    loss = classification_loss(in_mode(model, mode), examples(rank))
    (loss * (value if rank == 1 else 1.0)).backward()
    assert not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad.numel())
    norm = float(model.clip_grad_norm_(1.0))
    assert not torch.tensor(norm).isfinite()
    assert len({str(one) for one in _everywhere(norm)}) == 1


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


@pytest.mark.parametrize(
    ("mode", "users"),
    [("eager", (0,)), ("hooks", (0,)), ("graph", (0, 1)), ("graph", (0,)), ("graph", ())],
)
@on_ranks(2)
def test_strided_and_missing_gradients(rank: int, mode: str, users: tuple[int, ...]) -> None:
    """Accumulated over two steps, compared with one process that does what all ranks do."""
    inputs = [torch.randn(4, DIM, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    plain = _layers()
    model = FSDP(_layers(), auto_wrap_policy=ModuleWrapPolicy({_Layer}))
    run = in_mode(model, mode)
    model.module[1].module.use = rank in users
    for _ in range(2):
        run(inputs[rank]).square().mean().backward()
        for r, x in enumerate(inputs):
            plain[1].use = r in users
            (plain(x).square().mean() / len(inputs)).backward()
    got = _gradients(model)
    for name, want in plain.named_parameters():
        if want.grad is None:
            assert got[name] is None
        else:
            torch.testing.assert_close(got[name], want.grad, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("mode", ["hooks", "graph"])
@on_ranks(2)
def test_views_of_parameters(rank: int, mode: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Viewed(), Viewed())
    found = []
    for each in ("eager", mode):
        model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({Viewed}))
        loss = in_mode(model, each)(torch.full((2, DIM), rank + 1.0)).square().sum()
        loss.backward()
        found.append((loss.detach(), _gradients(model)))
    torch.testing.assert_close(found[1], found[0])
