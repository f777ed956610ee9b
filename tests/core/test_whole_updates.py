"""Optimizers that need whole tensors, of which every rank has a part."""

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


def _shared_out(rank: int, world_size: int) -> dict[str, int]:
    model = wrap(make_transformer(num_blocks=1))
    plain = dict(make_transformer(num_blocks=1).named_parameters())
    updated_here: dict[str, int] = {}

    def negated(name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert torch.equal(tensor, plain[name])
        updated_here[name] = tensor.numel()
        return -tensor

    parts = {name: param.detach() for name, param in model.named_parameters()}
    back = model.update_whole(parts, negated)
    assert all(torch.equal(local_of(back[name]), -local_of(parts[name])) for name in parts)
    return updated_here


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_work_is_spread(ranks: RankPool, world_size: int) -> None:
    """Each tensor is updated once, and all ranks have about as much to do."""
    answers = ranks.run(_shared_out, world_size)
    updated = [name for here in answers for name in here]
    assert sorted(updated) == sorted(dict(make_transformer(num_blocks=1).named_parameters()))
    loads = [sum(here.values()) for here in answers]
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
    for unknown, kind in ranks.run(_wrong, 2):
        assert "'nothing'" in unknown
        assert "placed as 'head.weight'" in kind
