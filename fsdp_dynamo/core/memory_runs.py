"""Tensors that lie one behind the other in memory, taken as one.

Gradients of a flat parameter are parts of one reduced gradient until the user puts others in their
place::

    reduced gradient    | grad 0 | grad 1 | grad 2 | padding |
    runs                |<------------------------>|
    grad 1 replaced     |<------>|        |<------>|            and the one in its place

What is done to all elements is then one launch per flat parameter and not one per gradient. Memory
decides, so a gradient that is absent, frozen, replaced, or summed over other ranks ends a run, and
padding is never read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def runs_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Cover the elements of some tensors by as few tensors as their order in memory allows.

    Args:
        tensors: in the order of memory where they share it; those without elements are left out.

    Returns:
        Tensors given, and 1-D views over several of them.
    """
    if torch.compiler.is_compiling():  # tensors of a trace have no addresses
        return [tensor for tensor in tensors if tensor.numel()]
    runs: list[list[torch.Tensor]] = []
    end: object = None
    for tensor in tensors:
        if not tensor.numel():
            continue
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            runs.append([tensor])
            end = None
            continue
        memory, begin = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        if end == (memory, tensor.dtype, begin):
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
        end = memory, tensor.dtype, begin + tensor.numel()
    return [_joined(run) for run in runs]


def _joined(run: list[torch.Tensor]) -> torch.Tensor:
    if len(run) == 1:
        return run[0]
    return run[0].as_strided((sum(tensor.numel() for tensor in run),), (1,))


def by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Lists of equal device and dtype, each of which one ``torch._foreach_*`` takes at once."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())
