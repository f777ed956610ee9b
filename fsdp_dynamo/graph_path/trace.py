"""The graph path: a unit's forward as Dynamo traces it.

The all-gather is the forward and the reduce-scatter the backward of one ``autograd.Function``
of functional collectives, so both are nodes of the graph. Every collective is marked where it
is made. Nothing here runs outside a trace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import traceback

from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.tensor_parallel import TensorParallel
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.core.unit_modules import UnitModuleProtocol, registered
from fsdp_dynamo.dynamo.private_api import CompileRefusedError, number_of_body, with_side_effects
from fsdp_dynamo.eager.hooks import cast_output, prepare_inputs
from fsdp_dynamo.errors import FSDPStateError, unit_name
from fsdp_dynamo.graph_path.offloading import TO_DEVICE, TO_HOST
from graph_passes.markers import BODY, COLLECTIVE, UNIT, VIEWS, CollectiveKind, Mark
from graph_passes.wire_format import text_of


class TracedFlat(NamedTuple):
    """Constants of one flat parameter in the graph; they make no guards.

    Attributes:
        group_name: the shard group's registered name (no rank number is baked in).
        world_size: its size.
        reductions: names of the groups over which gradients are averaged, in order.
        is_sharded: whether there is anything to gather.
        requires_grad: whether there is a gradient to reduce.
        param_dtype: name of the unsharded flat parameter's dtype.
        reduce_dtype: name of the reduction's dtype.
        sum_dtype: name of the dtype of gradients that wait for a reduction.
        grad_dtype: name of the dtype of the gradient that leaves the graph.
        grad_scale: factor of reduced gradients.
        gather_mark: mark of the all-gather.
        reduce_marks: a mark for each of ``reductions``.
        offloaded_from: the device that computes, where the shard is in host memory; ``""``: both
            are in one place.
        split_sizes: how the unsharded flat parameter is cut.
        views: for each original parameter its piece, its shape, and where it is put: the names
            that lead from the unit's module to the holder, and the parameter's name.
    """

    group_name: str
    world_size: int
    reductions: tuple[str, ...]
    is_sharded: bool
    requires_grad: bool
    param_dtype: str
    reduce_dtype: str
    sum_dtype: str
    grad_dtype: str
    grad_scale: float
    gather_mark: str
    reduce_marks: tuple[str, ...]
    offloaded_from: str
    split_sizes: tuple[int, ...]
    views: tuple[tuple[int, tuple[int, ...], tuple[tuple[tuple[str, ...], str], ...]], ...]


class TracedUnit(NamedTuple):
    """Constants of one unit in the graph.

    Attributes:
        fqn: the unit's FQN.
        input_dtype: name of the dtype that floating-point inputs are cast to; ``""``: none.
        output_dtype: name of the dtype that floating-point outputs are cast to; ``""``: none.
        device: where inputs are moved to; ``""``: they stay.
        flats: its flat parameters.
    """

    fqn: str
    input_dtype: str
    output_dtype: str
    device: str
    flats: tuple[TracedFlat, ...]


class TracedTensors(NamedTuple):
    """A unit's inputs of the graph, one per flat parameter in each field.

    Attributes:
        shards: the sharded flat parameters.
        parallels: for each one's originals, how tensor parallelism has split them.
        sums: unsharded gradients of earlier steps, to be reduced with this step's.
        carriers: in a step that reduces nothing, what takes the unsharded gradients.
    """

    shards: tuple[torch.Tensor, ...]
    parallels: tuple[tuple[TensorParallel | None, ...], ...]
    sums: tuple[torch.Tensor | None, ...]
    carriers: tuple[torch.Tensor | None, ...]


def _describe(module: UnitModuleProtocol) -> TracedUnit:
    """A unit's constants as they are now."""
    unit = module._fsdp_unit
    reshards = unit.settings.reshards_after_forward
    if reshards is None:
        reshards = unit.config.strategy.reshards_after_forward and not module._fsdp_is_outermost()
    paths = _paths(module._fsdp_inner())  # a checkpoint wrapper may have come in between
    flats = tuple(
        _describe_flat(flat, unit, i, reshards, paths) for i, flat in enumerate(unit.flats)
    )
    device = "" if unit.device is None else str(unit.device)
    input_dtype, output_dtype = _name(module._fsdp_input_dtype), _name(unit.output_dtype)
    return TracedUnit(unit.fqn, input_dtype, output_dtype, device, flats)


def _describe_flat(
    flat: FlatParameter,
    unit: Unit,
    ordinal: int,
    reshards: bool,
    paths: dict[nn.Module, tuple[str, ...]],
) -> TracedFlat:
    kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_reduce")
    if flat.is_sharded:
        kinds = ("reduce_scatter", "all_reduce")
    reductions = tuple(group.group_name for group in flat.groups.reductions)
    # Marks are unique: of two all-reduces, the one over replicas counts on behind all flats.
    second = ordinal if flat.is_sharded else ordinal + len(unit.flats)
    dtypes = flat.dtypes(unit.wants_full_precision)
    wires = flat.wires(unit.wants_full_precision)
    layout = flat.layout
    views = []
    for original, piece, slot in zip(flat.originals, layout.split_slots, layout.slots, strict=True):
        sites = [(paths.get(module), name) for module, name, _ in original.sites]
        places = {(path, name) for path, name in sites if path is not None}
        views.append((piece, slot.shape, tuple(sorted(places))))
    return TracedFlat(
        group_name=flat.group.group_name,
        world_size=flat.group.size(),
        reductions=reductions,
        is_sharded=flat.is_sharded,
        requires_grad=flat.requires_grad,
        param_dtype=_name(dtypes.param),
        reduce_dtype=_name(dtypes.reduce),
        sum_dtype=_name(dtypes.sum),
        grad_dtype=_name(flat.dtype),
        grad_scale=unit.settings.grad_scale,
        gather_mark=Mark(
            unit.fqn, "all_gather", "forward", ordinal, reshards, text_of(wires.gather)
        ).encode(),
        reduce_marks=tuple(
            Mark(
                unit.fqn,
                kind,
                "backward",
                ordinal if i == 0 else second,
                wire=text_of(wires.reduce if kind == "reduce_scatter" else wires.replicas),
            ).encode()
            for i, (kind, _) in enumerate(zip(kinds, reductions, strict=False))
        ),
        offloaded_from=str(flat.device) if flat.is_offloaded else "",
        split_sizes=layout.split_sizes,
        views=tuple(views),
    )


def _paths(module: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """For every module below, the names that lead to it, wrappers' names included."""
    paths: dict[nn.Module, tuple[str, ...]] = {module: ()}
    pending = [module]
    while pending:
        parent = pending.pop()
        for name, child in parent._modules.items():
            if child is not None and child not in paths:
                paths[child] = (*paths[parent], name)
                pending.append(child)
    return paths


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_originals(name: str) -> None:
    """Check the parameters of the unit module of this name, before its shards become inputs.

    Raises:
        CompileRefusedError: something is wrong with them (``Unit.check_originals``).
    """
    try:
        registered(name)._fsdp_unit.check_originals()
    except FSDPStateError as error:
        raise CompileRefusedError(*error.args) from None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constants_of(name: str) -> tuple[Any, ...]:
    """``TracedUnit`` of the unit module of this name, at the time of the trace, as plain tuples.

    Raises:
        CompileRefusedError: a setting or the strategy is for eager and hooks mode only, or buffers
            would have to be cast between training and evaluation.
    """
    module = registered(name)
    refused = module._fsdp_unit.settings.eager_only()
    if refused is not None:
        setter, reason = refused
        raise CompileRefusedError(
            expected="settings that a whole graph can follow",
            got=f"{setter}: {reason}",
            where=unit_name(module._fsdp_unit.fqn),
            fix="Leave it out, or compile without fullgraph (hooks mode).",
        )
    if module._fsdp_unit.config.groups.hierarchy is not None:
        raise CompileRefusedError(
            expected="a strategy whose gathers a graph places one by one",
            got="HIERARCHICAL_SHARD: its secondary shards outlive the graph that gathers them",
            where=unit_name(module._fsdp_unit.fqn),
            fix="Compile without fullgraph (hooks mode), or take FULL_SHARD or HYBRID_SHARD.",
        )
    if module._fsdp_unit.config.full_precision_in_eval and module._fsdp_buffer_dtypes:
        raise CompileRefusedError(
            expected="FSDP_USE_FULL_PREC_IN_EVAL without buffer_dtype, which would be cast then",
            got=f"a cast buffer, '{next(iter(module._fsdp_buffer_dtypes))}'",
            where=unit_name(module._fsdp_unit.fqn),
            fix="Leave one of them out, or compile without fullgraph (hooks mode).",
        )
    *constants, flats = _describe(module)
    return (*constants, tuple([tuple(flat) for flat in flats]))


def _cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    wanted = getattr(torch, dtype)
    return tensor if tensor.dtype == wanted else tensor.to(wanted)


def _unshard(shard: torch.Tensor, spec: TracedFlat) -> torch.Tensor:
    if spec.offloaded_from:
        dtype = getattr(torch, spec.param_dtype)
        shard = TO_DEVICE(shard, spec.offloaded_from, dtype)
    else:
        shard = _cast(shard, spec.param_dtype)
    if not spec.is_sharded:
        return shard.view_as(shard)
    with traceback.annotate({COLLECTIVE: spec.gather_mark}):
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(
            shard, spec.world_size, spec.group_name
        )
        unsharded: torch.Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
    return unsharded


def _reduce(grad: torch.Tensor, spec: TracedFlat) -> torch.Tensor:
    grad = _cast(grad, spec.reduce_dtype)
    scatters = spec.is_sharded
    for group, mark in zip(spec.reductions, spec.reduce_marks):  # noqa: B905  # traced by Dynamo
        with traceback.annotate({COLLECTIVE: mark}):
            if scatters:
                reduced = torch.ops._c10d_functional.reduce_scatter_tensor(
                    grad, "avg", spec.world_size, group
                )
            else:
                reduced = torch.ops._c10d_functional.all_reduce(grad, "avg", group)
            grad = torch.ops._c10d_functional.wait_tensor(reduced)
        scatters = False
    if spec.grad_scale != 1:
        grad = grad * spec.grad_scale
    grad = _cast(grad, spec.grad_dtype)
    return TO_HOST(grad) if spec.offloaded_from else grad


class TracedUnshard(torch.autograd.Function):
    """Shard ``(padded_numel / N,)`` to unsharded ``(padded_numel,)`` and back."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, spec: TracedFlat) -> torch.Tensor:  # type: ignore[override]
        ctx.spec = spec
        return _unshard(shard, spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _reduce(grad, ctx.spec), None


class TracedUnshardWithSum(torch.autograd.Function):
    """The same; what earlier steps have left is reduced with the gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, shard: torch.Tensor, total: torch.Tensor, spec: TracedFlat
    ) -> torch.Tensor:
        ctx.spec = spec
        ctx.save_for_backward(total)
        return _unshard(shard, spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (total,) = ctx.saved_tensors
        return _reduce(_cast(grad, ctx.spec.sum_dtype) + total, ctx.spec), None, None


class TracedUnshardNoReduce(torch.autograd.Function):
    """The same without a reduction: the gradient goes to the carrier, ``(padded_numel,)``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, shard: torch.Tensor, carrier: torch.Tensor, spec: TracedFlat
    ) -> torch.Tensor:
        ctx.spec = spec
        return _unshard(shard, spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:  # type: ignore[override]
        return None, _cast(grad, ctx.spec.sum_dtype), None


def _gather(
    tensors: TracedTensors, fqn: str, flats: tuple[tuple[Any, ...], ...]
) -> list[torch.Tensor]:
    unsharded = []
    with traceback.annotate({UNIT: fqn, BODY: "0"}):
        for shard, total, carrier, fields in zip(  # noqa: B905  # traced by Dynamo
            tensors.shards, tensors.sums, tensors.carriers, flats
        ):
            spec = TracedFlat(*fields)
            if not spec.requires_grad:
                unsharded.append(_unshard(shard, spec))
            elif carrier is not None:
                unsharded.append(TracedUnshardNoReduce.apply(shard, carrier, spec))  # type: ignore[no-untyped-call]
            elif total is not None:
                unsharded.append(TracedUnshardWithSum.apply(shard, total, spec))  # type: ignore[no-untyped-call]
            else:
                unsharded.append(TracedUnshard.apply(shard, spec))  # type: ignore[no-untyped-call]
    return unsharded


_OPEN = ""
"""The key that is there while the outermost unit runs, which forgets them all afterwards."""


def _gather_once(
    name: str,
    gathered: dict[str, list[torch.Tensor]],
    tensors: TracedTensors,
    fqn: str,
    flats: tuple[tuple[Any, ...], ...],
) -> list[torch.Tensor]:
    """What another module of the unit has gathered, in a forward of the outermost unit."""
    if is_outermost(name):
        with_side_effects(_put, [(gathered, _OPEN, [])])
    key = place_of(name, torch.is_grad_enabled())
    if key in gathered:
        return gathered[key]
    unsharded = _gather(tensors, fqn, flats)
    if _OPEN in gathered:
        with_side_effects(_put, [(gathered, key, unsharded)])
    return unsharded


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_outermost(name: str) -> bool:
    """Whether the unit module of this name is that of the outermost unit."""
    return registered(name)._fsdp_is_outermost()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def place_of(name: str, has_grad: bool) -> str:
    """The unit of the unit module of this name, the body in which it is traced, and whether with
    gradients.

    What is made in the body of an operator like ``checkpoint`` is not seen outside.
    """
    return f"{id(registered(name)._fsdp_unit)} in {number_of_body()}, {has_grad}"


def traced_forward(
    name: str,
    tensors: TracedTensors,
    module: Any,
    body: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gathered: dict[str, list[torch.Tensor]] | None,
) -> Any:
    """A unit's forward with its all-gathers in the graph.

    Views of the unsharded flat parameters stand in ``module._parameters`` while the module is
    called, and the original parameters after it. Holders are reached by their path, as the
    user's own code reaches them, so that Dynamo guards each module once.

    Args:
        name: the unit module's registered name.
        tensors: inputs of the graph.
        module: the unit's module.
        body: calls it.
        args: positional inputs.
        kwargs: keyword inputs.
        gathered: unsharded flat parameters of units of several modules, by unit, in a forward of
            the outermost one; ``None`` where there is no such unit.
    """
    fqn, input_dtype, output_dtype, device, flats = constants_of(name)
    if input_dtype or device:
        dtype = getattr(torch, input_dtype) if input_dtype else None
        target = torch.device(device) if device else None
        args, kwargs = prepare_inputs(target, dtype, args, kwargs)
    if gathered is None:
        unsharded = _gather(tensors, fqn, flats)
    else:
        unsharded = _gather_once(name, gathered, tensors, fqn, flats)
    shown = []
    with traceback.annotate({UNIT: fqn, BODY: "1"}):
        for flat, fields, splits in zip(unsharded, flats, tensors.parallels):  # noqa: B905  # traced
            spec = TracedFlat(*fields)
            with traceback.annotate({VIEWS: fqn}):
                pieces = torch.split(flat, spec.split_sizes)  # type: ignore[arg-type]
                views = [pieces[index].view(shape) for index, shape, _ in spec.views]
            for view, (_, _, places), split in zip(views, spec.views, splits):  # noqa: B905
                if split is not None:
                    view = split.as_dtensor(view)
                for path, parameter in places:
                    holder = module
                    for part in path:
                        holder = holder._modules[part]
                    shown.append((holder._parameters, parameter, view))
        originals = [(entries, name, entries[name]) for entries, name, _ in shown]
        with_side_effects(_put, shown)
        output = body(*args, **kwargs)
        with_side_effects(_put, originals)
        if output_dtype:
            output = cast_output(getattr(torch, output_dtype), output)
    if gathered is not None and is_outermost(name):
        with_side_effects(gathered.clear)
    return output


def _put(entries: list[tuple[Any, str, Any]]) -> None:
    for holder, name, tensor in entries:
        holder[name] = tensor
