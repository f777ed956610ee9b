"""Dynamo's bytecode decompiled to Python by depyf."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, ModuleType

import torch

from fsdp_dynamo.dynamo.artifacts import DECOMPILED, emit


def find_depyf() -> ModuleType | None:
    """The decompiler, if it is installed."""
    try:
        import depyf
    except ImportError:
        return None
    return depyf  # type: ignore[no-any-return]


def warn_without_depyf(stacklevel: int) -> None:
    """Warn about the missing output, with the command that installs depyf."""
    warnings.warn(
        "inspect_graphs(): depyf is not installed, so the decompiled code "
        "(*.dynamo.decompiled.py) is left out; everything else is written. "
        "To get it: pip install 'fsdp-dynamo[inspection]'",
        stacklevel=stacklevel + 1,
    )


@contextmanager
def emit_decompiled(depyf: ModuleType | None) -> Iterator[None]:
    """Emit the decompiled code of every frame that Dynamo compiles inside.

    Dynamo's bytecode is what runs, so a fault of the decompiler changes no result.

    Args:
        depyf: the decompiler; ``None``: emit nothing.
    """
    if depyf is None:
        yield
        return

    def hook(code: CodeType, new_code: CodeType) -> None:
        emit(DECOMPILED, lambda: _decompile(depyf, code, new_code))

    # Undocumented, but the only access to the bytecode that Dynamo makes.
    handle = torch._dynamo.convert_frame.register_bytecode_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _decompile(depyf: ModuleType, code: CodeType, new_code: CodeType) -> str:
    where = f"# {code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}, "
    where += f"{code.co_filename}:{code.co_firstlineno}\n"
    try:
        return where + str(depyf.decompile(new_code))
    except Exception as error:  # depyf raises many kinds of errors; none may reach the user
        return f"{where}# depyf could not decompile it: {type(error).__name__}: {error}\n"
