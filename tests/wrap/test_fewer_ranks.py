"""``reshard_after_forward=2`` on four ranks: pairs of them hold a unit until its backward."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as upstream
from loops import error_of
from models import Transformer, batch, loss_of, make_transformer
from modes import in_mode
from pool import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp_dynamo
from fsdp_dynamo import FSDP, FSDPModule, record_events
from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.process_groups import part_of

BLOCKS, STEPS = 3, 3
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


def _beside(rank: int, world_size: int) -> list[str]:
    wrong = []
    for low in (False, True):
        theirs = _model(upstream, low=low)
        expected = _train(theirs, theirs, rank)
        for case in ("eager", "hooks", "checkpointed", "copied", "by hand"):
            ours = _model(fsdp_dynamo, low=low)
            if case == "checkpointed":
                _checkpointed(ours)
            if case == "copied":
                ours = copy.deepcopy(ours)
            run = in_mode(ours, "hooks" if case == "hooks" else "eager")
            got = _train(ours, run, rank, by_hand=case == "by hand")
            for one, other in zip(got, expected, strict=True):
                rtol, atol = (2e-2, 2e-3) if low else (1e-4, 1e-6)
                if not torch.allclose(one, other, rtol, atol):
                    wrong.append(f"{case}, low={low}")
                    break
    return wrong


def test_equals_torchs(ranks: RankPool) -> None:
    for wrong in ranks.run(_beside, 4):
        assert wrong == []


def _counts(rank: int, world_size: int, num_ranks: int | bool, hybrid: bool) -> tuple[Any, ...]:
    """Of the blocks in a step: gathers by phase and group, kept elements, and peak bytes."""
    mesh = init_device_mesh("cpu", (2, 4)) if hybrid else None
    model = _model(fsdp_dynamo, num_ranks, mesh=mesh)
    unit = model.blocks[0]._fsdp_unit
    group = unit.config.groups.shard
    loss_of(model, batch(rank, 0)).backward()
    model.zero_grad()
    groups = {"all": group, "few": part_of(group, 2)}
    before = {name: len(collective_log.recent(one, 1000)) for name, one in groups.items()}
    loss = loss_of(model, batch(rank, 1))
    kept = sum(flat.kept_shard.tensor.numel() for flat in unit.flats if flat.kept_shard is not None)
    with record_events() as events:
        loss.backward()
    left = [
        flat for one in model._fsdp_root.units for flat in one.flats if flat.kept_shard is not None
    ]
    used = Counter(
        (name, entry.use)
        for name, one in groups.items()
        for entry in collective_log.recent(one, 1000)[before[name] :]
        if entry.kind == "all_gather" and entry.label.startswith("blocks")
    )
    padded = sum(flat.layout.padded_numel for flat in unit.flats)
    gathered = sum(e.num_bytes for e in events if e.kind == "all_gather")
    return used, kept / padded, len(left), gathered / (4 * padded)


def test_the_backward_gathers_among_few(ranks: RankPool) -> None:
    for used, kept, left, gathered in ranks.run(_counts, 4, 2, False):
        assert used == {("all", "forward"): BLOCKS, ("few", "backward"): BLOCKS}
        assert (kept, left, gathered) == (0.5, 0, BLOCKS)
    for used, kept, left, _ in ranks.run(_counts, 4, True, False):
        assert used == {("all", "forward"): BLOCKS, ("all", "backward"): BLOCKS}
        assert (kept, left) == (0, 0)


def _kept(model: Any) -> int:
    units = model._fsdp_root.units
    return sum(flat.kept_shard is not None for unit in units for flat in unit.flats)


def _states(rank: int, world_size: int) -> list[int]:
    """Pieces that are kept: after an evaluation, a forward, another one, and with the setter."""
    model = _model(fsdp_dynamo)
    found = []
    with torch.no_grad():
        model(batch(rank, 0))
    found.append(_kept(model))
    loss_of(model, batch(rank, 0))
    found.append(_kept(model))
    with torch.no_grad():
        model(batch(rank, 0))
    found.append(_kept(model))
    model.set_reshard_after_forward(True)
    loss_of(model, batch(rank, 0)).backward()
    found.append(_kept(model))
    return found


def test_what_is_kept(ranks: RankPool) -> None:
    for found in ranks.run(_states, 4):
        assert found == [0, BLOCKS, 0, 0]


def _errors(rank: int, world_size: int) -> list[str]:
    found = [error_of(lambda n=n: _model(fsdp_dynamo, n)) for n in (3, 0, -2, 8)]
    model = _model(fsdp_dynamo)
    run = in_mode(model, "graph")
    return [*found, error_of(lambda: loss_of(run, batch(rank, 0)))]


def test_errors(ranks: RankPool) -> None:
    for *numbers, graph in ranks.run(_errors, 4):
        for text in numbers:
            assert text.startswith("FSDPValueError")
            assert "a divisor of the number of shards, 4" in text
        assert graph.startswith("CompileRefusedError")
        assert "reshard_after_forward=<number of ranks>" in graph
        assert "blocks.0" in graph


@pytest.mark.slow
def test_hybrid(ranks: RankPool) -> None:
    for used, kept, left, _ in ranks.run(_counts, 8, 2, True):
        assert used == {("all", "forward"): BLOCKS, ("few", "backward"): BLOCKS}
        assert (kept, left) == (0.5, 0)
