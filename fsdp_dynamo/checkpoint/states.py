"""States in a checkpoint: those of a model and its optimizers, and auxiliary states.

Model and optimizers have the form of torch's own state dicts, ``{"model": {fqn: ...}, "optim":
{"state": {fqn: {...}}, "param_groups": [...]}}``, which FSDP2 and plain models can read, too.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_dynamo.api import SHARDED_WITHOUT_COPIES
from fsdp_dynamo.core.unit_modules import units_in
from fsdp_dynamo.errors import CheckpointError, FSDPTypeError, FSDPValueError, UnsupportedError
from fsdp_dynamo.state_dict import optim_state
from fsdp_dynamo.state_dict.methods import state_dict_type, uncompiled

MODEL, OPTIM = "model", "optim"
Optimizers = Sequence[torch.optim.Optimizer]


_SETTINGS = SHARDED_WITHOUT_COPIES


def _sharded_form(model: nn.Module) -> AbstractContextManager[None]:
    """Make state dicts of a model with units sharded inside the context."""
    has_units = bool(units_in(model))
    form = (_SETTINGS.state_dict_type, _SETTINGS.state_dict_config)
    return state_dict_type(model, *form) if has_units else nullcontext()


def _model_state(model: nn.Module) -> dict[str, Any]:
    with _sharded_form(model):
        state: dict[str, Any] = model.state_dict()
    return state


def tensors_to_save(
    model: nn.Module, optimizers: Optimizers, compare: optim_state.Compare
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return this rank's part of all tensors, and the model's extra states.

    Nothing here communicates, unless ``compare`` (see ``optim_state.save``) does.
    """
    model = uncompiled(model)
    named = optim_state.named_places(model, units_in(model))
    found = _model_state(model)
    extra_states = {k: v for k, v in found.items() if not isinstance(v, torch.Tensor)}
    state: dict[str, Any] = {MODEL: {k: v for k, v in found.items() if k not in extra_states}}
    if optimizers:
        state[OPTIM] = optim_state.save_several(named, optimizers, _SETTINGS, compare)
    return state, extra_states


# -- loading -------------------------------------------------------------------------------------


def model_tensors(
    index: Metadata, extra_states: Mapping[str, Any], model: nn.Module
) -> dict[str, Any]:
    """Allocate the model's tensors for DCP to read into."""
    model = uncompiled(model)
    optim_state.named_places(model, units_in(model))  # also raises for a part of a unit
    state = _model_state(model)
    saved = {path[1]: index.state_dict_metadata[key] for key, path in _entries_in(index, MODEL)}
    _require_same_keys({*saved, *extra_states}, set(state), "state dict")
    for fqn, entry in saved.items():
        shape = entry.size if isinstance(entry, TensorStorageMetadata) else ()
        _require_shape(f"{MODEL}.{fqn}", shape, state[fqn])
    own = {fqn: state[fqn] for fqn in saved}
    return {MODEL: optim_state.copied(own, to_cpu=False, is_deep=True)}


def allocate_optim_states(
    index: Metadata, model: nn.Module, optimizers: Optimizers
) -> dict[str, Any]:
    """Allocate optimizer states as a flat dict with the checkpoint's keys.

    Shapes and dtypes come from the index, so the optimizers need no states yet.
    """
    if not optimizers:
        return {}
    model = uncompiled(model)
    named = optim_state.named_places(model, units_in(model))
    own = {place.fqn: place for one in optimizers for _, _, place in named.of(one)}
    entries = list(_entries_in(index, OPTIM))
    if not entries:
        raise CheckpointError(
            "checkpoint: expected optimizer states, got none in the checkpoint. Load without "
            "optimizers."
        )
    saved = {path[2] for _, path in entries if path[1] == "state"}
    _require_same_keys(saved, set(own), "optimizers' parameters", may_lack=True)
    result: dict[str, Any] = {}
    for key, path in entries:
        entry = index.state_dict_metadata[key]
        result[key] = None
        if not isinstance(entry, TensorStorageMetadata):
            continue
        shape, dtype = tuple(entry.size), entry.properties.dtype
        if path[1] == "state" and len(path) == 4:
            result[key] = optim_state.empty_like_saved(own[path[2]], path[3], shape, dtype)
        else:  # in a list, or a learning rate
            result[key] = torch.empty(shape, dtype=dtype)
    return result


def _entries_in(index: Metadata, top: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield key and path of each entry below ``top``."""
    for key in index.state_dict_metadata:
        path = index.planner_data[key]
        if path[0] == top:
            yield key, path


def prepare_optimizer_load(
    state: Mapping[str, Any], index: Metadata, model: nn.Module, optimizers: Optimizers
) -> Callable[[], None]:
    """Return a function that loads the states of ``allocate_optim_states``, filled by DCP."""
    model = uncompiled(model)
    merged = unflatten_state_dict(dict(state), {key: index.planner_data[key] for key in state})
    named = optim_state.named_places(model, units_in(model))
    states = merged[OPTIM].get("state", {})
    ready = []
    for optimizer in optimizers:
        fqns = {place.fqn for _, _, place in named.of(optimizer)}
        own = {fqn: one for fqn, one in states.items() if fqn in fqns}
        given = {"state": own, "param_groups": merged[OPTIM]["param_groups"]}
        ready.append((optimizer, optim_state.load(named, optimizer, given, _SETTINGS)))

    def load() -> None:
        for optimizer, one in ready:
            try:
                optimizer.load_state_dict(one)
            except KeyError as error:
                raise FSDPValueError(
                    f"{type(optimizer).__name__}: expected a checkpoint of an optimizer of the "
                    f"same kind, got states without {error}. Make the optimizers as they were when "
                    "it was saved, or load without them."
                ) from error

    return load


def load_model(state: Mapping[str, Any], extra_states: Mapping[str, Any], model: nn.Module) -> None:
    """Load the tensors of ``model_tensors`` and extra states into the model."""
    model = uncompiled(model)
    with _sharded_form(model):
        model.load_state_dict({**state[MODEL], **extra_states})


def _require_same_keys(
    saved: set[str], own: set[str], what: str, *, may_lack: bool = False
) -> None:
    lacking = {"the model": saved - own, "the checkpoint": set() if may_lack else own - saved}
    got = [f"{len(k)} that {who} lacks ({listed(sorted(k))})" for who, k in lacking.items() if k]
    if got:
        raise CheckpointError(
            f"checkpoint: expected a checkpoint of this model's {what}, got {' and '.join(got)}. "
            "Build the model and the optimizers as they were when it was saved."
        )


def _require_shape(key: str, saved: Iterable[int], own: object) -> None:
    shape = tuple(own.shape) if isinstance(own, torch.Tensor) else type(own).__name__
    if tuple(saved) != shape:
        raise CheckpointError(
            f"'{key}': expected shape {shape}, as the model has it, got {tuple(saved)} in the "
            "checkpoint. Build the model as it was when it was saved."
        )


def listed(names: Iterable[str]) -> str:
    """List up to three distinct names, and say how many more there are."""
    distinct = list(dict.fromkeys(names))
    shown, num_more = ", ".join(f"'{name}'" for name in distinct[:3]), len(distinct) - 3
    return f"{shown} and {num_more} more" if num_more > 0 else shown


# -- auxiliary states ------------------------------------------------------------------------------
# States of schedulers, scalers, loaders and random number generators.
#
# They are stored in one file for all ranks and one file per rank. Only values that
# ``torch.load(weights_only=True)`` reads are accepted, so loading never runs code from a file.


@runtime_checkable
class Stateful(Protocol):
    """Object with a state, such as a scheduler, a gradient scaler or a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers, strings, lists and dicts."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state that ``state_dict`` returned."""


StatefulObject = Stateful | torch.Generator
"""A value of ``shared`` or ``per_rank``."""


def require_stateful(objects: Mapping[str, Any], where: str) -> None:
    """Raise ``FSDPTypeError`` for an object without ``state_dict`` and ``load_state_dict``."""
    for name, value in objects.items():
        if not isinstance(value, (Stateful, torch.Generator)):
            raise FSDPTypeError(
                f"{where}['{name}']: expected state_dict() and load_state_dict(), or a "
                f"torch.Generator, got {type(value).__name__}. Wrap the value in an object that "
                "has them."
            )


def collect_states(objects: Mapping[str, StatefulObject]) -> dict[str, Any]:
    """Return the state of each object."""
    return {
        name: value.get_state() if isinstance(value, torch.Generator) else value.state_dict()
        for name, value in objects.items()
    }


def restore_states(objects: Mapping[str, StatefulObject], states: Mapping[str, Any]) -> None:
    """Restore the state of each object."""
    for name, value in objects.items():
        if isinstance(value, torch.Generator):
            value.set_state(states[name])
        else:
            value.load_state_dict(states[name])


def serialize(kinds: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return the content of a file of states, by kind and name."""
    content = _to_bytes({kind: dict(states) for kind, states in kinds.items()})
    try:
        require_readable(content, "states")
    except UnsupportedError:
        for kind, states in kinds.items():
            for name, state in states.items():
                require_readable(_to_bytes(state), f"{kind}['{name}']")
        raise
    return content


def _to_bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def require_readable(content: bytes, where: str) -> None:
    """Raise ``UnsupportedError`` if ``torch.load(weights_only=True)`` refuses a file's content."""
    try:
        deserialize(content)
    except Exception as error:
        raise UnsupportedError(
            f"{where}: expected a state of tensors, numbers, strings, lists and dicts, got an "
            "object that torch.load(weights_only=True) does not read. Leave the object out of the "
            "state (of get_extra_state(), for example), or represent it by numbers and strings."
        ) from error


def deserialize(content: bytes) -> Any:
    """Return the states of a file that ``serialize`` made."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


# -- random numbers --------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Return the states of the random number generators of Python, NumPy and torch."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        state["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states of ``random_state``; CUDA's only if there is a device."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
