"""Operators for the collectives of a traced graph.

Whatever its gather plan, a gather is one node. torch's functional all-gather returns the ranks'
messages one after the other; these operators return the parameter-major unsharded buffer (see
``comm/gather_plan``). Before the graph is lowered, and in other backends, they run as torch's
functional collectives and copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp_dynamo.comm.gather_plan import decode

_C10D = torch.ops._c10d_functional


def all_gather_into_tensor(
    shard: torch.Tensor, group_size: int, group_name: str, plan: Sequence[int]
) -> torch.Tensor:
    """Return the unsharded buffer ``(n * group_size,)``.

    Args:
        shard: this rank's ``(n,)``.
        group_size: ranks of the group.
        group_name: registered name of the group.
        plan: encoded gather plan.
    """
    issued = _C10D.all_gather_into_tensor(shard, group_size, group_name)
    gathered: torch.Tensor = _C10D.wait_tensor(issued)
    packed = decode(plan).all_packed
    if packed.is_one_slice:
        return gathered
    unsharded = torch.empty_like(gathered)
    packed.copy_out(unsharded, gathered, group_size)
    return unsharded


def reduce_scatter_tensor(
    grad: torch.Tensor, reduce_op: str, group_size: int, group_name: str, plan: Sequence[int]
) -> torch.Tensor:
    """Return this rank's part ``(n,)`` of the reduced gradient.

    Args:
        grad: this rank's unsharded gradient ``(n * group_size,)``.
        reduce_op: ``"avg"``, as torch's collective names it.
    """
    message = decode(plan).all_packed.message_of(grad, group_size)
    reduced = _C10D.reduce_scatter_tensor(message, reduce_op, group_size, group_name)
    own: torch.Tensor = _C10D.wait_tensor(reduced)
    return own


def _fake_all_gather(shard: Any, group_size: int, group_name: str, plan: Sequence[int]) -> Any:
    return shard.new_empty(shard.numel() * group_size)


def _fake_reduce_scatter(
    grad: Any, reduce_op: str, group_size: int, group_name: str, plan: Sequence[int]
) -> Any:
    return grad.new_empty(grad.numel() // group_size)


NAMESPACE = "fsdp_dynamo_collectives"
"""Namespace of these operators; ``graph_passes.graph_utils.COLLECTIVES`` has it too."""

_library = torch.library.Library(NAMESPACE, "DEF")
for _function, _fake, _schema in (
    (
        all_gather_into_tensor,
        _fake_all_gather,
        "(Tensor shard, int group_size, str group_name, int[] plan) -> Tensor",
    ),
    (
        reduce_scatter_tensor,
        _fake_reduce_scatter,
        "(Tensor grad, str reduce_op, int group_size, str group_name, int[] plan) -> Tensor",
    ),
):
    _library.define(_function.__name__ + _schema)
    for _backend in ("CPU", "CUDA"):
        _library.impl(_function.__name__, _function, _backend)
    torch.library.register_fake(f"{NAMESPACE}::{_function.__name__}", _fake, lib=_library)

ALL_GATHER = torch.ops.fsdp_dynamo_collectives.all_gather_into_tensor.default
REDUCE_SCATTER = torch.ops.fsdp_dynamo_collectives.reduce_scatter_tensor.default
