"""Secondary shards of ``HIERARCHICAL_SHARD``: never out of date, and what they cost and save."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import batch, loss_of, make_transformer, through, wrap
from modes import in_mode
from namespaces import join_host, needs_link
from pool import RankPool, on_ranks
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import hierarchy_bytes, link
from benchmarks.workloads.catalogue import decoder
from fsdp_dynamo import FSDP, MixedPrecision, ShardingStrategy, record_events

FULL, HIERARCHICAL = ShardingStrategy.FULL_SHARD, ShardingStrategy.HIERARCHICAL_SHARD


def _sharded(strategy: ShardingStrategy, num_blocks: int = 1, **kwargs: Any) -> FSDP:
    mesh = init_device_mesh("cpu", (2, 2)) if strategy is HIERARCHICAL else None
    model = make_transformer(num_blocks=num_blocks)
    return wrap(model, sharding_strategy=strategy, device_mesh=mesh, **kwargs)


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


def _accumulated(strategy: ShardingStrategy, rank: int, mode: str) -> list[float]:
    """Losses of one model that goes through all changes, each within an accumulation and after."""
    model: Any = _sharded(strategy)
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
    return [*(loss.item() for loss in losses), model.evaluated]


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(4)
def test_values_are_never_old(rank: int, mode: str) -> None:
    got, expected = _accumulated(HIERARCHICAL, rank, mode), _accumulated(FULL, rank, "eager")
    assert got == pytest.approx(expected, rel=1e-6 if mode == "eager" else 1e-5)


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


@on_ranks(4)
def test_values_between_steps_are_never_old(rank: int) -> None:
    for name, change in [*CHANGES.items(), ("through data", _through_data)]:
        got, expected = (_between_steps(s, rank, change) for s in (HIERARCHICAL, FULL))
        assert got == pytest.approx(expected, rel=1e-6), name


@on_ranks(4)
def test_unsharded_by_hand(rank: int) -> None:
    """Unsharded after a change, where a forward without a backward has left secondary shards."""
    losses = []
    for strategy in (HIERARCHICAL, FULL):
        mesh = init_device_mesh("cpu", (2, 2)) if strategy is HIERARCHICAL else None
        plain = make_transformer(num_blocks=1)
        model = through("fully_shard", plain, strategy=strategy, mesh=mesh)
        loss_of(model, batch(rank, 0))
        _in_place(model)
        for block in model.blocks:
            block.unshard()
        losses.append(loss_of(model, batch(rank, 0)).item())
    assert losses[0] == losses[1]


@on_ranks(4)
def test_copies(rank: int) -> None:
    """Of a model and its copy, made while gradients wait; each goes its own way."""

    def loss(one: Any) -> float:
        with one.no_sync():
            return loss_of(one, batch(rank, 0)).item()

    full = _sharded(FULL)
    plain = loss(full)
    _in_place(full)
    expected = loss(full)
    model = _sharded(HIERARCHICAL)
    with model.no_sync():
        loss_of(model, batch(rank, 0)).backward()
    other = copy.deepcopy(model)
    _in_place(model)
    assert [loss(one) for one in (model, other, model)] == [expected, plain, expected]


@on_ranks(4)
def test_after_an_error(rank: int) -> None:
    model = _sharded(HIERARCHICAL)
    with (
        mock.patch.object(model.blocks[0].module, "forward", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
    ):
        loss_of(model, batch(rank, 0))
    left = [flat.kept_shard for unit in model._fsdp_root.units for flat in unit.flats]
    assert left == [None] * len(left)
    loss = loss_of(model, batch(rank, 0))
    loss.backward()
    assert loss.item() == loss_of(_sharded(FULL), batch(rank, 0)).item()


# -- memory ----------------------------------------------------------------------------------------


def _memory(
    rank: int, strategy: ShardingStrategy, precision: MixedPrecision | None
) -> dict[str, int]:
    """Bytes of flat parameters: what stands, what a step has, what is left."""
    model = _sharded(strategy, num_blocks=4, mixed_precision=precision)
    flats = [flat for unit in model._fsdp_root.units for flat in unit.flats]
    secondary: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: secondary.append(_kept(flats)))
    with record_events() as log:
        loss = loss_of(model, batch(rank, 0))
        secondary.append(_kept(flats))
        loss.backward()
    assert _kept(flats) == 0
    assert min(secondary) == max(secondary)
    padded = sum(flat.layout.padded_numel for flat in flats)
    assert sum(flat.sharded.nbytes for flat in flats) == 4 * padded // (4)
    unsharded = log.peak_unsharded_bytes()
    return {"padded": padded, "secondary": secondary[0], "unsharded": unsharded}


def _kept(flats: Sequence[Any]) -> int:
    kept = [flat.kept_shard.tensor for flat in flats if flat.kept_shard]
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)


@pytest.mark.parametrize("low", [False, True])
@on_ranks(4)
def test_memory(rank: int, low: bool) -> None:
    """The formula of docs/fewer-bytes.md: secondary shards come on top of FULL_SHARD's memory."""
    precision = MixedPrecision(param_dtype=torch.bfloat16) if low else None
    full, found = (_memory(rank, strategy, precision) for strategy in (FULL, HIERARCHICAL))
    padded, size = found["padded"], 2 if low else 4
    assert padded >= full["padded"]  # rows that do not divide are on each rank
    assert found["secondary"] == size * padded // 2
    assert full["unsharded"] <= found["unsharded"] < size * padded


# -- bytes between two hosts -----------------------------------------------------------------------


def _bytes_between_hosts(
    rank: int, world_size: int, hosts: Sequence[link.Host], store: Path
) -> list[dict[str, Any]]:
    """The benchmark's rows of a small model."""
    join_host(rank, world_size, hosts[rank // 2], store, 30.0)
    return hierarchy_bytes.measure(decoder("small"), ["eager"])


@needs_link
def test_bytes_between_hosts(ranks: RankPool, tmp_path: Path) -> None:
    """Two hosts of two ranks, counted by their interfaces. (Graph mode has the same collectives by
    group, as test_hierarchy counts; compiling takes a minute.)"""
    with link.two_hosts(link.Shape()) as hosts:
        found = ranks.run_and_kill(
            _bytes_between_hosts,
            4,
            hosts,
            tmp_path / "store",
            victims=[],
            when=lambda: None,
        )
    for is_answer, rows in found.values():
        assert is_answer, rows
        full, row = rows
        assert (full["strategy"], row["strategy"]) == ("FULL_SHARD", "HIERARCHICAL_SHARD")
        assert row["sent"]["1"] <= 0.40 * full["sent"]["1"], rows
        assert row["sent"]["4"] <= 0.15 * full["sent"]["4"], rows
        assert row["losses"] == pytest.approx(full["losses"], rel=1e-5)
        assert "0.1" in hierarchy_bytes.report(rows)
