"""Between the user's autograd graph and a compiled one: where the shards go in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp_dynamo import events, graph_ops
from fsdp_dynamo.flat_parameter import FlatParameter

_OWNER = "_fsdp_dynamo_flat"
_TAKER = "_fsdp_dynamo_taker"

Taker = Callable[[torch.Tensor], None]
"""Does with an input's gradient what is to be done."""


def mark_shard(flat: FlatParameter) -> None:
    """Let a shard that is handed to a compiled graph lead back to its flat parameter."""
    setattr(flat.sharded, _OWNER, flat)


def carrier_of(flat: FlatParameter) -> torch.Tensor:
    """An input of graphs that reduce nothing: its gradient is the unsharded one.

    As large as the unsharded flat parameter to look at, one element in memory.
    """
    one = torch.zeros((), dtype=flat.reduce_dtype, device=flat.device)
    carrier = one.expand(flat.layout.padded_numel).requires_grad_(flat.requires_grad)
    setattr(carrier, _TAKER, flat.add_unsharded_grad)
    return carrier


def _taker_of(flat: FlatParameter) -> Taker:
    """Takes a reduced gradient. A sum that was there before the forward is part of it."""
    if flat.unsharded_grad_sum is None or not flat.accumulation.sync:
        return flat.accumulate_grad

    def take(grad: torch.Tensor) -> None:
        flat.accumulate_grad(grad)
        flat.unsharded_grad_sum = None
        flat.accumulation.refresh()

    return take


class _ShardsIn(torch.autograd.Function):
    """Takes the gradients of all shards, and of their carriers.

    Forward: the inputs, unchanged. Backward: each shard's gradient, already reduced, is added to
    the original parameters' ``.grad``; each carrier's, unsharded, to what waits for a reduction.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, takers: Sequence[Taker], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.takers = takers
        return tuple([tensor.view_as(tensor) for tensor in inputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        if events.recorder is not None:
            graph_ops.end_of_graph()
        with torch.no_grad():
            for take, grad in zip(ctx.takers, grads, strict=True):
                if grad is not None:
                    take(grad)
        return (None,) * (len(grads) + 1)


def with_entry(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Route the shards among a compiled graph's inputs through ``_ShardsIn``."""

    def run(*inputs: Any) -> Any:
        where: list[int] = []
        takers: list[Taker] = []
        for position, value in enumerate(inputs):
            flat = getattr(value, _OWNER, None)
            taker = getattr(value, _TAKER, None)
            if flat is not None:
                flat.check_originals()
                flat.refuse_comm_hook()
                taker = _taker_of(flat)
            if taker is not None and value.requires_grad and torch.is_grad_enabled():
                where.append(position)
                takers.append(taker)
        if not where:
            return compiled(*inputs)
        arguments = list(inputs)
        tracked = _ShardsIn.apply(takers, *[inputs[i] for i in where])  # type: ignore[no-untyped-call]
        for position, shard in zip(where, tracked, strict=True):
            arguments[position] = shard
        outputs = compiled(*arguments)
        if events.recorder is not None:
            graph_ops.end_of_graph()
        return outputs

    return run
