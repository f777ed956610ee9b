"""CPU offload. Without an accelerator the device is the host too, but every copy is made.

So what is shown here is that values take the right way through the copies; what a stream leaves in
flight is for the tests with a device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import RankPool

from fsdp_dynamo import FSDP, CPUOffload, FSDPTypeError, MixedPrecision, ShardingStrategy
from fsdp_dynamo.api import converted
from fsdp_dynamo.wrap import arguments

HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _offloaded(**kwargs: Any) -> FSDP:
    """As on an accelerator: on the CPU the argument would change nothing."""
    decide, arguments.offloads = arguments.offloads, lambda given, device: given.offload_params
    try:
        return wrap(
            make_transformer(num_blocks=2), cpu_offload=CPUOffload(offload_params=True), **kwargs
        )
    finally:
        arguments.offloads = decide


def _run(rank: int, world_size: int, mode: str, kwargs: dict[str, Any]) -> tuple[Any, Any, int]:
    """Losses and norms without offload and with it; shards that share memory with what is sent."""
    expected = train(in_mode(wrap(make_transformer(num_blocks=2), **kwargs), mode), rank, clip=1.0)
    sharded = _offloaded(**kwargs)
    got = train(in_mode(sharded, mode), rank, clip=1.0)
    flats = [flat for unit in sharded._fsdp_root.units for flat in unit.flats]
    shared = [f for f in flats if f.shard_to_gather().data_ptr() == f.sharded.data_ptr()]
    assert all(flat.needs_storage and flat.is_offloaded for flat in flats)
    return expected, got, len(shared)


@pytest.mark.parametrize(
    ("mode", "kwargs"),
    [
        ("eager", {}),
        ("eager", {"sharding_strategy": ShardingStrategy.NO_SHARD}),
        ("hooks", {"mixed_precision": HALF}),
        ("graph", {}),
        ("graph", {"sharding_strategy": ShardingStrategy.NO_SHARD, "mixed_precision": HALF}),
        ("graph-inductor", {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    ],
)
def test_losses(ranks: RankPool, mode: str, kwargs: dict[str, Any]) -> None:
    for expected, got, shared in ranks.run(_run, 2, mode, kwargs):
        assert got == expected
        assert shared == 0


def _whole(rank: int, world_size: int) -> list[str]:
    """Where whole parameters are asked for; returns what was wrong."""
    plain = make_transformer(num_blocks=2)
    model = _offloaded()
    wrong = []
    expected = plain.state_dict()
    if any(not torch.equal(v, expected[k]) for k, v in model.state_dict().items()):
        wrong.append("state dict")
    loss_of(model, batch(rank, 0)).backward()
    for rank0_only in (False, True):
        with FSDP.summon_full_params(model, with_grads=True, rank0_only=rank0_only):
            if rank == 0 or not rank0_only:
                for name, param in model.named_parameters():
                    if not torch.equal(param, expected[name]):
                        wrong.append(f"summoned {name}")
                    with torch.no_grad():
                        param.add_(1.0)
        expected = {name: value + 1 for name, value in expected.items()}
        if any(not torch.equal(v, expected[k]) for k, v in model.state_dict().items()):
            wrong.append(f"written back, rank0_only={rank0_only}")
    parts = {n: p.detach() for n, p in model.named_parameters() if n.endswith("qkv.weight")}
    updated = model.update_whole(parts, lambda _, whole: whole * 2)
    if any(not torch.equal(updated[name], part * 2) for name, part in parts.items()):
        wrong.append("update_whole")
    model.load_state_dict(plain.state_dict())
    if train(model, rank)[0] != pytest.approx(ddp_losses(rank, num_blocks=2)[0], rel=1e-6):
        wrong.append("losses after loading")
    return wrong


def test_whole_parameters(ranks: RankPool) -> None:
    assert ranks.run(_whole, 2) == [[], []]


def test_not_an_offload() -> None:
    with pytest.raises(FSDPTypeError, match="expected a CPUOffload or None, got True"):
        converted("cpu_offload", True)
    assert not arguments.offloads(CPUOffload(offload_params=True), torch.device("cpu"))
    assert arguments.offloads(CPUOffload(offload_params=True), torch.device("cuda"))
