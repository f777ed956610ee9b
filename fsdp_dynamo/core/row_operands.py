"""What operators of ``RowDTensor`` take, and how they refuse the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fsdp_dynamo.comm.process_groups import served_device
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.rows import Rows
from fsdp_dynamo.core.whole_dtensor import whole_of
from fsdp_dynamo.errors import FSDPValueError, UnsupportedError


def refused(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise for an operator that is in no table; where one rank holds all, torch's own runs.

    Raises:
        UnsupportedError: more than one rank holds rows.
    """
    rows = _rows_in([*args, *kwargs.values()], cls)
    if all(group.size() == 1 for group in rows.groups):
        whole: Any = tree_map_only(cls, _replicated, (args, kwargs))
        return func(*whole[0], **whole[1])
    raise UnsupportedError(
        expected="operators that work element by element, sums, norms, to_local() or full_tensor()",
        got=f"{func} on rows of a sharded parameter",
        where=f"'{rows.fqn}'",
        fix="Compute with full_tensor(), which all ranks must call, or inside "
        "summon_full_params(). In a forward, parameters are whole inside of their own unit only: "
        "shard the module that uses it as one unit.",
    )


def _replicated(row: Any) -> DTensor:
    made: DTensor = row._placing.replicated(row._local_tensor)
    return made


def _rows_in(values: Sequence[Any], cls: type[DTensor]) -> Rows:
    """Those of the first ``RowDTensor`` among values and lists of them."""
    for value in values:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, cls):
                return one._placing.rows  # type: ignore[attr-defined,no-any-return]
    raise AssertionError("torch has called an operator of another class")


def rows_of(row: Any, value: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a tensor that has the shape of ``row``; those of ``value`` if it has one.

    Raises:
        FSDPValueError: another shape, or other rows.
    """
    rows = row._placing.rows
    if isinstance(value, type(row)):
        if rows.holds_as(value._placing.rows):  # type: ignore[attr-defined]
            own: torch.Tensor = value._local_tensor
            return own
        raise mismatch(rows, f"other rows, of '{value._placing.rows.fqn}'")  # type: ignore[attr-defined]
    if isinstance(value, DTensor):
        return rows_of_torchs(row._placing, value)
    if value.shape != rows.shape:
        raise mismatch(rows, f"a tensor of shape {tuple(value.shape)}")
    part: torch.Tensor = rows.take(value)
    return part


def is_made_of_rows(placing: Any, value: DTensor) -> bool:
    """Whether a DTensor of torch's has rows of ours on this rank; the others are not asked.

    Optimizers make states so, ``DTensor.from_local(state, p.device_mesh, p.placements)``. A tensor
    that torch has divided into as many rows as ours on this rank holds other ones only if it has
    another number of rows on another rank, which refuses it.
    """
    shape, held = placing.rows.shape, placing.rows.part.shape
    is_same: bool = value.shape == shape and value._local_tensor.shape == held
    is_same = is_same and value.placements == placing.placements
    return is_same and bool(_real(value.device_mesh) == _real(placing.mesh))


def _real(mesh: Any) -> Any:
    """The mesh for which an object stands in a trace."""
    return getattr(mesh, "real_obj", mesh)


def rows_of_torchs(placing: Any, value: DTensor) -> torch.Tensor:
    """This rank's rows of a DTensor of torch's own; all ranks must call it.

    ``DTensor.from_local(2 * p.to_local(), p.device_mesh, p.placements)`` has rows of ours where
    torch expects its own division, by which ``full_tensor()`` would gather. So all ranks look at
    what they hold first.

    Args:
        placing: a ``Placing``, of the parameter.
        value: of its shape, or of its rows.

    Raises:
        FSDPValueError: on all ranks, neither.
    """
    rows, local = placing.rows, value.to_local().detach()
    is_theirs, is_ours = value.shape == rows.shape, False
    on_these_ranks = value.device_mesh == placing.mesh and value.placements == placing.placements
    shape = rows.slot.shape  # of what this rank's group holds
    if on_these_ranks and shape:
        chunk = -(-shape[0] // rows.group.size())
        begin = min(chunk * rows.group.rank(), shape[0])
        held = min(chunk, shape[0] - begin)
        is_theirs = is_theirs and local.shape == (held, *shape[1:])
        is_ours = local.shape == rows.part.shape
        device = served_device(rows.group, local.device)
        votes = torch.tensor([is_theirs, is_ours], dtype=torch.int32, device=device)
        for group in rows.groups:
            with watched(group, "all_reduce", "a DTensor of torch's", votes.numel()):
                dist.all_reduce(votes, dist.ReduceOp.MIN, group=group)
        is_theirs, is_ours = map(bool, votes.tolist())
    if is_ours:
        return local
    if not is_theirs:
        got = f"a DTensor of torch's, {value.placements}, of shape {tuple(value.shape)} or of rows"
        raise mismatch(rows, f"{got} {tuple(local.shape)} on this rank", "a value for")
    part: torch.Tensor = rows.take(whole_of(value))
    return part


def mismatch(rows: Rows, got: str, what: str = "an operator on") -> FSDPValueError:
    """The error for an operand with other elements than ``rows``; ``got`` says what it is."""
    return FSDPValueError(
        expected=f"the same rows, or a whole tensor of shape {tuple(rows.shape)}",
        got=got,
        where=f"{what} '{rows.fqn}'",
        fix="Compute with full_tensor() where shapes differ.",
    )
