"""What operators of ``RowDTensor`` take beside rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_dynamo.comm.process_groups import served_device
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.rows import Rows
from fsdp_dynamo.core.whole_dtensor import whole_of
from fsdp_dynamo.errors import FSDPValueError


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
    part: torch.Tensor = rows.take(_expanded(rows, value))
    return part


def _expanded(rows: Rows, value: torch.Tensor) -> torch.Tensor:
    """A whole tensor; one of fewer elements, as operators of torch broadcast it."""
    try:
        return value.expand(rows.shape)
    except RuntimeError:
        raise mismatch(rows, f"a tensor of shape {tuple(value.shape)}") from None


def is_made_of_rows(placing: Any, value: DTensor) -> bool:
    """Whether a DTensor of torch's has rows of ours on this rank; the others are not asked.

    Optimizers make states so, ``DTensor.from_local(state, p.device_mesh, p.placements)``. A tensor
    that torch has divided into as many rows as ours on this rank holds other ones only if it has
    another number of rows on another rank, where the answer is no.
    """
    rows = placing.rows
    is_same: bool = value.shape == rows.shape and value._local_tensor.shape == rows.part.shape
    return is_same and _is_placed(placing, value)


def _is_placed(placing: Any, value: DTensor) -> bool:
    """Whether a DTensor of torch's has a parameter's placements on its mesh."""
    is_same: bool = value.placements == placing.placements
    return is_same and bool(_real(value.device_mesh) == _real(placing.mesh))


def _real(mesh: Any) -> Any:
    """The mesh for which an object stands in a trace."""
    return getattr(mesh, "real_obj", mesh)


def rows_of_torchs(placing: Any, value: DTensor, asks: bool = False) -> torch.Tensor:
    """This rank's rows of a DTensor of torch's own; all ranks must call it.

    Args:
        placing: a ``Placing``, of the parameter.
        value: of its shape, or of its rows.
        asks: see ``holds_rows``.

    Raises:
        FSDPValueError: neither.
    """
    if holds_rows(placing, value, asks):
        return value._local_tensor.detach()
    part: torch.Tensor = placing.rows.take(whole_of(value))
    return part


def holds_rows(placing: Any, value: DTensor, asks: bool = False) -> bool:
    """Whether a DTensor of torch's has rows of ours; otherwise, torch has divided it.

    ``DTensor.from_local(2 * p.to_local(), p.device_mesh, p.placements)`` has rows of ours where
    torch expects its own division, by which ``full_tensor()`` would gather. The answer is one for
    all ranks: where some of them have as many rows in both divisions, all look at what they hold.

    Args:
        asks: look in any case, so that all ranks raise together.

    Raises:
        FSDPValueError: neither.
    """
    rows, local = placing.rows, value._local_tensor
    is_theirs, is_ours = value.shape == rows.shape, False
    if rows.slot.shape and _is_placed(placing, value):
        held, is_same = rows.torchs_numel, rows.is_as_torchs
        is_theirs = is_theirs and local.numel() == held[rows.group.rank()]
        is_ours = local.shape == rows.part.shape
        if torch.compiler.is_compiling():
            is_theirs = False  # ranks cannot ask each other in a trace
        elif asks or (any(is_same) and not all(is_same)):
            is_theirs, is_ours = _of_all(rows, local.device, is_theirs, is_ours)
    if not (is_ours or is_theirs):
        got = f"a DTensor of torch's, {value.placements}, of shape {tuple(value.shape)} or of rows"
        raise mismatch(rows, f"{got} {tuple(local.shape)} on this rank", "a value for")
    return is_ours


def _of_all(rows: Rows, device: torch.device, *own: bool) -> list[bool]:
    """Which of some facts are true on all ranks."""
    votes = torch.tensor(own, dtype=torch.int32, device=served_device(rows.group, device))
    for group in rows.groups:
        with watched(group, "all_reduce", "a DTensor of torch's", votes.numel()):
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=group)
    return [bool(vote) for vote in votes.tolist()]


def mismatch(rows: Rows, got: str, what: str = "an operator on") -> FSDPValueError:
    """The error for an operand with other elements than ``rows``; ``got`` says what it is."""
    return FSDPValueError(
        expected=f"the same rows, or a whole tensor of shape {tuple(rows.shape)}",
        got=got,
        where=f"{what} '{rows.fqn}'",
        fix="Compute with full_tensor() where shapes differ.",
    )
