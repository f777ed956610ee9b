"""Parameters whose class decides what is gathered: FSDP2's ``fsdp_pre_all_gather`` protocol.

The best-known tensor subclasses of this kind are torchao's float8 weights. This rank's part of the
parameter is a tensor of the class around memory of the shard. Before each gather it returns the
tensors to send, such as float8 numbers; it makes the weight of the forward from those received::

    part (float32) -> fsdp_pre_all_gather -> bytes -> all-gather -> fsdp_post_all_gather -> weight

All parameters of a flat parameter share one message. The unsharded buffer holds bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fsdp_dynamo.api import MixedPrecision
from fsdp_dynamo.comm.gather_plan import GatherPlan, plan_of
from fsdp_dynamo.comm.process_groups import Groups
from fsdp_dynamo.comm.streams import side_streams
from fsdp_dynamo.core.dtensors import local_of, mesh_of
from fsdp_dynamo.core.flat_layout import ALIGN_BYTES, size_per_rank
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.module_parameters import record_version, set_readable, set_version
from fsdp_dynamo.core.original_parameter import wraps_one
from fsdp_dynamo.errors import FSDPValueError, UnsupportedError

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def has_gather_hooks(param: torch.Tensor) -> bool:
    """Return whether a parameter, or its local tensor, has a gather hook."""
    return any(hasattr(local_of(param), name) for name in _HOOKS)


def check_gather_hooks(param: torch.Tensor, fqn: str, groups: Groups, *, by_rows: bool) -> None:
    """Raise for a parameter with gather hooks that a unit cannot hold.

    ``by_rows`` says whether it is sharded along its first dimension.
    """
    local: Any = local_of(param)
    expected = fix = ""
    if not all(hasattr(local, name) for name in _HOOKS):
        expected, fix = f"both {' and '.join(_HOOKS)}", "Define both."
    elif not is_traceable_wrapper_subclass(local) or not wraps_one(local):
        expected = "a class that wraps one tensor of its own shape and dtype (__tensor_flatten__)"
        fix = "Leave it whole on every rank: ignored_states=[...]."
    elif not by_rows or groups.hierarchy is not None or not local.dim():
        expected = "gather hooks with shards of rows, all gathered at once"
        fix = (
            "Use FULL_SHARD, SHARD_GRAD_OP or HYBRID_SHARD, and let shard_placement_fn leave its "
            "first dimension."
        )
    if expected:
        kind = f"{type(local).__module__}.{type(local).__qualname__}"
        raise UnsupportedError(f"parameter '{fqn}': expected {expected}, got {kind}. {fix}")


class _Gathered(NamedTuple):
    """Unsharded parameters that hooks have made, and their storages with sizes in bytes."""

    values: list[torch.Tensor]
    storages: list[tuple[torch.UntypedStorage, int]]

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Return nothing: a copy of the flat parameter makes its own."""


class HookedFlatParameter(FlatParameter):
    """Flat parameter whose parameters' classes decide what is gathered.

    The unsharded buffer has as many bytes as the hooks return. The hooks make the tensors that
    modules see from it. All else, gradients included, works as in ``FlatParameter``.
    """

    gather_wire = None
    needs_storage = True

    def __init__(self, *args: Any, precision: MixedPrecision | None, **kwargs: Any) -> None:
        self._sent: list[list[torch.Tensor]] = []  # per parameter; on meta once they are sent
        self._metadata: list[Any] = []
        self._gathered: _Gathered | None = None
        self._has_arrived = False  # a gather was started whose parameters are still to be made
        of = precision or MixedPrecision()
        self._policy = MixedPrecisionPolicy(
            of.param_dtype, of.reduce_dtype, of.output_dtype, of.cast_forward_inputs
        )
        super().__init__(*args, precision=precision, **kwargs)

    @torch.inference_mode(False)
    def make_buffer(self) -> None:
        self._gathered = None
        self.unsharded = torch.empty(0, dtype=torch.uint8, device=self.device)

    # -- before a gather ---------------------------------------------------------------

    @torch.inference_mode(False)  # as the base class
    @torch.no_grad()
    def allocate(self) -> torch.Tensor:
        """Ask the hooks what to send; return the unsharded buffer with storage for it."""
        self._ask()
        num_bytes = sum(self._widths) * self.group.size()
        if self.unsharded.numel() != num_bytes:
            self._gathered = None
            self.unsharded = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            set_readable(self.unsharded, False)
            self._is_readable = False
        self._has_arrived = True
        self.unsharded.untyped_storage().resize_(num_bytes)
        return self.unsharded.data

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the buffer and the hooks' tensors; those of plain parameters before a gather."""
        if self._gathered is None:
            return super().unsharded_bytes
        return self.unsharded.nbytes + sum(num_bytes for _, num_bytes in self._gathered.storages)

    def _ask(self) -> None:
        mesh, shard = mesh_of(self.groups.shard, self.device), self.shard_on_device()
        self._sent, self._metadata = [], []
        for original, slot in zip(self.originals, self.layout.slots, strict=True):
            room = shard[slot.shard_start : slot.shard_start + slot.shard_numel]
            rows = room.view(-1, *slot.shape[1:])  # with padding: equal on all ranks
            own: Any = local_of(original.param)
            local = own
            if own.shape != rows.shape or own.device != rows.device:
                local = original.tensor_class.around(rows, own)  # type: ignore[union-attr]
            hook, more = local.fsdp_pre_all_gather, []
            if len(inspect.signature(hook).parameters) > 1:
                stride = torch.empty(slot.shape, device="meta").stride()
                more = [torch.Size(slot.shape), stride, original.sites[0][0], self._policy]
            sent, metadata = hook(mesh, *more)
            original.tensor_class.copy_attributes(local, own)  # type: ignore[union-attr]
            self._sent.append([tensor.contiguous() for tensor in sent])
            self._metadata.append(metadata)

    @property
    def _widths(self) -> list[int]:
        """Bytes of each tensor that is sent, each followed by the bytes of its padding."""
        sizes = [tensor.nbytes for tensors in self._sent for tensor in tensors]
        return [width for size in sizes for width in (size, -size % ALIGN_BYTES)]

    def shard_to_gather(self) -> torch.Tensor:
        pieces = []
        for tensor in (one for tensors in self._sent for one in tensors):
            gap = torch.zeros(-tensor.nbytes % ALIGN_BYTES, dtype=torch.uint8, device=self.device)
            pieces += [tensor.view(-1).view(torch.uint8), gap]
        self._sent = [[one.to("meta") for one in tensors] for tensors in self._sent]
        return torch.cat(pieces)

    def gather_plan(self, numel: int, *, is_packed: bool) -> GatherPlan:
        """One message, in which each tensor that a hook returned is a packed piece."""
        return plan_of((), (), self._widths, 0)

    def keep_shard(self, group: dist.ProcessGroup) -> None:
        """Keep nothing: the backward gathers among all ranks, by the hooks."""

    # -- behind a gather ---------------------------------------------------------------

    def set_readable(self, readable: bool) -> None:
        """Allow or forbid autograd to unpack parameters; make those that have arrived first."""
        if readable and self._has_arrived:
            self._has_arrived = False
            self._gathered = self._made()
        if readable is not self._is_readable and self._gathered is not None:
            for value in self._gathered.values:
                set_readable(value, readable)
        super().set_readable(readable)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _made(self) -> _Gathered:
        """Make the parameters, in the memory of the previous ones if there are any."""
        size, before, streams = self.group.size(), self._gathered, side_streams(self.device)
        if streams is not None:  # allocated on the stream of gathers, read on the current stream
            for tensor in tree_leaves(self._metadata):
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(streams.current())
        for storage, num_bytes in before.storages if before is not None else ():
            storage.resize_(num_bytes)
        values, tensors = [], []
        for index, outputs in enumerate(self._outputs(size)):
            original, shape = self.originals[index], self.layout.slots[index].shape
            hook: Any = local_of(original.param).fsdp_post_all_gather  # type: ignore[attr-defined]
            given = tuple(outputs), self._metadata[index], self.param_dtype
            if before is not None:
                value = before.values[index]
                version = value._version
                hook(*given, out=value)
                set_version(value, version)  # autograd may have saved it
                continue
            value, own = hook(*given)
            if value.shape[1:] == shape[1:] and len(value) > shape[0]:  # padding
                value = value.narrow(0, 0, shape[0])
            if value.shape != shape:
                raise FSDPValueError(
                    f"fsdp_post_all_gather of parameter '{self.paths.fqn_of(original.fqn)}': "
                    f"expected a tensor of shape {tuple(shape)}, got {tuple(value.shape)}. Return "
                    "the whole parameter; rows beyond it may follow."
                )
            values.append(value)
            tensors += own
        if before is not None:
            return before
        address = self.unsharded.untyped_storage().data_ptr()
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
        storages.pop(address, None)
        return _Gathered(values, [(one, one.nbytes()) for one in storages.values()])

    def _outputs(self, size: int) -> Iterator[list[torch.Tensor]]:
        """Yield, for each parameter, what all ranks have sent, without rows of padding."""
        parts = iter(self.unsharded.data.split([size * width for width in self._widths])[::2])
        for slot, sent in zip(self.layout.slots, self._sent, strict=True):
            padded = size_per_rank(slot.shape[0], size), *slot.shape[1:]
            outputs = [next(parts).view(one.dtype).view(-1, *one.shape[1:]) for one in sent]
            pairs = zip(outputs, sent, strict=True)
            yield [out[: slot.shape[0]] if one.shape == padded else out for out, one in pairs]

    def storages_to_free(self) -> list[torch.UntypedStorage]:
        made = [] if self._gathered is None else [one for one, _ in self._gathered.storages]
        return super().storages_to_free() + [one for one in made if one.nbytes()]

    def make_views(self) -> list[torch.Tensor]:
        record_version(self.unsharded)
        assert self._gathered is not None
        return [value.detach() for value in self._gathered.values]
