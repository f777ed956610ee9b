"""The entries of modules' ``_parameters`` that a flat parameter fills.

Between steps they hold the original parameters, views of the shard; while the unit runs, views of
the unsharded buffer. Values that the user puts there in between are detected before the next
forward, and copied into the shard or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.original_parameter import OriginalParameter, mark_managed, owner_of
from fsdp_dynamo.errors import FSDPStateError, unit_name
from fsdp_dynamo.module_tree import UnitPaths, join_fqn

UNREADABLE = 1 << 30
"""Added to the version of a tensor while its memory holds no parameters."""

_set_versions = torch._C._autograd._unsafe_set_version_counter
_Facts = tuple[dict[str, Any], str, nn.Parameter, torch.Tensor, int, int, bool]


class ModuleParameters:
    """Tensors that modules hold in place of one flat parameter's original parameters.

    Attributes:
        uninitialized: indices of uninitialized originals, which stay on the meta device.
        frozen: indices of originals that were not trained in the last forward.
        views: tensors that modules hold in place of the originals; empty: the originals.
        is_summoned: whether ``summon_full_params`` has made the originals whole on any rank.
        is_whole: whether it has on this rank.
        paths: paths of the unit, for messages.
    """

    def __init__(self, originals: Sequence[OriginalParameter]) -> None:
        self._originals = originals
        self._has_parallel = any(original.parallel is not None for original in originals)
        self.uninitialized = {i for i, original in enumerate(originals) if original.param.is_meta}
        self.frozen: frozenset[int] = frozenset()
        self.views: Sequence[torch.Tensor] = ()
        self._stood_in_for: Sequence[torch.Tensor] | None = None
        self.is_summoned = self.is_whole = False
        self._params: list[nn.Parameter] = []  # of the originals, at the last `_record`
        self._num_records = 0
        self.paths = UnitPaths(("",))
        self._parts: list[torch.Tensor] = []
        self._frees_grad_dtype = False
        self._gathered: list[tuple[OriginalParameter, int]] = []  # with versions when shown
        self._put_since: list[tuple[nn.Module, str, nn.Parameter | None]] = []  # by the user
        # For each site of an original: the module's `_parameters`, the name, the original, its
        # local tensor, that tensor's numel and address, and `requires_grad`.
        self._recorded: list[_Facts] = []

    def as_parallel(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Wrap views that tensor parallelism has split in DTensors; differentiable.

        Call this once per forward. Activation checkpointing recomputes with the same tensors: the
        backward shows them again, when gradients are off.
        """
        if not self._has_parallel:
            return [*views]
        return [
            view if original.parallel is None else original.parallel.as_dtensor(view)
            for original, view in zip(self._originals, views, strict=True)
        ]

    def set_views(self, views: Sequence[torch.Tensor]) -> None:
        """Make every module hold the views in place of its parameters.

        A view is no ``nn.Parameter`` and cannot be registered, and AOTAutograd would not see a
        plain attribute. So it goes into ``_parameters`` directly. A value that the user has put
        there since the forward is meant for the next forward: ``unset_views`` restores it.
        """
        for original, view in zip(self._originals, views, strict=True):
            for module, name, _ in original.sites:
                found = module._parameters.get(name)
                if (
                    found is not original.param
                    and found is not view
                    and found is not original.held
                    and not self.views
                ):
                    self._put_since.append((module, name, found))
                if found is None:
                    _put(module, name, view)
                else:
                    module._parameters[name] = view  # type: ignore[assignment]
        self.views = views

    def show_stand_ins(self, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the views in modules by ``of(view)``, until ``hide_stand_ins``."""
        if self.views and self._stood_in_for is None:
            self._stood_in_for = self.views
            self._exchange([of(view) for view in self.views])

    def hide_stand_ins(self) -> None:
        if self._stood_in_for is not None:
            self._exchange(self._stood_in_for)
            self._stood_in_for = None

    def _exchange(self, views: Sequence[torch.Tensor]) -> None:
        for original, held, view in zip(self._originals, self.views, views, strict=True):
            for module, name, _ in original.sites:
                if module._parameters.get(name) is held:  # not if the user has replaced it
                    module._parameters[name] = view  # type: ignore[assignment]
        self.views = views

    def require_kept_views(self) -> None:
        """Raise after a forward that has removed or replaced its parameters."""
        for original, view in zip(self._originals, self.views, strict=False):
            for module, name, _ in original.sites:
                if name in module._parameters or (_has(module, name) and not _was_moved(view)):
                    continue
                got = "a new value, which would be lost" if _has(module, name) else "none there"
                raise FSDPStateError(
                    f"parameter '{self.paths.fqn_of(original.fqn)}': expected parameters of a unit "
                    f"left in place by its forward, got {got}. Register parametrizations before "
                    "wrapping, or remove them in the forward that registers them, with "
                    "leave_parametrized=False."
                )

    def show_gathered(self, views: Sequence[torch.Tensor]) -> None:
        """Make modules hold whole, plain parameters in place of DTensors, for reading."""
        self.hide_gathered()
        for original, view in zip(self._originals, views, strict=True):
            value = view.data  # own version counter: tells writes by the user
            if original.parallel is not None:
                value = original.parallel.as_dtensor(value)
            whole = original.show_whole(value, self.paths.fqn_of(original.fqn))
            self._gathered.append((original, whole._version))

    def hide_gathered(self) -> None:
        """Make modules hold DTensors again.

        Raises:
            FSDPStateError: a whole parameter was written or has a gradient, which would be lost.
        """
        if not self._gathered:  # the common case, before every forward
            return
        shown, self._gathered = self._gathered, []
        lost = [
            original
            for original, version in shown
            if original.held._version != version or original.held.grad is not None
        ]
        for original, _ in shown:
            set_readable(original.held, False)  # its memory is about to be freed
            original.end_whole()
        if lost:
            raise FSDPStateError(
                f"parameter '{self.paths.fqn_of(lost[0].fqn)}': expected parameters unsharded by "
                "hand to be read only, got one that was written or has a gradient, which would be "
                "lost. Write values inside summon_full_params() or with a state dict. Use "
                "parameters with gradients in a forward (or a method of register_forward_method)."
            )

    def unset_views(self) -> None:
        """Put the original parameters back into modules."""
        if not self.views:
            return
        for original in self._originals:
            for module, name, _ in original.sites:
                if name in module._parameters:
                    module._parameters[name] = original.param
                elif _has(module, name):  # if it is gone, the next forward raises
                    _put(module, name, original.param)
        for module, name, param in self._put_since:
            module._parameters[name] = param
        self._put_since = []
        self.views, self._stood_in_for = (), None

    @torch.no_grad()
    def show_shard(self, parts: list[torch.Tensor], frees_grad_dtype: bool) -> None:
        """Make each original its part of the shard.

        ``frees_grad_dtype`` lets gradients have another dtype than the parameters.
        """
        self._parts, self._frees_grad_dtype = parts, frees_grad_dtype
        for i, (original, part) in enumerate(zip(self._originals, parts, strict=True)):
            original.show_part(part.to("meta") if i in self.uninitialized else part)
            original.end_whole()
            if frees_grad_dtype:
                original.param.grad_dtype = None
        self._record()

    def _record(self) -> None:
        """Record the state of the originals, with which ``are_unchanged`` compares."""
        self._num_records += 1
        self._params = [original.param for original in self._originals]
        self._recorded = []
        for original in self._originals:
            param = original.param
            memory = local_of(param)
            facts = (param, memory, memory.numel(), memory.data_ptr(), param.requires_grad)
            for module, name, _ in original.sites:
                self._recorded.append((module._parameters, name, *facts))
        self.frozen = self.frozen_now()

    def frozen_now(self) -> frozenset[int]:
        return frozenset([i for i, param in enumerate(self._params) if not param.requires_grad])

    def add_versions(self, versions: list[int]) -> None:
        """Append numbers that change when an original is written in place, moved or replaced."""
        versions.append(self._num_records)
        versions += [param._version for param in self._params]
        if self._parts:
            versions.append(self._parts[0]._version)  # shared by all parts: writes to local tensors

    def check(self) -> None:
        """Check before a forward that the shard holds the originals' values.

        Raises:
            FSDPStateError: inside ``summon_full_params``, a parameter was removed or is
                uninitialized, or ``write_back`` raises.
        """
        if self.is_summoned:
            raise FSDPStateError(
                f"{unit_name(self.paths.name)}: expected to run with sharded parameters, got a "
                "forward inside summon_full_params(). Leave the context first, or call the model "
                "under torch.no_grad() there.",
                see="a-forward-inside-summon_full_params",
            )
        self.hide_gathered()
        if self.views or (self.are_unchanged() and not self.uninitialized):
            return
        self.write_back()
        self.require_values()
        for original in self._originals:
            if not original.present():
                raise self._changed_error(original, "no parameter")
        self._record()

    def require_values(self) -> None:
        """Raise if originals are still on the meta device."""
        if self.uninitialized:
            fqns = [self._originals[i].fqn for i in sorted(self.uninitialized)]
            raise FSDPStateError(
                f"{unit_name(self.paths.name)}: expected values for all parameters before they "
                f"are used, got none for {', '.join(map(repr, fqns))}: they are on the meta "
                "device. After fully_shard, call model.to_empty(device=...) and initialise the "
                "model, or load a state dict.",
                see="no-values-on-the-meta-device",
            )

    def materialize(self, indices: set[int]) -> None:
        """Materialize originals: make them their parts of the shard, to be written."""
        if indices & self.uninitialized:
            self.uninitialized -= indices
            self.show_shard(self._parts, self._frees_grad_dtype)

    def require_gathered_values(self) -> None:
        if self.views or self.are_unchanged():
            return
        for index in self._replaced():
            got = "other values after they were gathered"
            raise self._changed_error(self._originals[index], got)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy values that the user has put in the place of an original into the shard.

        The user may have put another ``nn.Parameter`` there, whole or a DTensor, or changed the
        local tensor. The original is put back. An uninitialized original is written back once it is
        no longer on the meta device.

        Raises:
            FSDPStateError: the value has another shape or dtype, is a parameter of a unit, or is in
                only one of several tied places; or ``hide_gathered`` raises.
        """
        self.hide_gathered()
        if not (self.views or self.is_summoned):
            self._copy_replacements(self._replaced())

    @torch.no_grad()
    def write_back_uninitialized(self) -> None:
        self._copy_replacements([i for i in sorted(self.uninitialized) if self._is_replaced(i)])

    def _copy_replacements(self, replaced: Sequence[int]) -> None:
        if not replaced:
            return
        parts = self._parts
        originals = self._originals
        new = {i: self.replacement(originals[i]) for i in replaced}
        # Copies: a new value may be a view of the shard, in the place of another parameter.
        values = [originals[i].part_of(param).clone() for i, param in new.items()]
        for (i, param), value in zip(new.items(), values, strict=True):
            if param is not originals[i].param:
                originals[i].replace(param)
            mark_managed(originals[i].param, self.paths.fqn_of(originals[i].fqn))
            parts[i].copy_(value)
        self.uninitialized -= new.keys()
        self.show_shard(parts, self._frees_grad_dtype)

    def are_in_place(self) -> bool:
        """Return whether modules hold the originals, with unchanged ``requires_grad``.

        All ranks get the same answer. Storages are not compared, because a rank without elements of
        a parameter could not tell.
        """
        for holder, name, param, *_, requires_grad in self._recorded:
            if holder.get(name) is not param or param.requires_grad is not requires_grad:
                return False
        return True

    def are_unchanged(self) -> bool:
        """Return whether originals and their storage are unchanged; runs before every unshard."""
        for holder, name, param, memory, numel, address, requires_grad in self._recorded:
            if (
                holder.get(name) is not param
                or param._local_tensor is not memory  # type: ignore[attr-defined]
                or memory.data_ptr() != address
                or memory.numel() != numel
                or param.requires_grad is not requires_grad
            ):
                return False
        return True

    def _replaced(self) -> list[int]:
        return [i for i in range(len(self._originals)) if self._is_replaced(i)]

    def _is_replaced(self, index: int) -> bool:
        original, part = self._originals[index], self._parts[index]
        present = original.present()
        if index in self.uninitialized:
            return any(not param.is_meta for param in present)
        own = original.part
        return (
            any(param is not original.param for param in present)
            or own.dtype != part.dtype
            or own.data_ptr() != part.data_ptr()
            or own.numel() != part.numel()
        )

    def replacement(self, original: OriginalParameter) -> nn.Parameter:
        """Return the parameter that modules hold in place of an original; raise if it is unfit."""
        param, *others = original.present() or [original.held]
        if others:
            raise self._changed_error(original, "two parameters in places that were tied")
        if not isinstance(param, nn.Parameter):
            raise self._changed_error(original, f"a {type(param).__name__}")
        if param is not original.held and owner_of(param) is not None:
            raise self._changed_error(original, f"'{owner_of(param)}', which a unit holds already")
        shape = original.param.shape
        if param.shape != shape or param.dtype != self._dtype:
            got = f"a tensor of shape {tuple(param.shape)} and {param.dtype}"
            raise self._changed_error(original, got, shape)
        return param

    def _changed_error(
        self, original: OriginalParameter, got: str, shape: torch.Size | None = None
    ) -> FSDPStateError:
        expected = "the wrapped parameter unchanged"
        if shape is not None:
            expected += f", or new values of shape {tuple(shape)} and {self._dtype}"
        return FSDPStateError(
            f"parameter '{self.paths.fqn_of(original.fqn)}': expected {expected}, got {got}. "
            "Change values in place under torch.no_grad(), inside summon_full_params() or by a "
            "state dict, between two steps; tie and convert parameters before wrapping.",
            see="a-parameter-changed-after-wrapping",
        )

    @property
    def _dtype(self) -> torch.dtype:
        return self._parts[0].dtype


def _has(module: nn.Module, name: str) -> bool:
    """Return whether a module holds a parameter or its replacement in a forward.

    ``remove_parametrizations`` turns a view into a buffer, and an assignment into an attribute.
    """
    return name in module._parameters or name in module._buffers or name in module.__dict__


def _put(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    module._parameters[name] = tensor  # type: ignore[assignment]
    module._buffers.pop(name, None)
    module.__dict__.pop(name, None)


def _was_moved(view: torch.Tensor) -> bool:
    base = view._base
    return (
        base is not None and view.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    )


def set_readable(tensor: torch.Tensor, readable: bool) -> None:
    """Allow or forbid autograd to unpack what it has saved of a tensor."""
    version = tensor._version % UNREADABLE
    set_version(tensor, version if readable else version + UNREADABLE)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter that autograd compares for saved tensors."""
    _set_versions((tensor,), (version,))


def record_version(unsharded: torch.Tensor) -> None:
    """Record the version of a buffer of which views are made: a parametrization may raise it."""
    setattr(unsharded, _RECORDED_VERSION, unsharded._version)


_RECORDED_VERSION = "_fsdp_dynamo_version"


def restore_version(unsharded: torch.Tensor) -> None:
    """Reset the version of a buffer to the recorded version, if it was raised by one since."""
    recorded = getattr(unsharded, _RECORDED_VERSION, None)
    if recorded is not None and unsharded._version == recorded + 1:
        set_version(unsharded, recorded)


# -- late parameters -------------------------------------------------------------------------------


Walk = Callable[[], Iterable[tuple[str, nn.Module]]]


class LateParameterCheck:
    """Check that no trainable parameter was added to a unit's modules after wrapping.

    A full walk takes as long as the hooks of a forward. So a check compares only the sizes and
    children of known modules with those of the last walk.

    Args:
        modules: walks over the unit's modules with their FQNs, without nested units and ignored
            modules.
        ignored: parameters that the user synchronizes.
    """

    def __init__(self, modules: Walk, ignored: set[nn.Parameter]) -> None:
        self._modules = modules
        self._ignored = ignored
        self._record()

    def check(self, paths: UnitPaths) -> None:
        """Raise if a changed module has a trainable parameter that no unit holds."""
        if self._is_unchanged():
            return
        for fqn, module in self._modules():
            for name, param in module._parameters.items():
                if self._is_late(param) and param.requires_grad:
                    raise _late_error(paths.fqn_of(join_fqn(fqn, name)))
        self._record()

    def _is_late(self, param: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
        is_parameter = isinstance(param, nn.Parameter)
        return is_parameter and owner_of(param) is None and param not in self._ignored

    def _is_unchanged(self) -> bool:
        if sum(map(len, self._entries)) != self._num_entries:
            return False
        for holder, name in self._empty_entries:
            if holder.get(name) is not None:
                return False
        for param in self._frozen:
            if param.requires_grad:
                return False
        for held, children in self._children:  # noqa: SIM110  # a generator costs more than all of it
            if [*held.values()] != children:
                return False
        return True

    def _record(self) -> None:
        found = [module for _, module in self._modules()]
        self._entries: list[dict[str, Any]] = [module._parameters for module in found]
        self._entries += [module._modules for module in found]
        self._num_entries = sum(map(len, self._entries))
        self._empty_entries = [
            (module._parameters, name)
            for module in found
            for name, param in module._parameters.items()
            if param is None
        ]
        parameters = [param for module in found for param in module._parameters.values()]
        self._frozen = [param for param in parameters if self._is_late(param)]
        self._children = [
            (module._modules, [*module._modules.values()]) for module in found if module._modules
        ]


def _late_error(fqn: str) -> FSDPStateError:
    return FSDPStateError(
        f"parameter '{fqn}': expected all trainable parameters in place when the model is wrapped, "
        "got a parameter that was added later, which each rank would train by itself. Add it "
        "before wrapping, or wrap its module as a unit of its own (m.extra = FSDP(extra)). If you "
        "synchronize it yourself, pass it in ignored_states."
    )
