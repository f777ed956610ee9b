"""Stretches of small graphs built by hand: where they are cut, and which of them are equal."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Builder, aten
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from graph_passes.gradients.flat_gradient import OPERATORS
from graph_passes.graph_utils import is_collective, is_wait
from graph_passes.markers import UNIT
from graph_passes.scheduling.stretches import Cutting, Stretch, cut, graph_of, key_of


class _Valued(Builder):
    """A graph whose nodes carry fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = FakeTensorMode()
        self.owner = nn.Module()

    def input(self, name: str, *size: int, **kwargs: Any) -> fx.Node:
        node = super().input(name)
        with self.mode:
            node.meta["val"] = torch.empty(size or (4, 4), **kwargs)
        return node

    def call(self, unit: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["custom"] = {UNIT: unit}
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values, **named)
        return node

    def gathered(self, unit: str, shard: fx.Node) -> fx.Node:
        wait = self.gather(unit, shard)
        with self.mode:
            wait.meta["val"] = shard.meta["val"].repeat(2)
        return wait

    def cut(self, *outputs: Any) -> tuple[Cutting, fx.GraphModule]:
        self.graph.output(outputs)
        gm = fx.GraphModule(self.owner, self.graph)  # copies nodes
        return cut(gm.graph, lambda node: is_collective(node) or is_wait(node)), gm


def _names(nodes: list[fx.Node]) -> list[str]:
    return [node.name.replace("_default", "") for node in nodes]


def _contents(stretch: Stretch) -> tuple[list[str], ...]:
    return _names(stretch.inputs), _names(stretch.nodes), _names(stretch.outputs)


def test_views_and_constants_are_copied_to_their_readers() -> None:
    """The second stretch takes the unsharded parameter, not the first one's view of it."""
    build = _Valued()
    x, shard, other = build.input("x"), build.input("shard", 8), build.input("other", 8)
    view = build.call("a", aten.view.default, build.gathered("a", shard), [4, 4])
    one = build.call("a", aten.full.default, [4, 4], 1.0)
    first = build.call("a", aten.addmm.default, one, x, view)
    build.gathered("a", other)
    second = build.call("a", aten.addmm.default, one, first, view)
    cutting, _ = build.cut(second, view)
    assert list(map(_contents, cutting.stretches())) == [
        (["wait_tensor", "x"], ["full", "view", "addmm"], ["addmm"]),
        (["wait_tensor", "addmm"], ["full", "view", "addmm_1"], ["addmm_1"]),
    ]


def test_another_unit_begins_a_stretch() -> None:
    build = _Valued()
    x = build.input("x")
    for unit in ("a", "a", "b", "a"):
        x = build.call(unit, aten.mm.default, x, x)
    cutting, _ = build.cut(x)
    assert [_names(stretch.nodes) for stretch in cutting.stretches()] == [
        ["mm", "mm_1"],
        ["mm_2"],
        ["mm_3"],
    ]


def test_items_stay_with_their_operator() -> None:
    build = _Valued()
    x, shard = build.input("x"), build.input("shard", 8)
    norm = build.call("a", aten.native_layer_norm.default, x, [4], None, None, 1e-5)
    build.gathered("b", shard)
    items = [build.call("b", operator.getitem, norm, i) for i in (2, 0)]
    cutting, _ = build.cut(build.call("b", aten.mm.default, items[1], x), items[0])
    first, second = cutting.stretches()
    assert len(first.nodes) == 3
    assert sorted(_names(first.outputs)) == sorted(_names(first.nodes[1:]))
    assert second.inputs[0] is first.nodes[2]


def test_writes_are_no_outputs() -> None:
    """A flat gradient is given to the stretches that write to it, each as it was made."""
    build = _Valued()
    x, shard = build.input("x"), build.input("shard", 8)
    flat = build.call("a", OPERATORS.new_flat.default, x, 32, [], torch.float32)
    flat = build.call("a", OPERATORS.mm_into.default, flat, 0, [4, 1], x, x, False)
    build.gathered("b", shard)
    flat = build.call("a", OPERATORS.mm_into.default, flat, 16, [4, 1], x, x, False)
    cutting, _ = build.cut(build.reduce("a", flat))
    assert list(map(_contents, cutting.stretches())) == [
        (["new_flat", "x"], ["mm_into"], []),
        (["new_flat", "x"], ["mm_into_1"], []),
    ]


def _flattened(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.size(0) * x.size(1), 4).sin().cos()


def test_sizes_that_shapes_are_made_of_are_inputs() -> None:
    """Of a tensor of ``(a * b, 4)`` no code could tell ``a`` and ``b``."""
    example = torch.empty(3, 5, 4)
    gm = make_fx(_flattened, tracing_mode="symbolic")(example)
    (boundary,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
    (stretch,) = cut(gm.graph, lambda node: node is boundary).stretches()
    (placeholder,) = gm.graph.find_nodes(op="placeholder")
    sizes = [str(size) for size in placeholder.meta["val"].shape[:2]]
    assert stretch.inputs[0] is boundary
    assert [str(node.meta["val"]) for node in stretch.inputs[1:]] == sorted(sizes)


def _padded(x: torch.Tensor) -> torch.Tensor:
    y = aten.constant_pad_nd(x, [0, 0, 1, 2])
    return y.sin().view(y.size(0) * 4).cos()


def test_sizes_of_what_a_stretch_computes_are_read_in_it() -> None:
    gm = make_fx(_padded, tracing_mode="symbolic")(torch.empty(3, 4))
    (stretch,) = cut(gm.graph, lambda node: False).stretches()
    assert [node.op for node in stretch.inputs] == ["placeholder"]
    assert "sym_size" in str(stretch.nodes)
    (sine,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
    cutting = cut(gm.graph, lambda node: node is sine)
    assert all("sym_size" not in str(stretch.nodes) for stretch in cutting.stretches())


# -- keys ------------------------------------------------------------------------------------------


_Make = Callable[[_Valued, str], fx.Node]
"""Computes one unit of a graph, given by name, from inputs of its own."""


def _keys(*makes: _Make) -> list[Any]:
    """Keys of the stretches of units ``u0``, ``u1``, ..."""
    build = _Valued()
    outputs = [make(build, f"u{number}") for number, make in enumerate(makes)]
    cutting, gm = build.cut(*outputs)
    return [key_of(stretch, gm) for stretch in cutting.stretches()]


def _product(size: tuple[int, ...] = (4, 4), twice: bool = False, **kwargs: Any) -> _Make:
    def make(build: _Valued, unit: str) -> fx.Node:
        x = build.input(f"{unit}_x", *size, **kwargs)
        y = x if twice else build.input(f"{unit}_y", *size, **kwargs)
        return build.call(unit, aten.mm.default, x, y)

    return make


def _strided(stride: tuple[int, ...], offset: int) -> _Make:
    def make(build: _Valued, unit: str) -> fx.Node:
        x = build.input(f"{unit}_x")
        with build.mode:
            x.meta["val"] = torch.empty(99).as_strided((4, 4), stride, offset)
        return build.call(unit, aten.mm.default, x, x)

    return make


def _scaled(scale: float) -> _Make:
    return lambda build, unit: build.call(unit, aten.mul.Tensor, build.input(f"{unit}_x"), scale)


def _written(offset: int, stride: tuple[int, ...] = (4, 1)) -> _Make:
    def make(build: _Valued, unit: str) -> fx.Node:
        x = build.input(f"{unit}_x")
        flat = build.call(unit, OPERATORS.new_flat.default, x, 32, [], torch.float32)
        args = (offset, list(stride), x, x, False)
        return build.call(unit, OPERATORS.mm_into.default, flat, *args)

    return make


def _difference(*order: int) -> _Make:
    def make(build: _Valued, unit: str) -> fx.Node:
        x = build.input(f"{unit}_x")
        parts = [build.call(unit, aten.mul.Tensor, x, scale) for scale in (1.0, 2.0)]
        return build.call(unit, aten.sub.Tensor, *(parts[i] for i in order))

    return make


def _constant(value: torch.Tensor) -> _Make:
    def make(build: _Valued, unit: str) -> fx.Node:
        setattr(build.owner, f"constant_{unit}", value)
        node = build.graph.get_attr(f"constant_{unit}")
        with build.mode:
            node.meta["val"] = torch.empty(value.shape)
        return build.call(unit, aten.mul.Tensor, build.input(f"{unit}_x"), node)

    return make


def _with_body(scale: float, depth: int) -> _Make:
    """An operator whose body holds a body, ``depth`` times."""
    body = fx.symbolic_trace(_Scale(scale))
    for _ in range(depth):
        around = fx.Graph()
        x = around.placeholder("x")
        around.output(around.call_function(torch.cond, (True, around.get_attr("body"), x)))
        body = fx.GraphModule(nn.ModuleDict({"body": body}), around)

    def make(build: _Valued, unit: str) -> fx.Node:
        build.owner.add_module(f"body_{unit}", body)
        attribute = build.graph.get_attr(f"body_{unit}")
        x = build.input(f"{unit}_x")
        node = build.graph.call_function(torch.cond, (True, attribute, x))
        node.meta.update({"custom": {UNIT: unit}, "val": x.meta["val"]})
        return node

    return make


class _Scale(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


_ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_product(), _product((8, 8))),
        (_product(), _product(dtype=torch.float64)),
        (_product(), _product(device="meta")),
        (_product(), _product(twice=True)),
        (_strided((4, 1), 0), _strided((1, 4), 0)),
        (_strided((4, 1), 0), _strided((4, 1), 1)),
        (_scaled(0.0), _scaled(-0.0)),
        (_scaled(1.0), _scaled(1)),
        (_written(0), _written(16)),
        (_written(0), _written(0, (1, 4))),
        (_difference(0, 1), _difference(1, 0)),
        (_constant(_ONES), _constant(_ONES.clone())),
        (_with_body(1.0, 0), _with_body(2.0, 0)),
        (_with_body(1.0, 2), _with_body(2.0, 2)),
    ],
)
def test_what_differs_has_another_key(one: _Make, other: _Make) -> None:
    first, second, third, fourth = _keys(one, other, one, other)
    assert first == third
    assert second == fourth
    assert first != second


def test_which_results_are_read_is_part_of_the_key() -> None:
    build = _Valued()
    outputs = []
    for unit in ("u0", "u1"):
        first = build.call(unit, aten.neg.default, build.input(f"{unit}_x"))
        second = build.call(unit, aten.neg.default, first)
        outputs += [second] if unit == "u0" else [second, first]
    cutting, gm = build.cut(*outputs)
    one, other = [key_of(stretch, gm) for stretch in cutting.stretches()]
    assert one != other


def test_a_stretch_is_the_same_graph_wherever_it_stands() -> None:
    build = _Valued()
    outputs = [_product()(build, unit) for unit in ("u0", "u1")]
    cutting, gm = build.cut(*outputs)
    one, other = [graph_of(stretch, gm) for stretch in cutting.stretches()]
    assert one.code == other.code
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    assert torch.equal(one(x, y)[0], x @ y)
