"""Modules that are marked for wrapping where they are built: ``wrap`` and ``enable_wrap``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_dynamo.errors import UnsupportedError


@dataclass(frozen=True)
class _Wrapping:
    """Arguments of the open ``enable_wrap``."""

    wrapper_cls: Callable[..., nn.Module]
    arguments: dict[str, Any]


_open: ContextVar[_Wrapping | None] = ContextVar("_open", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Let ``wrap`` wrap modules while open; elsewhere it returns them as they are.

    Args:
        wrapper_cls: for example ``FullyShardedDataParallel``.
        wrapper_kwargs: its arguments, for all modules.

    Raises:
        UnsupportedError: opened within another one.
    """
    if _open.get() is not None:
        raise UnsupportedError(
            expected="one enable_wrap() at a time",
            got="a second one inside the first",
            where="enable_wrap()",
            fix="Give wrap() the arguments that differ.",
        )
    token = _open.set(_Wrapping(wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _open.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module if an ``enable_wrap`` is open.

    Args:
        module: what to wrap.
        wrap_overrides: arguments in place of those of ``enable_wrap``.

    Returns:
        The wrapper; without an open ``enable_wrap``, ``module`` itself.
    """
    wrapping = _open.get()
    if wrapping is None:
        return module
    return wrapping.wrapper_cls(module, **{**wrapping.arguments, **wrap_overrides})


__all__ = ["enable_wrap", "wrap"]
