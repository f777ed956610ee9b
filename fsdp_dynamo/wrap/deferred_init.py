"""Deferred initialization: give modules on the meta device their values, unit by unit.

Modules are initialized in the order of ``modules()``, each by ``param_init_fn`` or by its
``reset_parameters()``. Constructors run in the same order, so one seed gives the same values as
without the meta device. A unit is sharded as soon as all of its modules have values, so no rank
holds more than the units that are incomplete.

``param_init_fn`` sees tensors with storage. If it writes none of a module's tensors, it is called
again with tensors on the meta device, as FSDP1 does: many such functions begin with a check of
``is_meta``.

To find tensors that were never written, new floating-point tensors are filled with NaN; for other
dtypes the tensor's version is recorded. A tensor whose storage was replaced, as by ``to_empty()``,
counts as written, because its contents prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_dynamo.comm.process_groups import Groups, serves_cpu
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.original_parameter import REPLACED, OriginalParameter
from fsdp_dynamo.errors import FSDPValueError, UnsupportedError
from fsdp_dynamo.health.run import together
from fsdp_dynamo.module_tree import join_fqn

InitFn = Callable[[nn.Module], None]


@dataclass
class _Slot:
    """Place of a tensor in a module, and the tensor object that was there first."""

    tensors: dict[str, torch.Tensor | None]
    name: str
    fqn: str
    owned: torch.Tensor

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.tensors.get(self.name)


class DeferredInit:
    """Initialization of the modules in a tree that hold tensors on the meta device.

    Args:
        modules: all managed modules with their FQNs, in the order of ``modules()``.
        init: ``param_init_fn``; ``None``: ``reset_parameters()``.
        device: device on which values are made.
        is_overwritten: whether another rank's values overwrite this rank's; then tensors may stay
            unwritten.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        init: InitFn | None,
        device: torch.device,
        is_overwritten: bool,
    ) -> None:
        self._device = device
        self._is_overwritten = is_overwritten
        self._init = init
        self._slots: dict[nn.Module, list[_Slot]] = {}
        for fqn, module in modules:
            slots = [slot for slot in _slots_of(fqn, module) if slot.owned.is_meta]
            if slots:
                self._slots[module] = slots
        self._swapped: dict[torch.Tensor, list[torch.Tensor]] = {}  # by the slot's tensor
        self._unwritten: dict[str, None] = {}

    @property
    def modules(self) -> list[nn.Module]:
        """Modules that hold meta tensors themselves, in order."""
        return list(self._slots)

    def check(self) -> None:
        """Raise if a module cannot be initialized; changes nothing."""
        for slots in self._slots.values():
            for slot in slots:
                if isinstance(slot.owned, DTensor):
                    raise UnsupportedError(
                        f"deferred initialisation, parameter '{slot.fqn}': expected a DTensor with "
                        "storage, got one on the meta device. Give it values before it is wrapped, "
                        "or use fully_shard, which leaves it on the meta device until to_empty() "
                        "or loading."
                    )
        if self._init is not None or self._is_overwritten:
            return
        without_init = [
            slot.fqn
            for module, slots in self._slots.items()
            if not _can_reset(module)
            for slot in slots
        ]
        if without_init:
            raise FSDPValueError(
                "deferred initialisation: expected modules on the meta device with a "
                f"reset_parameters() method, got none for {', '.join(map(repr, without_init))}. "
                "Add the method to the modules that hold these tensors, or pass param_init_fn.",
                see="no-values-on-the-meta-device",
            )

    def run(self) -> Iterator[nn.Module]:
        """Initialize all modules one after the other; yield each module when it has its values.

        Parameters and buffers stay the same objects until DTensors replace them. After an error, of
        ``init`` or for tensors that cannot be initialized, the model has its meta tensors again.
        """
        try:
            for module, slots in self._slots.items():
                self._initialise(module, slots)
                yield module
            if self._unwritten:
                raise FSDPValueError(
                    "deferred initialisation: expected every parameter and buffer on the meta "
                    "device to be initialised, got no values for "
                    f"{', '.join(map(repr, self._unwritten))}. Let reset_parameters() or "
                    "param_init_fn write them.",
                    see="no-values-on-the-meta-device",
                )
        except BaseException:
            self._undo()
            raise

    @torch.no_grad()
    def _initialise(self, module: nn.Module, slots: list[_Slot]) -> None:
        new = [slot for slot in slots if slot.owned.is_meta]
        tied = [slot.owned for slot in slots if slot not in new]
        kept = [(tensor, tensor.clone()) for tensor in tied]
        for slot in new:
            if slot.owned.is_meta:  # one module may hold it twice
                self._swap(slot, _new_unwritten(slot.owned, self._device))
        before = {slot.name: _WriteDetector(slot.owned) for slot in new}
        init = self._init or _reset
        if init is not _reset or _can_reset(module):  # not needed where values follow
            init(module)
        if init is not _reset and all(before[s.name].is_unwritten(s.tensor) for s in new):
            _register_meta(new)
            init(module)
        for slot in slots:
            self._adopt(slot)
        for tensor, value in kept:  # of a tied parameter, the values of its first holder count
            tensor.copy_(value)
        for slot in new:
            if not self._is_overwritten and before[slot.name].is_unwritten(slot.tensor):
                self._unwritten[slot.fqn] = None

    def _adopt(self, slot: _Slot) -> None:
        """Accept a tensor that the initialization registered in place of the one it was given."""
        given = slot.tensor
        if given is None or given is slot.owned:
            return
        for other in self._all_slots():
            if given is other.owned:
                raise FSDPValueError(
                    f"deferred initialisation of '{slot.fqn}': expected an initialisation that "
                    f"writes or replaces tensors, got one that ties it to '{other.fqn}'. Tie "
                    "parameters before the model is wrapped."
                )
        self._swap(slot, given)
        slot.tensors[slot.name] = slot.owned

    def _swap(self, slot: _Slot, given: torch.Tensor) -> None:
        """Swap the contents of ``given`` into the slot's tensor, which stays the same object.

        Optimizers and other modules may hold that object.
        """
        try:
            torch.utils.swap_tensors(slot.owned, given)
        except RuntimeError as error:
            raise FSDPValueError(
                f"deferred initialisation of '{slot.fqn}': expected a tensor that only modules and "
                f"optimizers hold, got {error}. Build the model anew on the meta device, and wrap "
                "it before it is used."
            ) from error
        self._swapped.setdefault(slot.owned, []).append(given)

    def release(self, modules: Iterable[nn.Module]) -> None:
        """Free values that DTensors of finished units replace.

        The plain parameters go back to the meta device: an optimizer may still hold them, and so do
        the slots here.
        """
        for slot in (slot for module in modules for slot in self._slots.get(module, ())):
            if hasattr(slot.owned, REPLACED):
                marks = slot.owned.__dict__
                self._swap_back(slot.owned)
                slot.owned.__dict__.update(marks)

    def _swap_back(self, owned: torch.Tensor) -> None:
        for given in reversed(self._swapped.pop(owned, ())):
            torch.utils.swap_tensors(owned, given)

    def _undo(self) -> None:
        for owned in [*self._swapped]:
            self._swap_back(owned)
        for slot in self._all_slots():
            slot.tensors[slot.name] = slot.owned
            slot.owned.__dict__.pop(REPLACED, None)  # where its unit was made already

    def _all_slots(self) -> Iterator[_Slot]:
        return (slot for slots in self._slots.values() for slot in slots)


def _register_meta(slots: Iterable[_Slot]) -> None:
    """Register meta tensors in a module again, for a ``param_init_fn`` that looks for them."""
    for slot in slots:
        meta = torch.empty_like(slot.owned, device="meta")
        if isinstance(slot.owned, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=slot.owned.requires_grad)
        meta.__dict__.update(slot.owned.__dict__)
        slot.tensors[slot.name] = meta


def _can_reset(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def _new_unwritten(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Tensor like ``like`` with storage; floating-point elements are NaN until written."""
    new = torch.empty_like(like, device=device)
    if new.is_floating_point():
        new.fill_(torch.nan)
    if isinstance(like, nn.Parameter):
        new = nn.Parameter(new, requires_grad=like.requires_grad)
    new.__dict__.update(like.__dict__)
    return new


class _WriteDetector:
    """Detect whether a tensor was written, or given other storage, since construction."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._version = tensor._version

    def is_unwritten(self, now: torch.Tensor | None) -> bool:
        if now is None or now.numel() == 0:
            return False
        if now.is_meta:
            return True
        # Compare storages, not addresses: the allocator may have reused the address since.
        if self._storage != StorageWeakRef(now.untyped_storage()):
            return False
        if now.is_floating_point():
            return bool(now.isnan().any())
        return now._version == self._version


def _slots_of(fqn: str, module: nn.Module) -> Iterator[_Slot]:
    tables: tuple[dict[str, torch.Tensor | None], ...] = (module._parameters, module._buffers)  # type: ignore[assignment]
    for tensors in tables:
        for name, tensor in tensors.items():
            if tensor is not None:
                yield _Slot(tensors, name, join_fqn(fqn, name), tensor)


# -- initial values --------------------------------------------------------------------------------
# Values come from the module itself, from deferred initialization, or from rank 0.


class InitialValues:
    """Initial values of the parameters and buffers that one call of the constructor manages.

    Args:
        modules: all managed modules with their FQNs, in the order of ``modules()``.
        init: ``param_init_fn``.
        device: device on which deferred values are made.
        source: groups in which rank 0 broadcasts its values; ``None``: each rank has its own.
        may_stay_on_meta: whether meta tensors may stay, if ``init`` and ``source`` are ``None``.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        init: InitFn | None,
        device: torch.device,
        source: Groups | None,
        may_stay_on_meta: bool,
    ) -> None:
        self._modules = list(modules)
        self._source = source
        stays = may_stay_on_meta and init is None and source is None
        follows = source is not None and any(group.rank() for group in source.all)
        self._deferred = DeferredInit([] if stays else self._modules, init, device, follows)
        self.device = device

    def check(self, originals: Sequence[OriginalParameter]) -> None:
        """Raise if a value could not be obtained; changes nothing."""
        self._deferred.check()
        if self._source is None or serves_cpu(self._source.shard):
            return
        tensors = [*(original.param for original in originals), *self._buffers()]
        if any((self.device if t.is_meta else t.device).type == "cpu" for t in tensors):
            raise FSDPValueError(
                "argument 'sync_module_states': expected parameters on the accelerator, got a CPU "
                "tensor with an NCCL group. Pass device_id=torch.cuda.current_device() too, or "
                "move the module."
            )

    def in_order_of_completion(
        self, owned: Mapping[nn.Module, Sequence[OriginalParameter]]
    ) -> Iterator[nn.Module]:
        """Yield each unit once all of its parameters have values; the caller then shards it.

        Units are ordered by the last module that holds one of their parameters. This order is the
        same on all ranks, deferred or not.
        """
        position = {module: i for i, (_, module) in enumerate(self._modules)}
        holders = {
            owner: {module for original in originals for module, _, _ in original.sites}
            for owner, originals in owned.items()
        }
        steps = self._deferred.run()
        missing = set(self._deferred.modules)
        last = {o: max((position[m] for m in holders[o]), default=-1) for o in owned}
        sources = self._source.all if self._source else ()
        for owner in sorted(owned, key=last.__getitem__):
            with together(sources, self.device, "deferred initialisation"):  # before a broadcast
                while holders[owner] & missing:
                    missing.remove(next(steps))
            self._broadcast([original.param for original in owned[owner]])
            yield owner
            self._deferred.release(holders[owner])
        with together(sources, self.device, "deferred initialisation"):
            for _ in steps:
                pass  # the remaining modules hold only buffers
        self._broadcast(list(self._buffers()))

    def _buffers(self) -> Iterator[torch.Tensor]:
        """All buffers, each once."""
        seen: set[torch.Tensor] = set()
        for _, module in self._modules:
            for buffer in module._buffers.values():
                if buffer is not None and buffer not in seen:
                    seen.add(buffer)
                    yield buffer

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send rank 0's values to all ranks."""
        if self._source is None:
            return
        for tensor in tensors:
            for group in reversed(self._source.all):  # across replicas, then inside each
                with watched(group, "broadcast", "sync_module_states", tensor.numel()):
                    dist.broadcast(tensor.detach(), group=group, group_src=0)


def device_for(
    module: nn.Module, group: dist.ProcessGroup, device_id: torch.device | None
) -> torch.device:
    """Choose the device of deferred values.

    The first that applies: ``device_id``, the device of the module's other tensors, a device that
    the group's collectives support.
    """
    if device_id is not None:
        return device_id
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            return tensor.device
    if serves_cpu(group) or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
