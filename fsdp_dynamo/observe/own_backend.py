"""The backend of an explanation: the model's own, with compiled code apart from the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import CompileContext  # which graph is being compiled

from fsdp_dynamo.dynamo.private_api import (
    codes_apart,
    declare_mode,
    forgotten_code,
    key_of,
    mode_of,
)
from fsdp_dynamo.module_tree import unit_modules


class OwnBackend:
    """Compiles as another backend does; Dynamo takes it for a different one.

    So an explanation finds out about all graphs of the model, whatever was compiled before.

    Attributes:
        ran: numbers of the graphs that have run; to be cleared.
    """

    # No __getattr__: Dynamo asks for attributes at every frame, and that would be another one.

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self.ran: set[object] = set()
        self.dynamic = getattr(backend, "dynamic", None)
        name = getattr(backend, "__name__", backend)
        self.compiler_name = str(getattr(backend, "compiler_name", name))
        declare_mode(self, mode_of(backend))

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        compiled = self._backend(gm, example_inputs, **kwargs)
        graph = CompileContext.current_compile_id()

        def run(*args: Any) -> Any:
            self.ran.add(graph)
            return compiled(*args)

        return run

    @contextmanager
    def apart_from(self, module: torch.nn.Module) -> Iterator[None]:
        """Let a model be compiled into code that goes when the context is left.

        A function below in which a graph ends is compiled for itself, where the code of all
        backends is: Dynamo drops it, the model's own, too, and counts no recompile of the model.
        """
        units = [unit for _, unit in unit_modules(module)]
        roots = [unit for unit in units if unit._fsdp_is_outermost()]
        codes = [root._fsdp_codes for root in roots]
        for root in roots:
            root._fsdp_give_own_code()
        try:
            with codes_apart(self), forgotten_code():
                yield
        finally:
            for root, before in zip(roots, codes, strict=True):
                root._fsdp_codes = before
            for unit in units:
                unit._fsdp_compiled_bodies.pop(key_of(self), None)
