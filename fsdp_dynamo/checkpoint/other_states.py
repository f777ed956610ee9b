"""States of everything but tensors of the model: schedulers, scalers, loaders, random numbers.

They are kept in two small files: one for all ranks, one for each. Only what ``torch.load`` reads
with ``weights_only=True`` is let in, so that loading never runs code out of the file.
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
    """Whatever has a state: a scheduler, a gradient scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """The state, of tensors, numbers, texts, lists and dicts."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take what ``state_dict`` gave."""


Kept = Stateful | torch.Generator
"""What ``shared`` and ``per_rank`` may hold."""


def require_stateful(kept: Mapping[str, Any], where: str) -> None:
    """Raise for what has no state.

    Raises:
        FSDPTypeError: naming the entry.
    """
    for name, one in kept.items():
        if not isinstance(one, (Stateful, torch.Generator)):
            raise FSDPTypeError(
                expected="state_dict() and load_state_dict(), or a torch.Generator",
                got=type(one).__name__,
                where=f"{where}['{name}']",
                fix="Wrap the value in an object that has them.",
            )


def states_of(kept: Mapping[str, Kept]) -> dict[str, Any]:
    """The state of each one."""
    return {
        name: one.get_state() if isinstance(one, torch.Generator) else one.state_dict()
        for name, one in kept.items()
    }


def give_back(kept: Mapping[str, Kept], states: Mapping[str, Any]) -> None:
    """Put states back, each into the one of its name."""
    for name, one in kept.items():
        if isinstance(one, torch.Generator):
            one.set_state(states[name])
        else:
            one.load_state_dict(states[name])


def packed(kinds: Mapping[str, Mapping[str, Any]]) -> bytes:
    """States, by kind and name, as the bytes of a file; a copy.

    Raises:
        UnsupportedError: a state has an object that would not be read again.
    """
    content = _saved({kind: dict(states) for kind, states in kinds.items()})
    try:
        require_readable(content, "states")
    except UnsupportedError:
        for kind, states in kinds.items():
            for name, state in states.items():
                require_readable(_saved(state), f"{kind}['{name}']")
        raise
    return content


def _saved(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def require_readable(content: bytes, where: str) -> None:
    """Raise for bytes that loading would refuse.

    Raises:
        UnsupportedError: there is an object in them that ``weights_only=True`` does not read.
    """
    try:
        unpacked(content)
    except Exception as error:
        raise UnsupportedError(
            expected="a state of tensors, numbers, texts, lists and dicts",
            got="an object that torch.load(weights_only=True) does not read",
            where=where,
            fix="Leave the object out of its state (of get_extra_state(), say), or say it with "
            "numbers and texts.",
        ) from error


def unpacked(content: bytes) -> Any:
    """What ``packed`` was given."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


# -- random numbers --------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """States of the random number generators of this process: Python's, NumPy's, torch's."""
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
    """Put back what ``random_state`` gave; CUDA's where there is a device."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
