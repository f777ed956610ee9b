"""Deferred initialisation: modules built on the meta device get their values unit by unit.

Modules are initialised in the order of ``modules()``, each by ``param_init_fn`` or by its
``reset_parameters()``. Constructors run in the same order, so that one seed gives the same values
as a model that was never on the meta device. As soon as all modules of a unit have their values,
the unit is sharded: no rank ever holds more than the units that are not complete.

New floating-point tensors are filled with NaN, others are watched by their version: what nobody
wrote is found, and listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_dynamo.errors import FSDPValueError, explain
from fsdp_dynamo.flat_parameter import OriginalParameter, join_fqn

InitFn = Callable[[nn.Module], None]


@dataclass
class _Slot:
    """One tensor of a module: where it is registered."""

    tensors: dict[str, torch.Tensor | None]
    name: str
    fqn: str

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.tensors.get(self.name)


class DeferredInit:
    """The modules of a tree that hold tensors on the meta device.

    Args:
        modules: all managed modules with their FQNs, in the order of ``modules()``.
        init: ``param_init_fn``, or ``None`` for ``reset_parameters()``.
        device: where values are made.
        values_follow: whether this rank's values are overwritten by another rank's; then nothing
            has to be written here.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        init: InitFn | None,
        device: torch.device,
        values_follow: bool,
    ) -> None:
        self._device = device
        self._values_follow = values_follow
        self._init = init
        self._slots: dict[nn.Module, list[_Slot]] = {}
        for fqn, module in modules:
            slots = [s for s in _slots_of(fqn, module) if s.tensor is not None and s.tensor.is_meta]
            if slots:
                self._slots[module] = slots
        self._made: dict[torch.Tensor, torch.Tensor] = {}
        self._unwritten: dict[str, None] = {}

    @property
    def modules(self) -> list[nn.Module]:
        """Modules that hold meta tensors themselves, in order."""
        return list(self._slots)

    def check(self) -> None:
        """Raise if there is nothing to initialise a module with; changes nothing."""
        if self._init is not None:
            return
        helpless = [
            slot.fqn
            for module, slots in self._slots.items()
            if not callable(getattr(module, "reset_parameters", None))
            for slot in slots
        ]
        if helpless:
            raise FSDPValueError(
                explain(
                    expected="modules on the meta device with a reset_parameters() method",
                    got=f"none for {', '.join(map(repr, helpless))}",
                    where="deferred initialisation",
                    fix="Add the method to the modules that hold these tensors, or pass "
                    "param_init_fn.",
                    see="no-values-on-the-meta-device",
                )
            )

    def run(self, originals: Iterable[OriginalParameter]) -> Iterator[nn.Module]:
        """Give all modules their values, one after the other; yields each when it has them.

        Raises:
            FSDPValueError: at the end, listing every tensor that nobody wrote; or what the
                initialisation raises. The model has its meta tensors again.
        """
        by_param = {id(original.param): original for original in originals}
        try:
            for module, slots in self._slots.items():
                self._initialise(module, slots, by_param)
                yield module
            if self._unwritten:
                raise FSDPValueError(
                    explain(
                        expected="every parameter and buffer on the meta device to be initialised",
                        got=f"no values for {', '.join(map(repr, self._unwritten))}",
                        where="deferred initialisation",
                        fix="Let reset_parameters() or param_init_fn write them.",
                        see="no-values-on-the-meta-device",
                    )
                )
        except BaseException:
            self._undo(by_param)
            raise

    @torch.no_grad()
    def _initialise(
        self, module: nn.Module, slots: list[_Slot], by_param: dict[int, OriginalParameter]
    ) -> None:
        new = [slot for slot in slots if slot.tensor is not None and slot.tensor.is_meta]
        tied = [slot.tensor for slot in slots if slot not in new and slot.tensor is not None]
        kept = [(tensor, tensor.clone()) for tensor in tied]
        for slot in new:
            self._allocate(slot, by_param)
        before = {slot.name: _Trace(slot.tensor) for slot in new}
        if self._init is not None:
            self._init(module)
        else:
            module.reset_parameters()  # type: ignore[operator]
        for tensor, value in kept:  # of a tied parameter, the values of its first holder count
            tensor.copy_(value)
        for slot in new:
            self._adopt(slot, by_param)
            if not self._values_follow and before[slot.name].is_unwritten(slot.tensor):
                self._unwritten[slot.fqn] = None

    def _allocate(self, slot: _Slot, by_param: dict[int, OriginalParameter]) -> None:
        """A tensor with storage in place of one without, at every place that holds it."""
        old = slot.tensor
        if old is None or not old.is_meta:
            return
        new = self._made.get(old)
        if new is None:
            new = torch.empty_like(old, device=self._device)
            if new.is_floating_point():
                new.fill_(torch.nan)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
            self._made[old] = new
        slot.tensors[slot.name] = new
        if id(old) in by_param:
            self._replace(by_param[id(old)], new)

    def _adopt(self, slot: _Slot, by_param: dict[int, OriginalParameter]) -> None:
        """An initialisation may register another tensor instead of writing the one it finds."""
        for old, made in self._made.items():
            if id(old) not in by_param or slot.tensor is None or made is slot.tensor:
                continue
            original = by_param[id(old)]
            if any(m._parameters is slot.tensors and n == slot.name for m, n, _ in original.sites):
                self._made[old] = slot.tensor
                self._replace(original, slot.tensor)

    @staticmethod
    def _replace(original: OriginalParameter, new: torch.Tensor) -> None:
        assert isinstance(new, nn.Parameter)
        original.param = new
        for module, name, _ in original.sites:
            module._parameters[name] = new

    def _undo(self, by_param: dict[int, OriginalParameter]) -> None:
        for old, new in self._made.items():
            if id(old) in by_param and isinstance(old, nn.Parameter):
                self._replace(by_param[id(old)], old)
            for slots in self._slots.values():
                for slot in slots:
                    if slot.tensor is new:
                        slot.tensors[slot.name] = old


class _Trace:
    """What tells whether somebody has written a tensor since."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._tensor = tensor
        self._version = 0 if tensor is None else tensor._version
        self._place = 0 if tensor is None else tensor.data_ptr()

    def is_unwritten(self, now: torch.Tensor | None) -> bool:
        if now is None or now.numel() == 0:
            return False
        if now.is_meta:
            return True
        if now.is_floating_point():
            return bool(now.isnan().any())
        is_same = now is self._tensor and now.data_ptr() == self._place
        return is_same and now._version == self._version


def _slots_of(fqn: str, module: nn.Module) -> Iterator[_Slot]:
    tables: tuple[dict[str, torch.Tensor | None], ...] = (module._parameters, module._buffers)  # type: ignore[assignment]
    for tensors in tables:
        for name in tensors:
            yield _Slot(tensors, name, join_fqn(fqn, name))
