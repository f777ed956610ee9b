"""Exceptions as one line each, without paths of the machine."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OURS = ("fsdp_dynamo", "graph_passes")
LENGTH = 300

_PATH = re.compile(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.-]+)")
_INSTALLED = re.compile(r"(?<![\w.])(?:/[\w.+-]+)+/site-packages/")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_USER_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def message(error: BaseException) -> str:
    """Type and first line; of Dynamo also its explanation and the line of the model."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):  # Dynamo's, of a backend that failed
        return f"the backend failed: {message(inner)}"[:LENGTH]
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    if "Explanation:" in str(error):
        text += "".join(f" {line}" for line in lines[1:] if line.startswith("Explanation:"))
    user = _USER_LINE.findall(str(error).partition("from user code:")[2])
    if user:
        path, number = user[-1]
        text += f" [{_short(path)}:{number}]"
    return without_paths(text)[:LENGTH]


def place(error: BaseException) -> str:
    """The innermost line of this project that an error has passed, ``file:line``."""
    found = ""
    for one in _chain(error):
        for frame in traceback.extract_tb(one.__traceback__):
            path = Path(frame.filename)
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS:
                found = f"{path.relative_to(ROOT).as_posix()}:{frame.lineno}"
    return found


def without_paths(text: str) -> str:
    """A text without absolute paths and addresses."""
    text = text.replace(f"{ROOT}/", "")
    return _ADDRESS.sub("0x...", _PATH.sub("", _INSTALLED.sub("", text)))


def _short(path: str) -> str:
    return path.replace(f"{ROOT}/", "").rpartition("site-packages/")[2].rpartition("lib/")[2]


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__
