"""Regions: equal unit bodies are compiled once, and what that must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from loops import fit_squares
from models import nothing_cached
from pool import on_ranks
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fsdp_dynamo import FSDP, events
from fsdp_dynamo.graph_mode import backends
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.graph_utils import is_backward, is_region, op_name
from graph_passes.markers import BODY, UNIT, unit_of
from graph_passes.pipeline import Pipeline
from graph_passes.regions.outlining import RegionReport, outline_regions

EAGER, INDUCTOR = "fsdp_dynamo_aot_eager", "fsdp_dynamo"


_PRODUCTS = ("aten::mm", "aten::addmm", "fsdp_dynamo_grad::mm_into")


def _train(model: nn.Module, rank: int, steps: int) -> list[float]:
    """Losses of steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fit_squares(model, optimizer, (2, 3, 16), [2 * step + rank for step in range(steps)])


def _summary(graph: fx.Graph) -> tuple[bool, list[str], set[str | None], int]:
    """Backward or not, bodies called, units with matrix products, numel of the largest input."""
    bodies = [str(node.args[0].target) for node in graph.nodes if is_region(node)]
    products = {unit_of(node) for node in graph.nodes if op_name(node) in _PRODUCTS}
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    return is_backward(graph), bodies, products, max(value.numel() for value in inputs)


class _Mixed(nn.Module):
    """A block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize(
    ("backend", "budget"),
    [
        (EAGER, None),
        # The graph is partitioned twice: once to see which units the budget lets stay unsharded.
        (EAGER, 10**9),
        pytest.param(INDUCTOR, None, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_same_numbers_and_collectives(rank: int, backend: str, budget: int | None) -> None:
    """Without regions and with them; bodies are one graph, and reshard."""
    results = []
    for regions in (False, True):
        seen: list[Any] = []
        run = Pipeline.run

        def watch(self: Pipeline, graph: fx.Graph, seen: Any = seen, run: Any = run) -> None:
            before = _summary(graph)
            run(self, graph)
            seen.append((before, _summary(graph)))

        torch.manual_seed(7)
        plain = nn.Sequential(nn.Linear(16, 16), _Mixed(), _Mixed(), nn.Linear(16, 1))
        wrapped = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({_Mixed}))
        options = {"regions": regions} | ({"memory_budget_bytes": budget} if budget else {})
        torch._dynamo.reset()
        model = torch.compile(wrapped, fullgraph=True, backend=backend, options=options)
        torch.manual_seed(rank)
        with nothing_cached(), mock.patch.object(Pipeline, "run", watch):
            losses = _train(model, rank, 2)
        with events.record_events() as log:
            _train(model, rank, 1)
        collectives = log.keys("all_gather", "reduce_scatter", "all_reduce")
        results.append((losses, collectives, log.peak_unsharded_bytes()))
    plain_results, region_results = results
    if backend == EAGER:
        assert region_results == plain_results
    else:
        assert region_results[0] == pytest.approx(plain_results[0], rel=1e-6)
        assert region_results[1:] == plain_results[1:]
    if budget:
        gathers = [entry for entry in collectives if "all_gather" in entry]
        assert len(gathers) == 3  # none in the backward
        return
    # Of the run with regions:
    assert [before[0] for before, _ in seen] == [False, True]
    units = {"", "1", "2"}
    numel = wrapped._fsdp_root.units[1].flats[0].layout.padded_numel
    for (_, bodies, products, _), (_, inlined, products_then, largest) in seen:
        assert len(bodies) == 2
        assert len(set(bodies)) == 1
        assert products <= {""}  # the root's own alone
        assert not inlined
        assert products_then == units
        assert largest < numel  # no unsharded flat parameter of a block is saved


class _Reshaped(nn.Module):
    """Its output is a view of what its backward needs: it must be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(self.frozen(x.flatten(0, 1)))).view(x.shape)


class _Normed(nn.Module):
    """Writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.flatten(0, 1)).view(x.shape)


class _Checkpointed(nn.Module):
    """Recomputes its inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

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


LEFT = {
    _Reshaped: None,
    _Normed: "it writes to an input",
    _Checkpointed: None,
    _CheckpointedNorm: "it writes to an input",
    _OwnBackward: "it calls an operator with a body of its own",
}


@on_ranks(2)
def test_blocks_of_all_kinds(rank: int) -> None:
    """Two of each in one model: the same losses, and why some are left."""
    reports: list[RegionReport] = []

    def watch(gm: fx.GraphModule) -> RegionReport:
        reports.append(outline_regions(gm))
        return reports[-1]

    losses = []
    for regions in (False, True):
        torch.manual_seed(7)
        plain = nn.Sequential(nn.Linear(16, 16), *(kind() for kind in (*LEFT, *LEFT)))
        wrapped = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy(set(LEFT)))
        options = {"regions": regions}
        torch._dynamo.reset()
        model = torch.compile(wrapped, fullgraph=True, backend=EAGER, options=options)
        with mock.patch.object(backends, "outline_regions", watch):
            losses.append(_train(model, rank, 3))
    assert losses[0] == losses[1]
    (report,) = reports
    why = dict(report.left)
    assert [why.get(str(i)) for i in range(1, 11)] == [*LEFT.values()] * 2
    assert ["1", "6"] in report.regions
    assert ["3", "8"] in report.regions


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


def _units(*scales: float) -> tuple[list[str], fx.GraphModule]:
    """One unit a scale, each ``relu(matmul(w, x) * scale)``; the report's lines."""
    builder = _Builder()
    weights = [builder.input(f"w{i}") for i in range(len(scales))]
    x = builder.common
    for i, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        product = builder.call(f"u{i}", torch.matmul, weight, x)
        x = builder.call(f"u{i}", torch.relu, builder.call(f"u{i}", torch.mul, product, scale))
    gm = builder.done(x)
    inputs = [torch.randn(4, 4) for _ in range(len(scales) + 1)]
    before = gm(*[tensor.clone() for tensor in inputs])
    report = outline_regions(gm)
    after = gm(*[tensor.clone() for tensor in inputs])
    assert torch.equal(before[0], after[0])
    return report.text().splitlines(), gm


NO_EQUAL = "no region: '{}': no other unit is equal to it"


def test_equal_bodies_share_a_region() -> None:
    for scales, expected, num_calls in (
        ((2.0, 2.0, 3.0, 2.0), ["region of 3: u0, u1, u3", NO_EQUAL.format("u2")], 3),
        ((2.0, 3.0, 2.0, 3.0), ["region of 2: u0, u2", "region of 2: u1, u3"], 4),
        ((0.0, -0.0), [NO_EQUAL.format("u0"), NO_EQUAL.format("u1")], 0),
    ):
        lines, gm = _units(*scales)
        assert lines == expected
        assert sum(map(is_region, gm.graph.nodes)) == num_calls


def test_where_an_input_begins_does_not_matter() -> None:
    """Batches that are parts of one tensor begin elsewhere on each rank, which have one plan."""
    builder = _Builder()
    weights = [builder.input(f"w{i}") for i in range(2)]
    whole = weights[1].meta["example_value"].new_empty(8, 4)
    weights[1].meta["example_value"] = whole[4:]
    results = [builder.call(f"u{i}", torch.mul, weight, 2) for i, weight in enumerate(weights)]
    report = outline_regions(builder.done(*results))
    assert report.regions == [["u0", "u1"]]


def test_bodies_that_differ_in_a_keyword_share_none() -> None:
    builder = _Builder()
    results = [
        builder.call(f"u{i}", nn.functional.gelu, builder.input(f"w{i}"), approximate=kind)
        for i, kind in enumerate(["none", "tanh", "tanh"])
    ]
    assert outline_regions(builder.done(*results)).regions == [["u1", "u2"]]


def _view(b: _Builder, i: int) -> list[fx.Node]:
    return [b.call(f"u{i}", torch.t, b.input(f"w{i}"))]


def _write(b: _Builder, i: int) -> list[fx.Node]:
    weight = b.input(f"w{i}")
    b.call(f"u{i}", torch.relu_, weight)
    return [b.call(f"u{i}", torch.mul, weight, 2)]


def _write_without_a_version(b: _Builder, i: int) -> list[fx.Node]:
    """Batch norm's running statistics, without the count of batches that nn.BatchNorm keeps."""
    statistics = b.input(f"mean{i}", 4), b.input(f"variance{i}", 4)
    inputs = b.input(f"w{i}"), *statistics, None, None, True
    return [b.call(f"u{i}", nn.functional.batch_norm, *inputs)]


def _two_names_for_one_memory(b: _Builder, i: int) -> list[fx.Node]:
    weight = b.input(f"w{i}")
    view = b.graph.call_function(torch.t, (weight,))
    view.meta["example_value"] = weight.meta["example_value"].t()
    return [b.call(f"u{i}", torch.matmul, weight, view)]


def _input_without_gradient(b: _Builder, i: int) -> list[fx.Node]:
    """Its gradient is none, and torch's regions make it zeros."""
    x, scale = (b.input(f"{name}{i}", requires_grad=True) for name in "xw")
    scale = b.call(f"u{i}", torch.detach, scale)
    return [b.call(f"u{i}", torch.mul, b.call(f"u{i}", torch.tanh, x), scale)]


def _output_without_gradient(b: _Builder, i: int) -> list[fx.Node]:
    """As above, where what is computed from it is detached."""
    weight, x = (b.input(f"{name}{i}", requires_grad=True) for name in "wx")
    penalty = b.call(f"u{i}", torch.square, weight)
    product = b.call(f"u{i}", torch.matmul, weight, x)
    return [product, b.call("", torch.detach, b.call("", torch.square, penalty))]


@pytest.mark.parametrize(
    ("unit", "reason"),
    [
        (_view, "an input or an output is a view of another"),
        (_write, "it writes to an input"),
        (_write_without_a_version, "it writes to an input"),
        (_two_names_for_one_memory, "an input or an output is a view of another"),
        (_input_without_gradient, "no gradient comes to one of its inputs or outputs"),
        (_output_without_gradient, "no gradient comes to one of its inputs or outputs"),
    ],
)
def test_equal_units_that_are_left(
    unit: Callable[[_Builder, int], list[fx.Node]], reason: str
) -> None:
    builder = _Builder()
    report = outline_regions(builder.done(*(node for i in range(2) for node in unit(builder, i))))
    assert [entry for entry in report.left if entry[0]] == [("u0", reason), ("u1", reason)]
    assert not report.regions


def test_without_gradients_none_must_come_to_an_input() -> None:
    builder = _Builder()
    results = [node for i in range(2) for node in _input_without_gradient(builder, i)]
    with torch.no_grad():
        assert outline_regions(builder.done(*results)).regions == [["u0", "u1"]]


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


class _Nested(nn.Module):
    """A unit that computes with its own weight only after a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8, bias=False)
        self.linear.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


@on_ranks(2)
def test_a_view_of_a_parameter_that_a_region_saves_is_taken_again(rank: int) -> None:
    """Saved, it would keep the parameters of its unit from forward to backward."""
    found = []
    for regions in (False, True):
        torch.manual_seed(0)
        units = ModuleWrapPolicy({_Nested, nn.LayerNorm})
        wrapped = FSDP(nn.Sequential(_Nested(), _Nested()), auto_wrap_policy=units)
        options = {"regions": regions}
        torch._dynamo.reset()
        model = torch.compile(wrapped, fullgraph=True, backend=EAGER, options=options)
        with nothing_cached():
            model(torch.full((4, 8), rank + 1.0)).square().mean().backward()
        with events.record_events() as log:
            loss = model(torch.full((4, 8), rank + 2.0)).square().mean()
            loss.backward()
        gradients = [p.grad for p in wrapped.parameters() if p.grad is not None]
        gathers = [e.unit for e in log if e.kind == "all_gather" and e.phase == "backward"]
        found.append((sorted(gathers), [loss.detach(), *gradients]))
    assert {"0", "1"} <= set(found[1][0])
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[1][1], found[0][1])
