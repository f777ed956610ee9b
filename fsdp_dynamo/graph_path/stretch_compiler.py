"""Inductor on the stretches of a scheduled graph: each distinct one is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fsdp_dynamo.dynamo import artifacts
from fsdp_dynamo.graph_path.cache_keys import source_key
from fsdp_dynamo.graph_path.lowering import lower_boundaries, lower_writes
from fsdp_dynamo.graph_path.program import Program, is_boundary, no_output_strides, source_of
from graph_passes.graph_utils import is_backward
from graph_passes.pipeline import Pipeline
from graph_passes.scheduling.planner import Planner
from graph_passes.stretches.bodies import example_inputs, graph_of, is_one_operator, key_of
from graph_passes.stretches.cutting import Stretch, cut


class LowerWrites(CustomGraphPass):
    """Writes into flat gradients change what a stretch was given: Inductor's last pass on it.

    Args:
        key: of what else code depends on. As this pass is, it is a part of the keys of caches.
    """

    def __init__(self, key: str = "") -> None:
        self._key = f"{source_key()}.{key}"

    def __call__(self, graph: fx.Graph) -> None:
        lower_writes(graph)

    def uuid(self) -> str:
        return f"fsdp_dynamo.stretch.{self._key}"


class StretchCompiler:
    """``compile_fx``'s inner compiler: plans a graph, and compiles what it computes.

    Args:
        pipeline: of passes over the whole graph.
        planner: the one among them.
        inner_compile: Inductor's, for one stretch.
    """

    def __init__(
        self, pipeline: Pipeline, planner: Planner, inner_compile: Callable[..., Any]
    ) -> None:
        self._pipeline = pipeline
        self._planner = planner
        self._inner_compile = inner_compile

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Program:
        self._pipeline.run(gm.graph)
        lower_boundaries(gm.graph)
        artifacts.emit_graph(gm.graph, "lowered")
        cutting = cut(gm.graph, is_boundary)
        names: dict[Any, str] = {}
        name_of: dict[Stretch, str] = {}
        compiled: dict[str, Any] = {}
        kwargs |= {"static_input_idxs": ()}
        for stretch in cutting.stretches():
            if is_one_operator(stretch):
                continue  # the program calls it
            key = key_of(stretch, gm)
            if key not in names:
                names[key] = f"stretch_{len(names)}"
                body = graph_of(stretch, gm)
                compiled[names[key]] = self._compile(body, example_inputs(stretch), **kwargs)
            name_of[stretch] = names[key]
        source, constants = source_of(gm.graph, cutting, name_of)
        phase = "backward" if is_backward(gm.graph) else "forward"
        name = f"{artifacts.PREFIX}{phase}.inductor"
        artifacts.emit(name, lambda: _all_sources(source, compiled))
        _report_strides(gm.graph)
        return Program(source, compiled, constants, self._planner.last)

    def _compile(self, body: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        (output,) = body.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        # Each has an entry of its own in Inductor's cache, which models of any depth, options and
        # numbers of ranks share, as its code depends on nothing around it: not on the partition,
        # whose key has all of these. (That all outputs keep their strides is not in
        # Inductor's key; the uuid of a pass that no one else has stands for it.)
        with (
            no_output_strides(),
            torch._functorch.config.patch(bundled_autograd_cache=False),
            torch._inductor.config.patch(
                custom_partitioner_fn=None, post_grad_custom_post_pass=LowerWrites()
            ),
        ):
            return self._inner_compile(body, inputs, **kwargs)


def _all_sources(source: str, compiled: dict[str, Any]) -> str:
    parts = [f"\n# {name}\n{getattr(code, 'source_code', '')}" for name, code in compiled.items()]
    return "\n".join([source, *parts])


def _report_strides(graph: fx.Graph) -> None:
    """Tell AOTAutograd that outputs have the strides that they were traced with."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    (output,) = graph.find_nodes(op="output")
    for node in output.args[0]:  # type: ignore[union-attr]
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        strides = value.stride() if isinstance(value, torch.Tensor) else None
        context.output_strides.append(strides)


__all__ = ["LowerWrites", "StretchCompiler"]
