"""Communication hooks: a user's reduction in place of ours, and reductions in low precision.

A hook is called as ``hook(state, grad)`` where parameters are not sharded, and averages ``grad``
over ranks in place. Otherwise it is called as ``hook(state, grad, output)``: it averages ``grad``
``(padded_numel,)``, which holds all ranks' parts in rank order, and writes this rank's part to
``output`` ``(padded_numel / N,)``. It returns when that is done, so its communication does not
overlap. It sees each gradient once: after ``no_sync()``, the sum of all steps that were not
reduced.

Source: the names of hooks are those of ``torch.distributed.algorithms._comm_hooks``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp_dynamo.comm import collectives
from fsdp_dynamo.comm.process_groups import Groups

CommHook = Callable[..., Any]
"""``hook(state, grad)`` or ``hook(state, grad, output)``."""


class HookState:
    """Process groups for the hooks of this file; the state of hooks registered without one.

    Args:
        groups: groups of the units whose gradients are reduced.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    @property
    def process_group(self) -> Any:
        """Ranks that reduce, under the name in torch's hook states."""
        return self.groups.reduce

    def mean(self, grad: torch.Tensor, output: torch.Tensor | None) -> None:
        """Run the reduction without a hook, and wait; for the arguments see ``default_hook``."""
        target = grad if output is None else output
        collectives.issue_reduce_mean(target, grad, self.groups.reduce).wait()


def default_hook(state: HookState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average over ranks in the gradient's dtype.

    Args:
        state: process groups.
        grad: unsharded gradient ``(padded_numel,)``; overwritten if there is no ``output``.
        output: this rank's part of the mean ``(padded_numel / N,)``; overwritten.
    """
    state.mean(grad, output)


def fp16_compress_hook(
    state: HookState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Average over ranks in float16, with half the bytes of float32; see ``default_hook``."""
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: HookState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Average over ranks in bfloat16, with half the bytes of float32; see ``default_hook``."""
    _compressed(torch.bfloat16, state, grad, output)


def _compressed(
    dtype: torch.dtype, state: HookState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    low = grad.to(dtype)
    if output is None:
        state.mean(low, None)
        grad.copy_(low)
        return
    part = torch.empty_like(output, dtype=dtype)
    state.mean(low, part)
    output.copy_(part)


__all__ = ["CommHook", "HookState", "bf16_compress_hook", "default_hook", "fp16_compress_hook"]
