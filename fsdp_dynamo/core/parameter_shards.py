"""Original parameters as shards, for optimizers that need more than elements.

An optimizer that works element by element does not mind that it sees parts only. One that works on
matrices (Muon, Shampoo) or on blocks of elements (8-bit states) has to know what a rank's part is a
part of: ``parameter_shards`` says it, and ``update_whole`` brings whole matrices to one rank each::

    rank 0   W[0:6]   V[0:2]                 W -> rank 0: update(W) -> parts back to all
    rank 1   W[6:9]   V[2:8]        ==>      V -> rank 1: update(V) -> parts back to all
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_dynamo.comm.point_to_point import Work
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.original_parameter import OriginalParameter
from fsdp_dynamo.core.tensor_parallel import refuse_parallel
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.errors import FSDPValueError, UnsupportedError

WholeUpdate = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ParameterShard:
    """What one rank holds of an original parameter.

    Attributes:
        param: the parameter, a DTensor.
        shape: its original, global shape.
        start: where the part begins in the parameter, flattened row by row.
        numel: elements of the part; 0 where this rank holds nothing of it.
    """

    param: nn.Parameter
    shape: tuple[int, ...]
    start: int
    numel: int


def shards_of(units: Sequence[Unit]) -> dict[str, ParameterShard]:
    """By plain FQN, what this rank holds of each original parameter; tied ones once."""
    known = {fqn: flat.originals[index] for fqn, flat, index in _all_originals(units)}
    _require_rows(known, "parameter_shards()")
    return {
        fqn: ParameterShard(
            flat.originals[index].param,
            flat.layout.slots[index].shape,
            flat.shard_layout.ranges[index].start * math.prod(flat.layout.slots[index].shape[1:]),
            flat.shard_layout.ranges[index].numel,
        )
        for fqn, flat, index in _all_originals(units)
    }


def _all_originals(units: Sequence[Unit]) -> Iterator[tuple[str, FlatParameter, int]]:
    for unit in units:
        unit.write_back()
        for flat in unit.flats:
            for index, original in enumerate(flat.originals):
                yield unit.paths.fqn_of(original.fqn), flat, index


@torch.no_grad()
def update_whole(
    units: Sequence[Unit], parts: Mapping[str, torch.Tensor], update: WholeUpdate
) -> dict[str, torch.Tensor]:
    """Let one rank each update whole tensors of which every rank has its part.

    Every rank of the groups must call it with the same names. Which rank gets which tensor is
    settled by size, so that all have about as much to do. Each element travels to the updating
    rank and back once; nothing is padded.

    Args:
        units: whose parameters they are.
        parts: by plain FQN, this rank's part of a tensor of the parameter's shape: its gradient,
            a momentum, or the parameter itself. As large as the part of the parameter, or a
            DTensor.
        update: called with the FQN and the whole tensor, on one rank (on all where a parameter is
            not sharded); returns a tensor of the same shape.

    Returns:
        This rank's part of what ``update`` returned, by FQN, in the shape of ``parts``; a DTensor
        where that was one.

    Raises:
        FSDPValueError: an unknown name, or a part of another size.
    """
    known = {fqn: (flat, index) for fqn, flat, index in _all_originals(units)}
    for fqn, part in parts.items():
        _check(known, fqn, part)
    originals = {fqn: flat.originals[index] for fqn, (flat, index) in known.items()}
    _require_rows({fqn: originals[fqn] for fqn in parts}, "update_whole()")
    updates = [_WholeUpdate(fqn, *known[fqn], parts[fqn]) for fqn in sorted(parts)]
    _assign(updates)
    groups = list(dict.fromkeys(one.flat.group for one in updates if one.flat.is_sharded))
    _exchange([transfer for one in updates for transfer in one.gather()], groups)
    for one in updates:
        one.run(update)
    _exchange([transfer for one in updates for transfer in one.scatter()], groups)
    return {one.fqn: one.result for one in updates}


def _require_rows(originals: Mapping[str, OriginalParameter], what: str) -> None:
    refuse_parallel({fqn: original.parallel for fqn, original in originals.items()}, what)
    for fqn, original in originals.items():
        if original.dim:
            raise UnsupportedError(
                expected="parameters that are sharded by rows",
                got=f"one of placements {original.placing.placements}",
                where=f"{what}, parameter '{fqn}'",
                fix="Leave its dimension out of shard_placement_fn, or use full_tensor().",
            )


def _check(known: Mapping[str, tuple[FlatParameter, int]], fqn: str, part: torch.Tensor) -> None:
    if fqn not in known:
        raise FSDPValueError(
            expected="FQNs of parameters that units manage",
            got=f"'{fqn}'",
            where="update_whole()",
            fix="See parameter_shards() for the names.",
        )
    flat, index = known[fqn]
    numel = flat.shard_layout.ranges[index].numel
    part = local_of(part)
    if part.numel() != numel:
        raise FSDPValueError(
            expected=f"this rank's part of '{fqn}', {numel} elements",
            got=f"{part.numel()}",
            where="update_whole()",
            fix="Pass tensors as large as the parameter is on this rank.",
        )


@dataclass
class _Transfer:
    """One message between two ranks of a group."""

    is_send: bool
    tensor: torch.Tensor
    peer: int
    group: dist.ProcessGroup


class _WholeUpdate:
    """The update of one whole tensor on its owner, with the transfers before and after."""

    def __init__(self, fqn: str, flat: FlatParameter, index: int, part: torch.Tensor) -> None:
        self.fqn = fqn
        self.flat, self._index = flat, index
        self.shape = flat.layout.slots[index].shape
        self.numel = flat.layout.slots[index].numel
        self.rank = flat.group.rank() if flat.is_sharded else 0
        self.owner = self.rank
        self._given = part
        self._part = local_of(part).to(flat.device)  # collectives work there
        self._received = torch.empty_like(self._part)
        ranks = range(flat.layout.world_size)
        shards = map(flat.groups.shard_of, ranks) if flat.is_sharded else ranks
        self._ranges = [flat.layout.shard_range(index, shard) for shard in shards]
        self._whole: torch.Tensor | None = None

    @property
    def result(self) -> torch.Tensor:
        """This rank's part of what was returned, where the part was."""
        part = self._received.to(self._given.device)
        is_dtensor = isinstance(self._given, DTensor)
        return self.flat.originals[self._index].as_param(part) if is_dtensor else part

    def gather(self) -> Iterator[_Transfer]:
        """Transfers of the parts to the owner."""
        if self.rank != self.owner:
            if self._part.numel():
                yield _Transfer(True, self._part.contiguous(), self.owner, self.flat.group)
            return
        self._whole = self._part.new_empty(self.shape)
        for peer, place in self._places(self._whole):
            if peer == self.rank:
                place.copy_(self._part.view(place.shape))
            else:
                yield _Transfer(False, place, peer, self.flat.group)

    def run(self, update: WholeUpdate) -> None:
        """Call ``update`` on the owner."""
        if self._whole is None:
            return
        updated = update(self.fqn, self._whole)
        if updated.shape != self._whole.shape:
            raise FSDPValueError(
                expected=f"a tensor of shape {tuple(self.shape)} for '{self.fqn}'",
                got=str(tuple(updated.shape)),
                where="update_whole(), what update returned",
                fix="Return a tensor of the shape that was passed.",
            )
        self._whole = updated.to(self._part.dtype).contiguous()

    def scatter(self) -> Iterator[_Transfer]:
        """Transfers of the parts of the result to their ranks."""
        if self._whole is None:
            if self._received.numel():
                yield _Transfer(False, self._received, self.owner, self.flat.group)
            return
        for peer, place in self._places(self._whole):
            if peer == self.rank:
                self._received.copy_(place.view_as(self._received))
            else:
                yield _Transfer(True, place, peer, self.flat.group)

    def _places(self, whole: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Ranks that hold a part, and where it is in the whole."""
        for rank, part in enumerate(self._ranges):
            if part.numel:
                yield rank, part.of(whole)


def _assign(updates: Sequence[_WholeUpdate]) -> None:
    """Give each tensor an owner: the largest first, each to the rank with the smallest load."""
    loads: dict[dist.ProcessGroup, list[int]] = {}
    for one in sorted(updates, key=lambda one: (-one.numel, one.fqn)):
        if not one.flat.is_sharded:
            continue
        load = loads.setdefault(one.flat.group, [0] * one.flat.layout.world_size)
        one.owner = load.index(min(load))
        load[one.owner] += one.numel


def _exchange(transfers: Sequence[_Transfer], groups: Sequence[dist.ProcessGroup]) -> None:
    """Run messages; between two ranks they match in their order.

    Args:
        transfers: this rank's, perhaps none.
        groups: those of all ranks' transfers, in the same order on all of them.
    """
    works = {group: _issued([one for one in transfers if one.group is group]) for group in groups}
    for group in groups:
        with watched(group, "exchange", "update_whole()"):
            for work in works[group]:
                work.wait()


def _issued(transfers: Sequence[_Transfer]) -> Sequence[Work]:
    ops = [
        dist.P2POp(
            dist.isend if one.is_send else dist.irecv,
            one.tensor,
            group=one.group,
            group_peer=one.peer,
        )
        for one in transfers
    ]
    return dist.batch_isend_irecv(ops) if ops else []
