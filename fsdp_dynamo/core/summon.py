"""``summon_full_params``: original parameters with their unsharded values inside a context.

Inside the context, modules of the given units hold whole, plain parameters in place of DTensors. At
its end, each rank copies its part of them back into the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_dynamo.comm.process_groups import is_first_of
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.dtensors import local_of, refuse_parallel
from fsdp_dynamo.core.flat_layout import ShardRange
from fsdp_dynamo.core.flat_parameter import FlatParameter, shard_of, unsharded_of
from fsdp_dynamo.core.original_parameter import put_grad
from fsdp_dynamo.core.unit import Unit, UnitState
from fsdp_dynamo.errors import FSDPStateError, FSDPValueError

_USE = "summon_full_params()"


@dataclass(frozen=True)
class SummonOptions:
    """Arguments of ``FSDP.summon_full_params``, which documents them."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


@contextmanager
def unshard_originals(units: Iterable[Unit], options: SummonOptions) -> Iterator[None]:
    """Give original parameters their whole values; every rank must enter and leave the context.

    Units that are summoned already do not change.

    Raises:
        FSDPStateError: a unit is in its forward or backward.
        UnsupportedError: tensor parallelism has split a parameter.
    """
    units = [unit for unit in units if not unit.is_summoned]
    for unit in units:
        known = {unit.paths.fqn_of(o.fqn): o.parallel for o in unit.originals()}
        refuse_parallel(known, "summon_full_params()")
        unit.write_back()
    with ExitStack() as undo:  # of units opened before an error, without communication
        whole = [(unit, _open(unit, options, undo)) for unit in units]
        undo.pop_all()
    with ExitStack() as stack:
        # Runs on exceptions too: the other ranks also exit and block here.
        for unit, flats in whole:
            stack.callback(_close, unit, flats, options)
        yield


def _open(unit: Unit, options: SummonOptions, undo: ExitStack) -> list[_SummonedFlat]:
    unit.machine.advance(UnitState.SUMMON_FULL_PARAMS)
    undo.callback(unit.machine.reset)
    unit.is_summoned = True
    undo.callback(setattr, unit, "is_summoned", False)
    flats = []
    for flat in unit.flats:
        flats.append(_SummonedFlat(flat, options))
        undo.callback(flats[-1].restore)
    return flats


def _close(unit: Unit, flats: Sequence[_SummonedFlat], options: SummonOptions) -> None:
    unit.is_summoned = False
    with ExitStack() as stack:
        stack.callback(unit.machine.advance, UnitState.IDLE)
        if options.writeback:
            stack.callback(unit.reshard, "forward")  # earlier gathers are outdated
        for one in flats:
            stack.callback(one.close)


class _SummonedFlat:
    """One flat parameter whose original parameters are whole."""

    def __init__(self, flat: FlatParameter, options: SummonOptions) -> None:
        self._flat = flat
        self._options = options
        self._is_first = is_first_of(flat.groups.all)
        self._has_whole = self._is_first or not options.rank0_only
        self._grads = [original.param.grad for original in flat.originals]
        self._has_grads = [False] * len(self._grads)
        if options.with_grads:
            self._has_grads = self._any_rank_has_grad()
        values = self._gathered(flat.shard_on_device())
        grads = self._gathered(self._sharded_grad()) if any(self._has_grads) else ()
        flat.module_parameters.is_summoned = True
        flat.module_parameters.is_whole = self._has_whole
        if not self._has_whole:
            return
        for i, original in enumerate(flat.originals):
            original.show_whole(values[i], flat.paths.fqn_of(original.fqn))
            if self._has_grads[i]:
                put_grad(original.held, grads[i])

    def _any_rank_has_grad(self) -> list[bool]:
        flags = torch.tensor([g is not None for g in self._grads], device=self._flat.device).int()
        with watched(self._flat.group, "all_reduce", _USE, flags.numel()):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._flat.group)
        return [bool(flag) for flag in flags.tolist()]

    def _sharded_grad(self) -> torch.Tensor:
        return shard_of(
            self._flat, [grad if grad is None else local_of(grad) for grad in self._grads]
        )

    def _gathered(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        flat = self._flat
        whole = unsharded_of(flat, shard) if flat.is_sharded else shard.clone()
        if self._has_whole and self._options.offload_to_cpu:
            whole = whole.cpu()
        return flat.layout.split(whole)

    def restore(self) -> None:
        flat_parameters = self._flat.module_parameters
        flat_parameters.is_summoned = flat_parameters.is_whole = False
        self._flat.point_originals_to_shard()

    @torch.no_grad()
    def close(self) -> None:
        """Show this rank's parts again; with ``writeback``, of the current whole values."""
        originals = self._flat.originals
        try:
            self._use_replacements()
        except FSDPStateError:
            self.restore()
            raise
        values = [original.held.data for original in originals]
        grads = [original.held.grad for original in originals]
        shard = self._flat.sharded.detach()
        self.restore()
        if not self._options.writeback:
            return
        self._write(shard, values)
        if any(self._has_grads):
            self._write_grads(grads)

    def _use_replacements(self) -> None:
        """Use parameters that the user has put into modules as the whole values."""
        for original in self._flat.originals:
            param = self._flat.module_parameters.replacement(original)
            if param is not original.held:
                original.replace(param)

    def _write_grads(self, grads: Sequence[torch.Tensor | None]) -> None:
        sharded_grad = self._sharded_grad()
        self._write(sharded_grad, grads)
        parts = self._flat.shard_layout.split(sharded_grad.to(self._flat.home))
        for original, part, has in zip(self._flat.originals, parts, self._has_grads, strict=True):
            if has:
                original.grad = part

    def _write(self, shard: torch.Tensor, values: Sequence[torch.Tensor | None]) -> None:
        flat = self._flat
        if not self._has_whole or self._options.rank0_only:
            self._write_from_first(shard, values)
            return
        taken = flat.layout.shard_of(self._as_flat(shard, values), flat.rank).to(shard.device)
        # A backward that is still to come may have saved the shard: write only real changes.
        if not torch.equal(shard, taken):
            shard.copy_(taken)

    def _write_from_first(self, shard: torch.Tensor, values: Sequence[torch.Tensor | None]) -> None:
        """Write rank 0's values: scatter in its replica, then broadcast to the other replicas."""
        flat, kept = self._flat, shard
        shard = torch.empty_like(kept, device=flat.device)
        replicate = flat.groups.replicate
        if flat.is_sharded and (replicate is None or replicate.rank() == 0):
            chunks = None
            if self._is_first:
                whole = self._as_flat(shard, values)
                shards = map(flat.groups.shard_of, range(flat.group.size()))
                chunks = [flat.layout.shard_of(whole, one) for one in shards]
            with watched(flat.group, "scatter", _USE, flat.layout.padded_numel):
                dist.scatter(shard, chunks, group=flat.group, group_src=0)
        elif not flat.is_sharded:
            if self._is_first:
                shard.copy_(self._as_flat(shard, values))
            with watched(flat.group, "broadcast", _USE, shard.numel()):
                dist.broadcast(shard, group=flat.group, group_src=0)
        if replicate is not None:
            with watched(replicate, "broadcast", _USE, shard.numel()):
                dist.broadcast(shard, group=replicate, group_src=0)
        kept.copy_(shard)

    def _as_flat(self, like: torch.Tensor, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        numel = self._flat.layout.padded_numel
        whole = torch.empty(numel, dtype=like.dtype, device=self._flat.device)
        self._flat.layout.fill(whole, values)
        return whole


# -- whole updates ---------------------------------------------------------------------------------
# Muon and Shampoo update matrices, not elements. Each matrix is sent to one rank and updated there,
# and every rank gets its part of the result::
#
#     rank 0   W[0:6]   V[0:2]            W -> rank 0: update(W) -> parts back to all
#     rank 1   W[6:9]   V[2:8]    ==>     V -> rank 1: update(V) -> parts back to all


WholeUpdate = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(eq=False)
class _Whole:
    """A whole tensor to be updated on rank ``owner`` of its group.

    ``part`` is this rank's part, on the device of the collectives, ``ranges`` are those of all
    ranks, ``updated`` is this rank's part of the result.
    """

    fqn: str
    shape: torch.Size
    part: torch.Tensor
    ranges: Sequence[ShardRange]
    owner: int = 0
    updated: torch.Tensor = field(init=False)


@torch.no_grad()
def update_whole(
    units: Sequence[Unit], parts: Mapping[str, torch.Tensor], update: WholeUpdate
) -> dict[str, torch.Tensor]:
    """Update whole tensors, each on one rank, from the parts of all ranks.

    Every rank of the groups must call it with the same names. Tensors are assigned to ranks by
    size, so that all have about as much to do. Each element is sent to the updating rank and back
    once, without padding.

    Args:
        units: units that hold the parameters.
        parts: DTensors placed as their parameter (its gradient, a momentum, itself), by plain FQN.
        update: called with the FQN and the whole tensor on one rank (on all ranks if the parameter
            is not sharded); returns a tensor of the same shape.

    Returns:
        Results of ``update`` by FQN, as DTensors placed like ``parts``.

    Raises:
        FSDPValueError: an unknown name, or a tensor of other placements or shape.
        UnsupportedError: tensor parallelism has split a parameter.
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
    results = {}
    for one in every:
        flat, index = places[one.fqn]
        updated = one.updated.to(local_of(parts[one.fqn]).device)
        results[one.fqn] = flat.originals[index].as_param(updated)
    return results


def _check(place: tuple[FlatParameter, int] | None, fqn: str, part: torch.Tensor) -> None:
    if place is None:
        raise FSDPValueError(
            "update_whole(): expected a parameter's plain FQN, as named_parameters() gives it, got "
            f"'{fqn}'. Pass names of this model."
        )
    original = place[0].originals[place[1]]
    refuse_parallel({fqn: original.parallel}, "update_whole()")
    if not isinstance(part, DTensor) or not original.placing.holds(part):
        raise FSDPValueError(
            f"update_whole(): expected a DTensor of shape {tuple(original.placing.shape)}, placed "
            f"as '{fqn}', got a {type(part).__name__} of shape {tuple(part.shape)}. Pass the "
            "parameter, its gradient, or zeros_like() of it."
        )


def _update_among(group: dist.ProcessGroup, wholes: list[_Whole], update: WholeUpdate) -> None:
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
    """Send each rank its part of some tensors; return the concatenation of all received parts.

    ``sent`` and ``received`` are elements per rank; ``tensors`` are in the order of ranks.
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
            f"update_whole(), result of update: expected a tensor of shape {tuple(one.shape)} "
            f"for '{one.fqn}', got {tuple(updated.shape)}. Return a tensor of the same shape as "
            "the argument."
        )
    return updated.to(whole.dtype)
