"""States beside the model and its optimizers: schedulers, scalers, loaders, random numbers.

They are stored in small files: one for all ranks, and one per rank. Only values that
``torch.load(weights_only=True)`` reads are accepted, so that loading never runs code from a file.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from fsdp_dynamo.errors import FSDPTypeError, UnsupportedError


@runtime_checkable
class Stateful(Protocol):
    """An object with a state: a scheduler, a gradient scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """The state, of tensors, numbers, strings, lists and dicts."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state that ``state_dict`` returned."""


StatefulObject = Stateful | torch.Generator
"""A value of ``shared`` or ``per_rank``."""


def require_stateful(objects: Mapping[str, Any], where: str) -> None:
    """Require that each object has a state.

    Raises:
        FSDPTypeError: naming the entry without one.
    """
    for name, value in objects.items():
        if not isinstance(value, (Stateful, torch.Generator)):
            raise FSDPTypeError(
                expected="state_dict() and load_state_dict(), or a torch.Generator",
                got=type(value).__name__,
                where=f"{where}['{name}']",
                fix="Wrap the value in an object that has them.",
            )


def collect_states(objects: Mapping[str, StatefulObject]) -> dict[str, Any]:
    """The state of each object."""
    return {
        name: value.get_state() if isinstance(value, torch.Generator) else value.state_dict()
        for name, value in objects.items()
    }


def restore_states(objects: Mapping[str, StatefulObject], states: Mapping[str, Any]) -> None:
    """Restore each object's state, by name."""
    for name, value in objects.items():
        if isinstance(value, torch.Generator):
            value.set_state(states[name])
        else:
            value.load_state_dict(states[name])


def serialize(kinds: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Content of a file with states, by kind and name.

    Raises:
        UnsupportedError: a state has an object that could not be loaded.
    """
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
    """Require that ``torch.load(weights_only=True)`` accepts a file's content.

    Raises:
        UnsupportedError: it has an object of another kind.
    """
    try:
        deserialize(content)
    except Exception as error:
        raise UnsupportedError(
            expected="a state of tensors, numbers, strings, lists and dicts",
            got="an object that torch.load(weights_only=True) does not read",
            where=where,
            fix="Leave the object out of the state (of get_extra_state(), for example), or "
            "represent it by numbers and strings.",
        ) from error


def deserialize(content: bytes) -> Any:
    """States that ``serialize`` was given."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


# -- random numbers --------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """States of this process's random number generators: Python's, NumPy's and torch's."""
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
    """Restore a ``random_state``; CUDA's only where there is a device."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
