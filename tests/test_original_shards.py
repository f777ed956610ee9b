"""What a rank holds of an original parameter, and optimizers that need the whole of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import FSDP, FSDPValueError, MixedPrecision, ShardingStrategy


def orthogonalized(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """An orthogonal matrix near to this one, by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices, plain SGD for the rest; of a wrapped model or not."""

    def __init__(self, model: torch.nn.Module, lr: float = 0.02, momentum: float = 0.9) -> None:
        self.model = model
        super().__init__(model.parameters(), {"lr": lr, "momentum": momentum})

    def _shapes(self) -> dict[str, tuple[torch.nn.Parameter, tuple[int, ...]]]:
        if isinstance(self.model, FSDP):
            shards = self.model.parameter_shards()
            return {name: (shard.param, shard.shape) for name, shard in shards.items()}
        return {name: (p, tuple(p.shape)) for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        momenta: dict[str, torch.Tensor] = {}
        params = self._shapes()
        for name, (param, shape) in params.items():
            if len(shape) < 2:
                param.sub_(param.grad, alpha=group["lr"])
                continue
            state = self.state[param].setdefault("momentum", torch.zeros_like(param))
            momenta[name] = state.mul_(group["momentum"]).add_(param.grad)
        for name, change in self._orthogonalized(momenta).items():
            params[name][0].sub_(change, alpha=group["lr"])

    def _orthogonalized(self, momenta: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if isinstance(self.model, FSDP):
            return self.model.update_whole(momenta, lambda _, whole: orthogonalized(whole))
        return {name: orthogonalized(whole) for name, whole in momenta.items()}


def _batches(world_size: int, step: int) -> Iterable[torch.Tensor]:
    return (batch(rank, step) for rank in range(world_size))


def _muon(rank: int, world_size: int, strategy: ShardingStrategy) -> tuple[Any, Any]:
    plain = make_transformer(num_blocks=2, tied=True)
    reference = Muon(plain)
    mesh = init_device_mesh("cpu", (2, 2)) if strategy.is_hybrid else None
    model = wrap(
        make_transformer(num_blocks=2, tied=True), sharding_strategy=strategy, device_mesh=mesh
    )
    optimizer = Muon(model)
    for step in range(3):
        plain.zero_grad()
        losses = [loss_of(plain, tokens) for tokens in _batches(world_size, step)]
        torch.stack(losses).mean().backward()
        reference.step()
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
    return plain.state_dict(), model.state_dict()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
def test_muon_equals_one_process(ranks: RankPool, strategy: str) -> None:
    for expected, got in ranks.run(_muon, 4, ShardingStrategy[strategy]):
        assert list(expected) == list(got)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)


def _ranges(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    model = wrap(make_transformer(num_blocks=1))
    whole = model.state_dict()
    shards = model.parameter_shards()
    same = {
        name: bool(
            torch.equal(s.param.flatten(), whole[name].flatten()[s.start : s.start + s.numel])
        )
        for name, s in shards.items()
    }
    updated_here: dict[str, int] = {}

    def count(name: str, tensor: torch.Tensor) -> torch.Tensor:
        updated_here[name] = tensor.numel()
        return tensor

    parts = {name: shard.param.detach() for name, shard in shards.items()}
    back = model.update_whole(parts, count)
    assert all(torch.equal(back[name], parts[name]) for name in parts)
    assert {name: tuple(whole[name].shape) for name in shards} == {
        name: shard.shape for name, shard in shards.items()
    }
    return same, {n: (s.start, s.numel) for n, s in shards.items()}, updated_here


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranges(ranks: RankPool, world_size: int) -> None:
    """Parts are what they say they are, cover everything once, and the work is spread."""
    plain = {name: p.numel() for name, p in make_transformer(num_blocks=1).named_parameters()}
    answers = ranks.run(_ranges, world_size)
    assert all(all(same.values()) for same, _, _ in answers)
    for name, numel in plain.items():
        held = sorted(parts[name] for _, parts, _ in answers if parts[name][1])
        position = 0
        for start, length in held:
            assert start == position
            position += length
        assert position == numel
    updated = [name for _, _, here in answers for name in here]
    assert sorted(updated) == sorted(plain)
    loads = [sum(here.values()) for _, _, here in answers]
    assert max(loads) <= 1.5 * min(loads)


def _wrong(rank: int, world_size: int) -> list[str]:
    low = MixedPrecision(param_dtype=torch.bfloat16)
    model = wrap(make_transformer(num_blocks=1), mixed_precision=low)
    calls = [
        ({"nothing": torch.ones(1)}, lambda _, w: w),
        ({"head.weight": torch.ones(1)}, lambda _, w: w),
    ]
    messages = []
    for parts, update in calls:
        try:
            model.update_whole(parts, update)
        except FSDPValueError as error:
            messages.append(str(error))
    return messages


def test_wrong_parts(ranks: RankPool) -> None:
    for unknown, size in ranks.run(_wrong, 2):
        assert "'nothing'" in unknown
        assert "this rank's part of 'head.weight'" in size
