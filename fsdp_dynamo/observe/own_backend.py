"""Backend for explanations: the model's own backend, with separate compiled code."""

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
    """Compiles like another backend, but Dynamo caches its code separately.

    Therefore an explanation sees every graph of the model being compiled, whatever was compiled
    before.

    Attributes:
        ran: compile ids of the graphs that have run since the caller last cleared it.
    """

    # Every attribute that Dynamo reads is set here. A __getattr__ would be a Python frame of its
    # own, which Dynamo would compile.

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
        """Compile a model inside into code that is dropped on exit.

        After a graph break Dynamo compiles the functions that the model calls one by one, into a
        cache that all backends share. On exit that code is dropped, including the code that the
        model's own backend has there, so that the explanation causes no recompile.
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
