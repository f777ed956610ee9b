"""Collectives of a traced graph: one node for a unit's gather, whatever its gather plan is.

torch's functional all-gather would give what the ranks sent one behind the other; these give the
parameter-major buffer of ``comm/gather_plan``. A graph that runs before it is lowered, or by
another backend, runs them as torch's collectives and copies.
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
    """The unsharded flat parameter ``(n * group_size,)`` of shards ``(n,)``.

    Args:
        shard: this rank's.
        group_size: ranks of the group.
        group_name: its registered name.
        plan: the gather plan, encoded.
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
    """This rank's part ``(n,)`` of the mean of unsharded gradients ``(n * group_size,)``.

    Args:
        grad: this rank's.
        reduce_op: of torch's collective.
        group_size: ranks of the group.
        group_name: its registered name.
        plan: the gather plan, encoded.
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
"""``graph_passes`` knows collectives by it."""

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
