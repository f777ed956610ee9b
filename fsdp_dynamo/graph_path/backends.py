"""Backends of the graph path: ``"fsdp_dynamo"`` (Inductor) and ``"fsdp_dynamo_aot_eager"``.

Both partition the joint graph with functorch's min-cut partitioner under our recompute tags,
run the pass pipeline over forward and backward, and lower the collectives. What they return
goes through ``graph_entry``, which leads the shards' gradients to the original parameters.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.fx.graph import _BoxedCodeGen  # no public boxed calling convention

import graph_passes
from fsdp_dynamo.agreement.exchange import announce_compilations, announce_this_compilation
from fsdp_dynamo.dynamo import artifacts
from fsdp_dynamo.dynamo.private_api import (
    GRAPH_WAY,
    declare_way,
    one_schema_a_region,
    warn_if_the_graph_breaks,
)
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.graph_options import GraphOptions
from fsdp_dynamo.graph_path import generated_code, operators
from fsdp_dynamo.graph_path.entry import with_entry
from fsdp_dynamo.graph_path.lowering import (
    lower_regions_to_modules,
    lower_to_functions,
    lower_to_operators,
    region_bodies,
)
from fsdp_dynamo.graph_path.planning import (
    is_recording,
    live_bytes_node_by_node,
    live_bytes_of_generated,
    note_kept,
    planner_for,
)
from graph_passes.graph_pass import GraphPass
from graph_passes.markers import COLLECTIVE, UNIT
from graph_passes.pipeline import VIEW_PASSES, Pipeline, default_passes
from graph_passes.planner import Planner
from graph_passes.regions.boundary import tidy_region_boundaries
from graph_passes.regions.outlining import outline_regions
from graph_passes.scheduling.reshard import tag_reshard_after_forward
from graph_passes.scheduling.selective_unshard import choose_kept
from graph_passes.source_digest import source_digest

_log = logging.getLogger(__name__)


class _Partitioner(CustomPartitionerFn):
    """Min-cut partition with our tags: unsharded parameters are gathered again, not saved.

    With a memory budget, or as a plan says, some units stay unsharded.
    """

    def __init__(self, planner: Planner, may_keep: bool) -> None:
        self._planner = planner
        self._may_keep = may_keep

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
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
        forward, backward = _partition(_copy_of(gm), joint_inputs, **kwargs)
        return choose_kept(forward.graph, backward.graph, planner.options, planner.live_bytes_of)

    def uuid(self) -> str:
        return f"fsdp_dynamo.partition.{_sources()}.{self._may_keep}.{self._planner.cache_key()}"


def _copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, bodies of regions included, with nodes of its own; tensors are shared."""
    graph = fx.Graph()
    result = graph.graph_copy(gm.graph, {})
    output = next(iter(reversed(gm.graph.nodes)))
    graph.output(result).meta.update(output.meta)
    copy = fx.GraphModule(gm, graph)
    for name, body in list(copy.named_children()):
        if isinstance(body, fx.GraphModule):
            setattr(copy, name, _copy_of(body))
    return copy


def _partition(
    gm: fx.GraphModule, joint_inputs: Sequence[object], kept: Sequence[str] = (), **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    tidy_region_boundaries(gm)
    tag_reshard_after_forward(gm.graph, kept)
    pair: tuple[fx.GraphModule, fx.GraphModule]
    pair = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    return pair


def _run_as_python(
    pipeline: Pipeline, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    in_regions = Pipeline([pass_ for pass_ in pipeline.passes if pass_ in VIEW_PASSES])
    for body in region_bodies(gm):
        in_regions.run(body.graph)
        body.recompile()
    pipeline.run(gm.graph)
    lower_to_functions(gm.graph)
    artifacts.emit_graph(gm.graph, "lowered")
    lower_regions_to_modules(gm.graph)
    gm.graph.set_codegen(_BoxedCodeGen())  # takes a list and empties it: saved tensors die early
    gm.recompile()
    forward = gm.forward

    def run(inputs: list[Any]) -> Any:
        try:
            return forward(inputs)
        except BaseException:
            operators.abandon()
            raise

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _ScheduleAndLower(CustomGraphPass):
    """The pipeline and the lowering as Inductor's last pass on a graph."""

    def __init__(self, pipeline: Pipeline, marks: str) -> None:
        self.pipeline = pipeline
        self._marks = marks

    def __call__(self, graph: fx.Graph) -> None:
        self.pipeline.run(graph)
        lower_to_operators(graph)
        artifacts.emit_graph(graph, "lowered")

    def uuid(self) -> str:
        return f"fsdp_dynamo.eager.schedule.{_sources()}.{self.pipeline.cache_key()}.{self._marks}"


def _sources() -> str:
    """What changes when the code is edited that partitions, rewrites and lowers graphs."""
    passes = Path(graph_passes.__path__[0])
    return f"{source_digest(Path(__file__).parent)}.{source_digest(passes)}"


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


def _inductor_config(partitioner: _Partitioner, pipeline: Pipeline, marks: str) -> dict[str, Any]:
    """Inductor settings: our partition and passes, and no reordering after them."""
    config = {
        "custom_partitioner_fn": partitioner,
        "post_grad_custom_post_pass": _ScheduleAndLower(pipeline, marks),
        **generated_code.SETTINGS,
    }
    if (
        is_recording() or artifacts.is_recording()
    ):  # not force_disable_caches: that compiles C++ headers anew as well
        config |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    return config


Options = Mapping[str, Any] | None


_TUNED = "max-autotune-no-cudagraphs"


def _settings_of_mode(mode: str | None, *known: str) -> dict[str, Any]:
    """What Inductor makes of ``torch.compile(mode=...)``.

    Raises:
        FSDPValueError: not one of those that the backend knows.
    """
    if mode is None:
        return {}
    if mode not in known:
        raise FSDPValueError(
            expected=" or ".join(map(repr, ("default", *known))),
            got=repr(mode),
            where="torch.compile(mode=...)",
            fix="Leave mode out: CUDA graphs do not go with collectives in the graph, and "
            f'{_TUNED!r} needs backend="fsdp_dynamo".',
        )
    return dict(list_mode_options(mode))


def _prepare(gm: fx.GraphModule, options: Options) -> GraphOptions:
    """Read the options; make equal unit bodies regions, if the user asked for it."""
    announce_this_compilation()
    warn_if_the_graph_breaks(gm)
    parsed = GraphOptions.parse(options)
    if parsed.regions:
        report = outline_regions(gm)
        gm.meta["fsdp_regions"] = report
        _log.info("%s", report.text())
    return parsed


def _pipeline(passes: Sequence[GraphPass]) -> Pipeline:
    """A pipeline that writes down every graph at every stage, and first what the stages are."""
    pipeline = Pipeline(passes, artifacts.emit_graph)
    artifacts.emit_stages(pipeline.stages())
    return pipeline


def fsdp_dynamo_aot_eager(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    options: Options = None,
    mode: str | None = None,
) -> Any:
    """Backend: the whole step's graphs, scheduled, run node by node.

    ``options`` are those of ``fsdp_dynamo.graph_options.GraphOptions``; ``mode`` is the default.
    """
    _settings_of_mode(mode)
    parsed = _prepare(gm, options)
    planner = planner_for(gm, parsed, live_bytes_node_by_node)
    passes = default_passes(planner, True, parsed.passes, parsed.left_out)
    compiler = partial(_run_as_python, _pipeline(passes))
    compile_ = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        partition_fn=_Partitioner(planner, parsed.selective_unshard),
    )
    with one_schema_a_region():
        return with_entry(compile_(gm, example_inputs))


def fsdp_dynamo(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    options: Options = None,
    mode: str | None = None,
) -> Any:
    """Backend: the whole step's graphs, scheduled, compiled by Inductor.

    ``options`` are those of ``fsdp_dynamo.graph_options.GraphOptions``; ``mode`` is
    ``"max-autotune-no-cudagraphs"``, or ``"default"``.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    settings = _settings_of_mode(mode, _TUNED)
    parsed = _prepare(gm, options)
    planner = planner_for(gm, parsed, live_bytes_of_generated)
    passes = default_passes(planner, False, parsed.passes, parsed.left_out)
    pipeline = _pipeline(passes)
    partitioner = _Partitioner(planner, parsed.selective_unshard)
    config = settings | _inductor_config(partitioner, pipeline, _digest_of_marks(gm))
    inner_compile = generated_code.checking(compile_fx_inner)
    with one_schema_a_region():
        compiled: Any = compile_fx(gm, example_inputs, inner_compile, config_patches=config)
    return with_entry(compiled)


for _backend in (fsdp_dynamo, fsdp_dynamo_aot_eager):
    declare_way(_backend, GRAPH_WAY)
    register_backend(_backend, name=_backend.__name__)
announce_compilations()
