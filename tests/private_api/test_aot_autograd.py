"""AOTAutograd and regions."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compiling import boxed, partition
from torch import fx, nn
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.usefixtures("fresh", "cache")


@pytest.mark.private(
    "torch.fx.graph._BoxedCodeGen",
    need="a graph that is run node by node frees its inputs early; fx's public calls keep them",
    instead="a subclass of torch.fx.graph.CodeGen that takes a list and empties it",
)
def test_an_input_is_freed_after_its_last_use() -> None:
    from torch.fx.graph import _BoxedCodeGen

    args = [torch.ones(2)]
    reference = weakref.ref(args[0])
    alive: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append(reference() is not None)
        return x

    graph = fx.Graph()
    sine = graph.call_function(torch.sin, (graph.placeholder("x"),))
    graph.output((graph.call_function(look, (sine,)),))
    gm = fx.GraphModule({}, graph)
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    (result,) = gm.forward(args)
    assert torch.equal(result, torch.ones(2).sin())
    assert args == []
    assert alive == [False]


@pytest.mark.private(
    "_boxed_call",
    need="a compiled graph gets its inputs in a list that it empties: saved tensors die early",
    instead="functorch.compile.make_boxed_func, which keeps the inputs until the graph has run",
)
def test_a_backward_may_free_what_was_saved() -> None:
    from torch._dynamo.backends.common import aot_autograd

    alive: list[bool] = []

    def compile_(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def run(inputs: list[Any]) -> Any:
            results = gm.forward(*inputs)
            saved = [weakref.ref(tensor) for tensor in inputs if {*tensor.shape} == {2, 4}]
            alive.extend(one() is not None for one in saved)
            inputs.clear()
            alive.extend(one() is not None for one in saved)
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(fw_compiler=compile_, partition_fn=partition)
    compiled = torch.compile(lambda x, y, z: (x @ y) @ z, backend=backend)
    x, y, z = torch.rand(2, 3), torch.rand(3, 4), torch.rand(4, 5, requires_grad=True)
    compiled(x, y, z).sum().backward()
    assert alive == [True, False]


@pytest.mark.private(
    "desc",
    "mutated_input",
    need="which inputs a joint graph changes: checkpointed code that reads them is computed again "
    "when they have changed",
    instead="copies of all inputs without gradients that checkpointed code reads",
)
def test_a_joint_graph_knows_which_inputs_change() -> None:
    from torch._dynamo.backends.common import aot_autograd

    norm = nn.BatchNorm1d(2)
    found: list[torch.Tensor] = []

    def look(gm: fx.GraphModule, inputs: Sequence[object], **kwargs: Any) -> Any:
        returned = tree_leaves(gm.graph.output_node().meta["desc"])
        changed = [one.mutated_input for one in returned if hasattr(one, "mutated_input")]
        nodes = gm.graph.find_nodes(op="placeholder")
        found.extend(node.meta["val"] for node in nodes if node.meta["desc"] in changed)
        return partition(gm, inputs, **kwargs)

    backend = aot_autograd(fw_compiler=lambda gm, inputs: boxed(gm), partition_fn=look)
    torch.compile(norm, backend=backend, fullgraph=True)(torch.rand(3, 2)).sum().backward()
    assert not any(value.requires_grad for value in found)
    assert sorted(tuple(value.shape) for value in found) == [(), (2,), (2,)]
