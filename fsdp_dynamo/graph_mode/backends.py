"""Backends of graph mode: ``"fsdp_dynamo"`` (Inductor) and ``"fsdp_dynamo_aot_eager"``.

Both partition the joint graph with functorch's min-cut partitioner under our recompute tags, run
the pass pipeline over forward and backward, and lower the collectives. ``route_gradients`` wraps
the result, so that gradients of the shards reach the original parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch.fx.graph import _BoxedCodeGen  # no public boxed calling convention

from fsdp_dynamo.comm import wire_kernels
from fsdp_dynamo.dynamo import artifacts
from fsdp_dynamo.dynamo.private_api import (
    GRAPH_MODE,
    collected_seldom,
    declare_mode,
    nothing_donated,
    one_schema_a_region,
)
from fsdp_dynamo.dynamo.progress import (
    compilations,
    report_compilations,
    report_this_compilation,
)
from fsdp_dynamo.graph_mode.captures import phase_of
from fsdp_dynamo.graph_mode.compile_cache import (
    compile_once,
    graph_key,
    marks_key,
)
from fsdp_dynamo.graph_mode.gradient_routing import refuse_writes_before_gathers, route_gradients
from fsdp_dynamo.graph_mode.inductor import (
    MAX_AUTOTUNE,
    built_together,
    inductor_settings,
    keeps_graphs,
    mode_settings,
    users_settings,
    vectorization,
)
from fsdp_dynamo.graph_mode.lowering import bind, lower_to_functions
from fsdp_dynamo.graph_mode.operators import GraphOperators
from fsdp_dynamo.graph_mode.options import GraphOptions
from fsdp_dynamo.graph_mode.planning import (
    live_bytes_node_by_node,
    live_bytes_of_generated,
    planner_for,
    record_compiled_alone,
)
from fsdp_dynamo.graph_mode.program import loading
from fsdp_dynamo.graph_mode.stretch_compiler import Partitioner, StretchCompiler
from fsdp_dynamo.graph_mode.trace import warn_if_the_graph_breaks
from fsdp_dynamo.graph_mode.traced_unit import copy_shared_inputs
from fsdp_dynamo.graph_mode.unshard_operators import collectives_of, share_unshards, unshard_nodes
from graph_passes.graph_pass import GraphPass
from graph_passes.pipeline import Pipeline, default_passes
from graph_passes.regions.outlining import outline_regions
from graph_passes.scheduling.planner import Planner

_log = logging.getLogger(__name__)


def _run_node_by_node(
    pipeline: Pipeline,
    operators: GraphOperators,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
) -> Callable[..., Any]:
    pipeline.run(gm.graph)
    phase = phase_of(gm.graph)
    lower_to_functions(gm.graph)
    artifacts.emit_graph(gm.graph, "lowered")
    bind(gm.graph, operators)
    gm.graph.set_codegen(_BoxedCodeGen())  # empties its list of inputs: saved tensors die early
    gm.recompile()
    run = operators.runner(gm.forward, phase)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


Options = Mapping[str, Any] | None


def _prepare(gm: fx.GraphModule, options: Options) -> GraphOptions:
    """Parse the options, share unshards, and make equal unit bodies regions."""
    report_this_compilation()
    compilations.describe(_what_for(gm))
    warn_if_the_graph_breaks(gm)
    parsed = GraphOptions.parse(options)
    refuse_writes_before_gathers(gm)
    share_unshards(gm)
    copy_shared_inputs(gm)
    if parsed.regions:
        report = outline_regions(gm)
        _log.info("%s", report.text())
        record_compiled_alone(report.left)
    return parsed


def _what_for(gm: fx.GraphModule) -> str:
    """Name the graph by the kind of step that needs one of its own."""
    if not torch.is_grad_enabled():
        return "the graph of a forward without gradients"
    inputs = [node.args for node in unshard_nodes(gm)]
    if any(unreduced is not None for *_, unreduced, _ in inputs):
        return "the graph of a step that accumulates gradients, as under no_sync()"
    if any(total is not None for _, _, total, *_ in inputs):
        return "the graph of a step that reduces accumulated gradients"
    return "the graph of a step"


def _pipeline(passes: Sequence[GraphPass]) -> Pipeline:
    """Return a pipeline that emits every graph at every stage as an artifact."""
    return Pipeline(passes, artifacts.emit_graph)


def fsdp_dynamo_aot_eager(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    options: Options = None,
    mode: str | None = None,
) -> Any:
    """Backend that schedules the whole step's graphs and runs them node by node.

    ``options`` are the fields of ``graph_mode.options.GraphOptions``; ``mode`` is the default.
    """
    mode_settings(mode)
    parsed = _prepare(gm, options)
    users_settings(parsed, is_used=False)
    planner = planner_for(gm, parsed, live_bytes_node_by_node)
    passes = default_passes(planner, True, parsed.passes, parsed.left_out)
    operators = GraphOperators(parsed.cuda_graphs)
    compiler = partial(_run_node_by_node, _pipeline(passes), operators)
    compile_ = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        partition_fn=Partitioner(planner, parsed.selective_unshard),
    )
    with one_schema_a_region(), nothing_donated(), collected_seldom():
        return route_gradients(compile_(gm, example_inputs), operators)


def _planned_alike(planner: Planner, operators: GraphOperators, compile_: Callable[[], Any]) -> Any:
    """Compile; compile again if cached code has another plan than the ranks of this run follow."""
    with loading(operators) as programs:
        compiled = compile_()
        plans = [program.plan for program in programs if program.plan is not None]
        if planner.agree is None or planner.agree.are_followed(plans):
            return compiled
        planner.last = None  # it must not differ between ranks: cache keys contain the planner
        return compile_()


def _inductor_alone(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, config_patches=vectorization(example_inputs))


_SETTINGS = {
    # A traced autograd.Function of the user's is entirely in Dynamo's graph, hence in its key.
    "autograd_cache_allow_custom_autograd_functions": True,
    # The cache stores the Program itself, not a key into Inductor's cache.
    "bundled_autograd_cache": True,
    # Compile the backward now: while these settings are in force and other processes wait.
    "force_non_lazy_backward_lowering": True,
}


def fsdp_dynamo(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    options: Options = None,
    mode: str | None = None,
) -> Any:
    """Backend that schedules the whole step's graphs and compiles them with Inductor.

    ``options`` are the fields of ``graph_mode.options.GraphOptions``, and Inductor's; ``mode`` is
    ``"max-autotune-no-cudagraphs"``, or ``"default"``.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    settings = mode_settings(mode, MAX_AUTOTUNE)
    parsed = _prepare(gm, options)
    settings |= users_settings(parsed)
    if collectives_of(gm).formats:
        wire_kernels.compile_kernels(_inductor_alone)
    planner = planner_for(gm, parsed, live_bytes_of_generated)
    passes = default_passes(planner, False, parsed.passes, parsed.left_out)
    pipeline = _pipeline(passes)
    partitioner = Partitioner(planner, parsed.selective_unshard)
    marks = marks_key(gm)
    compiler = StretchCompiler(pipeline, planner, compile_fx_inner)

    def compile_() -> Any:
        config = (
            vectorization(example_inputs)
            | settings
            | inductor_settings(partitioner, pipeline, marks)
        )
        key = None
        # A user's pass may wait for other ranks, which must not wait for this rank's code.
        if keeps_graphs(config) and not parsed.passes:
            parts = (marks, partitioner.uuid(), pipeline.cache_key(), repr(settings))
            key = graph_key(gm, example_inputs, *parts)

        def run() -> Any:
            with built_together(example_inputs):
                return compile_fx(gm, example_inputs, compiler, config_patches=config)

        return compile_once(key, run)

    operators = GraphOperators(parsed.cuda_graphs)
    settings_of_autograd = torch._functorch.config.patch(_SETTINGS)
    once = one_schema_a_region()
    with once, settings_of_autograd, nothing_donated(), collected_seldom():
        return route_gradients(_planned_alike(planner, operators, compile_), operators)


for _backend in (fsdp_dynamo, fsdp_dynamo_aot_eager):
    declare_mode(_backend, GRAPH_MODE)
    register_backend(_backend, name=_backend.__name__)
report_compilations()
