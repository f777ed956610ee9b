"""Base class of passes: a name, a part of the cache key, and one signature."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any
from uuid import uuid4

from torch import fx

PassFunction = Callable[[fx.Graph], None]
"""Function, or any callable object, that a user may give in place of a ``GraphPass``."""


class GraphPass(ABC):
    """Change of an FX graph in place.

    Attributes:
        name: name in messages, stages and ``options={"disabled_passes": [...]}``; by default the
            class's name.
        is_bitwise: whether all numbers that the graph computes stay bitwise the same.
        required: why the pass cannot be left out; ``""``: it can.
    """

    name: str
    is_bitwise: bool = False
    required: str = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @abstractmethod
    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place."""

    @property
    def definition(self) -> Any:
        """Return the class or function that has source, docstring and qualified name."""
        return type(self)

    @property
    def summary(self) -> str:
        """Return the first line of the docstring; ``""`` without one."""
        named = self.definition
        text = inspect.cleandoc(named.__doc__ or "")
        is_made = text.startswith(f"{named.__name__}(")  # a dataclass gets its signature
        return "" if is_made else text.partition("\n")[0]

    def cache_key(self) -> str:
        """Return the settings of the pass as text, the same on all ranks; ``""`` without any."""
        return ""

    def identity(self) -> str:
        """Return module, qualified name and ``cache_key()``, which ranks compare."""
        key = self.cache_key()
        name = f"{self.definition.__module__}.{self.definition.__qualname__}"
        return f"{name} {key}" if key else name

    def uuid(self) -> str:
        """Return a part of the compile cache's key; it changes with source and settings."""
        try:
            source = inspect.getsource(inspect.getmodule(self.definition) or type(self.definition))
        except (OSError, TypeError):  # a notebook's: an edit cannot be seen
            source = uuid4().hex
        return hashlib.sha256(f"{self.name}\0{source}\0{self.cache_key()}".encode()).hexdigest()


class FunctionPass(GraphPass):
    """Function, or another callable, as a pass.

    Args:
        function: changes a graph in place.
        name: by default that of the function, or of the object's class.
        is_bitwise: whether all numbers that the graph computes stay bitwise the same.
    """

    def __init__(
        self, function: PassFunction, name: str | None = None, is_bitwise: bool = False
    ) -> None:
        self._function = function
        update_wrapper(self, self.definition, updated=())
        self.name = name or str(self.definition.__name__)
        self.is_bitwise = is_bitwise

    def __call__(self, graph: fx.Graph) -> None:
        self._function(graph)

    @property
    def definition(self) -> Any:
        function = getattr(self._function, "func", self._function)  # of a partial
        return function if hasattr(function, "__name__") else type(function)

    def cache_key(self) -> str:
        key = getattr(self._function, "cache_key", None)  # of a user's object with settings
        return "" if key is None else str(key())


def graph_pass(
    name: str | None = None, *, is_bitwise: bool = False
) -> Callable[[PassFunction], FunctionPass]:
    """Make a function a pass; see ``FunctionPass``."""
    return partial(FunctionPass, name=name, is_bitwise=is_bitwise)


def as_pass(given: GraphPass | PassFunction) -> GraphPass:
    """Return a pass as it is, any other callable as a ``FunctionPass``."""
    return given if isinstance(given, GraphPass) else FunctionPass(given)


__all__ = ["FunctionPass", "GraphPass", "PassFunction", "as_pass", "graph_pass"]
