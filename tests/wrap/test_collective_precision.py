"""Shards that travel in fewer bits: what the modules see, what is reduced, in all three modes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loops import error_of
from models import Block, average_gradients, batch, loss_of, make_transformer, train, wrap
from modes import MODES, in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import (
    FSDP,
    CollectivePrecision,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    record_events,
)
from fsdp_dynamo.comm import point_to_point
from fsdp_dynamo.graph_mode import calibration
from fsdp_dynamo.wrap_policy import CustomPolicy, ModuleWrapPolicy
from graph_passes.wire_format import WireFormat

FORMATS = ("bfloat16", "float8", "int8")
ERROR = {"bfloat16": 2**-8, "float8": 2**-4, "int8": 1 / 254, "int4": 1 / 14}
"""Largest error, as a part of the largest element of a block."""


def _both(name: Any, **kwargs: Any) -> CollectivePrecision:
    return CollectivePrecision(name, name, stochastic_rounding=False, **kwargs)


# -- gathers ---------------------------------------------------------------------------------------


def _seen(rank: int, world_size: int, name: Any) -> tuple[list[float], list[float], bool]:
    """Per block, the largest error of the weights that its modules see, and the largest weight."""
    plain = make_transformer(num_blocks=2)
    exact = {n: p.detach().clone() for n, p in plain.named_parameters()}
    model = wrap(plain, collective_precision=CollectivePrecision(all_gather=name))
    seen: dict[str, torch.Tensor] = {}
    for number, block in enumerate(plain.blocks):
        linear = block.module.up

        def keep(module: nn.Module, _: Any, number: int = number) -> None:
            seen[f"blocks.{number}.up.weight"] = module.weight.detach().clone()  # type: ignore[operator, union-attr]

        linear.register_forward_pre_hook(keep)
    loss_of(model, batch(rank, 0))
    errors = [float((seen[n] - exact[n]).abs().max()) for n in seen]
    largest = [
        max(float(exact[n].abs().max()) for n in exact if n.startswith(f"blocks.{i}."))
        for i in range(2)
    ]
    of_rank_0 = torch.stack([seen[n] for n in sorted(seen)])
    dist.broadcast(of_rank_0, 0)
    is_equal = torch.equal(of_rank_0, torch.stack([seen[n] for n in sorted(seen)]))
    with FSDP.summon_full_params(model):
        masters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return errors, largest, is_equal and all(torch.equal(masters[n], exact[n]) for n in exact)


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_see_equal_parameters_and_keep_exact_ones(ranks: RankPool, name: str) -> None:
    for errors, largest, is_exact in ranks.run(_seen, 3, name):
        assert is_exact
        for error, bound in zip(errors, largest, strict=True):
            assert 0 < error <= ERROR[name] * bound


# -- reductions ------------------------------------------------------------------------------------


def _gradients(rank: int, world_size: int, name: Any, mode: str) -> list[tuple[float, float]]:
    """Of each parameter, the largest error of its gradient, and the most that it may be."""
    reference = make_transformer(num_blocks=2)
    loss_of(reference, batch(rank, 0)).backward()
    own = {n: p.grad.abs().max() for n, p in reference.named_parameters()}  # type: ignore[union-attr]
    average_gradients(reference)
    for value in own.values():
        dist.all_reduce(value, dist.ReduceOp.MAX)

    def largest(fqn: str) -> float:
        prefix = ".".join(fqn.split(".")[:2]) + "." if fqn.startswith("blocks.") else ""
        unit = [n for n in own if (n.startswith(prefix) if prefix else "blocks." not in n)]
        return max(float(own[n]) for n in unit)

    precision = CollectivePrecision(reduce_scatter=name, stochastic_rounding=False)
    model = wrap(make_transformer(num_blocks=2), collective_precision=precision)
    loss_of(in_mode(model, mode), batch(rank, 0)).backward()
    found = []
    with FSDP.summon_full_params(model, with_grads=True):
        exact = dict(reference.named_parameters())
        for fqn, param in model.named_parameters():
            error = float((param.grad - exact[fqn].grad).abs().max())  # type: ignore[operator]
            found.append((error, ERROR[name] * largest(fqn)))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*FORMATS, "int4"])
def test_gradients_are_means_of_what_arrived(ranks: RankPool, name: str, mode: str) -> None:
    for found in ranks.run(_gradients, 3, name, mode):
        assert all(error <= bound * 1.01 + 1e-7 for error, bound in found)
        assert any(error > 0 for error, _ in found)


def _between_replicas(
    rank: int, world_size: int, strategy: ShardingStrategy, name: Any, mode: str
) -> tuple[bool, float, float, int, list[float]]:
    """Whether replicas hold bitwise equal means, their error, what it may be, and bytes sent; what
    events say of these, as parts of the gradients'."""
    tokens = batch(rank, 0)
    reference = make_transformer(num_blocks=2)
    loss_of(reference, tokens).backward()
    average_gradients(reference)
    precision = CollectivePrecision(all_reduce=name, stochastic_rounding=False)
    kwargs: dict[str, Any] = {"sharding_strategy": strategy, "collective_precision": precision}
    if strategy is ShardingStrategy.HYBRID_SHARD:
        kwargs["device_mesh"] = init_device_mesh("cpu", (world_size // 2, 2))
    call = in_mode(model := wrap(make_transformer(num_blocks=2), **kwargs), mode)
    with _counted() as sent, record_events() as log:
        loss_of(call, tokens).backward()
    parts = [event.message_bytes / event.num_bytes for event in log if event.kind == "all_reduce"]
    error = largest = 0.0
    is_equal = True
    with FSDP.summon_full_params(model, with_grads=True):
        exact = dict(reference.named_parameters())
        for fqn, param in model.named_parameters():
            grad, expected = param.grad, exact[fqn].grad
            assert grad is not None
            assert expected is not None
            error = max(error, float((grad - expected).abs().max()))
            largest = max(largest, float(expected.abs().max()))
            of_rank_0 = grad.clone()
            dist.broadcast(of_rank_0, 0)
            is_equal &= torch.equal(of_rank_0, grad)
    return is_equal, error, largest, sum(sent), parts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*FORMATS, "int4"])
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(3, ShardingStrategy.NO_SHARD), (4, ShardingStrategy.HYBRID_SHARD)],
    ids=["not sharded", "hybrid"],
)
def test_means_of_replicas(
    ranks: RankPool, mode: str, name: str, world_size: int, strategy: ShardingStrategy
) -> None:
    """Replicas that are no divisor of a flat parameter's elements, too."""
    for is_equal, error, largest, sent, parts in ranks.run(
        _between_replicas, world_size, strategy, name, mode
    ):
        assert is_equal
        # Once by the rank that sends its part, once by the one that has summed it; others' parts
        # are up to so many times the mean.
        assert 0 < error <= (world_size + 1) * ERROR[name] * largest
        assert sent > 0
        assert parts
        assert all(0 < part < 0.6 for part in parts)


def _losses(rank: int, world_size: int, mode: str, kwargs: dict[str, Any]) -> list[float]:
    if kwargs.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD:
        kwargs = {**kwargs, "device_mesh": init_device_mesh("cpu", (world_size // 2, 2))}
    model = wrap(make_transformer(num_blocks=2), **kwargs)
    return train(in_mode(model, mode), rank, steps=3)[0]


@pytest.mark.parametrize("name", FORMATS)
def test_modes_are_equal(ranks: RankPool, name: str) -> None:
    kwargs = {"collective_precision": _both(name)}
    eager = ranks.run(_losses, 2, "eager", kwargs)
    exact = ranks.run(_losses, 2, "eager", {})
    for mode in ("hooks", "graph"):
        for got, expected in zip(ranks.run(_losses, 2, mode, kwargs), eager, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)
    for got, expected in zip(eager, exact, strict=True):
        assert got == pytest.approx(expected, rel=0.05)
        assert got != expected


LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("world_size", "kwargs"),
    [
        (2, {"mixed_precision": LOW}),
        (2, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
        (4, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}),
    ],
    ids=["low precision", "kept", "hybrid"],
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_with_other_arguments(
    ranks: RankPool, mode: str, world_size: int, kwargs: dict[str, Any]
) -> None:
    exact = ranks.run(_losses, world_size, "eager", kwargs)
    every = CollectivePrecision("int8", "int8", all_reduce="int8")
    formats = {**kwargs, "collective_precision": every}
    for got, expected in zip(ranks.run(_losses, world_size, mode, formats), exact, strict=True):
        assert got == pytest.approx(expected, rel=0.05)


def _accumulated(rank: int, world_size: int) -> tuple[float, float]:
    """Largest error after a step under ``no_sync()`` and one without, and the largest gradient."""
    reference = make_transformer(num_blocks=2)
    model = fully_shard(
        make_transformer(num_blocks=2),
        policy=ModuleWrapPolicy({Block}),
        collective_precision=CollectivePrecision(reduce_scatter="int8"),
    )
    for step in range(2):
        loss_of(reference, batch(rank, step)).backward()
    with model.no_sync():
        loss_of(model, batch(rank, 0)).backward()
    loss_of(model, batch(rank, 1)).backward()
    average_gradients(reference)
    exact = {n: p.grad for n, p in reference.named_parameters()}
    error, largest = 0.0, max(float(grad.abs().max()) for grad in exact.values())  # type: ignore[union-attr]
    with FSDP.summon_full_params(model, with_grads=True):
        for fqn, param in model.named_parameters():
            error = max(error, float((param.grad - exact[fqn]).abs().max()))
    return error, largest


def test_sums_of_steps_travel_once(ranks: RankPool) -> None:
    for error, largest in ranks.run(_accumulated, 2):
        assert 0 < error <= 2 * largest / 127 * 3  # rounded at random, of unlike ranks


def _repeated(rank: int, world_size: int, mode: str, file: Path) -> list[list[float]]:
    """Losses of the same seed twice, the second time with rates measured; and of another one."""
    precision = CollectivePrecision("int8", "int4")

    def losses(seed: int, measures: bool = False) -> list[float]:
        plain = make_transformer(num_blocks=2)
        torch.manual_seed(seed)
        model = wrap(plain, collective_precision=precision)
        if measures:
            texts = [wire.encode() for wire in (WireFormat("int4", 32, True), WireFormat("int8"))]
            with mock.patch.object(calibration, "_path_of", return_value=file):
                measured = inspect.unwrap(calibration.measured_formats)
                measured(model.process_group, torch.device("cpu"), texts)
        return train(in_mode(model, mode), rank, steps=4)[0]

    return [losses(3), losses(3, measures=True), losses(4)]


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_repeats_a_run_that_rounds_at_random(
    ranks: RankPool, mode: str, tmp_path: Path
) -> None:
    """Whatever the process has run before, and whether rates are measured or known."""
    for first, again, other in ranks.run(_repeated, 2, mode, tmp_path / "rates.json"):
        assert first == again
        assert first != other


class _Choosing(nn.Module):
    """Two layers, of which a rank may use one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if uses_second else x


def _absent(
    rank: int, world_size: int, name: Any, strategy: ShardingStrategy
) -> tuple[bool, bool, float]:
    """Whether gradients that no rank has are ``None``, one that rank 0 has is there; its error."""
    x = torch.linspace(-1, 1, 16).view(2, 8)
    reference = _Choosing()
    reference(x, True).pow(2).sum().backward()
    precision = CollectivePrecision(reduce_scatter=name, all_reduce=name)
    model = FSDP(_Choosing(), sharding_strategy=strategy, collective_precision=precision)
    model(x, rank == 0).pow(2).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    held = {n: p.numel() for n, p in model.named_parameters()}
    is_none = all(grads[n] is None for n in grads if n.startswith("third"))
    is_there = all(grads[n] is not None for n in grads if n.startswith("second") and held[n])
    with FSDP.summon_full_params(model, with_grads=True):
        grad = model.second.weight.grad
        expected = reference.second.weight.grad
        assert grad is not None
        assert expected is not None
        error = float((grad * world_size - expected).abs().max() / expected.abs().max())
    return is_none, is_there, error


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("name", FORMATS)
def test_gradients_that_are_not_there(
    ranks: RankPool, name: str, strategy: ShardingStrategy
) -> None:
    for is_none, is_there, error in ranks.run(_absent, 2, name, strategy):
        assert is_none
        assert is_there
        assert error < 0.2


def _not_finite(rank: int, world_size: int) -> list[bool]:
    model = wrap(
        make_transformer(num_blocks=2), collective_precision=CollectivePrecision("int8", "int8")
    )
    finite = []
    for bad in (False, True):
        loss = loss_of(model, batch(rank, 0))
        (loss * (float("inf") if bad and rank == 1 else 1.0)).backward()
        finite.append(bool(model.clip_grad_norm_(1.0).isfinite()))
        model.zero_grad()
    return finite


def test_what_is_not_finite_reaches_all_ranks(ranks: RankPool) -> None:
    for finite in ranks.run(_not_finite, 2):
        assert finite == [True, False]


# -- bytes -----------------------------------------------------------------------------------------


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Bytes that this rank sends, one entry for each collective."""
    sent: list[int] = []
    gather, exchange = point_to_point.issue_all_gathers, point_to_point.issue_exchanges

    def counted(issue: Any, pairs: Any, group: Any, tag: int) -> Any:
        sent.append(sum(own.nbytes for _, own in pairs) * (group.size() - 1))
        return issue(pairs, group, tag)

    with (
        mock.patch.object(point_to_point, "issue_all_gathers", partial(counted, gather)),
        mock.patch.object(point_to_point, "issue_exchanges", partial(counted, exchange)),
    ):
        yield sent


def _bytes(rank: int, world_size: int, mode: str, name: Any) -> int:
    gathers = "int8" if name == "int4" else name
    precision = CollectivePrecision(gathers, name)
    model = wrap(make_transformer(num_blocks=2, dim=64), collective_precision=precision)
    call = in_mode(model, mode)
    loss_of(call, batch(rank, 0)).backward()
    with _counted() as sent:
        loss_of(call, batch(rank, 1)).backward()
    return sum(sent)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_bytes(ranks: RankPool, mode: str) -> None:
    as_they_are = ranks.run(_bytes, 2, mode, None)
    for name, most in (
        ("bfloat16", 0.5001),
        ("int8", 0.267),
        ("float8", 0.267),
        ("int4", 0.226),  # of which gathers, in int8, are two thirds
    ):
        for sent, exact in zip(ranks.run(_bytes, 2, mode, name), as_they_are, strict=True):
            assert 0 < sent <= most * exact


# -- what is refused -------------------------------------------------------------------------------


def _differ(rank: int, world_size: int, kwargs: list[Any]) -> str:
    model = wrap(make_transformer(num_blocks=2), collective_precision=kwargs[rank])
    return error_of(lambda: loss_of(model, batch(rank, 0)).backward())


@pytest.mark.parametrize("others", [None, CollectivePrecision(all_gather="bfloat16")])
def test_ranks_with_other_formats(ranks: RankPool, others: CollectivePrecision | None) -> None:
    for error in ranks.run(_differ, 2, [CollectivePrecision(all_gather="int8"), others]):
        assert "DivergenceError" in error
        assert "int8" in error


def _refused(rank: int, world_size: int) -> dict[str, str]:
    def wrapped(precision: Any, model: nn.Module | None = None, **kwargs: Any) -> FSDP:
        return FSDP(model or nn.Linear(4, 4), collective_precision=precision, **kwargs)

    both = CollectivePrecision("int8", "int8")
    composable = fully_shard(nn.Linear(4, 4), collective_precision=both)
    return {
        "format": error_of(lambda: wrapped(CollectivePrecision("int3"))),  # type: ignore[arg-type]
        "coarse": error_of(lambda: wrapped(CollectivePrecision("int4"))),
        "class": error_of(lambda: wrapped("int8")),
        "blocks": error_of(lambda: wrapped(CollectivePrecision("int8", block_numel=100))),
        "dtype": error_of(lambda: wrapped(both, nn.Linear(4, 4, dtype=torch.float64))),
        "hook": error_of(lambda: wrapped(both).register_comm_hook(None, lambda *_: None)),
        "gather": error_of(lambda: composable.set_custom_all_gather(lambda *_: None)),
        "reduction": error_of(lambda: composable.set_custom_reduce_scatter(lambda *_: None)),
    }


def test_refused(ranks: RankPool) -> None:
    for errors in ranks.run(_refused, 2):
        assert "one of bfloat16, float8, int8" in errors["format"]
        assert "all_gather: None or one of bfloat16, float8, int8, got 'int4'" in errors["coarse"]
        assert "a CollectivePrecision or None" in errors["class"]
        assert "block_numel=100" in errors["blocks"]
        assert "torch.float64" in errors["dtype"]
        assert "parameter 'weight'" in errors["dtype"]
        for name in ("hook", "gather", "reduction"):
            assert "collective_precision with 'int8'" in errors[name], name


def _of_one_unit(rank: int, world_size: int) -> list[str]:
    plain = make_transformer(num_blocks=2)
    chosen = plain.blocks[1]
    policy = CustomPolicy(
        lambda module: (
            {"collective_precision": CollectivePrecision("int8")}
            if module is chosen
            else isinstance(module, Block)
        )
    )
    model = wrap(plain, auto_wrap_policy=policy)
    return [
        unit.fqn
        for unit in model._fsdp_root.units
        if any(flat.gather_wire is not None for flat in unit.flats)
    ]


def test_one_unit_may_have_a_format(ranks: RankPool) -> None:
    for found in ranks.run(_of_one_unit, 2):
        assert found == ["blocks.1"]


@pytest.mark.parametrize("per_node", [1, 4, 8])
@on_ranks(1)
def test_reductions_over_a_flat_group_of_nodes(rank: int, per_node: int) -> None:
    """Several ranks of each node would send more to other nodes than without a format."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=8)
    reduced = CollectivePrecision(reduce_scatter="int8", only_where_exposed=True)
    averaged = CollectivePrecision(all_reduce="int8")
    whole = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    nodes = {"device_mesh": init_device_mesh("cpu", (2, 4))}
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, **nodes}
    hierarchical = {"sharding_strategy": ShardingStrategy.HIERARCHICAL_SHARD, **nodes}
    both = CollectivePrecision(reduce_scatter="int8", all_reduce="int8")
    with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE=str(per_node)):
        for precision, kwargs in ((reduced, {}), (averaged, whole)):
            model = nn.Linear(8, 8)
            wrap_it = partial(FSDP, model, collective_precision=precision, **kwargs)
            if per_node == 4:
                error = error_of(wrap_it)
                assert "UnsupportedError" in error
                assert "parameter 'weight'" in error
                assert model.weight.shape == (8, 8)
            else:
                wrap_it()
        if per_node == 4:
            FSDP(nn.Linear(8, 8), collective_precision=both, **hybrid)
            FSDP(nn.Linear(8, 8), collective_precision=both, **hierarchical)
            FSDP(nn.Linear(8, 8), collective_precision=CollectivePrecision("int8"))
