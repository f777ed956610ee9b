"""Gradients written into the flat gradient: golden graphs, results with the pass off, bytes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from models import batch, loss_of, make_transformer, nothing_cached, wrap
from pool import on_ranks
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_dynamo import FSDP, MixedPrecision
from fsdp_dynamo.dynamo.artifacts import record_artifacts
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.gradients.flat_gradient import (
    chain_of,
    ranges_of,
    reductions,
    write_name,
)
from graph_passes.gradients.grad_buffer import grad_buffer_node_by_node, group_writes
from graph_passes.graph_utils import is_backward, is_collective, op_name
from graph_passes.markers import COLLECTIVE, UNIT, Mark
from graph_passes.pipeline import Pipeline
from graph_passes.spec import SpecError, inventory, verify_graph
from graph_passes.views import drop_noop_views

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
EAGER, INDUCTOR = "fsdp_dynamo_aot_eager", "fsdp_dynamo"
GATHER = "fsdp_dynamo_collectives::all_gather_into_tensor"
WAIT = "_c10d_functional::wait_tensor"


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """The graph of a function that returns gradients to be concatenated and reduced.

    A reduction of the concatenation (over one rank that does not exist) is put behind ``cat``.
    """
    module = make_fx(function, tracing_mode="fake")(*inputs)
    graph = module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    flat, *rest = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    with graph.inserting_before(output):
        reduce = graph.call_function(c10d.reduce_scatter_tensor.default, (flat, "avg", 1, "g"))
        wait = graph.call_function(c10d.wait_tensor.default, (reduce,))
    mark = Mark("u", "reduce_scatter", "backward", 0).encode()
    for node in graph.nodes:
        node.meta["custom"] = {UNIT: "u"} if node.op == "call_function" else {}
    for node in (reduce, wait):
        node.meta["custom"] = {COLLECTIVE: mark}
        node.meta["val"] = flat.meta["val"]
    output.args = ((wait, *rest),)
    return module


def run(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph without its collectives."""
    graph = fx.Graph()
    seen: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if is_collective(node) or op_name(node) == "_c10d_functional::wait_tensor":
            seen[node] = seen[node.args[0]]
        else:
            seen[node] = graph.node_copy(node, lambda n: seen[n])
    results = fx.GraphModule(module, graph)(*[x.clone() for x in inputs])
    return list(results)


def render(graph: fx.Graph) -> str:
    """One line a node: what it calls, and with what."""
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            lines.append(f"{node.name} = {op_name(node).split('::')[-1]}{node.args}")
    return "\n".join(lines)


def rewritten(
    function: Callable[..., Any], *inputs: torch.Tensor, grouped: bool = False, exact: bool = True
) -> fx.Graph:
    """The graph after the passes, which must compute what it did before."""
    module = traced(function, *inputs)
    before = inventory(module.graph)
    expected = run(module, inputs)
    drop_noop_views(module.graph)
    grad_buffer_node_by_node(module.graph)
    verify_graph(module.graph, "grad_buffer", before)
    if grouped:
        group_writes(module.graph)
        verify_graph(module.graph, "group_writes", before)
    for got, wanted in zip(run(module, inputs), expected, strict=True):
        if exact:
            assert torch.equal(got, wanted)
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    return module.graph


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_linear_with_bias_and_padding() -> None:
    def linear(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight, bias = g.t() @ x, g.sum(0, keepdim=True)
        return torch.cat([bias.view(3), torch.zeros(1), weight.view(6), torch.zeros(2)])

    assert_expected_inline(
        render(rewritten(linear, rand(5, 3), rand(5, 2))),
        """\
t = t(g_1,)
new_flat_default = new_flat(t, 12, [3, 4, 10, 12], torch.float32)
mm_into_default = mm_into(new_flat_default, 4, [2, 1], t, x_1, False)
sum_into_default = sum_into(mm_into_default, 0, [1, 3], [3, 1], g_1, [0], True)
reduce_scatter_tensor_default = reduce_scatter_tensor(sum_into_default, 'avg', 1, 'g')
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default,)""",
    )


def _transposed(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The product goes straight into a transposed view of the slice."""
    return torch.cat([torch.zeros(4), (g.t() @ x).t().reshape(-1)])


def _used_twice(g: torch.Tensor, x: torch.Tensor, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([(g.t() @ x + h.t() @ y).view(6), torch.zeros(2)])


def _used_twice_fused(
    g: torch.Tensor, x: torch.Tensor, h: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """What Inductor makes of the sum of two products."""
    return torch.cat([torch.addmm(g.t() @ x, h.t(), y).view(6), torch.zeros(2)])


def _batched(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(2), torch.bmm(g.transpose(1, 2), x).view(12)])


def _cast_together(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The copy into the slice is the cast."""
    weight, bias = g.t() @ x, g.sum(0)
    return torch.cat([weight.view(6), bias, torch.zeros(1, dtype=g.dtype)]).float()


def _cast_one_by_one(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([(g.t() @ x).view(6).float(), torch.zeros(2)])


def _embedding_tied_to_a_head(
    g: torch.Tensor, h: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, padding_idx: int
) -> torch.Tensor:
    rows = aten.embedding_dense_backward(g, tokens, 6, padding_idx, False)
    tied = h.t() @ x + aten.embedding_dense_backward(g, tokens, 6, -1, False)
    return torch.cat([rows.view(24), tied.view(24)])


_PAIR = (rand(5, 3), rand(5, 2))
_LOW = tuple(one.bfloat16() for one in _PAIR)
_PAIRS = (*_PAIR, rand(5, 3, seed=1), rand(5, 2, seed=2))
_TIED = (rand(2, 3, 4), rand(7, 6), rand(7, 4), torch.tensor([[0, 2, 2], [5, 2, 0]]))


@pytest.mark.parametrize(
    ("function", "inputs", "writes"),
    [
        (_transposed, _PAIR, ["mm_into"]),
        (_used_twice, _PAIRS, ["mm_into", "mm_into"]),
        (_used_twice_fused, _PAIRS, ["mm_into", "mm_into"]),
        (_batched, (rand(2, 5, 3), rand(2, 5, 2)), ["mm_into"]),
        (_cast_together, _LOW, ["write", "write"]),
        (_cast_one_by_one, _LOW, ["write"]),
        *(
            (
                partial(_embedding_tied_to_a_head, padding_idx=padding_idx),
                _TIED,
                ["embedding_into", "mm_into", "add_into"],
            )
            for padding_idx in (-1, 2)
        ),
    ],
)
def test_nothing_is_copied(
    function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], writes: list[str]
) -> None:
    """But for casts, which are the copies of gradients of low precision."""
    graph = rewritten(function, *inputs, exact=function is not _used_twice)
    assert [name for name in map(write_name, graph.nodes) if name] == ["new_flat", *writes]
    assert "aten::_to_copy" not in map(op_name, graph.nodes)


def test_gradients_that_others_read_are_copied() -> None:
    """An output, a gradient of two parameters, an input: each stays, and is copied."""

    def shared(g: torch.Tensor, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, bias = g.t() @ x, g.sum(0)
        return torch.cat([weight.view(6), bias, bias, z]), weight

    inputs = (rand(5, 3), rand(5, 2), rand(4))
    assert_expected_inline(
        render(rewritten(shared, *inputs, grouped=True)),
        """\
t = t(g_1,)
mm = mm(t, x_1)
sum_1 = sum(g_1, [0])
new_flat_default = new_flat(mm, 16, [], torch.float32)
write_many_default = write_many(new_flat_default, [0, 6, 9, 12], [mm, sum_1, sum_1, z_1])
reduce_scatter_tensor_default = reduce_scatter_tensor(write_many_default, 'avg', 1, 'g')
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default,)""",
    )


def test_left_alone() -> None:
    """A concatenation that is an output too, and a gradient that is no concatenation."""

    def output_too(g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = torch.cat([g.sum(0), torch.zeros(1)])
        return flat, flat

    def one(g: torch.Tensor) -> torch.Tensor:
        return g.sum(0)

    for function in (output_too, one):
        graph = rewritten(function, rand(5, 3))
        assert not any("fsdp_dynamo_grad" in op_name(node) for node in graph.nodes)


def test_spec_refuses_misplaced_writes() -> None:
    def linear(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([(g.t() @ x).view(6), g.sum(0), torch.zeros(1)])

    def skip(node: fx.Node) -> None:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)

    def move(node: fx.Node) -> None:
        node.args = (node.args[0], 1, *node.args[2:])

    def add(node: fx.Node) -> None:
        node.args = (*node.args[:-1], True)

    for change, expected in (
        (skip, "a write from element 0 on, got one from element 6"),
        (move, "a write from element 0 on, got one from element 1"),
        (add, "a write of elements 0 to 6 before adding, got none"),
    ):
        graph = rewritten(linear, *_PAIR)
        change(next(n for n in graph.nodes if op_name(n).endswith("mm_into")))
        with pytest.raises(SpecError, match=expected):
            verify_graph(graph, "test")


# -- over ranks -----------------------------------------------------------------------------------


@contextmanager
def watched(look: Callable[[fx.Graph], None]) -> Iterator[None]:
    """Look at every backward graph behind its passes; nothing comes from a cache."""
    run_pipeline = Pipeline.run

    def run_and_look(self: Pipeline, graph: fx.Graph) -> None:
        run_pipeline(self, graph)
        if is_backward(graph):
            look(graph)

    with mock.patch.object(Pipeline, "run", run_and_look), nothing_cached():
        yield


def _compiled(model: FSDP, backend: str = EAGER, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend, options=options)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


class Odd(nn.Module):
    """Uses a weight twice, has one unused and one without a bias; embedding and norm.

    Gradients of weights of three dimensions are transposed views of products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8, padding_idx=3)
        self.apart = nn.Parameter(torch.randn(8, 4, 2))
        self.together = nn.Parameter(torch.randn(8, 4, 2))
        self.shared = nn.Linear(8, 8)
        self.unused = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 31, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.einsum("ibh,hnd->ibnd", self.embed(tokens), self.apart)
        x = torch.einsum("ibnd,hnd->ibh", x, self.together)
        return self.head(self.norm(self.shared(self.shared(x).relu())))


_MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_CASES: dict[str, Callable[[], FSDP]] = {
    "mixed": lambda: wrap(make_transformer(num_blocks=1), mixed_precision=_MIXED),
    "odd": lambda: FSDP(Odd()),
}


@pytest.mark.parametrize(
    ("case", "backend", "tolerance"),
    [
        ("mixed", EAGER, {"rtol": 0.0, "atol": 0.0}),
        ("odd", EAGER, {"rtol": 1e-6, "atol": 1e-7}),  # the sum is accumulated in the slice
        pytest.param("odd", INDUCTOR, {"rtol": 1e-5, "atol": 1e-7}, marks=pytest.mark.slow),
        # Sums and casts of low precision may be fused otherwise.
        pytest.param("mixed", INDUCTOR, {"rtol": 2e-2, "atol": 1e-3}, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_results_are_those_without_the_pass(
    rank: int, case: str, backend: str, tolerance: dict[str, float]
) -> None:
    """Gradients accumulated over two steps."""
    results = []
    for is_on in (False, True):

        def look(graph: fx.Graph, is_on: bool = is_on) -> None:
            assert any(write_name(one.args[0]) for one in reductions(graph)) == is_on

        torch.manual_seed(5)
        wrapped = _CASES[case]()
        model = _compiled(wrapped, backend, grad_buffer=is_on)
        with watched(look):
            for step in range(2):
                loss_of(model, batch(rank, step)).backward()
        results.append(_gradients(wrapped))
    off, on = results
    assert len(on) > 0
    torch.testing.assert_close(on, off, **tolerance)


@on_ranks(2)
def test_low_precision_is_cast_into_the_flat_gradient(rank: int) -> None:
    """bf16 parameters, fp32 reductions: a copy per gradient, which is the cast, and no other."""
    num_written = []

    def look(graph: fx.Graph) -> None:
        for reduction in reductions(graph):
            flat, *chain = reversed(chain_of(reduction))
            assert write_name(flat) == "new_flat"
            assert flat.meta["val"].dtype == torch.float32
            writes = [node for node in chain if write_name(node) in ("write", "write_many")]
            sources = [s for node in writes for s in _sources(node)]
            assert {s.meta["val"].dtype for s in sources} == {torch.bfloat16}
            assert _as_large(graph, flat) == []
            num_written.append(sum(len(ranges_of(node)) for node in chain))

    model = _compiled(wrap(make_transformer(num_blocks=1), mixed_precision=_MIXED))
    with watched(look):
        loss_of(model, batch(rank, 0)).backward()
    assert num_written == [12, 6]  # parameters of the block, and of the root


def _sources(write: fx.Node) -> list[fx.Node]:
    """The gradients that a node copies into the flat one."""
    sources: Any = write.args[2] if write_name(write) == "write_many" else [write.args[3]]
    return list(sources)


def _as_large(graph: fx.Graph, flat: fx.Node) -> list[str]:
    """Other rows of as many elements as a flat gradient has, but gathered ones."""
    names = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or write_name(node) or not isinstance(value, torch.Tensor):
            continue
        if value.shape == flat.meta["val"].shape and op_name(node) not in (GATHER, WAIT):
            names.append(node.name)
    return names


class Linears(nn.Module):
    """A unit of products and biases alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


@on_ranks(2)
def test_no_bytes_are_copied_where_linears_dominate(rank: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(Linears(), Linears())
    policy = ModuleWrapPolicy({Linears})
    eager, wrapped = (FSDP(one, auto_wrap_policy=policy) for one in (copy.deepcopy(model), model))
    x = rand(16, 8, seed=rank)
    eager(x).square().mean().backward()
    compiled = _compiled(wrapped, INDUCTOR)
    with nothing_cached(), record_artifacts() as written:
        compiled(x).square().mean().backward()
    torch.testing.assert_close(_gradients(wrapped), _gradients(eager), rtol=1e-5, atol=1e-7)
    (code,) = [one.text for one in written if one.name.endswith("backward.inductor")]
    program, _, stretches = code.partition("# stretch_0")
    names = re.findall(r"torch\.ops\.fsdp_dynamo_grad\.(\w+)\.default\(", stretches)
    assert set(names) == {"mm_into_"}
    assert "cat" not in "".join(re.findall(r"cpp_fused_\w*", stretches))
    assert "clone" not in stretches
    flats = re.findall(r"(\w+) = graph_ops\.new_flat_on\(", program)
    assert len(flats) == 2
    for flat in flats:
        issued = program.index(f"graph_ops.reduce_scatter([{flat}, ],")
        given = [m.start() for m in re.finditer(rf"given = \[.*\b{flat}\b", program)]
        assert given
        assert max(given) < issued
