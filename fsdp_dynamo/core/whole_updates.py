"""Updates of whole tensors of which every rank has a part, each made on one rank.

Muon and Shampoo work on matrices, not on elements. Each matrix is brought to one rank, updated
there, and every rank gets its part of the result::

    rank 0   W[0:6]   V[0:2]            W -> rank 0: update(W) -> parts back to all
    rank 1   W[6:9]   V[2:8]    ==>     V -> rank 1: update(V) -> parts back to all
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.layout.flat_layout import ShardRange
from fsdp_dynamo.core.tensor_parallel import refuse_parallel
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.errors import FSDPValueError

WholeUpdate = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(eq=False)
class _Whole:
    """A tensor to be updated.

    Attributes:
        fqn: of its parameter.
        shape: of the whole tensor.
        part: this rank's, where collectives work.
        ranges: what each rank of the group has of it.
        owner: the rank of the group that updates it.
        updated: this rank's part of the result.
    """

    fqn: str
    shape: torch.Size
    part: torch.Tensor
    ranges: Sequence[ShardRange]
    owner: int = 0
    updated: torch.Tensor | None = None


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
        parts: by plain FQN, DTensors placed as the parameter: its gradient, a momentum, itself.
        update: called with the FQN and the whole tensor, on one rank (on all where a parameter is
            not sharded); returns a tensor of the same shape.

    Returns:
        What ``update`` returned, by FQN, as DTensors like those of ``parts``.

    Raises:
        FSDPValueError: an unknown name, or a tensor that is placed or shaped otherwise.
        UnsupportedError: tensor parallelism has split a parameter, too.
    """
    places = {
        unit.paths.fqn_of(original.fqn): (flat, index)
        for unit in units
        for flat in unit.flats
        for index, original in enumerate(flat.originals)
    }
    for fqn, part in parts.items():
        _check(places.get(fqn), fqn, part)
    together: dict[tuple[dist.ProcessGroup | None, torch.dtype], list[_Whole]] = {}
    every = []
    for fqn in sorted(parts):
        flat, index = places[fqn]
        local = local_of(parts[fqn]).to(flat.device)
        shape = torch.Size(flat.layout.slots[index].shape)
        ranks = range(flat.layout.world_size)
        ranges = [flat.layout.shard_range(index, flat.groups.shard_of(rank)) for rank in ranks]
        every.append(_Whole(fqn, shape, local, ranges))
        is_on_each = flat.originals[index].is_replicated or len(ranks) == 1
        group = None if is_on_each else flat.group
        together.setdefault((group, local.dtype), []).append(every[-1])
    for (group, _), wholes in together.items():
        if group is None:
            for one in wholes:
                one.updated = _result(one, update, one.part)
        else:
            _update_among(group, wholes, update)
    return {one.fqn: _as_given(places[one.fqn], one, parts[one.fqn]) for one in every}


def _check(place: tuple[FlatParameter, int] | None, fqn: str, part: torch.Tensor) -> None:
    if place is None:
        raise FSDPValueError(
            expected="a parameter's plain FQN, as named_parameters() gives it",
            got=f"'{fqn}'",
            where="update_whole()",
            fix="Pass names of this model.",
        )
    original = place[0].originals[place[1]]
    refuse_parallel({fqn: original.parallel}, "update_whole()")
    if not isinstance(part, DTensor) or not original.placing.holds(part):
        raise FSDPValueError(
            expected=f"a DTensor of shape {tuple(original.placing.shape)}, placed as '{fqn}'",
            got=f"a {type(part).__name__} of shape {tuple(part.shape)}",
            where="update_whole()",
            fix="Pass the parameter, its gradient, or zeros_like() of it.",
        )


def _update_among(group: dist.ProcessGroup, wholes: list[_Whole], update: WholeUpdate) -> None:
    """Update tensors that are sharded over a group, in one exchange there and one back."""
    loads = [0] * group.size()
    for one in sorted(wholes, key=lambda one: (-one.shape.numel(), one.fqn)):
        one.owner = loads.index(min(loads))
        loads[one.owner] += one.shape.numel()
    wholes = sorted(wholes, key=lambda one: one.owner)
    own = [one for one in wholes if one.owner == group.rank()]
    sent, received = [0] * group.size(), [0] * group.size()
    for one in wholes:
        sent[one.owner] += one.part.numel()
    held = [(rank, one, one.ranges[rank]) for rank in range(group.size()) for one in own]
    for rank, _, part in held:
        received[rank] += part.numel
    arrived = _exchange([one.part for one in wholes], sent, received, group)
    whole = {one: one.part.new_empty(one.shape) for one in own}
    pieces = arrived.split([part.numel for _, _, part in held])
    for (_, one, part), piece in zip(held, pieces, strict=True):
        part.view_of(whole[one]).copy_(piece.view(part.shape))
    whole = {one: _result(one, update, tensor) for one, tensor in whole.items()}
    back = [part.view_of(whole[one]) for _, one, part in held] or [arrived]
    arrived = _exchange(back, received, sent, group)
    for one, piece in zip(wholes, arrived.split([o.part.numel() for o in wholes]), strict=True):
        one.updated = piece.view_as(one.part)


def _exchange(
    tensors: Sequence[torch.Tensor], sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send each rank its part of some tensors; returns, as one, what all ranks have sent.

    Args:
        tensors: for the ranks, in their order.
        sent: elements for each rank.
        received: elements from each rank.
        group: the ranks.
    """
    message = torch.cat([tensor.reshape(-1) for tensor in tensors])
    arrived = message.new_empty(sum(received))
    given, taken = message.view(torch.uint8), arrived.view(torch.uint8)
    to, by = ([number * message.itemsize for number in numbers] for numbers in (sent, received))
    with watched(group, "exchange", "update_whole()"):
        dist.all_to_all_single(taken, given, by, to, group)
    return arrived


def _result(one: _Whole, update: WholeUpdate, whole: torch.Tensor) -> torch.Tensor:
    updated = update(one.fqn, whole)
    if updated.shape != one.shape:
        raise FSDPValueError(
            expected=f"a tensor of shape {tuple(one.shape)} for '{one.fqn}'",
            got=str(tuple(updated.shape)),
            where="update_whole(), what update returned",
            fix="Return a tensor of the shape that was passed.",
        )
    return updated.to(whole.dtype)


def _as_given(place: tuple[FlatParameter, int], one: _Whole, given: torch.Tensor) -> torch.Tensor:
    assert one.updated is not None
    return place[0].originals[place[1]].as_param(one.updated.to(local_of(given).device))
