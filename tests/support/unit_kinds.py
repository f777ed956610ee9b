"""What a module's result may depend on besides its input, and what it may change, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

GLOBALS = {"scale": 1.0}
"""Read by modules whose number is ``global``; set before each forward."""


class Config:
    """An object that the modules of a model share."""

    scale = 1.0


def init(module: Any, config: Config) -> None:
    """Give a module all that the kinds read or change; modules of a model share ``config``."""
    module.scale, module.choice, module.flag, module.config = 1.0, 0, False, config
    module.stats, module.seen = {"n": 0}, []


_Setter = Callable[[Any, int], object]
"""Set a module's number, given where it stands and the step."""


def _set_scale(module: Any, i: int) -> None:
    module.scale = 0.5 + i / 16


def _set_choice(module: Any, i: int) -> None:
    module.choice = i % 3


def _set_flag(module: Any, i: int) -> None:
    module.flag = i % 2 == 1


def _set_config(module: Any, i: int) -> None:
    module.config.scale = 0.5 + i / 16


def _set_global(module: Any, i: int) -> None:
    GLOBALS["scale"] = 0.5 + i / 16


def _branch(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y.sin() if module.choice == 1 else y.tanh() if module.choice == 2 else y


NUMBERS: dict[str, tuple[_Setter, Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "scale": (_set_scale, lambda module, y: y * module.scale),
    "choice": (_set_choice, _branch),
    "config": (_set_config, lambda module, y: y * module.config.scale),
    "global": (_set_global, lambda module, y: y * GLOBALS["scale"]),
}
"""How a number is set, and what a module computes with it."""

RESULTS: dict[str, tuple[_Setter, Callable[[Any, torch.Tensor], Any]]] = {
    "tuple": (_set_flag, lambda module, y: (y, y.mean()) if module.flag else y),
    "none": (_set_flag, lambda module, y: (y, y.mean() if module.flag else None)),
    "length": (_set_flag, lambda module, y: (y, *[y.mean()] * (2 if module.flag else 1))),
    "order": (_set_flag, lambda module, y: (y.mean(), y) if module.flag else (y, y.mean())),
    "dtype": (_set_flag, lambda module, y: y.double() if module.flag else y),
    "number": (_set_scale, lambda module, y: (y, module.scale)),
}
"""How what a result's structure depends on is set, and the result."""


def of_result(result: Any, dtype: torch.dtype) -> torch.Tensor:
    """One tensor of a module's result, on which every item of the result has an effect."""
    items = result if isinstance(result, tuple) else (result,)
    is_main = [isinstance(one, torch.Tensor) and one.dim() > 1 for one in items]
    y = items[is_main.index(True)].to(dtype)
    for number, one in enumerate(items):
        if one is not None and not is_main[number]:
            y = y + one / (2 + number)
    return y


def _append(module: Any, given: Any, y: torch.Tensor) -> torch.Tensor:
    given[0].append(y.mean())
    return y


def _append_whole(module: Any, given: Any, y: torch.Tensor) -> torch.Tensor:
    given[0].append(y)
    return y.sin()


def _enter(module: Any, given: Any, y: torch.Tensor) -> torch.Tensor:
    given[0][len(given[0])] = y.mean()
    return y


def _count(module: Any, given: Any, y: torch.Tensor) -> torch.Tensor:
    module.stats["n"] += 1
    return y / (1 + module.stats["n"] % 3)


def _keep(module: Any, given: Any, y: torch.Tensor) -> torch.Tensor:
    module.seen.append(y.mean())
    return y * len(module.seen)


FILLS: dict[str, tuple[type | None, Callable[[Any, Any, torch.Tensor], torch.Tensor]]] = {
    "losses in a list": (list, _append),
    "hidden states in a list": (list, _append_whole),
    "losses in a dict": (dict, _enter),
    "a counter in its dict": (None, _count),
    "losses in its list": (None, _keep),
}
"""The container that a module is given, and how the module fills it, or one of its own."""


def of_filled(filled: list[Any], x: torch.Tensor) -> torch.Tensor:
    """A tensor on which what modules filled has an effect."""
    for container in filled:
        for one in container.values() if isinstance(container, dict) else container:
            x = x + one.mean().to(x.dtype) / 4
    return x


SETTERS = ("own", "common", "caller")
"""Who sets: the user before a forward, for each module another value or one for all; the caller."""
LOCAL = ("_buffers", "stats")
"""Attributes in which modules hold what differs between ranks."""
