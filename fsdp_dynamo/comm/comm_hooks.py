"""Communication hooks: a user's own reduction in place of ours, and reductions in low precision.

A hook is called as ``hook(state, grad)`` where parameters are not sharded, and averages ``grad``
over ranks in place; else as ``hook(state, grad, output)``, and writes this rank's part of the mean
of ``grad`` ``(padded_numel,)``, in which ranks' parts are one behind the other, to ``output``
``(padded_numel / N,)``. It returns when that is done:
communication in a hook does not overlap. It sees each gradient once: after ``no_sync()``, the sum
of its steps without what was reduced before.

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
    """Process groups for the hooks of this file. Made for hooks registered without a state.

    Args:
        groups: of the units whose gradients are reduced.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    @property
    def process_group(self) -> Any:
        """The ranks that reduce, under the name that upstream's hook states use."""
        return self.groups.reduce

    def mean(self, grad: torch.Tensor, output: torch.Tensor | None) -> None:
        """The reduction without a hook, waited for; for the arguments see ``default_hook``."""
        target = grad if output is None else output
        collectives.issue_reduce_mean(target, grad, self.groups.reduce).wait()


def default_hook(state: HookState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """The mean over ranks, in the gradient's dtype.

    Args:
        state: the groups.
        grad: the unsharded gradient ``(padded_numel,)``; without ``output`` overwritten.
        output: this rank's part of the mean ``(padded_numel / N,)``; overwritten.
    """
    state.mean(grad, output)


def fp16_compress_hook(
    state: HookState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """The mean over ranks in float16: half the bytes of float32.

    For the arguments see ``default_hook``.
    """
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: HookState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """The mean over ranks in bfloat16: half the bytes of float32, and its range.

    For the arguments see ``default_hook``.
    """
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
