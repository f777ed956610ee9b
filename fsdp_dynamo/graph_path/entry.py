"""Between the user's autograd graph and a compiled one: where the shards go in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import ref

import torch

from fsdp_dynamo import events
from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.graph_path import operators

_OWNER = "_fsdp_dynamo_flat"
_CARRIED = "_fsdp_dynamo_carried"

Taker = Callable[[torch.Tensor], None]
"""Does with an input's gradient what is to be done."""


def mark_shard(flat: FlatParameter) -> None:
    """Let a shard that is handed to a compiled graph lead back to its flat parameter.

    Weakly: autograd's nodes hold the shard, and nobody finds cycles through them.
    """
    setattr(flat.sharded, _OWNER, ref(flat))


def carrier_of(flat: FlatParameter) -> torch.Tensor:
    """An input of graphs that reduce nothing: its gradient is the unsharded one.

    As large as the unsharded flat parameter to look at, one element in memory.
    """
    one = torch.zeros((), dtype=flat.reduce_dtype, device=flat.device)
    carrier = one.expand(flat.layout.padded_numel).requires_grad_(flat.requires_grad)
    setattr(carrier, _CARRIED, ref(flat))
    return carrier


def _nobody() -> None:
    """Of a tensor that is no unit's."""


def _taker_of(flat: FlatParameter) -> Taker:
    """Takes a reduced gradient. A sum that was there before the forward is part of it."""
    total = flat.unsharded_grad_sum
    if total is None or not flat.accumulation.sync:
        return flat.accumulate_grad

    def take(grad: torch.Tensor) -> None:
        # Other forwards that wait for their backward, and this one's where its graph is retained,
        # would add the sum once more: from now on they add nothing.
        if flat.unsharded_grad_sum is total:
            flat.take_sum()
            flat.accumulation.refresh()
        total.data.zero_()
        flat.accumulate_grad(grad)

    return take


class _ShardsIn(torch.autograd.Function):
    """Takes the gradients of all shards, and of their carriers.

    Forward: the inputs, unchanged. Backward: each shard's gradient, already reduced, is added to
    the original parameters' ``.grad``; each carrier's, unsharded, to what waits for a reduction.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, takers: Collection[Taker], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.takers = takers
        return tuple([tensor.view_as(tensor) for tensor in inputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        if events.recorder is not None:
            operators.end_of_graph()
        with torch.no_grad():
            for take, grad in zip(ctx.takers, grads, strict=True):
                if grad is not None:
                    take(grad)
        return (None,) * (len(grads) + 1)


def _run(compiled: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    try:
        return compiled(*arguments)
    except BaseException:
        operators.abandon()
        raise


def with_entry(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Route the shards among a compiled graph's inputs through ``_ShardsIn``."""

    def run(*inputs: Any) -> Any:
        operators.abandon()  # a backward that failed may have left some
        takers = _takers_of(inputs)
        if not takers or not torch.is_grad_enabled():
            return _run(compiled, inputs)
        arguments = list(inputs)
        tracked = _ShardsIn.apply(list(takers.values()), *[inputs[i] for i in takers])  # type: ignore[no-untyped-call]
        for position, shard in zip(takers, tracked, strict=True):
            arguments[position] = shard
        outputs = _run(compiled, arguments)
        _drop_dropped_first(inputs, outputs)
        if events.recorder is not None:
            operators.end_of_graph()
        return outputs

    return run


def _drop_dropped_first(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Let the backward of a graph that adds sums add what the user has kept of them until then."""
    flats: list[FlatParameter | None] = [getattr(value, _OWNER, _nobody)() for value in inputs]
    summed = [flat for flat in flats if flat is not None and flat.unsharded_grad_sum is not None]
    if not summed:
        return

    def drop_dropped(grad: torch.Tensor) -> None:
        for flat in summed:
            flat.drop_dropped_grads()

    for output in outputs:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(drop_dropped)


def _takers_of(inputs: Sequence[Any]) -> dict[int, Taker]:
    """By position, who takes the gradients of the shards, and of their carriers, that need one."""
    takers: dict[int, Taker] = {}
    has_units = False
    for position, value in enumerate(inputs):
        flat: FlatParameter | None = getattr(value, _OWNER, _nobody)()
        carried: FlatParameter | None = getattr(value, _CARRIED, _nobody)()
        if flat is not None:
            has_units = True
            flat.check_originals()
            flat.refuse_comm_hook()
        if flat is not None and value.requires_grad:
            takers[position] = _taker_of(flat)
        elif carried is not None and value.requires_grad:
            takers[position] = carried.add_unsharded_grad
    if has_units:
        collective_log.begin_step()
    return takers
