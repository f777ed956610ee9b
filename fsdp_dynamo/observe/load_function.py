"""Function that a command line names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from fsdp_dynamo.errors import FSDPValueError


def load_function(name: str, expected: str, command: str) -> Any:
    """Import the function that ``"package.module:function"`` names.

    Args:
        name: the name; modules of the current folder are found, too.
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
