"""``reshard_after_forward=2`` on four ranks: pairs of them hold a unit until its backward."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as upstream
from models import Transformer, batch, loss_of, make_transformer
from modes import in_mode
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp_dynamo
from fsdp_dynamo import FSDP, FSDPError, FSDPModule, FSDPValueError, record_events
from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.process_groups import part_of

BLOCKS, STEPS = 2, 3
HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def _model(library: Any, num_ranks: Any = 2, *, low: bool = False, mesh: Any = None) -> Any:
    model = make_transformer(num_blocks=BLOCKS)
    given: dict[str, Any] = {"mesh": mesh or init_device_mesh("cpu", (4,))}
    if low:
        given["mp_policy"] = library.MixedPrecisionPolicy(**HALF)
    for block in model.blocks:
        library.fully_shard(block, reshard_after_forward=num_ranks, **given)
    return library.fully_shard(model, **given)


def _train(model: Any, run: Any, rank: int, *, by_hand: bool = False) -> list[torch.Tensor]:
    """Whole parameters after some steps; one of them only adds up its gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        with torch.no_grad():
            model(batch(rank, step))
        model.set_requires_gradient_sync(step != 0)
        if by_hand:
            model.blocks[1].unshard()
        loss_of(run, batch(rank, step)).backward()
        if step != 0:
            optimizer.step()
            optimizer.zero_grad()
    if isinstance(model, FSDPModule):
        with FSDP.summon_full_params(model):
            return [param.detach().clone() for param in model.parameters()]
    return [param.full_tensor() for param in model.parameters()]


def _checkpointed(model: Transformer) -> None:
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)  # type: ignore[method-assign]


@pytest.mark.parametrize("low", [False, True])
@on_ranks(4)
def test_equals_torchs(rank: int, low: bool) -> None:
    theirs = _model(upstream, low=low)
    expected = _train(theirs, theirs, rank)
    for case in ("eager", "by hand") if low else ("hooks", "checkpointed", "copied"):
        ours = _model(fsdp_dynamo, low=low)
        if case == "checkpointed":
            _checkpointed(ours)
        if case == "copied":
            ours = copy.deepcopy(ours)
        run = in_mode(ours, "hooks" if case == "hooks" else "eager")
        got = _train(ours, run, rank, by_hand=case == "by hand")
        rtol, atol = (2e-2, 2e-3) if low else (1e-4, 1e-6)
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, msg=case)


def _kept(model: Any) -> int:
    """Number of pieces that are kept between forward and backward."""
    units = model._fsdp_root.units
    return sum(flat.kept_shard is not None for unit in units for flat in unit.flats)


def _assert_gathers(
    rank: int, num_ranks: int | bool, kept: float, in_backward: str, mesh: Any = None
) -> None:
    """Part of a block that is kept, and the group of the blocks' gathers in the backward."""
    model = _model(fsdp_dynamo, num_ranks, mesh=mesh)
    unit = model.blocks[0]._fsdp_unit
    group = unit.config.groups.shard
    loss_of(model, batch(rank, 0)).backward()
    model.zero_grad()
    groups = {"all": group, "few": part_of(group, 2)}
    before = {name: len(collective_log.recent(one, 1000)) for name, one in groups.items()}
    loss = loss_of(model, batch(rank, 1))
    kept_shards = [flat.kept_shard for flat in unit.flats if flat.kept_shard is not None]
    kept_numel = sum(shard.tensor.numel() for shard in kept_shards)
    padded_numel = sum(flat.layout.padded_numel for flat in unit.flats)
    assert kept_numel == kept * padded_numel
    with record_events() as events:
        loss.backward()
    assert _kept(model) == 0
    used = Counter(
        (name, entry.use)
        for name, one in groups.items()
        for entry in collective_log.recent(one, 1000)[before[name] :]
        if entry.kind == "all_gather" and entry.label.startswith("blocks")
    )
    assert used == {("all", "forward"): BLOCKS, (in_backward, "backward"): BLOCKS}
    gathered = [e.num_bytes for e in events if e.kind == "all_gather" and e.unit]
    assert sum(gathered) == BLOCKS * 4 * padded_numel


@on_ranks(4)
def test_the_backward_gathers_among_few(rank: int) -> None:
    _assert_gathers(rank, 2, kept=0.5, in_backward="few")
    _assert_gathers(rank, True, kept=0, in_backward="all")


@pytest.mark.slow
@on_ranks(8)
def test_hybrid(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    _assert_gathers(rank, 2, kept=0.5, in_backward="few", mesh=mesh)


@on_ranks(4)
def test_what_is_kept(rank: int) -> None:
    """After an evaluation, a forward, an evaluation behind it, and a step with the setter."""
    model = _model(fsdp_dynamo)
    for with_grad, num_kept in ((False, 0), (True, BLOCKS), (False, 0)):
        with torch.set_grad_enabled(with_grad):
            loss_of(model, batch(rank, 0))
        assert _kept(model) == num_kept
    model.set_reshard_after_forward(True)
    loss_of(model, batch(rank, 0)).backward()
    assert _kept(model) == 0


@on_ranks(4)
def test_errors(rank: int) -> None:
    for number in (3, 0, -2, 8):
        with pytest.raises(FSDPValueError, match="a divisor of the number of shards, 4"):
            _model(fsdp_dynamo, number)
    run = in_mode(_model(fsdp_dynamo), "graph")
    words = r"(?s)blocks\.0.*reshard_after_forward=<number of ranks>"
    with pytest.raises(FSDPError, match=words):
        loss_of(run, batch(rank, 0))
