"""summon_full_params: original parameters with their unsharded values inside a context.

Inside the context modules of the units named hold whole, plain parameters in the place of DTensors.
At the end the parts that this rank holds are taken from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.shard_conversion import shard_of, unsharded_of
from fsdp_dynamo.core.tensor_parallel import refuse_parallel
from fsdp_dynamo.core.training_state import UnitState
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.errors import FSDPStateError

_USE = "summon_full_params()"


@dataclass(frozen=True)
class SummonOptions:
    """Arguments of ``summon_full_params``.

    Attributes:
        writeback: keep what was changed.
        rank0_only: only rank 0 has whole values; what it changes is sent to all.
        offload_to_cpu: whole values are in host memory.
        with_grads: gradients are whole too.
    """

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


@contextmanager
def unshard_originals(units: Iterable[Unit], options: SummonOptions) -> Iterator[None]:
    """Give original parameters their whole values; every rank must enter and leave the context.

    Units that are summoned already stay as they are.

    Raises:
        FSDPStateError: a unit is in its forward or backward.
        UnsupportedError: tensor parallelism has split a parameter too.
    """
    units = [unit for unit in units if not unit.is_summoned]
    for unit in units:
        known = {unit.paths.fqn_of(o.fqn): o.parallel for o in unit.originals()}
        refuse_parallel(known, "summon_full_params()")
        unit.write_back()
    with ExitStack() as undo:  # of what was gathered before an error; nothing is communicated
        whole = [(unit, _open(unit, options, undo)) for unit in units]
        undo.pop_all()
    with ExitStack() as stack:
        # Also behind an exception: the others leave the context too, and wait here.
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
            stack.callback(unit.reshard, "forward")  # what was gathered before is out of date
        for one in flats:
            stack.callback(one.close)


class _SummonedFlat:
    """One flat parameter whose original parameters are whole."""

    def __init__(self, flat: FlatParameter, options: SummonOptions) -> None:
        self._flat = flat
        self._options = options
        self._is_first = all(group.rank() == 0 for group in flat.groups.all)
        self._has_whole = self._is_first or not options.rank0_only
        self._grads = [original.param.grad for original in flat.originals]
        self._has_grads = self._any_rank_has_grad() if options.with_grads else None
        values = self._gathered(flat.shard_on_device())
        grads = None if self._has_grads is None else self._gathered(self._sharded_grad())
        flat.module_parameters.is_summoned = True
        flat.module_parameters.is_whole = self._has_whole
        if not self._has_whole:
            return
        for i, original in enumerate(flat.originals):
            original.show_whole(values[i], flat.paths.fqn_of(original.fqn))
            if grads is not None and self._has_grads is not None and self._has_grads[i]:
                original.held.grad = grads[i]

    def _any_rank_has_grad(self) -> list[bool]:
        """Whether any rank has a gradient, per original parameter."""
        flags = torch.tensor([g is not None for g in self._grads], device=self._flat.device).int()
        with watched(self._flat.group, "all_reduce", _USE, flags.numel()):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._flat.group)
        return [bool(flag) for flag in flags.tolist()]

    def _sharded_grad(self) -> torch.Tensor:
        return shard_of(
            self._flat, [grad if grad is None else local_of(grad) for grad in self._grads]
        )

    def _gathered(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        """Whole tensors made of every rank's shard; copies, on every rank."""
        flat = self._flat
        whole = unsharded_of(flat, shard) if flat.is_sharded else shard.clone()
        if self._has_whole and self._options.offload_to_cpu:
            whole = whole.cpu()
        return flat.layout.split(whole)

    def restore(self) -> None:
        """Point the originals at this rank's parts again, unchanged."""
        flat_parameters = self._flat.module_parameters
        flat_parameters.is_summoned = flat_parameters.is_whole = False
        self._flat.point_originals_to_shard()

    @torch.no_grad()
    def close(self) -> None:
        """Point the originals at this rank's parts again; with writeback, of the present values."""
        originals = self._flat.originals
        try:
            self._hold_replacements()
        except FSDPStateError:
            self.restore()
            raise
        values = [original.held.data for original in originals]
        grads = [original.held.grad for original in originals]
        shard = self._flat.sharded.detach()
        self.restore()
        if not self._options.writeback:
            return
        self._take(shard, values)
        if self._has_grads is not None and any(self._has_grads):
            self._take_grads(grads)

    def _hold_replacements(self) -> None:
        """Take parameters that the user has put into modules meanwhile for the values."""
        for original in self._flat.originals:
            param = self._flat.module_parameters.replacement(original)
            if param is not original.held:
                original.replace(param)

    def _take_grads(self, grads: Sequence[torch.Tensor | None]) -> None:
        assert self._has_grads is not None
        sharded_grad = self._sharded_grad()
        self._take(sharded_grad, grads)
        parts = self._flat.shard_layout.split(sharded_grad.to(self._flat.home))
        for original, part, has in zip(self._flat.originals, parts, self._has_grads, strict=True):
            if has:
                original.grad = part

    def _take(self, shard: torch.Tensor, values: Sequence[torch.Tensor | None]) -> None:
        """Write this rank's part of whole values into ``shard``."""
        flat = self._flat
        if not self._has_whole or self._options.rank0_only:
            self._take_from_first(shard, values)
            return
        taken = flat.layout.shard_of(self._as_flat(shard, values), flat.rank).to(shard.device)
        if not torch.equal(shard, taken):  # a backward that is still to come may have saved it
            shard.copy_(taken)

    def _take_from_first(self, shard: torch.Tensor, values: Sequence[torch.Tensor | None]) -> None:
        """Write rank 0's values: to the ranks of its replica, then to the others."""
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
        """Whole values in their places of an unsharded tensor ``(padded_numel,)``."""
        numel = self._flat.layout.padded_numel
        whole = torch.empty(numel, dtype=like.dtype, device=self._flat.device)
        self._flat.layout.fill(whole, values)
        return whole
