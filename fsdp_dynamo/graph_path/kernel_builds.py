"""C++ kernels of several stretches are built at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.async_compile import AsyncCompile


@contextmanager
def built_together(example_inputs: Sequence[Any]) -> Iterator[None]:
    """While open, Inductor starts the builds of kernels and goes on; at the end they are done.

    Inductor waits for the kernels of one graph before it turns to the next, although their
    compilers are processes of their own. Only where all inputs are on CPUs: kernels of other
    devices are measured, or kept with the graph's code, before the next graph.

    Args:
        example_inputs: of the graph that is compiled.
    """
    tensors = (value for value in example_inputs if isinstance(value, torch.Tensor))
    if any(tensor.device.type != "cpu" for tensor in tensors):
        yield
        return
    wait, thread = AsyncCompile.wait, threading.get_ident()
    waiting: list[tuple[AsyncCompile, dict[str, Any]]] = []

    def wait_later(builds: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            waiting.append((builds, scope))
        else:
            wait(builds, scope)

    AsyncCompile.wait = wait_later  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        AsyncCompile.wait = wait  # type: ignore[method-assign]
    for builds, scope in waiting:
        wait(builds, scope)


__all__ = ["built_together"]
