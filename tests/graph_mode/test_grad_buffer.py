"""Gradients written into the flat gradient: golden graphs, results with the pass off, bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from models import Transformer, batch, loss_of, make_transformer, nothing_cached, wrap
from pool import RankPool
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_dynamo import FSDP, MixedPrecision
from fsdp_dynamo.dynamo.artifacts import record_artifacts
from fsdp_dynamo.graph_mode import backends
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.gradients.flat_gradient import (
    OPERATORS,
    chain_of,
    concatenation_of,
    ranges_of,
    reductions,
    write_name,
)
from graph_passes.gradients.grad_buffer import grad_buffer_node_by_node, group_writes
from graph_passes.graph_utils import is_backward, is_collective, num_bytes, op_name
from graph_passes.markers import COLLECTIVE, UNIT, Mark
from graph_passes.pipeline import Pipeline
from graph_passes.spec import SpecError, inventory, verify_graph
from graph_passes.views import drop_noop_views

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def copied_bytes(graph: fx.Graph, fuses: bool = False) -> int:
    """Return the bytes copied between the producers of gradients and the reductions.

    Counts what concatenations read, and what ``write`` copies without a cast.

    Args:
        graph: graph before its collectives are lowered.
        fuses: whether the compiler fuses a ``write`` with the sum that makes its source.
    """
    total = 0
    for reduction in reductions(graph):
        cat = concatenation_of(reduction)
        copied = [] if cat is None else [cat]
        for write in chain_of(reduction):
            copied += _copied(write, fuses)
        total += sum(num_bytes(node) for node in copied)
    return total


def _copied(write: fx.Node, fuses: bool) -> list[fx.Node]:
    """Return the gradients that a write copies without a cast."""
    if write_name(write) not in ("write", "write_many"):
        return []
    dtype = write.meta["val"].dtype
    kept = [source for source in _sources(write) if source.meta["val"].dtype == dtype]
    return [source for source in kept if not (fuses and op_name(_base(source)) == "aten::sum")]


def _base(node: fx.Node) -> fx.Node:
    """Return the tensor that a gradient is a reshaped view of."""
    while op_name(node) in ("aten::view", "aten::reshape") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _sources(write: fx.Node) -> list[fx.Node]:
    sources: Any = write.args[2] if write_name(write) == "write_many" else [write.args[3]]
    return list(sources)


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

    graph = rewritten(linear, rand(5, 3), rand(5, 2))
    assert copied_bytes(graph) == 0
    assert_expected_inline(
        render(graph),
        """\
t = t(g_1,)
new_flat_default = new_flat(t, 12, [3, 4, 10, 12], torch.float32)
mm_into_default = mm_into(new_flat_default, 4, [2, 1], t, x_1, False)
sum_into_default = sum_into(mm_into_default, 0, [1, 3], [3, 1], g_1, [0], True)
reduce_scatter_tensor_default = reduce_scatter_tensor(sum_into_default, 'avg', 1, 'g')
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default,)""",
    )


def test_transposed_gradient() -> None:
    """The product goes straight into a transposed view of the slice."""

    def transposed(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight = (g.t() @ x).t().reshape(-1)
        return torch.cat([torch.zeros(4), weight])

    graph = rewritten(transposed, rand(5, 3), rand(5, 2))
    assert copied_bytes(graph) == 0
    assert_expected_inline(
        render(graph),
        """\
t = t(g_1,)
new_flat_default = new_flat(t, 10, [0, 4], torch.float32)
mm_into_default = mm_into(new_flat_default, 4, [1, 3], t, x_1, False)
reduce_scatter_tensor_default = reduce_scatter_tensor(mm_into_default, 'avg', 1, 'g')
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default,)""",
    )


def test_weight_used_twice() -> None:
    def twice(g: torch.Tensor, x: torch.Tensor, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = g.t() @ x + h.t() @ y
        return torch.cat([weight.view(6), torch.zeros(2)])

    inputs = (rand(5, 3), rand(5, 2), rand(5, 3, seed=1), rand(5, 2, seed=2))
    graph = rewritten(twice, *inputs, exact=False)
    assert copied_bytes(graph) == 0
    assert_expected_inline(
        render(graph),
        """\
t = t(g_1,)
new_flat_default = new_flat(t, 8, [6, 8], torch.float32)
mm_into_default = mm_into(new_flat_default, 0, [2, 1], t, x_1, False)
t_1 = t(h_1,)
mm_into_default_1 = mm_into(mm_into_default, 0, [2, 1], t_1, y_1, True)
reduce_scatter_tensor_default = reduce_scatter_tensor(mm_into_default_1, 'avg', 1, 'g')
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default,)""",
    )


def test_fused_addmm_of_a_weight_used_twice() -> None:
    """What Inductor makes of the sum of two products."""

    def twice(g: torch.Tensor, x: torch.Tensor, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = torch.addmm(g.t() @ x, h.t(), y)
        return torch.cat([weight.view(6), torch.zeros(2)])

    inputs = (rand(5, 3), rand(5, 2), rand(5, 3, seed=1), rand(5, 2, seed=2))
    graph = rewritten(twice, *inputs)
    names = [op_name(node).split("::")[-1] for node in graph.nodes if op_name(node)]
    assert [name for name in names if "mm" in name] == ["mm_into", "mm_into"]


@pytest.mark.parametrize("padding_idx", [-1, 2])
def test_embedding_tied_to_a_head(padding_idx: int) -> None:
    tokens = torch.tensor([[0, 2, 2], [5, 2, 0]])

    def embedding(
        g: torch.Tensor, h: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        rows = aten.embedding_dense_backward(g, tokens, 6, padding_idx, False)
        head = h.t() @ x
        tied = head + aten.embedding_dense_backward(g, tokens, 6, -1, False)
        return torch.cat([rows.view(24), tied.view(24)])

    graph = rewritten(embedding, rand(2, 3, 4), rand(7, 6), rand(7, 4), tokens)
    assert copied_bytes(graph) == 0
    names = [op_name(node).split("::")[-1] for node in graph.nodes if op_name(node)]
    assert [n for n in names if n.endswith("_into")] == ["embedding_into", "mm_into", "add_into"]


def test_batched_product() -> None:
    def experts(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros(2), torch.bmm(g.transpose(1, 2), x).view(12)])

    graph = rewritten(experts, rand(2, 5, 3), rand(2, 5, 2))
    assert copied_bytes(graph) == 0


def test_gradients_that_others_read_are_copied() -> None:
    """An output, a gradient of two parameters, an input: each stays, and is copied."""

    def shared(g: torch.Tensor, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, bias = g.t() @ x, g.sum(0)
        return torch.cat([weight.view(6), bias, bias, z]), weight

    inputs = (rand(5, 3), rand(5, 2), rand(4))
    graph = rewritten(shared, *inputs)
    assert copied_bytes(graph) == 4 * (6 + 3 + 3 + 4)
    assert_expected_inline(
        render(graph),
        """\
t = t(g_1,)
mm = mm(t, x_1)
new_flat_default = new_flat(mm, 16, [], torch.float32)
write_default = write(new_flat_default, 0, [2, 1], mm)
sum_1 = sum(g_1, [0])
write_default_1 = write(write_default, 6, [1], sum_1)
write_default_2 = write(write_default_1, 9, [1], sum_1)
write_default_3 = write(write_default_2, 12, [1], z_1)
reduce_scatter_tensor_default = reduce_scatter_tensor(write_default_3, 'avg', 1, 'g')
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default,)""",
    )
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


def test_mixed_precision() -> None:
    """The copy into the slice is the cast."""

    def low(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight, bias = g.t() @ x, g.sum(0)
        return torch.cat([weight.view(6), bias, torch.zeros(1, dtype=g.dtype)]).float()

    graph = rewritten(low, rand(5, 3).bfloat16(), rand(5, 2).bfloat16())
    assert copied_bytes(graph) == 0
    assert_expected_inline(
        render(graph),
        """\
t = t(g_1,)
mm = mm(t, x_1)
new_flat_default = new_flat(mm, 10, [9, 10], torch.float32)
write_default = write(new_flat_default, 0, [2, 1], mm)
sum_1 = sum(g_1, [0])
write_default_1 = write(write_default, 6, [1], sum_1)
reduce_scatter_tensor_default = reduce_scatter_tensor(write_default_1, 'avg', 1, 'g')
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default,)""",
    )


def test_one_cast_each() -> None:
    """Gradients that are cast one by one are cast into their slices."""

    def low(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([(g.t() @ x).view(6).float(), torch.zeros(2)])

    graph = rewritten(low, rand(5, 3).bfloat16(), rand(5, 2).bfloat16())
    names = [op_name(node).split("::")[-1] for node in graph.nodes if op_name(node)]
    assert "_to_copy" not in names
    assert copied_bytes(graph) == 0


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

    def broken(change: Callable[[fx.Node], None]) -> fx.Graph:
        graph = rewritten(linear, rand(5, 3), rand(5, 2))
        change(next(n for n in graph.nodes if op_name(n).endswith("mm_into")))
        return graph

    def skip(node: fx.Node) -> None:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)

    def move(node: fx.Node) -> None:
        node.args = (node.args[0], 1, *node.args[2:])

    def add(node: fx.Node) -> None:
        node.args = (*node.args[:-1], True)

    with pytest.raises(SpecError, match="a write from element 0 on, got one from element 6"):
        verify_graph(broken(skip), "test")
    with pytest.raises(SpecError, match="a write from element 0 on, got one from element 1"):
        verify_graph(broken(move), "test")
    with pytest.raises(SpecError, match="a write of elements 0 to 6 before adding, got none"):
        verify_graph(broken(add), "test")


def test_operators_have_meta_kernels() -> None:
    with FakeTensorMode():
        flat = OPERATORS.new_flat(torch.empty(1), 8, [6, 8], torch.bfloat16)
        assert (flat.shape, flat.dtype) == ((8,), torch.bfloat16)
        assert (
            OPERATORS.mm_into(flat, 0, [2, 1], flat[:6].view(3, 2), flat[:4].view(2, 2), False)
            is flat
        )
        assert OPERATORS.write_(flat, 0, [1], flat[:2]) is None


# -- over ranks -----------------------------------------------------------------------------------


class Twice(nn.Module):
    """Uses a weight twice, has one unused and one without a bias; embedding and norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 6, padding_idx=3)
        self.shared = nn.Linear(6, 6)
        self.unused = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 31, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.embed(tokens)).relu()
        return self.head(self.norm(self.shared(x)))


class Spread(nn.Module):
    """Weights of three dimensions, whose gradients are transposed views of products."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.apart = nn.Parameter(torch.randn(8, 4, 2))
        self.together = nn.Parameter(torch.randn(8, 4, 2))
        self.head = nn.Linear(8, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.einsum("ibh,hnd->ibnd", self.embed(tokens), self.apart)
        return self.head(torch.einsum("ibnd,hnd->ibh", x, self.together))


def _frozen() -> Transformer:
    model = make_transformer(num_blocks=2)
    for block in model.blocks:
        block.qkv.weight.requires_grad_(False)
        block.norm1.bias.requires_grad_(False)
    return model


GATHER = "fsdp_dynamo_collectives::all_gather_into_tensor"
WAIT = "_c10d_functional::wait_tensor"
_MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_CASES: dict[str, Callable[[], FSDP]] = {
    "plain": lambda: wrap(make_transformer(num_blocks=2)),
    "tied": lambda: wrap(make_transformer(num_blocks=1, tied=True)),
    "mixed": lambda: wrap(make_transformer(num_blocks=1), mixed_precision=_MIXED),
    "frozen": lambda: wrap(_frozen()),
    "twice": lambda: FSDP(Twice()),
    "spread": lambda: FSDP(Spread()),
}


def _two_steps(rank: int, world_size: int, case: str, backend: str) -> Any:
    """Gradients accumulated over two steps, with the pass off and on; what the graph copies."""
    results = []
    copied: list[int] = []
    run_pipeline = Pipeline.run
    for is_on in (False, True):

        def watch(self: Pipeline, graph: fx.Graph, on: bool = is_on) -> None:
            run_pipeline(self, graph)
            if is_backward(graph):
                copied.append(copied_bytes(graph, fuses=backend == "fsdp_dynamo"))
                assert any(chain for chain in map(_writes, reductions(graph))) == on

        torch._dynamo.reset()
        Pipeline.run = watch  # type: ignore[method-assign]
        try:
            torch.manual_seed(5)
            wrapped = _CASES[case]()
            options = {"grad_buffer": is_on}
            model = torch.compile(wrapped, fullgraph=True, backend=backend, options=options)
            with nothing_cached():
                for step in range(2):
                    loss_of(model, batch(rank, step)).backward()
        finally:
            Pipeline.run = run_pipeline  # type: ignore[method-assign]
        results.append([p.grad for p in wrapped.parameters() if p.grad is not None])
    return results, copied


def _writes(reduction: fx.Node) -> bool:
    return "fsdp_dynamo_grad" in op_name(reduction.args[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        ("plain", 2),
        pytest.param("plain", 4, marks=pytest.mark.slow),
        ("tied", 2),
        ("mixed", 2),
        pytest.param("frozen", 2, marks=pytest.mark.slow),
        ("twice", 2),
    ],
)
def test_results_are_those_without_the_pass(ranks: RankPool, case: str, world_size: int) -> None:
    """Bitwise, except where a weight used twice is accumulated."""
    for (off, on), (before, after) in ranks.run(
        _two_steps, world_size, case, backends.fsdp_dynamo_aot_eager.__name__
    ):
        assert len(off) == len(on) > 0
        assert after < before
        for expected, got in zip(off, on, strict=True):
            if case == "twice":
                torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "case", ["spread", *(pytest.param(case, marks=pytest.mark.slow) for case in ("mixed", "twice"))]
)
def test_results_under_inductor(ranks: RankPool, case: str) -> None:
    """Sums and casts of low precision may be fused otherwise: equal to rounding."""
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if case == "mixed" else {"rtol": 1e-5, "atol": 1e-7}
    for (off, on), (before, after) in ranks.run(_two_steps, 2, case, "fsdp_dynamo"):
        assert len(off) == len(on) > 0
        assert after < before
        for expected, got in zip(off, on, strict=True):
            torch.testing.assert_close(got, expected, **tolerance)


def _mixed_writes(rank: int, world_size: int) -> list[tuple[str, set[torch.dtype], int, list[str]]]:
    """Of each reduction in fp32: what makes its flat gradient, the dtypes of what is copied there,
    how many gradients, and whatever else is as large."""
    found = []
    run_pipeline = Pipeline.run

    def watch(self: Pipeline, graph: fx.Graph) -> None:
        run_pipeline(self, graph)
        for reduction in reductions(graph) if is_backward(graph) else ():
            flat, *chain = reversed(chain_of(reduction))
            assert flat.meta["val"].dtype == torch.float32
            sources = [source for node in chain for source in _written(node)]
            found.append(
                (
                    op_name(flat).split("::")[-1],
                    {source.meta["val"].dtype for source in sources},
                    sum(len(ranges_of(node)) for node in chain),
                    _as_large(graph, flat),
                )
            )

    Pipeline.run = watch  # type: ignore[method-assign]
    try:
        torch._dynamo.reset()
        wrapped = wrap(make_transformer(num_blocks=2), mixed_precision=_MIXED)
        backend = backends.fsdp_dynamo_aot_eager.__name__
        model = torch.compile(wrapped, fullgraph=True, backend=backend)
        with nothing_cached():
            loss_of(model, batch(rank, 0)).backward()
    finally:
        Pipeline.run = run_pipeline  # type: ignore[method-assign]
    return found


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


def _written(node: fx.Node) -> list[fx.Node]:
    """What a node of a chain copies into the flat gradient."""
    if write_name(node) == "write_many":
        return list(node.args[2])  # type: ignore[arg-type]
    return [node.args[3]] if write_name(node) == "write" else []  # type: ignore[list-item]


def test_low_precision_is_cast_into_the_flat_gradient(ranks: RankPool) -> None:
    """bf16 parameters, fp32 reductions: a copy per gradient, which is the cast, and no other."""
    for found in ranks.run(_mixed_writes, 2):
        expected = ("new_flat", {torch.bfloat16}, [])
        assert [(made, dtypes, large) for made, dtypes, _, large in found] == [expected] * 3
        assert [number for _, _, number, _ in found] == [12, 12, 6]  # parameters, last block first


class Linears(nn.Module):
    """A unit of products and biases alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def _linears(rank: int, world_size: int, backend: str) -> Any:
    """Generated code of the backward, what the graph copies, and gradients with their reference."""
    copied: list[int] = []
    run_pipeline = Pipeline.run

    def watch(self: Pipeline, graph: fx.Graph) -> None:
        run_pipeline(self, graph)
        if is_backward(graph):
            copied.append(copied_bytes(graph, fuses=backend == "fsdp_dynamo"))

    def make() -> FSDP:
        torch.manual_seed(3)
        policy = ModuleWrapPolicy({Linears})
        return FSDP(nn.Sequential(Linears(), Linears()), auto_wrap_policy=policy)

    eager, wrapped = make(), make()
    x = rand(16, 8, seed=rank)
    eager(x).square().mean().backward()
    model = torch.compile(wrapped, fullgraph=True, backend=backend)
    Pipeline.run = watch  # type: ignore[method-assign]
    try:
        with nothing_cached(), record_artifacts() as written:
            model(x).square().mean().backward()
    finally:
        Pipeline.run = run_pipeline  # type: ignore[method-assign]
    grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (eager, wrapped)]
    code = [artifact.text for artifact in written if artifact.name.endswith("backward.inductor")]
    return code, copied, grads


@pytest.mark.parametrize("backend", ["fsdp_dynamo_aot_eager", "fsdp_dynamo"])
def test_no_bytes_are_copied_where_linears_dominate(ranks: RankPool, backend: str) -> None:
    for code, copied, (expected, got) in ranks.run(_linears, 2, backend):
        assert copied == [0]
        for one, other in zip(expected, got, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        if backend == "fsdp_dynamo":
            (backward,) = code
            program, _, stretches = backward.partition("# stretch_0")
            names = re.findall(r"torch\.ops\.fsdp_dynamo_grad\.(\w+)\.default\(", stretches)
            assert set(names) == {"mm_into_"}
            assert "cat" not in "".join(re.findall(r"cpp_fused_\w*", stretches))
            assert "clone" not in stretches
            flats = re.findall(r"(\w+) = graph_ops\.new_flat_on\(", program)
            assert len(flats) == 2
            for flat in flats:
                issued = program.index(f"graph_ops.reduce_scatter([{flat}, ],")
                written = [m.start() for m in re.finditer(rf"given = \[.*\b{flat}\b", program)]
                assert written
                assert max(written) < issued
