"""Helpers of the command lines: tables as text, and functions by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_dynamo.errors import FSDPValueError


def format_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Align rows of cells, the header first; columns not in ``left`` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_bytes(num_bytes: float) -> str:
    """Format a size with its unit, such as ``"3.2 MB"``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def load_function(name: str, expected: str, command: str) -> Any:
    """Import ``"package.module:function"``; the current folder is searched first.

    Args:
        name: the value of ``--module``.
        expected: kind of function, for the error.
        command: module of the command line, for the error.

    Raises:
        FSDPValueError: there is no such function.
    """
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise FSDPValueError(
            f"fsdp_dynamo.{command}: expected --module PKG:FN, {expected}, got '{name}' ({error}). "
            "The module is looked for in the current folder too."
        ) from error
