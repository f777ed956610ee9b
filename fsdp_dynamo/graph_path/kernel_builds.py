"""C++ kernels of all stretches of a graph are built at the end, many in one file."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import _worker_compile_cpp
from torch._inductor.cpp_builder import CppBuilder

from fsdp_dynamo.graph_path.joined_kernels import build_joined, command_of

_log = logging.getLogger(__name__)

_KERNELS_A_FILE = 24
"""Beyond these, a file for each of Inductor's compile threads: they are built side by side."""

_Kernel = tuple[CppBuilder, "Future[None]"]


@contextmanager
def built_together(example_inputs: Sequence[Any]) -> Iterator[None]:
    """While open, Inductor puts off the builds of kernels and goes on; at the end they are done.

    By itself it starts a compiler for each kernel, and waits for those of one graph before it turns
    to the next. Only where all inputs are on CPUs: kernels of other devices are measured, or kept
    with the graph's code, before the next graph.

    Args:
        example_inputs: of the graph that is compiled.
    """
    tensors = (value for value in example_inputs if isinstance(value, torch.Tensor))
    if any(tensor.device.type != "cpu" for tensor in tensors):
        yield
        return
    wait, submit, thread = AsyncCompile.wait, AsyncCompile.submit, threading.get_ident()
    waiting: list[tuple[AsyncCompile, dict[str, Any]]] = []
    kernels: list[_Kernel] = []

    def wait_later(builds: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            waiting.append((builds, scope))
        else:
            wait(builds, scope)

    def submit_later(task: Callable[..., Any]) -> Any:
        builder = _builder_of(task)
        if builder is None or threading.get_ident() != thread:
            return submit(task)
        built: Future[None] = Future()
        kernels.append((builder, built))
        return built

    replaced = {name: vars(AsyncCompile)[name] for name in ("wait", "submit")}
    AsyncCompile.wait = wait_later  # type: ignore[method-assign, assignment]
    AsyncCompile.submit = staticmethod(submit_later)  # type: ignore[method-assign, assignment]
    try:
        yield
    except BaseException:
        _release(kernels)
        raise
    finally:
        for name, method in replaced.items():
            setattr(AsyncCompile, name, method)
    for batch in _batches(kernels):
        submit(functools.partial(_build, batch))
    for builds, scope in waiting:
        wait(builds, scope)


def _builder_of(task: Callable[..., Any]) -> CppBuilder | None:
    """What builds a kernel alone, if that is the task."""
    if isinstance(task, functools.partial) and task.func is _worker_compile_cpp:
        builders: Sequence[CppBuilder] = task.args[1]
        return builders[0] if len(builders) == 1 else None
    return None


def _batches(kernels: Sequence[_Kernel]) -> Iterator[Sequence[_Kernel]]:
    """Kernels that one file can hold, in as few files as is good for them."""
    alike: dict[str, list[_Kernel]] = {}
    for kernel in kernels:
        alike.setdefault(command_of(kernel[0]), []).append(kernel)
    for some in alike.values():
        files = min(get_compile_threads(), -(-len(some) // _KERNELS_A_FILE))
        yield from (some[first::files] for first in range(files))


def _build(batch: Sequence[_Kernel]) -> None:
    """Build kernels in one file; one that lacks its library afterwards is built by itself."""
    try:
        if len(batch) > 1:
            build_joined([builder for builder, _ in batch])
    except (OSError, RuntimeError):
        _log.debug("%d kernels are built one by one", len(batch), exc_info=True)
    finally:
        _release(batch)


def _release(kernels: Sequence[_Kernel]) -> None:
    for _, built in kernels:
        built.set_result(None)


__all__ = ["built_together"]
