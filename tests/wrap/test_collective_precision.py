"""Shards that travel in fewer bits: what the modules see, what is reduced, in all three modes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loops import error_of, gradients, whole_gradients
from models import (
    Block,
    Transformer,
    average_gradients,
    batch,
    loss_of,
    make_transformer,
    train,
    wrap,
)
from modes import in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from user_collectives import gather_of_the_user, scatter_of_the_user

from fsdp_dynamo import (
    FSDP,
    CollectivePrecision,
    DivergenceError,
    FSDPError,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    record_events,
)
from fsdp_dynamo.comm import point_to_point
from fsdp_dynamo.graph_mode import calibration
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.wire_format import WireFormat

FORMATS = ("bfloat16", "float8", "int8")
ERROR = {"bfloat16": 2**-8, "float8": 2**-4, "int8": 1 / 254, "int4": 1 / 14}
"""Largest error, as a part of the largest element of a block."""


def _plain(mode: str = "eager", **sizes: int) -> Transformer:
    """Compiling takes as long as there are blocks."""
    return make_transformer(num_blocks=2 if mode == "eager" else 1, **sizes)


def _exact_gradients(rank: int, *steps: int, mode: str = "eager") -> dict[str, torch.Tensor]:
    """Means over ranks that no format has rounded."""
    plain = _plain(mode)
    for step in steps:
        loss_of(plain, batch(rank, step)).backward()
    average_gradients(plain)
    return gradients(plain)


def _largest(tensors: Iterable[torch.Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors)


def _errors(model: nn.Module, exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest error of each gradient."""
    return {fqn: _largest([grad - exact[fqn]]) for fqn, grad in whole_gradients(model).items()}


def _assert_equal_on_all_ranks(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        of_rank_0 = tensor.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(tensor, of_rank_0)


@on_ranks(3)
def test_ranks_see_equal_parameters_and_keep_exact_ones(rank: int) -> None:
    for name in FORMATS:
        _assert_parameters_are_rounded(rank, name)


def _assert_parameters_are_rounded(rank: int, name: Any) -> None:
    plain = make_transformer(num_blocks=2)
    exact = {n: p.detach().clone() for n, p in plain.named_parameters()}
    linears = {f"blocks.{number}.": block.up for number, block in enumerate(plain.blocks)}
    model = wrap(plain, collective_precision=CollectivePrecision(all_gather=name))
    seen: list[torch.Tensor] = []
    for linear in linears.values():
        linear.register_forward_pre_hook(lambda module, _: seen.append(module.weight.clone()))
    with torch.no_grad():
        loss_of(model, batch(rank, 0))
    _assert_equal_on_all_ranks(seen)
    for unit, weight in zip(linears, seen, strict=True):
        error = _largest([weight - exact[f"{unit}up.weight"]])
        assert 0 < error <= ERROR[name] * _largest(exact[n] for n in exact if n.startswith(unit))
    with FSDP.summon_full_params(model):
        assert [n for n, p in model.named_parameters() if not torch.equal(p, exact[n])] == []


# -- reductions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("bfloat16", "eager"),
        ("float8", "eager"),
        ("int8", "eager"),
        ("int4", "graph"),
    ],
)
@on_ranks(3)
def test_gradients_are_means_of_what_arrived(rank: int, name: Any, mode: str) -> None:
    """The error is bounded by the largest gradient of the unit on any rank."""
    own = _plain(mode)
    loss_of(own, batch(rank, 0)).backward()
    largest: dict[str, torch.Tensor] = {}
    for fqn, grad in gradients(own).items():
        value = grad.abs().max()
        dist.all_reduce(value, dist.ReduceOp.MAX)
        largest[_unit_of(fqn)] = value.maximum(largest.get(_unit_of(fqn), value))
    precision = CollectivePrecision(reduce_scatter=name, stochastic_rounding=False)
    model = wrap(_plain(mode), collective_precision=precision)
    loss_of(in_mode(model, mode), batch(rank, 0)).backward()
    errors = _errors(model, _exact_gradients(rank, 0, mode=mode))
    for fqn, error in errors.items():
        assert error <= ERROR[name] * float(largest[_unit_of(fqn)]) * 1.01 + 1e-7, fqn
    assert max(errors.values()) > 0


def _unit_of(fqn: str) -> str:
    return ".".join(fqn.split(".")[:2]) if fqn.startswith("blocks.") else ""


def _hybrid() -> dict[str, Any]:
    """Arguments for two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2))
    return {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}


@pytest.mark.parametrize(
    ("world_size", "mode", "name"),
    [
        (3, "eager", "float8"),
        (4, "eager", "int4"),
        (3, "hooks", "int8"),
        (4, "graph", "int8"),
    ],
)
def test_means_of_replicas(ranks: RankPool, world_size: int, mode: str, name: str) -> None:
    """Three, which are no divisor of a flat parameter's elements, or two of sharded units."""
    ranks.run(_replicas_average, world_size, mode, name)


def _replicas_average(rank: int, world_size: int, mode: str, name: Any) -> None:
    precision = CollectivePrecision(all_reduce=name, stochastic_rounding=False)
    whole = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    kwargs: dict[str, Any] = _hybrid() if world_size == 4 else whole
    model = wrap(_plain(mode), collective_precision=precision, **kwargs)
    call = in_mode(model, mode)
    with _counted() as sent, record_events() as log:
        loss_of(call, batch(rank, 0)).backward()
    assert sum(sent) > 0
    parts = [event.message_bytes / event.num_bytes for event in log if event.kind == "all_reduce"]
    assert parts
    assert all(0 < part < 0.6 for part in parts)
    _assert_equal_on_all_ranks(whole_gradients(model).values())
    exact = _exact_gradients(rank, 0, mode=mode)
    # Once by the rank that sends its part, once by the one that has summed it; others' parts
    # are up to so many times the mean.
    bound = (world_size + 1) * ERROR[name] * _largest(exact.values())
    assert 0 < max(_errors(model, exact).values()) <= bound


def _losses(rank: int, mode: str, **kwargs: Any) -> list[float]:
    model = wrap(make_transformer(num_blocks=1), **kwargs)
    return train(in_mode(model, mode), rank, steps=3)[0]


@on_ranks(2)
def test_modes_are_equal(rank: int) -> None:
    precision = CollectivePrecision("int8", "int8", stochastic_rounding=False)
    eager = _losses(rank, "eager", collective_precision=precision)
    for mode in ("hooks", "graph"):
        got = _losses(rank, mode, collective_precision=precision)
        assert got == pytest.approx(eager, rel=1e-5)
    exact = _losses(rank, "eager")
    assert eager == pytest.approx(exact, rel=0.05)
    assert eager != exact


@on_ranks(4)
def test_with_other_arguments(rank: int) -> None:
    low = MixedPrecision(torch.bfloat16, torch.float32)
    every = CollectivePrecision("int8", "int8", all_reduce="int8")
    for kwargs in (
        {"mixed_precision": low},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        _hybrid(),
    ):
        got = _losses(rank, "eager", collective_precision=every, **kwargs)
        assert got == pytest.approx(_losses(rank, "eager", **kwargs), rel=0.05)


@on_ranks(2)
def test_sums_of_steps_travel_once(rank: int) -> None:
    model = fully_shard(
        make_transformer(num_blocks=2),
        policy=ModuleWrapPolicy({Block}),
        collective_precision=CollectivePrecision(reduce_scatter="int8"),
    )
    with model.no_sync():
        loss_of(model, batch(rank, 0)).backward()
    loss_of(model, batch(rank, 1)).backward()
    exact = _exact_gradients(rank, 0, 1)
    # Rounded at random, of unlike ranks.
    assert 0 < max(_errors(model, exact).values()) <= 2 * _largest(exact.values()) / 127 * 3


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_a_seed_repeats_a_run_that_rounds_at_random(rank: int, mode: str, tmp_path: Path) -> None:
    """Whatever the process has run before, and whether rates are measured or known."""

    def losses(seed: int, measures: bool = False) -> list[float]:
        plain = _plain(mode)
        torch.manual_seed(seed)
        model = wrap(plain, collective_precision=CollectivePrecision("int8", "int4"))
        if measures:
            texts = [wire.encode() for wire in (WireFormat("int4", 32, True), WireFormat("int8"))]
            with mock.patch.object(calibration, "_path_of", return_value=tmp_path / "rates.json"):
                measured = inspect.unwrap(calibration.measured_formats)
                measured(model.process_group, torch.device("cpu"), texts)
        return train(in_mode(model, mode), rank, steps=2)[0]

    first = losses(3)
    assert losses(3, measures=True) == first
    if mode == "eager":
        assert losses(4) != first


class _Choosing(nn.Module):
    """Two layers, of which a rank may use one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if uses_second else x


@on_ranks(2)
def test_gradients_that_are_not_there(rank: int) -> None:
    """Gradients that no rank has are ``None``; what rank 0 alone has is there."""
    x = torch.linspace(-1, 1, 16).view(2, 8)
    reference = _Choosing()
    reference(x, True).pow(2).sum().backward()
    for name, strategy in (("bfloat16", "FULL_SHARD"), ("float8", "NO_SHARD")):
        kwargs: Any = {"collective_precision": CollectivePrecision(None, name, all_reduce=name)}
        model = FSDP(_Choosing(), sharding_strategy=ShardingStrategy[strategy], **kwargs)
        model(x, rank == 0).pow(2).sum().backward()
        assert [p.grad for p in model.third.parameters()] == [None, None]
        assert all(p.grad is not None for p in model.second.parameters())
        got, expected = whole_gradients(model)["second.weight"], reference.second.weight.grad
        assert expected is not None
        assert _largest([2 * got - expected]) < 0.2 * _largest([expected])


@on_ranks(2)
def test_what_is_not_finite_reaches_all_ranks(rank: int) -> None:
    precision = CollectivePrecision("int8", "int8")
    model = wrap(make_transformer(num_blocks=2), collective_precision=precision)
    for factor in (1.0, float("inf")):
        (loss_of(model, batch(rank, 0)) * (factor if rank == 1 else 1.0)).backward()
        assert bool(model.clip_grad_norm_(1.0).isfinite()) is (factor == 1.0)
        model.zero_grad()


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


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_bytes(rank: int, mode: str) -> None:
    def num_bytes(precision: CollectivePrecision) -> int:
        model = wrap(_plain(mode, dim=64), collective_precision=precision)
        call = in_mode(model, mode)
        loss_of(call, batch(rank, 0)).backward()
        with _counted() as sent:
            loss_of(call, batch(rank, 1)).backward()
        return sum(sent)

    exact = num_bytes(CollectivePrecision())
    formats = [("int8", "int4", 0.226)]  # the gathers are two thirds
    if mode == "eager":
        formats += [("bfloat16", "bfloat16", 0.5001), ("float8", "float8", 0.267)]
    for gathers, reductions, most in formats:
        precision = CollectivePrecision(gathers, reductions)  # type: ignore[arg-type]
        assert 0 < num_bytes(precision) <= most * exact


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [None, CollectivePrecision(all_gather="bfloat16")])
@on_ranks(2)
def test_ranks_with_other_formats(rank: int, others: CollectivePrecision | None) -> None:
    precision = others if rank else CollectivePrecision(all_gather="int8")
    model = wrap(make_transformer(num_blocks=2), collective_precision=precision)
    with pytest.raises(DivergenceError, match="int8"):
        loss_of(model, batch(rank, 0)).backward()


@on_ranks(2)
def test_refused(rank: int) -> None:
    both = CollectivePrecision("int8", "int8")
    for precision, words in (
        (CollectivePrecision("int3"), "one of bfloat16, float8, int8"),  # type: ignore[arg-type]
        (CollectivePrecision("int4"), "all_gather: .* got 'int4'"),
        ("int8", "a CollectivePrecision or None"),
        (CollectivePrecision("int8", block_numel=100), "block_numel=100"),
    ):
        with pytest.raises(FSDPError, match=words):
            FSDP(nn.Linear(4, 4), collective_precision=precision)  # type: ignore[arg-type]
    with pytest.raises(FSDPError, match=r"parameter 'weight'.*torch.float64"):
        FSDP(nn.Linear(4, 4, dtype=torch.float64), collective_precision=both)
    wrapped = FSDP(nn.Linear(4, 4), collective_precision=both)
    composable = fully_shard(nn.Linear(4, 4), collective_precision=both)
    for replace in (
        lambda: wrapped.register_comm_hook(None, lambda *_: None),
        lambda: composable.set_custom_all_gather(gather_of_the_user()),
        lambda: composable.set_custom_reduce_scatter(scatter_of_the_user()),
    ):
        with pytest.raises(FSDPError, match="collective_precision with 'int8'"):
            replace()


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
