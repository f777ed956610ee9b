"""Steps that leave no trace: gradients, buffers and random states are restored, no hooks called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.pytree import tensors_of


@contextmanager
def preserve_state(module: nn.Module, units: Sequence[Unit], values: Any = ()) -> Iterator[None]:
    """Begin without gradients; restore gradients, buffers and random states at the end.

    Args:
        module: owner of the parameters and buffers.
        units: of the module.
        values: inputs, whose gradients are restored too.
    """
    leaves = [t for t in tensors_of(values) if t.is_leaf and t.requires_grad]
    holders = dict.fromkeys([*module.parameters(), *leaves])
    flats = [flat for unit in units for flat in unit.flats]
    sums = [(flat, flat.grad_sum.take()) for flat in flats]  # of steps under no_sync()
    grads = [(holder, holder.grad) for holder in holders]
    buffers = [(m, name, b) for m in module.modules() for name, b in m._buffers.items()]
    values_of_buffers = [None if b is None else b.detach().clone() for _, _, b in buffers]
    devices = [d for d in {unit.device for unit in units} if d is not None and d.type != "cpu"]
    try:
        with torch.random.fork_rng(devices):
            clear_gradients(holders, units)
            for flat in flats:
                flat.runs_hooks = False  # they may run an optimizer
            yield
    finally:
        clear_gradients(holders, units)
        for flat in flats:
            flat.runs_hooks = True
        for holder, grad in grads:
            holder.grad = grad
        for flat, total in sums:
            if total is not None:
                flat.grad_sum.put(total)
        with torch.no_grad():
            for (owner, name, buffer), before in zip(buffers, values_of_buffers, strict=True):
                owner._buffers[name] = buffer
                if buffer is not None and before is not None:
                    buffer.copy_(before)


def clear_gradients(
    holders: Sequence[torch.Tensor] | dict[Any, None], units: Sequence[Unit]
) -> None:
    """Drop gradients of tensors, and those of units that wait for a reduction."""
    for holder in holders:
        holder.grad = None
    for unit in units:
        for flat in unit.flats:
            flat.grad_sum.take()
            flat.grad_sum.accumulation.refresh()
