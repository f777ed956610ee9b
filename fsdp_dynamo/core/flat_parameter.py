"""One flat parameter: its tensors, its views, and where its gradient goes.

[Note: tensors of a unit]

=========================  ===================  =============================================
tensor                     shape                lifetime
=========================  ===================  =============================================
``sharded``                (padded_numel / N,)  always; the autograd leaf, in the original dtype
                                                (in host memory where it is offloaded)
``kept_shard``             (padded_numel / M,)  post-forward shard: between a forward and its
                                                backward, where M of N ranks gather again;
                                                secondary shard: one step, or several steps that
                                                accumulate
``unsharded``              (padded_numel,)      always as an object; storage from unshard to
                                                reshard only
parameter views            original shapes      made at every unshard for autograd; modules
                                                see them (``ModuleParameters``)
local tensors of the       (rows, *shape[1:])   always; views of ``sharded``
original parameters
unsharded gradient         (padded_numel,)      ``grad_to_reduce`` to the end of the reduction;
                                                under ``no_sync()`` in ``grad_sum``
=========================  ===================  =============================================

The all-gather reads ``sharded`` and writes ``unsharded``, packed parameters by way of a message
(``comm/gather_plan``). If ``param_dtype`` differs, it reads a temporary cast of ``sharded`` that
lives until the all-gather is done (``shard_to_gather``).

The storage of ``unsharded`` is emptied and refilled in place, so views that autograd saved in the
forward read the values gathered again for the backward. A backward may reach such a view before the
unit's pre-backward, for example from a loss on an activation that the unit stored. The storage is
then empty or being written. To detect this, all views share the version counter of ``unsharded``,
which is raised by ``UNREADABLE`` except between the end of a gather and the next reshard. Autograd
then refuses to unpack the views, as it does for any tensor that was changed in place
(``set_readable``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_dynamo.api import CollectivePrecision, MixedPrecision
from fsdp_dynamo.comm import collectives
from fsdp_dynamo.comm.collectives import all_gather
from fsdp_dynamo.comm.gather_plan import GatherPlan
from fsdp_dynamo.comm.in_flight import InFlight
from fsdp_dynamo.comm.process_groups import Groups, Hierarchy, served_device
from fsdp_dynamo.comm.registered_memory import allocating
from fsdp_dynamo.comm.streams import StreamEvent, side_streams
from fsdp_dynamo.core.accumulation import UnshardedSum
from fsdp_dynamo.core.dtensors import (
    Placing,
    has_post_accumulate_hooks,
    mesh_of,
    mesh_of_levels,
    refuse_tensor_hooks,
    run_post_accumulate_hooks,
)
from fsdp_dynamo.core.flat_layout import ALIGN_BYTES, has_value, make_layout
from fsdp_dynamo.core.module_parameters import ModuleParameters, record_version, set_readable
from fsdp_dynamo.core.original_parameter import OriginalParameter
from fsdp_dynamo.module_tree import UnitPaths
from graph_passes.markers import NO_VALUE
from graph_passes.wire_format import WireFormat


class Dtypes(NamedTuple):
    """Dtypes of a flat parameter while its unit runs: unsharded buffer, and gradient reduction."""

    param: torch.dtype
    reduce: torch.dtype

    @property
    def sum(self) -> torch.dtype:
        """Dtype in which pending gradients accumulate."""
        return torch.promote_types(self.param, self.reduce)


class KeptShard(NamedTuple):
    """Post-forward or secondary shard: fewer, larger parts of an unsharded buffer than its shards.

    Attributes:
        tensor: this rank's part.
        group: ranks whose parts make up the whole.
        made: gather or copy that fills ``tensor``, to be waited for; ``None`` if it is filled.
    """

    tensor: torch.Tensor
    group: dist.ProcessGroup
    made: StreamEvent | InFlight | None

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Return nothing: a copy of the flat parameter gathers its own."""


class UnshardedGrad(NamedTuple):
    """Unsharded gradient; with ``has_message``, packed pieces are rank-major (``messages``)."""

    flat: torch.Tensor
    has_message: bool = False


class Wires(NamedTuple):
    """Wire formats of all-gather, reduce-scatter and all-reduce; ``None``: uncompressed."""

    gather: WireFormat | None = None
    reduce: WireFormat | None = None
    replicas: WireFormat | None = None


_UNCOMPRESSED = Wires()


class FlatParameter:
    """The parameters of a unit that share dtype, ``requires_grad`` and precision, flattened.

    Args:
        originals: parameters in traversal order, with their original shapes and values.
        groups: ranks to shard over, and ranks that reduce.
        sharded_strategy: ``False`` keeps the whole parameter on every rank (NO_SHARD).
        precision: dtypes; ``None``: those of the parameters.
        offload: keep the shard and its gradient in host memory.
        mesh: mesh of the DTensors; ``None``: make one.
        device: device for originals that are still on the meta device.
        collective_precision: wire formats; ``None``: uncompressed.
    """

    def __init__(
        self,
        originals: Sequence[OriginalParameter],
        groups: Groups,
        *,
        sharded_strategy: bool,
        precision: MixedPrecision | None,
        offload: bool = False,
        mesh: DeviceMesh | None = None,
        device: torch.device | None = None,
        collective_precision: CollectivePrecision | None = None,
    ) -> None:
        first = originals[0].param
        self.collective_precision = collective_precision
        self.is_offloaded = offload
        self.originals = tuple(originals)
        self.groups = groups
        self.is_sharded = sharded_strategy
        self.requires_grad = first.requires_grad
        self.dtype = first.dtype
        devices = {o.param.device for o in originals if not o.param.is_meta}
        self.device = next(iter(devices), device or first.device)
        self.dtypes = Dtypes(self.dtype, self.dtype)
        self.keep_low_precision_grads = False
        if precision is not None:
            self._set_precision(precision)
        num_shards = self.group.size() if sharded_strategy else 1
        # Number of this rank's shard: in a hierarchy not the rank in the group.
        self.rank = groups.shard_of(self.group.rank()) if sharded_strategy else 0
        align = ALIGN_BYTES // min(self.dtype.itemsize, self.param_dtype.itemsize)
        self.layout = make_layout(
            [o.fqn for o in originals],
            [o.param.shape for o in originals],
            num_shards,
            max(1, align),
            self._direct_numel() if num_shards > 1 else None,
            dims=[o.dim for o in originals],
            undivided=self._undivided(num_shards),
        )
        self.shard_layout = self.layout.shard(self.rank) if self.is_sharded else self.layout.whole()
        self.sharded = self._make_shard()
        self.grad_sum = UnshardedSum(self.originals, self.layout, self.shard_layout)
        self.module_parameters = ModuleParameters(self.originals)
        self.comm_hook: Callable[..., object] | None = None
        self.unit_fqn = ""
        self.paths = UnitPaths(("",))
        self.ordinal = 0  # index in its unit
        self.runs_hooks = True
        self._show_dtensors(mesh)
        self.point_originals_to_shard()
        self._is_readable = False
        self.unsharded: torch.Tensor  # set by make_buffer
        self.kept_shard: KeptShard | None = None

    def rename(self, paths: UnitPaths) -> None:
        self.paths, self.unit_fqn = paths, paths.name
        for original in self.originals:
            original.placing.fqn = paths.fqn_of(original.fqn)
        self.grad_sum.paths = self.module_parameters.paths = paths

    # -- construction ------------------------------------------------------------------

    def _set_precision(self, precision: MixedPrecision) -> None:
        if not self.dtype.is_floating_point:  # low precision would drop imaginary parts
            return
        param_dtype = precision.param_dtype or self.dtype
        self.dtypes = Dtypes(param_dtype, precision.reduce_dtype or param_dtype)
        self.keep_low_precision_grads = precision.keep_low_precision_grads

    @torch.no_grad()
    def _make_shard(self) -> torch.Tensor:
        """Copy this rank's part of all parameters, so that the originals' storage can be freed."""
        shard = torch.zeros(self.shard_layout.numel, dtype=self.dtype, device=self.home)
        if self.home != self.device:
            shard = shard.pin_memory()
        for original, part in zip(self.originals, self.shard_layout.ranges, strict=True):
            if part.numel and not original.param.is_meta:
                target = shard[part.shard_start : part.shard_start + part.numel]
                target.view(part.shape).copy_(part.of(original.param.detach()))
        return shard.requires_grad_(self.requires_grad)

    def _show_dtensors(self, mesh: DeviceMesh | None) -> None:
        """Replace the originals by DTensors over this rank's parts."""
        levels = self.groups.hierarchy if self.layout.world_size > 1 else None
        is_whole = not self.is_sharded and self.group.size() > 1
        if levels is not None:
            mesh = mesh_of_levels(levels, self.device)
        elif mesh is None:
            mesh = mesh_of(self.groups.shard, self.device)
        parts = self.shard_layout.split(self.sharded.detach())
        found = zip(self.originals, parts, self.layout.slots, self.shard_layout.ranges, strict=True)
        for original, part, slot, held in found:
            on_each = is_whole or slot.copies > 1 or not slot.shape
            num_sharding = 0 if on_each else 1 if levels is None else 2
            part = part.to("meta") if original.param.is_meta else part
            placing = Placing(slot.shape, held, mesh, num_sharding, original.parallel, original.fqn)
            original.become_dtensor(placing, part)

    @torch.inference_mode(False)  # autograd cannot save views of inference tensors
    def make_buffer(self) -> None:
        """Make ``unsharded``, without storage; the shard itself if nothing is gathered.

        Called once the originals' former storage is free.
        """
        if not self.needs_storage:
            self.unsharded = self.sharded.data
            return
        self.unsharded = torch.empty(
            self.layout.padded_numel, dtype=self.param_dtype, device=self.device
        )
        self.unsharded.untyped_storage().resize_(0)
        set_readable(self.unsharded, False)

    # -- precision ---------------------------------------------------------------------

    @property
    def param_dtype(self) -> torch.dtype:
        return self.dtypes.param

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self.dtypes.reduce

    @property
    def sum_dtype(self) -> torch.dtype:
        return self.dtypes.sum

    @property
    def gather_wire(self) -> WireFormat | None:
        """Wire format of the all-gather; ``None``: uncompressed."""
        return self.wires.gather

    @property
    def wires(self) -> Wires:
        """Wire formats of the collectives."""
        precision = self.collective_precision
        if precision is None:
            return _UNCOMPRESSED
        return Wires(
            precision.wire_of("all_gather", self.param_dtype) if self.is_sharded else None,
            precision.wire_of("reduce_scatter", self.reduce_dtype) if self.is_sharded else None,
            precision.wire_of("all_reduce", self.reduce_dtype),
        )

    # -- sizes -------------------------------------------------------------------------

    @property
    def home(self) -> torch.device:
        """Device of the shard and its gradient between steps."""
        return torch.device("cpu") if self.is_offloaded else self.device

    @property
    def group(self) -> dist.ProcessGroup:
        return self.groups.shard

    @property
    def hierarchy(self) -> Hierarchy | None:
        """Levels on which the unit is gathered one after the other; ``None``: one level."""
        return self.groups.hierarchy if self.is_sharded else None

    def _undivided(self, num_shards: int) -> set[int]:
        """Indices of parameters that two-level DTensors cannot divide: rows not divisible by ranks.

        torch divides rows among nodes first, so a rank's rows would not be one contiguous part.
        """
        if self.groups.hierarchy is None or num_shards == 1:
            return set()
        sizes = [o.param.shape[o.dim] if o.param.dim() else 0 for o in self.originals]
        return {i for i, size in enumerate(sizes) if size % num_shards}

    def _direct_numel(self) -> int | None:
        """Elements per rank from which on a parameter is gathered directly; ``None``: none is."""
        device = served_device(self.group, self.device)
        least = collectives.DIRECT_BYTES[collectives.transport_of(self.group, device)]
        return None if least is None else least // self.param_dtype.itemsize

    def gather_plan(self, numel: int, *, is_packed: bool) -> GatherPlan:
        """Gather plan for a send buffer of ``numel`` elements: a shard, or a kept shard."""
        plan = self.layout.plan.all_packed if is_packed else self.layout.plan
        return plan.scaled(numel // self.layout.shard_numel)

    @property
    def reduce_plans(self) -> tuple[GatherPlan, ...]:
        """Gather plans of the gradient's reductions; in a hierarchy, in the node and between nodes.

        A wire format packs everything, and so do the user's own collectives.
        """
        plan, is_custom = self.layout.plan, self.comm_hook or self.grad_sum.settings.reduce_scatter
        last = plan.all_packed if is_custom or self.wires.reduce is not None else plan
        if self.hierarchy is None:
            return (last,)
        first = plan.all_packed if is_custom else plan
        return first.scaled(self.hierarchy.across.size()), last

    @property
    def reduce_plan(self) -> GatherPlan:
        return self.reduce_plans[0]

    @property
    def unsharded_bytes(self) -> int:
        return self.layout.padded_numel * self.param_dtype.itemsize

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the gradient that is sent to a reduction."""
        return self.layout.padded_numel * self.reduce_dtype.itemsize

    @property
    def grad_dtype(self) -> torch.dtype:
        return self.reduce_dtype if self.keep_low_precision_grads else self.dtype

    @property
    def needs_storage(self) -> bool:
        """Whether ``unsharded`` has its own storage, which every unshard fills."""
        return self.is_sharded or self.is_offloaded or self.param_dtype != self.dtype

    # -- storage of the unsharded flat parameter -----------------------------------------

    @property
    def is_allocated(self) -> bool:
        return self.unsharded.untyped_storage().nbytes() > 0

    def allocate(self) -> torch.Tensor:
        """Give the unsharded buffer its storage and return it for writing.

        The returned tensor has its own version counter: a refill must not look to autograd like a
        change of the views that it has saved.
        """
        storage = self.unsharded.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.unsharded_bytes)
        return self.unsharded.data

    def set_readable(self, readable: bool) -> None:
        """Allow or forbid autograd to unpack saved views: see the note above."""
        if readable is not self._is_readable and self.needs_storage:
            self._is_readable = readable
            set_readable(self.unsharded, readable)

    def storages_to_free(self) -> list[torch.UntypedStorage]:
        storage = self.unsharded.untyped_storage()
        return [storage] if self.needs_storage and storage.nbytes() else []

    def free(self) -> None:
        """Free the unsharded storage at once."""
        for storage in self.storages_to_free():
            storage.resize_(0)

    def keep_shard(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's part of the unsharded buffer; the ranks of ``group`` gather it again."""
        if self.is_sharded:
            size = group.size()
            plan = self.layout.plan.scaled(self.layout.world_size // size)
            kept = plan.shard_of(self.unsharded.data, group.rank(), size)
            streams = side_streams(self.device)
            copied = None if streams is None else streams.after_current()
            self.kept_shard = KeptShard(kept, group, copied)

    def kept_shard_to_gather(self) -> tuple[torch.Tensor, dist.ProcessGroup] | None:
        """Return the kept shard and its group, or ``None`` if there is none in this dtype.

        A post-forward shard is gathered once; a secondary shard stays for later gathers.
        """
        kept = self.kept_shard
        if self.hierarchy is None:
            self.kept_shard = None
        if kept is None or kept.tensor.dtype != self.param_dtype:
            return None
        if kept.made is not None:
            kept.made.wait()
        return kept.tensor, kept.group

    def shard_to_gather(self) -> torch.Tensor:
        """Return the send buffer: the shard itself, or a copy in low precision or other memory."""
        shard = self.shard_on_device()
        if self.param_dtype != self.dtype:
            return shard.to(self.param_dtype)
        is_elsewhere = self.grad_sum.settings.gather_memory is not None and not self.is_offloaded
        return shard.clone() if is_elsewhere else shard

    def shard_on_device(self) -> torch.Tensor:
        """Return the shard on the device of the collectives; parameters must have values."""
        self.module_parameters.require_values()
        shard = self.sharded.detach()
        if not self.is_offloaded:
            return shard
        return torch.empty_like(shard, device=self.device).copy_(shard, non_blocking=True)

    # -- views ---------------------------------------------------------------------------

    def make_views(self) -> list[torch.Tensor]:
        """Return one view of the unsharded buffer for each original parameter."""
        record_version(self.unsharded)
        return self.layout.split(self.unsharded)

    def point_originals_to_shard(self) -> None:
        keeps = self.keep_low_precision_grads and self.requires_grad
        self.module_parameters.show_shard(self.shard_layout.split(self.sharded.data), keeps)

    # -- freezing ------------------------------------------------------------------------

    @property
    def is_trainable(self) -> bool:
        """Whether at least one parameter was trained in the last forward."""
        return len(self.module_parameters.frozen) < len(self.originals)

    def check_originals(self) -> None:
        """Check before a forward that the shard holds the values of all parameters.

        Parameters may have been frozen or unfrozen since. ``requires_grad``, on which whole graphs
        are specialized, never becomes ``False``: gradients of frozen parameters are dropped.
        """
        self.module_parameters.check()
        if self.is_trainable and not self.requires_grad:
            self.requires_grad = True
            self.sharded.requires_grad_()
            self.point_originals_to_shard()

    # -- gradients -------------------------------------------------------------------------

    def set_comm_hook(self, hook: Callable[..., object]) -> None:
        """Reduce with a communication hook, which sees each gradient once."""
        self.comm_hook = hook
        self.grad_sum.keeps_reduced_apart = True

    def grad_to_reduce(self, grads: Sequence[torch.Tensor | None]) -> UnshardedGrad:
        """Return the unsharded gradient, ``grad_sum`` included, in ``reduce_dtype``."""
        total = None if self.grad_sum.total is None else self.grad_sum.take()
        memory, flat = self.grad_sum.settings.reduce_memory, None
        if memory is not None or total is not None or not self.is_sharded:
            # Tensors that only some ranks need do not come from the pool: see `registered_memory`.
            with allocating(memory):
                flat = torch.empty(
                    self.layout.padded_numel, dtype=self.reduce_dtype, device=self.device
                )
        if total is None and self.is_sharded:
            size = self.layout.world_size if self.hierarchy is None else self.hierarchy.node.size()
            plan, dtype = self.reduce_plan, self.reduce_dtype
            flat = self.layout.messages(grads, plan, size, dtype, self.device, flat)
            return UnshardedGrad(flat, has_message=True)
        assert flat is not None
        in_place = total is None or self.sum_dtype == self.reduce_dtype
        summed = flat if in_place else torch.empty_like(flat, dtype=self.sum_dtype)
        self.layout.fill(summed, grads)
        if total is not None:
            summed.add_(total)
            # A graph whose backward is still to come may hold the sum: it must not add it again.
            total.data.fill_(NO_VALUE)
        return UnshardedGrad(flat if in_place else flat.copy_(summed))

    def sum_to_reduce(self, total: torch.Tensor) -> UnshardedGrad:
        """Return a copy of a sum of gradients, in ``reduce_dtype``."""
        with allocating(self.grad_sum.settings.reduce_memory):
            return UnshardedGrad(total.to(self.reduce_dtype, copy=True))

    def new_shard(self, plan: GatherPlan, grad: torch.Tensor) -> torch.Tensor:
        """Tensor ``(plan.shard_numel,)`` for the reduction of a gradient to write to."""
        with allocating(self.grad_sum.settings.reduce_memory):
            return plan.new_shard(grad)

    def keep_grads(
        self, grads: Sequence[torch.Tensor | None], unused: Collection[int] = frozenset()
    ) -> None:
        """Add gradients to ``grad_sum`` for the reduction of a later step, under ``no_grad``."""
        flat = torch.empty(self.layout.padded_numel, dtype=self.sum_dtype, device=self.device)
        self.layout.fill(flat, grads)
        self.grad_sum.add(flat, unused)

    def as_grad(self, sharded_grad: torch.Tensor) -> torch.Tensor:
        wanted = self.grad_dtype
        return sharded_grad if sharded_grad.dtype == wanted else sharded_grad.to(wanted)

    def accumulate_grad(
        self,
        sharded_grad: torch.Tensor,
        unused: Collection[int] = (),
        frozen: Collection[int] = (),
    ) -> Undecided:
        """Add a reduced gradient ``(shard_numel,)`` to the originals' ``.grad``; call their hooks.

        Call this without gradient tracking. Parameters that are frozen now get nothing: autograd,
        too, tests ``requires_grad`` when a gradient arrives.

        Args:
            sharded_grad: mean over ranks.
            unused: indices of parameters without a gradient on this rank.
            frozen: indices of parameters that were not trained in the forward.

        Returns:
            The ``unused`` ones, which ``add_present`` adds if another rank had a gradient.

        Raises:
            FSDPStateError: a parameter has a hook of ``register_hook()``.
        """
        for original in self.originals:
            refuse_tensor_hooks(original.param, self.paths, original.fqn)
        sharded_grad = self.as_grad(sharded_grad)
        if self.is_offloaded:
            sharded_grad = sharded_grad.to(self.home)
        parts = self.shard_layout.split(sharded_grad)
        trained = [
            index
            for index, original in enumerate(self.originals)
            if index not in frozen and original.param.requires_grad
        ]
        if self.grad_sum.total is not None:
            reduced: list[torch.Tensor | None] = [None] * len(parts)
            for index in trained:
                reduced[index] = None if index in unused else parts[index]
            self.grad_sum.add_reduced(reduced)
            # Their `.grad` may be None, which would drop them from the sum.
            self.grad_sum.keep_reduced([index for index in trained if index in unused], parts)
            return []
        undecided: Undecided = []
        if unused and not self.grad_sum.settings.zeros_unused:
            waiting = [index for index in trained if index in unused]
            if self._has_hooks():  # now: they may call collectives, in one order on all ranks
                has = has_value([parts[index] for index in waiting])
                waiting = [one for one, has_one in zip(waiting, has, strict=True) if not has_one]
            else:
                undecided = [(self, index, parts[index]) for index in waiting]
            trained = [index for index in trained if index not in waiting]
        self._add_parts(trained, parts)
        return undecided

    def _has_hooks(self) -> bool:
        params = [original.param for original in self.originals]
        return self.runs_hooks and any(map(has_post_accumulate_hooks, params))

    def _add_parts(
        self, indices: Sequence[int], parts: Sequence[torch.Tensor] | dict[int, torch.Tensor]
    ) -> None:
        for index in indices:
            self.originals[index].add_grad(parts[index])
        for index in indices if self.runs_hooks else ():
            run_post_accumulate_hooks(self.originals[index].param)

    @staticmethod
    def add_present(undecided: Undecided) -> None:
        """Add those reduced gradients that any rank had; the host stops once for all of them.

        The others leave ``.grad`` as it is: ``None`` stays ``None``.
        """
        has = has_value([part for _, _, part in undecided])
        for (flat, index, part), has_one in zip(undecided, has, strict=True):
            if has_one and flat.grad_sum.total is not None:  # a later backward has left a sum
                flat.grad_sum.keep_reduced([index], {index: part})
            elif has_one:
                flat._add_parts([index], {index: part})

    # -- moving ----------------------------------------------------------------------------

    @torch.no_grad()
    def convert(self, shard: torch.Tensor, kept: Collection[int] = ()) -> None:
        """Replace the shard by ``shard``, which has another dtype or device.

        Original parameters become views of the new storage; their gradients must have been
        converted already. ``kept`` are indices of parameters that keep their current values.
        """
        if kept and not self.sharded.is_meta:
            old, new = (self.shard_layout.split(one) for one in (self.sharded, shard))
            for index in kept:
                new[index].copy_(old[index])
        if self.layout.padding_numel and not shard.is_meta:
            # Padding stays zero.
            given, shard = shard, torch.zeros_like(shard)
            for place, part in zip(*map(self.shard_layout.split, (shard, given)), strict=True):
                place.copy_(part)
        self.dtypes = Dtypes(*(shard.dtype if low == self.dtype else low for low in self.dtypes))
        self.free()
        self.kept_shard = None
        self._is_readable = False
        self.dtype = shard.dtype
        if not self.is_offloaded:
            self.device = shard.device
        elif shard.device.type != "cpu":
            self.device, shard = shard.device, shard.to(self.home).pin_memory()
        self.sharded = shard.detach().contiguous().requires_grad_(self.requires_grad)
        self.make_buffer()
        self.point_originals_to_shard()


Undecided = list[tuple[FlatParameter, int, torch.Tensor]]
"""Reduced gradients by flat parameter and index, of which any rank or none had one."""


# -- shard conversion ------------------------------------------------------------------------------


def shard_of(flat: FlatParameter, locals_: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Build a shard ``(shard_numel,)`` from this rank's parts, which have one dtype.

    It lies on the device of the collectives, and is zero where a part is ``None``.
    """
    dtypes = {local.dtype for local in locals_ if local is not None} or {flat.dtype}
    assert len(dtypes) == 1, f"tensors of one dtype, got {dtypes}"
    shard = torch.zeros(flat.layout.shard_numel, dtype=dtypes.pop(), device=flat.device)
    for place, local in zip(flat.shard_layout.split(shard), locals_, strict=True):
        if local is not None:
            place.copy_(local)
    return shard


def unsharded_of(flat: FlatParameter, shard: torch.Tensor) -> torch.Tensor:
    """All-gather a tensor ``(padded_numel,)`` from shards; where nothing is sharded, the shard."""
    if not flat.is_sharded:
        return shard
    unsharded = shard.new_empty(flat.layout.padded_numel)
    hierarchy, group, plan = flat.groups.hierarchy, flat.group, flat.layout.plan
    if hierarchy is not None:
        secondary = shard.new_empty(shard.numel() * hierarchy.across.size())
        all_gather(secondary, shard, hierarchy.across, flat.unit_fqn, plan)
        shard, group = secondary, hierarchy.node
        plan = plan.scaled(hierarchy.across.size())
    all_gather(unsharded, shard, group, flat.unit_fqn, plan)
    return unsharded
