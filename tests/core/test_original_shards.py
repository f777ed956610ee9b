"""What a rank holds of an original parameter, and optimizers that need the whole of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch.distributed.device_mesh import init_device_mesh

from examples.muon import Muon
from fsdp_dynamo import FSDPValueError, MixedPrecision, ShardingStrategy
from fsdp_dynamo.core.dtensors import local_of


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
            torch.equal(
                local_of(s.param).flatten(), whole[name].flatten()[s.start : s.start + s.numel]
            )
        )
        for name, s in shards.items()
    }
    updated_here: dict[str, int] = {}

    def count(name: str, tensor: torch.Tensor) -> torch.Tensor:
        updated_here[name] = tensor.numel()
        return tensor

    parts = {name: shard.param.detach() for name, shard in shards.items()}
    back = model.update_whole(parts, count)
    assert all(torch.equal(local_of(back[name]), local_of(parts[name])) for name in parts)
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
