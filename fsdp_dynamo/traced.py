"""The graph path: a unit's forward as Dynamo traces it.

The all-gather is the forward and the reduce-scatter the backward of one ``autograd.Function``
of functional collectives, so both are nodes of the graph. Every collective is marked where it
is made. Nothing here runs outside a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import traceback

from fsdp_dynamo.flat_parameter import FlatParameter
from graph_passes.markers import COLLECTIVE, UNIT, Mark


@dataclass(frozen=True)
class TracedFlat:
    """What the graph needs to know of one flat parameter, as constants.

    Attributes:
        group_name: the process group's registered name (no rank number is baked in).
        world_size: its size.
        is_sharded: whether there is anything to gather.
        param_dtype: dtype of the unsharded flat parameter.
        reduce_dtype: dtype of the reduction.
        grad_dtype: dtype of the gradient that leaves the graph.
        gather_mark: mark of the all-gather.
        reduce_mark: mark of the reduction.
        split_sizes: how the unsharded flat parameter is cut.
        views: for each original parameter, its piece and its shape.
    """

    group_name: str
    world_size: int
    is_sharded: bool
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    grad_dtype: torch.dtype
    gather_mark: str
    reduce_mark: str
    split_sizes: tuple[int, ...]
    views: tuple[tuple[int, tuple[int, ...]], ...]


def describe(flat: FlatParameter, unit_fqn: str, ordinal: int, reshards: bool) -> TracedFlat:
    """Constants of one flat parameter for the trace.

    Args:
        flat: the flat parameter.
        unit_fqn: its unit.
        ordinal: which of the unit's it is.
        reshards: whether the unit is resharded after its forward.
    """
    world_size = flat.group.size()
    reduce_kind = "reduce_scatter" if flat.is_sharded else "all_reduce"
    return TracedFlat(
        group_name=flat.group.group_name,
        world_size=world_size,
        is_sharded=flat.is_sharded,
        param_dtype=flat.param_dtype,
        reduce_dtype=flat.reduce_dtype,
        grad_dtype=flat.dtype,
        gather_mark=Mark(unit_fqn, "all_gather", "forward", ordinal, reshards).encode(),
        reduce_mark=Mark(unit_fqn, reduce_kind, "backward", ordinal).encode(),  # type: ignore[arg-type]
        split_sizes=flat.layout.split_sizes,
        views=tuple(
            (i, slot.shape)
            for i, slot in zip(flat.layout.split_slots, flat.layout.slots, strict=True)
        ),
    )


def _unshard(shard: torch.Tensor, spec: TracedFlat) -> torch.Tensor:
    if shard.dtype != spec.param_dtype:
        shard = shard.to(spec.param_dtype)
    if not spec.is_sharded:
        return shard.view_as(shard)
    with traceback.annotate({COLLECTIVE: spec.gather_mark}):
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(
            shard, spec.world_size, spec.group_name
        )
        unsharded: torch.Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
    return unsharded


def _reduce(grad: torch.Tensor, spec: TracedFlat) -> torch.Tensor:
    if grad.dtype != spec.reduce_dtype:
        grad = grad.to(spec.reduce_dtype)
    if spec.world_size > 1:
        with traceback.annotate({COLLECTIVE: spec.reduce_mark}):
            if spec.is_sharded:
                reduced = torch.ops._c10d_functional.reduce_scatter_tensor(
                    grad, "avg", spec.world_size, spec.group_name
                )
            else:
                reduced = torch.ops._c10d_functional.all_reduce(grad, "avg", spec.group_name)
            grad = torch.ops._c10d_functional.wait_tensor(reduced)
    return grad.to(spec.grad_dtype)


class TracedUnshard(torch.autograd.Function):
    """Shard ``(padded_numel / N,)`` to unsharded ``(padded_numel,)`` and back."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, spec: TracedFlat) -> torch.Tensor:  # type: ignore[override]
        ctx.spec = spec
        return _unshard(shard, spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _reduce(grad, ctx.spec), None


def traced_forward(
    flats: tuple[FlatParameter, ...],
    specs: tuple[TracedFlat, ...],
    unit_fqn: str,
    module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A unit's forward with its all-gathers in the graph.

    Views of the unsharded flat parameters stand in ``module._parameters`` while the module is
    called, and the original parameters after it.
    """
    kept = []
    with traceback.annotate({UNIT: unit_fqn}):
        for flat, spec in zip(flats, specs):  # noqa: B905  # traced by Dynamo
            if flat.requires_grad:
                unsharded = TracedUnshard.apply(flat.sharded, spec)  # type: ignore[no-untyped-call]
            else:
                unsharded = _unshard(flat.sharded, spec)
            pieces = torch.split(unsharded, spec.split_sizes)  # type: ignore[arg-type]
            for original, (index, shape) in zip(flat.originals, spec.views):  # noqa: B905
                view = pieces[index].view(shape)
                for holder, name, _ in original.sites:
                    kept.append((holder, name, holder._parameters[name]))
                    holder._parameters[name] = view  # type: ignore[assignment]
        output = call(*args, **kwargs)
        for holder, name, param in kept:
            holder._parameters[name] = param
    return output
