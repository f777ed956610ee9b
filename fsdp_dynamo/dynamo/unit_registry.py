"""Names that stand for wrappers in traced code.

Dynamo would make a number dynamic and would guard on an object; a string is a constant.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

_wrappers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(wrapper: Any) -> str:
    """A name for a wrapper, unique in the process."""
    name = f"unit{next(_numbers)}"
    _wrappers[name] = wrapper
    return name


def lookup(name: str) -> Any:
    """The wrapper of that name."""
    return _wrappers[name]
