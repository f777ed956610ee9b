"""Every combination of strategy, mode, precision, checkpointing and frozen parameters, against one
process that sees all ranks' batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

from fsdp_dynamo import FSDP, MixedPrecision, ShardingStrategy, record_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

STEPS = 2
LEARNING_RATE = 0.1
NUM_BLOCKS = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(3, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(NUM_BLOCKS)])
        self.outer = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.blocks(self.inner(x)))
        return out


class Case(NamedTuple):
    strategy: ShardingStrategy
    low_precision: bool
    checkpointed: bool
    frozen: bool

    def __str__(self) -> str:
        flags = [name for name in self._fields[1:] if getattr(self, name)]
        return " ".join([self.strategy.name, *flags])


def cases(grid: bool) -> Iterator[Case]:
    """Those of strategies whose ranks form a grid, or of the others."""
    for strategy, *flags in itertools.product(ShardingStrategy, *[(False, True)] * 3):
        if needs_grid(strategy) is grid:
            yield Case(strategy, *flags)


def needs_grid(strategy: ShardingStrategy) -> bool:
    return strategy.is_hybrid or strategy.is_hierarchical


def make_model(case: Case) -> Model:
    torch.manual_seed(1)
    model = Model()
    if case.frozen:
        for block in model.blocks:
            block.up.requires_grad_(False)
    return model


def batch_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 3, generator=generator)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def reference(case: Case, world_size: int) -> dict[str, torch.Tensor]:
    """Parameters after some steps of SGD on the mean of all ranks' gradients, in fp32."""
    model = make_model(case)
    dtype = torch.bfloat16 if case.low_precision else torch.float32
    params = dict(model.named_parameters())
    trained = {name: p for name, p in params.items() if p.requires_grad}
    for step in range(STEPS):
        sums = {name: torch.zeros_like(p) for name, p in trained.items()}
        for rank in range(world_size):
            low = {name: p.detach().to(dtype).requires_grad_() for name, p in params.items()}
            loss = loss_of(functional_call(model, low, batch_of(rank, step).to(dtype)))
            grads = torch.autograd.grad(loss, [low[name] for name in trained])
            for name, grad in zip(trained, grads, strict=True):
                sums[name] += grad.float()
        with torch.no_grad():
            for name, p in trained.items():
                p.sub_(sums[name] / world_size, alpha=LEARNING_RATE)
    return {name: p.detach() for name, p in params.items()}


def check_case(case: Case, rank: int, mode: str) -> None:
    """Compare parameters with the reference's; count all-gathers."""
    world_size = dist.get_world_size()
    model = make_model(case)
    if case.checkpointed:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
    mesh = init_device_mesh("cpu", (2, world_size // 2)) if needs_grid(case.strategy) else None
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = FSDP(
        model,
        sharding_strategy=case.strategy,
        device_mesh=mesh,
        mixed_precision=low if case.low_precision else None,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )
    run = in_mode(wrapped, mode)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        with record_events() as log:
            loss_of(run(batch_of(rank, step))).backward()
        optimizer.step()
    expected = reference(case, world_size)
    got = wrapped.state_dict()
    rtol, atol = (2e-2, 2e-3) if case.low_precision else (1e-5, 1e-6)
    wrong = [n for n in expected if not torch.allclose(got[n], expected[n], rtol, atol)]
    assert wrong == [], str(case)
    # A unit with a frozen part has two flat parameters.
    flats = NUM_BLOCKS * (1 + case.frozen)
    wanted = 1 + flats * (1 + case.strategy.reshards_after_forward)
    if case.strategy is ShardingStrategy.NO_SHARD:
        wanted = 0
    if case.strategy.is_hierarchical:
        wanted += 1 + flats  # between nodes
    assert len(log.keys("all_gather")) <= wanted, str(case)


def check_all(rank: int, mode: str, grid: bool) -> None:
    for case in cases(grid):
        check_case(case, rank, mode)
        torch._dynamo.reset()
        dist.barrier()


@pytest.mark.parametrize("mode", ["eager", pytest.param("hooks", marks=pytest.mark.slow), "graph"])
@on_ranks(2)
def test_on_two_ranks(rank: int, mode: str) -> None:
    check_all(rank, mode, grid=False)


@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize(
    "mode", ["eager", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("hooks", "graph"))]
)
@on_ranks(4)
def test_on_four_ranks(rank: int, mode: str, grid: bool) -> None:
    """Compiled, these 48 cases take minutes on 2 cores: ``pytest -m slow``."""
    check_all(rank, mode, grid)
