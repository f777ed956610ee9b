"""Secondary shards of ``HIERARCHICAL_SHARD``: never out of date, and what they cost in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import RankPool
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import FSDP, ShardingStrategy, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

FULL, HIERARCHICAL = ShardingStrategy.FULL_SHARD, ShardingStrategy.HIERARCHICAL_SHARD
BLOCKS = 1


def _sharded(strategy: ShardingStrategy, num_blocks: int = BLOCKS, **kwargs: Any) -> FSDP:
    if strategy is HIERARCHICAL:
        kwargs["device_mesh"] = init_device_mesh("cpu", (2, 2))
    return wrap(make_transformer(num_blocks=num_blocks), sharding_strategy=strategy, **kwargs)


# -- parameters that change ------------------------------------------------------------------------


@torch.no_grad()
def _in_place(model: Any) -> None:
    for param in model.parameters():
        param.mul_(1.5)


def _one_in_place(model: Any) -> None:
    """One parameter, of which some ranks have no element."""
    with torch.no_grad():
        model.blocks[0].norm1.weight.add_(1)


def _through_data(model: Any) -> None:
    for param in model.parameters():
        param.data.mul_(1.5)


def _other_data(model: Any) -> None:
    for param in model.parameters():
        param.data = param.data * 1.5


def _loaded(model: Any) -> None:
    state = {name: value * 1.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def _summoned(model: Any) -> None:
    with FSDP.summon_full_params(model):
        for param in model.parameters():
            param.data.mul_(1.5)


def _summoned_on_first(model: Any) -> None:
    with FSDP.summon_full_params(model, rank0_only=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)


def _swapped_for_evaluation(model: Any) -> None:
    """Other weights for an evaluation, through ``data``, and the old ones again."""
    kept = [param.data.clone() for param in model.parameters()]
    _through_data(model)
    with torch.no_grad():
        model.evaluated = loss_of(model, batch(0, 9)).item()
    for param, value in zip(model.parameters(), kept, strict=True):
        param.data.copy_(value)


CHANGES: dict[str, Callable[[Any], None]] = {
    "in place": _in_place,
    "one in place": _one_in_place,
    "other data": _other_data,
    "loaded": _loaded,
    "summoned": _summoned,
    "summoned on the first": _summoned_on_first,
    "swapped": _swapped_for_evaluation,
}


def _accumulated(strategy: ShardingStrategy, rank: int, change: Callable[[Any], None]) -> list[Any]:
    """Losses and a norm: parameters change between backwards that accumulate."""
    model = _sharded(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        with model.no_sync():
            losses.append(loss_of(model, batch(rank, 0)))
            losses[-1].backward()
            change(model)
            losses.append(loss_of(model, batch(rank, 0)))
            losses[-1].backward()
        losses.append(loss_of(model, batch(rank, 1)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    evaluated = getattr(model, "evaluated", 0.0)
    return [*(loss.item() for loss in losses), evaluated]


def _between_steps(
    strategy: ShardingStrategy, rank: int, change: Callable[[Any], None]
) -> list[Any]:
    """Losses where parameters change after an evaluation, a step, or a forward without backward."""
    model = _sharded(strategy)
    with torch.no_grad():
        losses = [loss_of(model, batch(rank, 0))]
    change(model)
    with torch.no_grad():
        losses.append(loss_of(model, batch(rank, 0)))
    losses.append(loss_of(model, batch(rank, 0)))
    change(model)
    losses.append(loss_of(model, batch(rank, 0)))
    losses[-1].backward()
    change(model)
    with model.no_sync():
        losses.append(loss_of(model, batch(rank, 0)))
        losses[-1].backward()
    model.clip_grad_norm_(1.0)  # reduces what waits
    change(model)
    with model.no_sync():
        losses.append(loss_of(model, batch(rank, 0)))
    return [loss.item() for loss in losses]


def _with_changes(rank: int, world_size: int) -> list[str]:
    wrong = []
    for name, change in [*CHANGES.items(), ("through data", _through_data)]:
        runs = [("between steps", _between_steps)]
        if name in CHANGES:
            runs.append(("accumulated", _accumulated))
        for where, run in runs:
            got, expected = (run(strategy, rank, change) for strategy in (HIERARCHICAL, FULL))
            if got != pytest.approx(expected, rel=1e-6):
                wrong.append(f"{name}, {where}: {got} for {expected}")
    return wrong


def test_values_are_never_old(ranks: RankPool) -> None:
    for wrong in ranks.run(_with_changes, 4):
        assert wrong == []


def _changed_in_graphs(strategy: ShardingStrategy, rank: int, mode: str) -> list[float]:
    """Losses of one model that goes through all changes, each within an accumulation and after."""
    model = _sharded(strategy)
    run = in_mode(model, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for change in CHANGES.values():
        with model.no_sync():
            for _ in range(2):
                losses.append(loss_of(run, batch(rank, 0)))
                losses[-1].backward()
                change(model)
        for _ in range(2):
            losses.append(loss_of(run, batch(rank, 1)))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
    return [loss.item() for loss in losses]


def _with_changes_in_graphs(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    return _changed_in_graphs(HIERARCHICAL, rank, "graph"), _changed_in_graphs(FULL, rank, "eager")


def test_values_are_never_old_in_graphs(ranks: RankPool) -> None:
    for got, expected in ranks.run(_with_changes_in_graphs, 4):
        assert got == pytest.approx(expected, rel=1e-5)


def _unsharded_by_hand(rank: int, world_size: int) -> tuple[float, float]:
    """Unsharded after a change, where a forward without a backward has left secondary shards."""
    losses = []
    for strategy in (HIERARCHICAL, FULL):
        model = make_transformer(num_blocks=BLOCKS)
        mesh = init_device_mesh("cpu", (2, 2)) if strategy is HIERARCHICAL else None
        policy = ModuleWrapPolicy({type(model.blocks[0])})
        fully_shard(model, policy=policy, strategy=strategy, mesh=mesh)
        loss_of(model, batch(rank, 0))
        _in_place(model)
        for block in model.blocks:
            block.unshard()
        losses.append(loss_of(model, batch(rank, 0)).item())
    return losses[0], losses[1]


def test_unsharded_by_hand(ranks: RankPool) -> None:
    for got, expected in ranks.run(_unsharded_by_hand, 4):
        assert got == expected


def _copied(rank: int, world_size: int) -> list[float]:
    """Of a model and its copy, made while gradients wait; each goes its own way."""
    model = _sharded(HIERARCHICAL)
    with model.no_sync():
        loss_of(model, batch(rank, 0)).backward()
    other = copy.deepcopy(model)
    _in_place(model)
    losses = []
    for one in (model, other, model):
        with one.no_sync():
            losses.append(loss_of(one, batch(rank, 0)).item())
    full = _sharded(FULL)
    losses.append(loss_of(full, batch(rank, 0)).item())
    _in_place(full)
    losses.append(loss_of(full, batch(rank, 0)).item())
    return losses


def test_copies(ranks: RankPool) -> None:
    for changed, copied, again, plain, expected in ranks.run(_copied, 4):
        assert changed == again == expected
        assert copied == plain


def _after_an_error(rank: int, world_size: int) -> list[float]:
    model = _sharded(HIERARCHICAL)
    block = model.blocks[0]
    body = block.module.forward if isinstance(block, FSDP) else block.forward

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    block.module.forward = fails
    try:
        loss_of(model, batch(rank, 0))
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError
    block.module.forward = body
    left = [flat.kept_shard for unit in model._fsdp_root.units for flat in unit.flats]
    assert left == [None] * len(left)
    loss = loss_of(model, batch(rank, 0))
    loss.backward()
    return [loss.item(), loss_of(_sharded(FULL), batch(rank, 0)).item()]


def test_after_an_error(ranks: RankPool) -> None:
    for got, expected in ranks.run(_after_an_error, 4):
        assert got == expected
