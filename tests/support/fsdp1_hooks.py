"""Communication hooks for both sides: upstream's own, and one of a user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks

KINDS = ("default", "bf16", "fp16", "user")
COMPRESSING = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def hook_of(
    kind: str, group: dist.ProcessGroup | None, is_sharded: bool
) -> tuple[object, Callable[..., None]]:
    """The state and the hook to register."""
    group = group or dist.group.WORLD
    if kind == "user":
        return {"group": group, "calls": 0}, _doubled
    if kind == "default":
        hook = default_hooks.reduce_scatter_hook if is_sharded else default_hooks.allreduce_hook
        return default_hooks.DefaultState(group), hook
    return default_hooks.LowPrecisionState(group), COMPRESSING[kind]


def _doubled(state: dict[str, Any], grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Twice the mean, by an all-reduce; of this rank's part, where there is one."""
    group = state["group"]
    dist.all_reduce(grad, group=group)
    grad.mul_(2 / group.size())
    if output is not None:
        output.copy_(grad.chunk(group.size())[group.rank()])
    state["calls"] += 1


def _decompress(state: default_hooks.LowPrecisionState, grad: torch.Tensor) -> None:
    grad.data = grad.data.to(state.parameter_type)


on_cpu = mock.patch.object(default_hooks, "_decompress", _decompress)
"""Upstream's compressing hooks without ``record_stream``, which fails for tensors on the CPU."""
