"""Inductor on the stretches of a scheduled graph, and the partition of a joint graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

from fsdp_dynamo.dynamo import artifacts
from fsdp_dynamo.graph_mode.captures import NUM_OUTPUTS, phase_of
from fsdp_dynamo.graph_mode.compile_cache import source_key
from fsdp_dynamo.graph_mode.lowering import lower_boundaries, lower_writes
from fsdp_dynamo.graph_mode.planning import record_kept
from fsdp_dynamo.graph_mode.program import Program, is_boundary, no_output_strides, source_of
from graph_passes.pipeline import Pipeline
from graph_passes.regions.eligibility import tidy_region_boundaries
from graph_passes.regions.outlining import inline_regions
from graph_passes.scheduling.plan import share_gathers
from graph_passes.scheduling.planner import Planner, choose_kept
from graph_passes.scheduling.reshard import (
    changed_inputs,
    save_copies,
    save_old_values,
    tag_reshard_after_forward,
)
from graph_passes.scheduling.stretches import (
    Stretch,
    cut,
    example_inputs,
    graph_of,
    is_one_operator,
    key_of,
)


class LowerWrites(CustomGraphPass):
    """Inductor's last pass over a stretch: writes into flat gradients become in-place operators.

    The pass is part of Inductor's and AOTAutograd's cache keys.

    Args:
        key: whatever else the code depends on.
    """

    def __init__(self, key: str = "") -> None:
        self._key = f"{source_key()}.{key}"

    def __call__(self, graph: fx.Graph) -> None:
        lower_writes(graph)

    def uuid(self) -> str:
        return f"fsdp_dynamo.stretch.{self._key}"


class StretchCompiler:
    """Inner compiler of ``compile_fx``: plans a graph and compiles each distinct stretch once."""

    def __init__(
        self, pipeline: Pipeline, planner: Planner, inner_compile: Callable[..., Any]
    ) -> None:
        self._pipeline = pipeline
        self._planner = planner
        self._inner_compile = inner_compile

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Program:
        self._pipeline.run(gm.graph)
        facts = phase_of(gm.graph)
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
        phase = "backward" if facts.is_backward else "forward"
        name = f"{artifacts.PREFIX}{phase}.inductor"
        artifacts.emit(name, lambda: _all_sources(source, compiled))
        _report_strides(gm.graph)
        return Program(source, compiled, constants, facts, self._planner.last)

    def _compile(self, body: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        (output,) = body.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        # A stretch has an entry of its own in Inductor's cache. Models of other depth, options and
        # number of ranks share it, since its code does not depend on the graph around it: so the
        # partitioner, whose key contains all of these, is left out. Inductor's key does not tell
        # that all outputs keep their strides; the uuid of our pass does.
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
    """Tell AOTAutograd that outputs have the strides with which they were traced."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    (output,) = graph.find_nodes(op="output")
    for node in output.args[0]:  # type: ignore[union-attr]
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        strides = value.stride() if isinstance(value, torch.Tensor) else None
        context.output_strides.append(strides)


# -- partitioner -----------------------------------------------------------------------------------


class Partitioner(CustomPartitionerFn):
    """Min-cut partition under our tags: unsharded buffers are gathered again, not saved.

    Units that a plan or a memory budget keeps stay unsharded.
    """

    def __init__(self, planner: Planner, may_keep: bool) -> None:
        self._planner = planner
        self._may_keep = may_keep

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if joint_inputs:  # none for the body of a region, which is partitioned by itself
            artifacts.emit_graph(gm.graph, "traced", "joint")
        kept = self._kept(gm, joint_inputs, **kwargs)
        record_kept(kept)
        return _partition(gm, joint_inputs, kept, **kwargs)

    def _kept(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[str, ...]:
        planner = self._planner
        if planner.plan is not None:
            return planner.plan.kept
        budget = planner.options.limits.memory_budget_bytes
        if not self._may_keep or budget is None or planner.live_bytes_of is None:
            return ()
        forward, backward = _partition(copy_of(gm), joint_inputs, **kwargs)
        for part in (forward, backward):
            inline_regions(part.graph)
        return choose_kept(forward.graph, backward.graph, planner.options, planner.live_bytes_of)

    def uuid(self) -> str:
        return f"fsdp_dynamo.partition.{source_key()}.{self._may_keep}.{self._planner.cache_key()}"


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph and the bodies of its regions; tensors are shared."""
    graph = fx.Graph()
    result = graph.graph_copy(gm.graph, {})
    output = next(iter(reversed(gm.graph.nodes)))
    graph.output(result).meta.update(output.meta)
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    for name, body in list(copy.named_children()):
        if isinstance(body, fx.GraphModule):
            setattr(copy, name, copy_of(body))
    return copy


def _partition(
    gm: fx.GraphModule, joint_inputs: Sequence[object], kept: Sequence[str] = (), **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    tidy_region_boundaries(gm)
    share_gathers(gm.graph)
    save_old_values(gm.graph)
    tag_reshard_after_forward(gm.graph, kept)
    pair: tuple[fx.GraphModule, fx.GraphModule]
    changed = changed_inputs(gm.graph)
    pair = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    (output,) = pair[0].graph.find_nodes(op="output")
    output.meta[NUM_OUTPUTS] = kwargs["num_fwd_outputs"]
    if changed:
        save_copies(pair[0].graph, changed, kwargs["num_fwd_outputs"])
        pair[0].recompile()
    return pair


__all__ = ["LowerWrites", "StretchCompiler"]
