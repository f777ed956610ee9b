"""One flat parameter: its tensors, its views, and where its gradient goes.

[Note: tensors of a unit]

=========================  ===================  =============================================
tensor                     shape                lives
=========================  ===================  =============================================
``sharded``                (padded_numel / N,)  always; the autograd leaf, in the original dtype
                                                (in host memory where it is offloaded)
``low_precision_shard``    (padded_numel / N,)  around an all-gather with ``param_dtype`` set
``unsharded``              (padded_numel,)      always as an object; storage from unshard to
                                                reshard only
parameter views            original shapes      made at every unshard for autograd
original parameters        (range.numel,)       always; views of ``sharded`` (with NO_SHARD:
                                                original shapes)
=========================  ===================  =============================================

The all-gather reads ``sharded`` and writes ``unsharded``: no copy in, no copy out.
The storage of ``unsharded`` is emptied and refilled in place, so a view that autograd saved in
the forward reads the values that were gathered again for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo.accumulation import Accumulation
from fsdp_dynamo.api import MixedPrecision
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError, explain, unit_name
from fsdp_dynamo.groups import Groups
from fsdp_dynamo.layout import ALIGN_BYTES, FlatLayout, ShardRange, make_layout
from fsdp_dynamo.tensor_parallel import TensorParallel, as_local_parameter


@dataclass
class OriginalParameter:
    """One parameter of the user's model and every place that holds it.

    Attributes:
        param: the object that optimizers hold; its identity never changes.
        fqn: FQN relative to the unit.
        sites: ``(module, name, FQN)`` of every place; more than one where tied.
        parallel: how tensor parallelism has split it, if it has.
    """

    param: nn.Parameter
    fqn: str
    sites: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    parallel: TensorParallel | None = None

    def take_local(self) -> None:
        """Put a plain parameter in the place of a DTensor: its local tensor."""
        self.param, self.parallel = as_local_parameter(self.param)
        if self.parallel is not None:
            for module, name, _ in self.sites:
                module._parameters[name] = self.param


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
        # Gradient of the unsharded flat parameter that `no_sync` steps have summed so far.
        self.unsharded_grad_sum: torch.Tensor | None = None
        self.accumulation = Accumulation([self])  # until a root takes over
        self._sharded_sizes, self._sharded_index = self._shard_pieces()
        self._all_held = -1 not in self._sharded_index
        self._views_set = False
        self.is_summoned = False
        self.comm_hook: Callable[..., object] | None = None
        self.unit_fqn = ""
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

    def free(self) -> bool:
        """Free the unsharded flat parameter; ``False`` where there was nothing to free."""
        if not self.needs_storage or not self.is_allocated:
            return False
        self.unsharded.untyped_storage().resize_(0)
        return True

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
        for original, local in zip(self.originals, self.local_parts(self.sharded), strict=True):
            original.param.data = local
            if self.keep_low_precision_grads and self.requires_grad:
                original.param.grad_dtype = self.reduce_dtype

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
        """Raise if a parameter was replaced, moved or frozen behind the wrapper's back."""
        if self.is_summoned:
            raise FSDPStateError(
                explain(
                    expected="to run with sharded parameters",
                    got="a forward inside summon_full_params()",
                    where=unit_name(self.unit_fqn),
                    fix="Leave the context first.",
                    see="a-forward-inside-summon_full_params",
                )
            )
        if self._views_set:
            return
        base = self.sharded.data_ptr()
        itemsize = self.dtype.itemsize
        for original, part in zip(self.originals, self.ranges, strict=True):
            module, name, fqn = original.sites[0]
            param = original.param
            present = module._parameters.get(name)
            if present is not param:
                got = "no parameter" if present is None else "another object"
            elif param.numel() != part.numel or (
                part.numel and param.data_ptr() != base + part.shard_start * itemsize
            ):
                got = f"a tensor of shape {tuple(param.shape)} with storage of its own"
            elif param.requires_grad != self.requires_grad:
                got = f"requires_grad={param.requires_grad}"
            else:
                continue
            raise FSDPStateError(
                explain(
                    expected=f"the wrapped parameter (requires_grad={self.requires_grad}, "
                    f"{part.numel} elements on this rank) unchanged",
                    got=got,
                    where=f"parameter '{join_fqn(self.unit_fqn, fqn)}'",
                    fix="Change values in place under torch.no_grad(), load a state dict, or "
                    "replace and freeze parameters before wrapping.",
                    see="a-parameter-changed-after-wrapping",
                )
            )

    def refuse_comm_hook(self) -> None:
        """Raise if a hook is to reduce what a graph's own collectives would."""
        if self.comm_hook is not None:
            raise UnsupportedError(
                explain(
                    expected="no communication hook on the graph path",
                    got="one that register_comm_hook() has set",
                    where=unit_name(self.unit_fqn),
                    fix="Run eagerly or with torch.compile(model), or leave the hook out: "
                    "MixedPrecision(reduce_dtype=...) compresses on all paths.",
                )
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
        if self.unsharded_grad_sum is not None:
            flat.add_(self.unsharded_grad_sum)
            self.unsharded_grad_sum = None
        return flat

    def add_unsharded_grad(self, grad: torch.Tensor) -> None:
        """Keep an unsharded gradient ``(padded_numel,)`` for a later reduction.

        To be called without gradient tracking.
        """
        if self.unsharded_grad_sum is None:
            self.unsharded_grad_sum = grad
        else:
            self.unsharded_grad_sum.data.add_(grad)  # a graph may have saved it for its backward
        self.accumulation.has_sums = True

    def accumulate_grad(self, sharded_grad: torch.Tensor) -> None:
        """Add a reduced gradient ``(shard_numel,)`` to the original parameters' ``.grad``.

        To be called without gradient tracking.
        """
        if sharded_grad.dtype != self.dtype and not self.keep_low_precision_grads:
            sharded_grad = sharded_grad.to(self.dtype)
        if self.is_offloaded:  # the host reads it next: not left in flight
            sharded_grad = sharded_grad.to(self.home)
        for original, part in zip(self.originals, self.local_parts(sharded_grad), strict=True):
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


def join_fqn(*parts: str) -> str:
    """Join FQN parts, leaving empty ones out."""
    return ".".join(part for part in parts if part)
