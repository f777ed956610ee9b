"""What Dynamo made of a frame's bytecode, as Python again, by depyf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, ModuleType

import torch

from fsdp_dynamo.artifacts import DECOMPILED, emit
from fsdp_dynamo.errors import FSDPError, explain


def require_depyf() -> ModuleType:
    """The decompiler.

    Raises:
        FSDPError: it is not installed.
    """
    try:
        import depyf
    except ImportError as error:
        raise FSDPError(
            explain(
                expected="depyf to be installed",
                got=str(error),
                where="inspect_graphs()",
                fix="pip install depyf, or pip install 'fsdp-dynamo[inspection]'.",
            )
        ) from error
    return depyf  # type: ignore[no-any-return]


@contextmanager
def emit_decompiled(depyf: ModuleType) -> Iterator[None]:
    """While open, every frame that Dynamo compiles is emitted as decompiled code.

    What runs is Dynamo's bytecode all the same: a fault of the decompiler changes no result.
    """

    def hook(code: CodeType, new_code: CodeType) -> None:
        emit(DECOMPILED, lambda: _decompile(depyf, code, new_code))

    # Not documented, and there is no other way to see what Dynamo made of a frame.
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
    except Exception as error:  # depyf raises many kinds; its failure must not be the user's
        return f"{where}# depyf could not decompile it: {type(error).__name__}: {error}\n"
