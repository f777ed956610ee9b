"""Regions: equal unit bodies are compiled once, and what that must not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batch, loss_of, make_transformer, nothing_cached, train, wrap
from pool import RankPool
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fsdp_dynamo import FSDP, ShardingStrategy, events
from fsdp_dynamo.graph_mode import backends
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.graph_utils import is_backward, is_region, op_name
from graph_passes.markers import BODY, UNIT, unit_of
from graph_passes.pipeline import Pipeline
from graph_passes.regions.outlining import RegionReport, outline_regions

BACKENDS = ["fsdp_dynamo_aot_eager", "fsdp_dynamo"]
NUM_BLOCKS = 2


_PRODUCTS = ("aten::mm", "aten::addmm", "fsdp_dynamo_grad::mm_into")


def _summary(graph: fx.Graph) -> tuple[bool, list[str], set[str | None], int]:
    """Backward or not, bodies called, units with matrix products, numel of the largest input."""
    bodies = [str(node.args[0].target) for node in graph.nodes if is_region(node)]
    products = {unit_of(node) for node in graph.nodes if op_name(node) in _PRODUCTS}
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    return is_backward(graph), bodies, products, max(value.numel() for value in inputs)


def _run(
    rank: int,
    world_size: int,
    backend: str,
    options: dict[str, Any],
    dropout: float,
    kwargs: dict[str, Any],
) -> Any:
    """Losses, collectives and peak of one step, summaries of all graphs, numel of a block."""
    seen: list[Any] = []
    run = Pipeline.run

    def watch(self: Pipeline, graph: fx.Graph) -> None:
        before = _summary(graph)
        run(self, graph)
        seen.append((before, _summary(graph)))

    plain = make_transformer(num_blocks=NUM_BLOCKS, dim=32)
    for block in plain.blocks:
        block.down = nn.Sequential(block.down, nn.Dropout(dropout))
    wrapped = wrap(plain, **kwargs)
    model = torch.compile(wrapped, fullgraph=True, backend=backend, options=options)
    Pipeline.run = watch  # type: ignore[method-assign]
    try:
        torch.manual_seed(rank)
        with nothing_cached():
            losses, _ = train(model, rank, steps=3)
        with events.record_events() as log:
            loss_of(model, batch(rank, 9)).backward()
    finally:
        Pipeline.run = run  # type: ignore[method-assign]
    numel = wrapped._fsdp_root.units[1].flats[0].layout.padded_numel
    collectives = log.keys("all_gather", "reduce_scatter", "all_reduce")
    return losses, collectives, log.peak_unsharded_bytes(), seen, numel


def _both(
    ranks: RankPool,
    backend: str,
    dropout: float = 0.0,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Rank 0's run without regions and with them."""
    plain, regions = [
        ranks.run(_run, 2, backend, {"regions": regions, **(options or {})}, dropout, kwargs)[0]
        for regions in (False, True)
    ]
    return plain, regions


@pytest.mark.parametrize(
    ("strategy", "dropout"),
    [
        (ShardingStrategy.FULL_SHARD, 0.0),
        (ShardingStrategy.FULL_SHARD, 0.3),
        pytest.param(ShardingStrategy.SHARD_GRAD_OP, 0.0, marks=pytest.mark.slow),
        pytest.param(ShardingStrategy.NO_SHARD, 0.0, marks=pytest.mark.slow),
    ],
)
def test_same_numbers_and_collectives(
    ranks: RankPool, strategy: ShardingStrategy, dropout: float
) -> None:
    plain, regions = _both(ranks, BACKENDS[0], dropout, sharding_strategy=strategy)
    assert regions[:3] == plain[:3]


def test_a_memory_budget_keeps_units_unsharded(ranks: RankPool) -> None:
    """The graph is partitioned twice: once to see which units the budget lets stay unsharded."""
    unlimited = {"memory_budget_bytes": 10**9}
    plain, regions = _both(ranks, BACKENDS[0], 0.3, unlimited)
    assert regions[:3] == plain[:3]
    gathers = [entry for entry in regions[1] if "all_gather" in entry]
    assert len(gathers) == NUM_BLOCKS + 1  # none in the backward


def test_bodies_are_one_graph_and_reshard(ranks: RankPool) -> None:
    *_, seen, numel = ranks.run(_run, 2, BACKENDS[0], {"regions": True}, 0.0, {})[0]
    assert [before[0] for before, _ in seen] == [False, True]
    units = {"", *(f"blocks.{number}" for number in range(NUM_BLOCKS))}
    for (_, bodies, products, _), (_, inlined, *_, largest) in seen:
        assert len(bodies) == NUM_BLOCKS
        assert len(set(bodies)) == 1
        assert products <= {""}  # the root's head alone
        assert not inlined
        assert largest < numel  # no unsharded flat parameter of a block is saved
    assert [after[2] for _, after in seen] == [units, units]


@pytest.mark.slow
def test_inductor(ranks: RankPool) -> None:
    plain, regions = _both(ranks, BACKENDS[1])
    assert regions[0] == pytest.approx(plain[0], rel=1e-6)
    assert regions[1:3] == plain[1:3]
    largest = max(after[3] for _, after in regions[3])
    assert largest < regions[4]


class _Reshaped(nn.Module):
    """Its output is a view of what its backward needs: it must be copied."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.frozen = nn.Linear(dim, dim).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(self.frozen(x.flatten(0, 1)))).view(x.shape)


class _Normed(nn.Module):
    """Writes to its buffers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.flatten(0, 1)).view(x.shape)


class _Checkpointed(nn.Module):
    """Recomputes its inside."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self._inside, x, use_reentrant=False)

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


class _CheckpointedNorm(_Normed):
    """Writes to its buffers, and recomputes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


class _OwnBackward(_Checkpointed):
    """Has an operator with bodies of its own, a forward and a backward."""

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Double.apply(self.inner(x))
        return result


def _losses_of(
    rank: int, world_size: int, block: type[nn.Module], regions: bool
) -> tuple[list[float], set[str]]:
    """Losses, and why blocks were left."""
    plain = make_transformer(num_blocks=1)
    plain.blocks = nn.ModuleList(block(16) for _ in range(NUM_BLOCKS))
    reports: list[RegionReport] = []
    outline = backends.outline_regions

    def watch(gm: fx.GraphModule) -> RegionReport:
        reports.append(outline(gm))
        return reports[-1]

    backends.outline_regions = watch
    try:
        model = torch.compile(
            FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({block})),
            fullgraph=True,
            backend=BACKENDS[0],
            options={"regions": regions},
        )
        losses, _ = train(model, rank, steps=3)
    finally:
        backends.outline_regions = outline
    return losses, {why for report in reports for unit, why in report.left if unit}


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (_Reshaped, None),
        (_Normed, "it writes to an input"),
        (_Checkpointed, None),
        (_CheckpointedNorm, "it writes to an input"),
        (_OwnBackward, "it calls an operator with a body of its own"),
    ],
)
def test_blocks_of_all_kinds(ranks: RankPool, block: type[nn.Module], reason: str | None) -> None:
    plain, _ = ranks.run(_losses_of, 2, block, False)[0]
    regions, left = ranks.run(_losses_of, 2, block, True)[0]
    assert regions == plain
    assert left == ({reason} if reason else set())


# -- hand-built graphs ----------------------------------------------------------------------------


class _Builder:
    """A graph of units that each compute from one input of their own and one in common."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()
        self.common = self.input("x")

    def input(self, name: str, *size: int, requires_grad: bool = False) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            value = torch.empty(size or (4, 4), requires_grad=requires_grad)
        node.meta["example_value"] = value
        return node

    def call(self, unit: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["custom"] = {UNIT: unit, BODY: "1"}
        values = [a.meta["example_value"] if isinstance(a, fx.Node) else a for a in args]
        with self.mode:
            node.meta["example_value"] = target(*values, **kwargs)
        return node

    def done(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule(nn.Module(), self.graph)


def _units(*scales: float, last: Any = torch.relu) -> tuple[list[str], fx.GraphModule]:
    """One unit a scale, each ``last(matmul(w, x) * scale)``; the report's lines."""
    builder = _Builder()
    weights = [builder.input(f"w{i}") for i in range(len(scales))]
    x = builder.common
    for i, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        product = builder.call(f"u{i}", torch.matmul, weight, x)
        x = builder.call(f"u{i}", last, builder.call(f"u{i}", torch.mul, product, scale))
    gm = builder.done(x)
    inputs = [torch.randn(4, 4) for _ in range(len(scales) + 1)]
    before = gm(*[tensor.clone() for tensor in inputs])
    report = outline_regions(gm)
    after = gm(*[tensor.clone() for tensor in inputs])
    assert torch.equal(before[0], after[0])
    return report.text().splitlines(), gm


def test_equal_bodies_share_a_region() -> None:
    lines, gm = _units(2.0, 2.0, 3.0, 2.0)
    assert lines == ["region of 3: u0, u1, u3", "no region: 'u2': no other unit is equal to it"]
    assert sum(map(is_region, gm.graph.nodes)) == 3


def test_where_an_input_begins_does_not_matter() -> None:
    """Batches that are parts of one tensor begin elsewhere on each rank, which have one plan."""
    builder = _Builder()
    weights = [builder.input(f"w{i}") for i in range(2)]
    whole = weights[1].meta["example_value"].new_empty(8, 4)
    weights[1].meta["example_value"] = whole[4:]
    results = [builder.call(f"u{i}", torch.mul, weight, 2) for i, weight in enumerate(weights)]
    report = outline_regions(builder.done(*results))
    assert report.regions == [["u0", "u1"]]


def test_regions_that_follow_one_another() -> None:
    lines, gm = _units(2.0, 3.0, 2.0, 3.0)
    assert lines == ["region of 2: u0, u2", "region of 2: u1, u3"]
    assert sum(map(is_region, gm.graph.nodes)) == 4


def test_bodies_that_differ_in_a_constant_share_none() -> None:
    lines, _ = _units(0.0, -0.0)
    assert [line.split(": ")[0] for line in lines] == ["no region", "no region"]


def test_bodies_that_differ_in_a_keyword_share_none() -> None:
    builder = _Builder()
    results = [
        builder.call(f"u{i}", nn.functional.gelu, builder.input(f"w{i}"), approximate=kind)
        for i, kind in enumerate(["none", "tanh", "tanh"])
    ]
    assert outline_regions(builder.done(*results)).regions == [["u1", "u2"]]


def test_a_view_of_an_input_is_left() -> None:
    builder = _Builder()
    views = [builder.call(f"u{i}", torch.t, builder.input(f"w{i}")) for i in range(2)]
    report = outline_regions(builder.done(*views))
    reason = "an input or an output is a view of another"
    assert report.left == [("u0", reason), ("u1", reason)]


def test_a_write_to_an_input_is_left() -> None:
    builder = _Builder()
    results = []
    for i in range(2):
        weight = builder.input(f"w{i}")
        builder.call(f"u{i}", torch.relu_, weight)
        results.append(builder.call(f"u{i}", torch.mul, weight, 2))
    report = outline_regions(builder.done(*results))
    assert report.left == [("u0", "it writes to an input"), ("u1", "it writes to an input")]
    assert not report.regions


def _scaled(detached: bool) -> fx.GraphModule:
    """Two units that scale one tensor by a parameter, by its value alone if ``detached``."""
    builder = _Builder()
    results = []
    for i in range(2):
        x, scale = (builder.input(f"{name}{i}", requires_grad=True) for name in "xw")
        if detached:
            scale = builder.call(f"u{i}", torch.detach, scale)
        results.append(
            builder.call(f"u{i}", torch.mul, builder.call(f"u{i}", torch.tanh, x), scale)
        )
    return builder.done(*results)


def test_an_input_that_no_gradient_comes_to_is_left() -> None:
    """Its gradient is none, and torch's regions make it zeros."""
    assert outline_regions(_scaled(detached=False)).regions == [["u0", "u1"]]
    reason = "no gradient comes to one of its inputs or outputs"
    assert outline_regions(_scaled(detached=True)).left == [("u0", reason), ("u1", reason)]
    with torch.no_grad():
        assert outline_regions(_scaled(detached=True)).regions == [["u0", "u1"]]


def test_an_output_that_no_gradient_comes_to_is_left() -> None:
    """As above, where what is computed from it is detached."""
    builder = _Builder()
    results = []
    for i in range(2):
        weight, x = (builder.input(f"{name}{i}", requires_grad=True) for name in "wx")
        penalty = builder.call(f"u{i}", torch.square, weight)
        results.append(builder.call(f"u{i}", torch.matmul, weight, x))
        results.append(builder.call("", torch.detach, builder.call("", torch.square, penalty)))
    report = outline_regions(builder.done(*results))
    reason = "no gradient comes to one of its inputs or outputs"
    assert [entry for entry in report.left if entry[0]] == [("u0", reason), ("u1", reason)]


def test_a_write_that_raises_no_version_is_left() -> None:
    """Batch norm's running statistics, without the count of batches that nn.BatchNorm keeps."""
    builder = _Builder()
    statistics = builder.input("mean", 4), builder.input("variance", 4)
    results = []
    for i in range(2):
        inputs = builder.input(f"w{i}"), *statistics, None, None, True
        results.append(builder.call(f"u{i}", nn.functional.batch_norm, *inputs))
    report = outline_regions(builder.done(*results))
    assert report.left == [("u0", "it writes to an input"), ("u1", "it writes to an input")]


def test_an_input_that_is_changed_later_is_left() -> None:
    """Autograd would miss what the region has saved of it. A change before is none of its own."""
    builder = _Builder()
    builder.graph.call_function(torch.relu_, (builder.common,)).meta["example_value"] = torch.relu_(
        builder.common.meta["example_value"]
    )
    results = []
    for i in range(4):
        inputs = builder.input(f"w{i}"), builder.common
        results.append(builder.call(f"u{i}", torch.matmul, *inputs))
        if i < 2:
            builder.call("", torch.relu_, inputs[0])
    report = outline_regions(builder.done(*results))
    reason = "one of its inputs is changed after it"
    assert [entry for entry in report.left if entry[0]] == [("u0", reason), ("u1", reason)]
    assert ["u2", "u3"] in report.regions


def test_two_names_for_one_memory_are_left() -> None:
    builder = _Builder()
    results = []
    for i in range(2):
        weight = builder.input(f"w{i}")
        view = builder.graph.call_function(torch.t, (weight,))
        view.meta["example_value"] = weight.meta["example_value"].t()
        results.append(builder.call(f"u{i}", torch.matmul, weight, view))
    report = outline_regions(builder.done(*results))
    assert {reason for _, reason in report.left} == {"an input or an output is a view of another"}


class _Nested(nn.Module):
    """A unit that computes with its own weight only after a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8, bias=False)
        self.linear.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


def _nested(rank: int, world_size: int, has_regions: bool) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    units = ModuleWrapPolicy({_Nested, nn.LayerNorm})
    wrapped = FSDP(nn.Sequential(*(_Nested() for _ in range(3))), auto_wrap_policy=units)
    options = {"regions": has_regions}
    backend = "fsdp_dynamo_aot_eager"
    model = torch.compile(wrapped, fullgraph=True, backend=backend, options=options)
    with nothing_cached():
        model(torch.full((4, 8), rank + 1.0)).square().mean().backward()
    with events.record_events() as log:
        loss = model(torch.full((4, 8), rank + 2.0)).square().mean()
        loss.backward()
    gradients = [p.grad.norm().item() for p in wrapped.parameters() if p.grad is not None]
    gathers = [e.unit for e in log if e.kind == "all_gather" and e.phase == "backward"]
    return sorted(gathers), [loss.item(), *gradients]


def test_a_view_of_a_parameter_that_a_region_saves_is_taken_again(ranks: RankPool) -> None:
    """Saved, it would keep the parameters of its unit from forward to backward."""
    expected = ranks.run(_nested, 2, False)
    for (gathers, numbers), (wanted, values) in zip(
        ranks.run(_nested, 2, True), expected, strict=True
    ):
        assert {"0", "1", "2"} <= set(gathers)
        assert gathers == wanted
        assert numbers == pytest.approx(values, rel=1e-6)
