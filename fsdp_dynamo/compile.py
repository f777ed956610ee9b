"""Backends of the graph path: ``"fsdp_dynamo"`` (Inductor) and ``"fsdp_dynamo_aot_eager"``.

Both partition the joint graph with functorch's min-cut partitioner under our recompute tags,
run the pass pipeline over forward and backward, and lower the collectives. What they return
goes through ``_ShardsIn``, which leads the shards' gradients to the original parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

from fsdp_dynamo import events, graph_ops
from fsdp_dynamo import lowering as lowering_module
from fsdp_dynamo.dynamo_glue import GRAPH_WAY, declare_way
from fsdp_dynamo.flat_parameter import FlatParameter
from fsdp_dynamo.lowering import lower_to_functions, lower_to_operators
from fsdp_dynamo.rendezvous import announce_compilations, announce_this_compilation
from graph_passes.markers import COLLECTIVE, UNIT
from graph_passes.pipeline import Pipeline, default_passes
from graph_passes.planner import Planner
from graph_passes.reshard import tag_reshard_after_forward

_OWNER = "_fsdp_dynamo_flat"


def mark_shard(flat: FlatParameter) -> None:
    """Let a shard that is handed to a compiled graph lead back to its flat parameter."""
    setattr(flat.sharded, _OWNER, flat)


class _ShardsIn(torch.autograd.Function):
    """Between the user's autograd graph and the compiled one: takes all shards' gradients.

    Forward: the shards, unchanged. Backward: each gradient, already reduced, is added to the
    original parameters' ``.grad``.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, flats: Sequence[FlatParameter], *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.flats = flats
        return tuple([shard.view_as(shard) for shard in shards])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        if events.recorder is not None:
            graph_ops.end_of_graph()
        with torch.no_grad():
            for flat, grad in zip(ctx.flats, grads, strict=True):
                if grad is not None:
                    flat.accumulate_grad(grad)
        return (None,) * (len(grads) + 1)


def _with_entry(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Route the shards among a compiled graph's inputs through ``_ShardsIn``."""

    def run(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*inputs)
        where: list[int] = []
        flats: list[FlatParameter] = []
        for position, value in enumerate(inputs):
            flat = getattr(value, _OWNER, None)
            if flat is None:
                continue
            flat.check_originals()
            if flat.requires_grad:
                where.append(position)
                flats.append(flat)
        if not where:
            return compiled(*inputs)
        arguments = list(inputs)
        tracked = _ShardsIn.apply(flats, *[inputs[i] for i in where])  # type: ignore[no-untyped-call]
        for position, shard in zip(where, tracked, strict=True):
            arguments[position] = shard
        outputs = compiled(*arguments)
        if events.recorder is not None:
            graph_ops.end_of_graph()
        return outputs

    return run


def _partition(gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Min-cut partition with our tags: unsharded parameters are gathered again, not saved."""
    tag_reshard_after_forward(gm.graph)
    return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


def _run_as_python(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    Pipeline(default_passes(Planner(), node_by_node=True)).run(gm.graph)
    lower_to_functions(gm.graph)
    gm.recompile()
    boxed: Callable[..., Any] = make_boxed_func(gm.forward)
    return boxed


_aot_eager = aot_autograd(
    fw_compiler=_run_as_python,
    bw_compiler=_run_as_python,
    inference_compiler=_run_as_python,
    partition_fn=_partition,
)


class _Partitioner(CustomPartitionerFn):
    """``_partition`` for Inductor's compile cache."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        pair: tuple[fx.GraphModule, fx.GraphModule] = _partition(gm, joint_inputs, **kwargs)
        return pair

    def uuid(self) -> str:
        return "fsdp_dynamo.partition.1"


class _ScheduleAndLower(CustomGraphPass):
    """The pipeline and the lowering as Inductor's last pass on a graph."""

    def __init__(self, marks: str) -> None:
        self.pipeline = Pipeline()
        self._marks = marks

    def __call__(self, graph: fx.Graph) -> None:
        self.pipeline.run(graph)
        lower_to_operators(graph)

    def uuid(self) -> str:
        lowering = hashlib.sha256(Path(lowering_module.__file__).read_bytes()).hexdigest()
        return f"fsdp_dynamo.schedule.{self.pipeline.cache_key()}.{lowering}.{self._marks}"


def _digest_of_marks(gm: fx.GraphModule) -> str:
    """Units and collectives in order, as a hash.

    Inductor's cache keys know nothing of annotations, but generated code holds what is made of
    them: two graphs that differ in their units alone must not share code.
    """
    digest = hashlib.sha256()
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                custom = node.meta.get("custom") or {}
                digest.update(repr([custom.get(key) for key in (COLLECTIVE, UNIT)]).encode())
    return digest.hexdigest()


def _inductor_config(marks: str) -> dict[str, Any]:
    """Inductor settings: our partition and passes, and no reordering after them."""
    return {
        "custom_partitioner_fn": _Partitioner(),
        "post_grad_custom_post_pass": _ScheduleAndLower(marks),
        "reorder_for_peak_memory": False,
    }


def fsdp_dynamo_aot_eager(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Any:
    """Backend: the whole step's graphs, scheduled, run node by node."""
    announce_this_compilation()
    return _with_entry(_aot_eager(gm, example_inputs))


def fsdp_dynamo(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Any:
    """Backend: the whole step's graphs, scheduled, compiled by Inductor."""
    from torch._inductor.compile_fx import compile_fx

    announce_this_compilation()
    compiled: Any = compile_fx(
        gm, example_inputs, config_patches=_inductor_config(_digest_of_marks(gm))
    )
    return _with_entry(compiled)


for _backend in (fsdp_dynamo, fsdp_dynamo_aot_eager):
    declare_way(_backend, GRAPH_WAY)
    register_backend(_backend, name=_backend.__name__)
announce_compilations()
