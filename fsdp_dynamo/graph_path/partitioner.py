"""Partition of a joint graph into forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from fsdp_dynamo.dynamo import artifacts
from fsdp_dynamo.graph_path.cache_keys import source_key
from fsdp_dynamo.graph_path.planning import note_kept
from graph_passes.regions.boundary import tidy_region_boundaries
from graph_passes.regions.inlining import inline_regions
from graph_passes.scheduling.old_values import changed_inputs, save_copies, save_old_values
from graph_passes.scheduling.planner import Planner
from graph_passes.scheduling.reshard import tag_reshard_after_forward
from graph_passes.scheduling.selective_unshard import choose_kept
from graph_passes.scheduling.shared_gathers import share_gathers


class Partitioner(CustomPartitionerFn):
    """Min-cut partition with our tags: unsharded parameters are gathered again, not saved.

    With a memory budget, or as a plan says, some units stay unsharded.
    """

    def __init__(self, planner: Planner, may_keep: bool) -> None:
        self._planner = planner
        self._may_keep = may_keep

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if joint_inputs:  # none: the body of a region, which is partitioned before the whole graph
            artifacts.emit_graph(gm.graph, "traced", "joint")
        kept = self._kept(gm, joint_inputs, **kwargs)
        note_kept(kept)
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
    """A copy of a graph, bodies of regions included, with nodes of its own; tensors are shared."""
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
    if changed:
        save_copies(pair[0].graph, changed, kwargs["num_fwd_outputs"])
        pair[0].recompile()
    return pair
