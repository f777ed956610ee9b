"""The graph path: a unit's forward as Dynamo traces it.

The all-gather is the forward and the reduce-scatter the backward of one ``autograd.Function``
of functional collectives, so both are nodes of the graph. Every collective is marked where it
is made. Nothing here runs outside a trace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import traceback

from fsdp_dynamo.core.tensor_parallel import TensorParallel
from fsdp_dynamo.core.unit_modules import registered
from fsdp_dynamo.dynamo.private_api import CompileRefusedError, number_of_body, with_side_effects
from fsdp_dynamo.eager.hooks import cast_output, prepare_inputs
from fsdp_dynamo.errors import FSDPStateError
from fsdp_dynamo.graph_path.offloading import TO_DEVICE, TO_HOST
from fsdp_dynamo.graph_path.traced_unit import TracedFlat, constants_of
from graph_passes.markers import BODY, COLLECTIVE, UNIT, VIEWS


class TracedTensors(NamedTuple):
    """A unit's inputs of the graph, one per flat parameter in each field.

    Attributes:
        shards: the sharded flat parameters.
        parallels: for each one's originals, how tensor parallelism has split them.
        sums: unsharded gradients of earlier steps, to be reduced with this step's.
        carriers: in a step that reduces nothing, what takes the unsharded gradients.
        secondaries: what is gathered in place of the shards, on nodes of ranks.
    """

    shards: tuple[torch.Tensor, ...]
    parallels: tuple[tuple[TensorParallel | None, ...], ...]
    sums: tuple[torch.Tensor | None, ...]
    carriers: tuple[torch.Tensor | None, ...]
    secondaries: tuple[torch.Tensor | None, ...]


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


def _cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    wanted = getattr(torch, dtype)
    return tensor if tensor.dtype == wanted else tensor.to(wanted)


def _unshard(shard: torch.Tensor, secondary: torch.Tensor | None, spec: TracedFlat) -> torch.Tensor:
    if secondary is not None:
        shard = secondary
    elif spec.offloaded_from:
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
    for group, size, mark in zip(spec.reductions, spec.scatters, spec.reduce_marks):  # noqa: B905  # traced by Dynamo
        with traceback.annotate({COLLECTIVE: mark}):
            if size:
                reduced = torch.ops._c10d_functional.reduce_scatter_tensor(grad, "avg", size, group)
            else:
                reduced = torch.ops._c10d_functional.all_reduce(grad, "avg", group)
            grad = torch.ops._c10d_functional.wait_tensor(reduced)
    if spec.grad_scale != 1:
        grad = grad * spec.grad_scale
    grad = _cast(grad, spec.grad_dtype)
    return TO_HOST(grad) if spec.offloaded_from else grad


class TracedUnshard(torch.autograd.Function):
    """Shard ``(padded_numel / N,)`` to unsharded ``(padded_numel,)`` and back.

    With a secondary shard, ``(padded_numel / ranks in a node,)``, that one is gathered. The
    gradient is the shard's all the same.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, shard: torch.Tensor, secondary: torch.Tensor | None, spec: TracedFlat
    ) -> torch.Tensor:
        ctx.spec = spec
        return _unshard(shard, secondary, spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _reduce(grad, ctx.spec), None, None


class TracedUnshardWithSum(torch.autograd.Function):
    """The same; what earlier steps have left is reduced with the gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        shard: torch.Tensor,
        secondary: torch.Tensor | None,
        total: torch.Tensor,
        spec: TracedFlat,
    ) -> torch.Tensor:
        ctx.spec = spec
        ctx.save_for_backward(total)
        return _unshard(shard, secondary, spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (total,) = ctx.saved_tensors
        return _reduce(_cast(grad, ctx.spec.sum_dtype) + total, ctx.spec), None, None, None


class TracedUnshardNoReduce(torch.autograd.Function):
    """The same without a reduction: the gradient goes to the carrier, ``(padded_numel,)``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        shard: torch.Tensor,
        secondary: torch.Tensor | None,
        carrier: torch.Tensor,
        spec: TracedFlat,
    ) -> torch.Tensor:
        ctx.spec = spec
        return _unshard(shard, secondary, spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor, None]:  # type: ignore[override]
        return None, None, _cast(grad, ctx.spec.sum_dtype), None


def _gather(
    tensors: TracedTensors, fqn: str, flats: tuple[tuple[Any, ...], ...]
) -> list[torch.Tensor]:
    unsharded = []
    with traceback.annotate({UNIT: fqn, BODY: "0"}):
        for shard, secondary, total, carrier, fields in zip(  # noqa: B905  # traced by Dynamo
            tensors.shards, tensors.secondaries, tensors.sums, tensors.carriers, flats
        ):
            spec = TracedFlat(*fields)
            if not spec.requires_grad:
                unsharded.append(_unshard(shard, secondary, spec))
            elif carrier is not None:
                unsharded.append(TracedUnshardNoReduce.apply(shard, secondary, carrier, spec))  # type: ignore[no-untyped-call]
            elif total is not None:
                unsharded.append(TracedUnshardWithSum.apply(shard, secondary, total, spec))  # type: ignore[no-untyped-call]
            else:
                unsharded.append(TracedUnshard.apply(shard, secondary, spec))  # type: ignore[no-untyped-call]
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
