"""CPU offload. Without an accelerator the device is the host too, but every copy is made.

So what is shown here is that values take the right way through the copies; what a stream leaves in
flight is for the tests with a device.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from models import batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import on_ranks

from fsdp_dynamo import FSDP, CPUOffload, FSDPTypeError, MixedPrecision, ShardingStrategy
from fsdp_dynamo.api import converted
from fsdp_dynamo.wrap import arguments

HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _offloaded(**kwargs: Any) -> FSDP:
    """As on an accelerator: on the CPU the argument would change nothing."""
    with mock.patch.object(arguments, "offloads", lambda given, device: given.offload_params):
        offload = CPUOffload(offload_params=True)
        return wrap(make_transformer(num_blocks=1), cpu_offload=offload, **kwargs)


@pytest.mark.parametrize(
    ("mode", "kwargs"),
    [
        ("eager", {}),
        ("eager", {"sharding_strategy": ShardingStrategy.NO_SHARD}),
        ("graph-inductor", {}),
        ("graph", {"sharding_strategy": ShardingStrategy.NO_SHARD, "mixed_precision": HALF}),
    ],
)
@on_ranks(2)
def test_losses(rank: int, mode: str, kwargs: dict[str, Any]) -> None:
    """With offload the bits of a run without it; no shard shares memory with what is sent."""
    plain, sharded = wrap(make_transformer(num_blocks=1), **kwargs), _offloaded(**kwargs)
    expected, got = (train(in_mode(m, mode), rank, clip=1.0) for m in (plain, sharded))
    assert got == expected
    for flat in (flat for unit in sharded._fsdp_root.units for flat in unit.flats):
        assert flat.needs_storage
        assert flat.is_offloaded
        assert flat.shard_to_gather().data_ptr() != flat.sharded.data_ptr()


def _are_equal(got: dict[str, Any], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(got[name], value) for name, value in expected.items())


@on_ranks(2)
def test_whole_parameters(rank: int) -> None:
    """Wherever they are asked for."""
    expected = make_transformer(num_blocks=1).state_dict()
    model = _offloaded()
    assert _are_equal(model.state_dict(), expected)
    loss_of(model, batch(rank, 0)).backward()
    for rank0_only in (False, True):
        with FSDP.summon_full_params(model, with_grads=True, rank0_only=rank0_only):
            if rank == 0 or not rank0_only:
                assert _are_equal(dict(model.named_parameters()), expected)
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(1.0)
        expected = {name: value + 1 for name, value in expected.items()}
        assert _are_equal(model.state_dict(), expected)  # written back
    parts = {n: p.detach() for n, p in model.named_parameters() if n.endswith("qkv.weight")}
    updated = model.update_whole(parts, lambda _, whole: whole * 2)
    assert all(torch.equal(updated[name], part * 2) for name, part in parts.items())
    model.load_state_dict(make_transformer(num_blocks=1).state_dict())
    losses, _ = ddp_losses(rank, num_blocks=1)
    assert train(model, rank)[0] == pytest.approx(losses, rel=1e-6)


def test_not_an_offload() -> None:
    with pytest.raises(FSDPTypeError, match="expected a CPUOffload or None, got True"):
        converted("cpu_offload", True)
    assert not arguments.offloads(CPUOffload(offload_params=True), torch.device("cpu"))
    assert arguments.offloads(CPUOffload(offload_params=True), torch.device("cuda"))
