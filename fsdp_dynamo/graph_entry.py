"""Between the user's autograd graph and a compiled one: where the shards go in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp_dynamo import events, graph_ops
from fsdp_dynamo.flat_parameter import FlatParameter

_OWNER = "_fsdp_dynamo_flat"


def mark_shard(flat: FlatParameter) -> None:
    """Let a shard that is handed to a compiled graph lead back to its flat parameter."""
    setattr(flat.sharded, _OWNER, flat)


class _ShardsIn(torch.autograd.Function):
    """Takes all shards' gradients.

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


def with_entry(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Route the shards among a compiled graph's inputs through ``_ShardsIn``."""

    def run(*inputs: Any) -> Any:
        where: list[int] = []
        flats: list[FlatParameter] = []
        for position, value in enumerate(inputs):
            flat = getattr(value, _OWNER, None)
            if flat is None:
                continue
            flat.check_originals()
            flat.refuse_comm_hook()
            if flat.requires_grad and torch.is_grad_enabled():
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
