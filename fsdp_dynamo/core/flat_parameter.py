"""One flat parameter: its tensors, its views, and where its gradient goes.

[Note: tensors of a unit]

=========================  ===================  =============================================
tensor                     shape                lives
=========================  ===================  =============================================
``sharded``                (padded_numel / N,)  always; the autograd leaf, in the original dtype
                                                (in host memory where it is offloaded)
``unsharded``              (padded_numel,)      always as an object; storage from unshard to
                                                reshard only
parameter views            original shapes      made at every unshard for autograd
original parameters        (range.numel,)       always; views of ``sharded`` (with NO_SHARD:
                                                original shapes)
=========================  ===================  =============================================

The all-gather reads ``sharded`` and writes ``unsharded``: no copy in, no copy out. Where
``param_dtype`` is another dtype, it reads a temporary cast of ``sharded`` that lives until the
all-gather is done (``shard_to_gather``).
The storage of ``unsharded`` is emptied and refilled in place, so a view that autograd saved in
the forward reads the values that were gathered again for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo.comm.process_groups import Groups
from fsdp_dynamo.config import MixedPrecision
from fsdp_dynamo.core.accumulation import Accumulation, UnshardedSum
from fsdp_dynamo.core.layout import ALIGN_BYTES, FlatLayout, ShardRange, make_layout
from fsdp_dynamo.core.original_parameter import OriginalParameter, owner_of
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError, unit_name
from fsdp_dynamo.module_tree import join_fqn


class FlatParameter:
    """The parameters of a unit that share dtype, ``requires_grad`` and precision, flattened.

    Args:
        originals: the parameters in traversal order, with their original shapes and values.
        groups: the ranks to shard over, and those that reduce.
        sharded_strategy: ``False`` keeps every rank's copy whole (NO_SHARD).
        precision: data types, or ``None`` for those of the parameters.
        offload: keep the shard and its gradient in host memory.
    """

    def __init__(
        self,
        originals: Sequence[OriginalParameter],
        groups: Groups,
        *,
        sharded_strategy: bool,
        precision: MixedPrecision | None,
        offload: bool = False,
    ) -> None:
        first = originals[0].param
        self.is_offloaded = offload
        self.originals = tuple(originals)
        self.groups = groups
        self.is_sharded = sharded_strategy
        self.requires_grad = first.requires_grad
        self.dtype = first.dtype
        self.device = first.device
        self.param_dtype = self.dtype
        self.reduce_dtype = self.dtype
        self.keep_low_precision_grads = False
        if precision is not None:
            self._set_precision(precision)
        num_shards = self.group.size() if sharded_strategy else 1
        self.rank = self.group.rank() if sharded_strategy else 0
        align = ALIGN_BYTES // min(self.dtype.itemsize, self.param_dtype.itemsize)
        self.layout: FlatLayout = make_layout(
            [o.fqn for o in originals],
            [o.param.shape for o in originals],
            num_shards,
            max(1, align),
        )
        self.ranges: tuple[ShardRange, ...] = tuple(
            self.layout.shard_range(i, self.rank) for i in range(len(originals))
        )
        self.sharded = self._make_shard()
        self.unsharded = self._make_unsharded()
        self._sum: UnshardedSum | None = None  # what `no_sync` steps have left
        self.accumulation = Accumulation([self])  # until a root takes over
        self._sharded_sizes, self._sharded_index = self._shard_pieces()
        self._all_held = -1 not in self._sharded_index
        self._views_set = False
        self.is_summoned = False
        self.comm_hook: Callable[..., object] | None = None
        self.unit_fqn = ""
        # For each place of an original: who holds it, its name, it, its elements and its address.
        self._as_left: list[tuple[dict[str, Any], str, nn.Parameter, int, int]] = []
        self.point_originals_to_shard()

    # -- construction ------------------------------------------------------------------

    def _set_precision(self, precision: MixedPrecision) -> None:
        self.param_dtype = precision.param_dtype or self.dtype
        self.reduce_dtype = precision.reduce_dtype or self.param_dtype
        self.keep_low_precision_grads = precision.keep_low_precision_grads

    @torch.no_grad()
    def _make_shard(self) -> torch.Tensor:
        """This rank's part of all parameters, copied; the originals' storage is free after it."""
        layout = self.layout
        shard = torch.zeros(layout.shard_numel, dtype=self.dtype, device=self.home)
        if self.home != self.device:
            shard = shard.pin_memory()
        for original, part in zip(self.originals, self.ranges, strict=True):
            if part.numel:
                source = original.param.detach().reshape(-1)
                source = source[part.param_start : part.param_start + part.numel]
                shard[part.shard_start : part.shard_start + part.numel].copy_(source)
        return shard.requires_grad_(self.requires_grad)

    def _make_unsharded(self) -> torch.Tensor:
        """The unsharded flat parameter; without storage unless it is never sharded."""
        if not self.needs_storage:
            return self.sharded.data
        unsharded = torch.empty(
            self.layout.padded_numel, dtype=self.param_dtype, device=self.device
        )
        unsharded.untyped_storage().resize_(0)
        return unsharded

    def _shard_pieces(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes that cut the shard, and each original parameter's piece (-1: it has none)."""
        sizes: list[int] = []
        index: list[int] = []
        position = 0
        for part in self.ranges:
            if not part.numel:
                index.append(-1)
                continue
            if part.shard_start > position:
                sizes.append(part.shard_start - position)
            index.append(len(sizes))
            sizes.append(part.numel)
            position = part.shard_start + part.numel
        if self.layout.shard_numel > position:
            sizes.append(self.layout.shard_numel - position)
        return tuple(sizes), tuple(index)

    # -- sizes -------------------------------------------------------------------------

    @property
    def home(self) -> torch.device:
        """Where the shard and its gradient are between steps."""
        return torch.device("cpu") if self.is_offloaded else self.device

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks among which it is sharded."""
        return self.groups.shard

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded flat parameter."""
        return self.layout.padded_numel * self.param_dtype.itemsize

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the gradient that goes into a reduction."""
        return self.layout.padded_numel * self.reduce_dtype.itemsize

    @property
    def needs_storage(self) -> bool:
        """Whether ``unsharded`` has a storage of its own, to be filled at every unshard."""
        return self.is_sharded or self.is_offloaded or self.param_dtype != self.dtype

    # -- storage of the unsharded flat parameter -----------------------------------------

    @property
    def is_allocated(self) -> bool:
        """Whether the unsharded flat parameter has its storage now."""
        return self.unsharded.untyped_storage().nbytes() > 0

    def allocate(self) -> torch.Tensor:
        """Give the unsharded flat parameter its storage; returns it for writing.

        The tensor returned has a version counter of its own: filling it again must not look
        like a change of what autograd has saved.
        """
        storage = self.unsharded.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.unsharded_bytes)
        return self.unsharded.data

    def free(self) -> int:
        """Free the unsharded flat parameter; returns the bytes that were allocated."""
        if not self.needs_storage:
            return 0
        storage = self.unsharded.untyped_storage()
        num_bytes = storage.nbytes()
        if num_bytes:
            storage.resize_(0)
        return num_bytes

    def shard_to_gather(self) -> torch.Tensor:
        """The send buffer: the shard itself, or its low-precision copy."""
        shard = self.shard_on_device()
        return shard if self.param_dtype == self.dtype else shard.to(self.param_dtype)

    def shard_on_device(self) -> torch.Tensor:
        """The shard where collectives work; a copy where it is offloaded."""
        shard = self.sharded.detach()
        if not self.is_offloaded:
            return shard
        return torch.empty_like(shard, device=self.device).copy_(shard, non_blocking=True)

    # -- views ---------------------------------------------------------------------------

    def make_views(self) -> list[torch.Tensor]:
        """One view of the unsharded flat parameter for each original parameter."""
        return self.cut(self.unsharded.data)

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cut a tensor ``(padded_numel,)`` into the original parameters' shapes (views)."""
        pieces = torch.split_with_sizes(flat, self.layout.split_sizes)
        return [
            pieces[i].view(slot.shape)
            for i, slot in zip(self.layout.split_slots, self.layout.slots, strict=True)
        ]

    def set_views(self, views: Sequence[torch.Tensor]) -> None:
        """Let every module see the views in place of its parameters.

        A view is no ``nn.Parameter`` and cannot be registered; as a plain attribute AOTAutograd
        would not see it. So it goes into ``_parameters`` directly.
        """
        for original, view in zip(self.originals, views, strict=True):
            if original.parallel is not None:
                view = original.parallel.as_dtensor(view)
            for module, name, _ in original.sites:
                module._parameters[name] = view  # type: ignore[assignment]
        self._views_set = True

    def unset_views(self) -> None:
        """Put the original parameters back."""
        if not self._views_set:
            return
        for original in self.originals:
            for module, name, _ in original.sites:
                module._parameters[name] = original.param
        self._views_set = False

    @torch.no_grad()
    def point_originals_to_shard(self) -> None:
        """Let each original parameter be this rank's part of ``sharded``."""
        self._as_left = []
        for original, local in zip(self.originals, self.local_parts(self.sharded), strict=True):
            param = original.param
            param.data = local
            if self.keep_low_precision_grads and self.requires_grad:
                param.grad_dtype = self.reduce_dtype
            for module, name, _ in original.sites:
                left = (module._parameters, name, param, param.numel(), param.data_ptr())
                self._as_left.append(left)

    def local_parts(self, shard_like: torch.Tensor) -> list[torch.Tensor]:
        """Cut a tensor ``(shard_numel,)`` into the parts of the original parameters (views).

        1-D and often empty; with NO_SHARD the original shapes.
        """
        flat = shard_like.detach() if shard_like.requires_grad else shard_like
        pieces = torch.split_with_sizes(flat, self._sharded_sizes)
        if self._all_held:
            parts = [pieces[i] for i in self._sharded_index]
        else:
            empty = flat[:0]
            parts = [pieces[i] if i >= 0 else empty for i in self._sharded_index]
        if self.is_sharded:
            return parts
        return [p.view(slot.shape) for p, slot in zip(parts, self.layout.slots, strict=True)]

    # -- consistency -----------------------------------------------------------------------

    def check_originals(self) -> None:
        """Make sure before a forward that the shard holds the originals' values.

        Raises:
            FSDPStateError: inside ``summon_full_params``; what ``write_back`` raises; a parameter
                was removed or frozen.
        """
        if self.is_summoned:
            raise FSDPStateError(
                expected="to run with sharded parameters",
                got="a forward inside summon_full_params()",
                where=unit_name(self.unit_fqn),
                fix="Leave the context first.",
                see="a-forward-inside-summon_full_params",
            )
        if self._views_set or self._are_as_left():
            return
        self.write_back()
        for original in self.originals:
            if not original.present():
                raise self._changed_error(original, "no parameter")
            if original.param.requires_grad != self.requires_grad:
                got = f"requires_grad={original.param.requires_grad}"
                raise self._changed_error(original, got)

    def require_gathered_values(self) -> None:
        """Raise if an original was given other values since they were gathered."""
        if self._views_set or self._are_as_left():
            return
        for index in self._replaced():
            got = "other values after they were gathered"
            raise self._changed_error(self.originals[index], got)

    @torch.no_grad()
    def write_back(self) -> None:
        """Take into the shard what was put in the place of an original since it was last used.

        That is other storage (``param.data = ...``), whose values are copied, or another
        ``nn.Parameter``, which is the original from now on, as upstream has it.

        Raises:
            FSDPStateError: of another shape or dtype, a parameter of a unit, or only in one of
                several places.
        """
        if self._views_set or self.is_summoned:
            return
        replaced = self._replaced()
        if not replaced:
            return
        parts = self.local_parts(self.sharded.data)
        new = {i: self.replacement(self.originals[i], parts[i].shape) for i in replaced}
        values = [
            param.detach().clone() for param in new.values()
        ]  # perhaps of each other's places
        for (i, param), value in zip(new.items(), values, strict=True):
            if param is not self.originals[i].param:
                self.originals[i].replace(param)
            parts[i].copy_(value)
        self.point_originals_to_shard()

    def _are_as_left(self) -> bool:
        """Whether all originals are where and what they were; runs before every unshard."""
        requires_grad = self.requires_grad
        for holder, name, param, numel, address in self._as_left:
            if (
                holder.get(name) is not param
                or param.data_ptr() != address
                or param.numel() != numel
                or param.requires_grad is not requires_grad
            ):
                return False
        return True

    def _replaced(self) -> list[int]:
        """Positions of originals that are other objects now, or have other storage."""
        parts = self.local_parts(self.sharded.data)
        return [
            i
            for i, (original, part) in enumerate(zip(self.originals, parts, strict=True))
            if any(param is not original.param for param in original.present())
            or original.param.data_ptr() != part.data_ptr()
            or original.param.numel() != part.numel()
        ]

    def replacement(self, original: OriginalParameter, shape: torch.Size) -> nn.Parameter:
        """What is in the place of an original now; raises if it cannot be."""
        param, *others = original.present() or [original.param]
        if others:
            raise self._changed_error(original, "two parameters in places that were tied")
        if not isinstance(param, nn.Parameter):
            raise self._changed_error(original, f"a {type(param).__name__}")
        if param is not original.param and owner_of(param) is not None:
            raise self._changed_error(original, f"'{owner_of(param)}', which a unit holds already")
        if param.shape != shape or param.dtype != self.dtype:
            got = f"a tensor of shape {tuple(param.shape)} and {param.dtype}"
            raise self._changed_error(original, got, shape)
        return param

    def _changed_error(
        self, original: OriginalParameter, got: str, shape: torch.Size | None = None
    ) -> FSDPStateError:
        expected = f"the wrapped parameter (requires_grad={self.requires_grad}) unchanged"
        if shape is not None:
            expected += f", or new values of this rank's shape {tuple(shape)} and {self.dtype}"
        return FSDPStateError(
            expected=expected,
            got=got,
            where=f"parameter '{join_fqn(self.unit_fqn, original.fqn)}'",
            fix="Change values in place under torch.no_grad(), inside summon_full_params() or "
            "by a state dict, between two steps; freeze, tie and convert parameters before "
            "wrapping.",
            see="a-parameter-changed-after-wrapping",
        )

    def refuse_comm_hook(self) -> None:
        """Raise if a hook is to reduce what a graph's own collectives would."""
        if self.comm_hook is not None:
            raise UnsupportedError(
                expected="no communication hook in graph mode",
                got="one that register_comm_hook() has set",
                where=unit_name(self.unit_fqn),
                fix="Run eagerly or with torch.compile(model), or leave the hook out: "
                "MixedPrecision(reduce_dtype=...) compresses on all paths.",
            )

    # -- gradients -------------------------------------------------------------------------

    def gather_grads(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The unsharded gradient ``(padded_numel,)`` in ``reduce_dtype``.

        One pass: each gradient is copied (and cast) into its place; a parameter without a
        gradient, gaps and padding become zero. To be called without gradient tracking.
        """
        flat = torch.empty(self.layout.padded_numel, dtype=self.reduce_dtype, device=self.device)
        pieces = torch.split_with_sizes(flat, self.layout.split_sizes)
        for i in self.layout.split_gaps:
            pieces[i].zero_()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for grad, i, slot in zip(grads, self.layout.split_slots, self.layout.slots, strict=True):
            if grad is None:
                pieces[i].zero_()
            else:
                targets.append(pieces[i].view(slot.shape))
                sources.append(grad)
        if targets:
            torch._foreach_copy_(targets, sources)
        total = self.take_sum()
        if total is not None:
            flat.add_(total)
            total.data.zero_()  # a graph whose backward is still to come may have it, too
        return flat

    @property
    def unsharded_grad_sum(self) -> torch.Tensor | None:
        """Sum of unsharded gradients ``(padded_numel,)`` that waits for a reduction."""
        return None if self._sum is None else self._sum.total

    def add_unsharded_grad(self, grad: torch.Tensor) -> None:
        """Keep an unsharded gradient ``(padded_numel,)`` for a later reduction.

        To be called without gradient tracking.
        """
        if self._sum is None:
            self.put_sum(grad)
        else:
            self._sum.add(grad)

    @torch.no_grad()
    def put_sum(self, total: torch.Tensor) -> None:
        """Let a sum of unsharded gradients wait for a reduction; reduced ones go into it."""
        self._add_reduced(total, [original.param.grad for original in self.originals])
        params = {join_fqn(self.unit_fqn, o.fqn): o.param for o in self.originals}
        self._sum = UnshardedSum(total, self.cut(total.data), params)
        self.accumulation.has_sums = True

    @torch.no_grad()
    def take_sum(self) -> torch.Tensor | None:
        """The sum of unsharded gradients; it waits no more. ``None``: the user has dropped it."""
        if self._sum is None:
            return None
        total = self._sum.total if self._sum.hide() else None
        self._sum = None
        return total

    @torch.no_grad()
    def drop_dropped_grads(self) -> None:
        """Set to zero in the sum of unsharded gradients what the user has dropped."""
        if self._sum is not None:
            self._sum.drop_dropped()

    def _add_reduced(self, total: torch.Tensor, grads: Sequence[torch.Tensor | None]) -> None:
        """Add gradients of the original parameters, already reduced, to an unsharded one.

        So that its mean over ranks has them once: this rank's part is of this shard only.
        """
        own, times = total.data, 1
        if self.is_sharded:
            numel = self.layout.shard_numel
            own, times = own.narrow(0, self.rank * numel, numel), self.group.size()
        for part, grad in zip(self.local_parts(own), grads, strict=True):
            if grad is not None:
                part.add_(grad.to(part.device), alpha=times)

    def accumulate_grad(self, sharded_grad: torch.Tensor) -> None:
        """Add a reduced gradient ``(shard_numel,)`` to the original parameters' ``.grad``.

        To be called without gradient tracking.
        """
        if sharded_grad.dtype != self.dtype and not self.keep_low_precision_grads:
            sharded_grad = sharded_grad.to(self.dtype)
        if self.is_offloaded:  # the host reads it next: not left in flight
            sharded_grad = sharded_grad.to(self.home)
        parts = self.local_parts(sharded_grad)
        if self._sum is not None:
            self._sum.drop_dropped()
            self._add_reduced(self._sum.total, parts)
            return
        for original, part in zip(self.originals, parts, strict=True):
            grad = original.param.grad
            if grad is None:
                original.param.grad = part
            else:
                grad.add_(part)

    # -- moving ----------------------------------------------------------------------------

    def convert(self, shard: torch.Tensor) -> None:
        """Take ``shard`` (another dtype or device) as the new sharded flat parameter.

        Original parameters become views of the new storage; their gradients must have been
        converted already.
        """
        if self.param_dtype == self.dtype:
            self.param_dtype = shard.dtype
        if self.reduce_dtype == self.dtype:
            self.reduce_dtype = shard.dtype
        self.free()
        self.dtype = shard.dtype
        if not self.is_offloaded:
            self.device = shard.device
        elif shard.device.type != "cpu":
            self.device, shard = shard.device, shard.to(self.home).pin_memory()
        self.sharded = shard.detach().contiguous().requires_grad_(self.requires_grad)
        self.unsharded = self._make_unsharded()
        self.point_originals_to_shard()

    def sites(self) -> Iterator[tuple[OriginalParameter, nn.Module, str, str]]:
        """Every place that holds an original parameter: it, module, name, FQN in the unit."""
        for original in self.originals:
            for module, name, fqn in original.sites:
                yield original, module, name, fqn
