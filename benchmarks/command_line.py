"""Command lines of the scripts: argument types, and one line for bad input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

EXIT_CODE = 2

DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
"""Choices of ``--dtype`` and their ``param_dtype``; ``None`` is the model's own."""


def at_least(least: int) -> Callable[[str], int]:
    """Argument type: a whole number with a minimum."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least}, got '{text}'")
        return value

    return parse


def numbers(text: str) -> list[int]:
    """Argument type: whole numbers above 0, such as ``4,8,16``."""
    return [at_least(1)(part) for part in text.split(",")]


def output_file(text: str) -> Path:
    """Argument type: a file that can be written; an hour of measurement must not end in an error.

    Raises:
        argparse.ArgumentTypeError: it cannot.
    """
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a file that can be written, got '{text}': {error.strerror}"
        ) from error
    return path


def some_of(option: str, text: str, known: Collection[str]) -> list[str]:
    """The names of an option, joined by commas.

    Raises:
        BadInputError: one that is not known.
    """
    names = text.split(",")
    for name in names:
        if name not in known:
            raise BadInputError(f"{option}: expected some of {', '.join(known)}, got {name!r}")
    return names


class BadInputError(Exception):
    """An error that the caller can fix; it says what was expected, what came and what to do."""


@contextmanager
def one_line_on_bad_input() -> Iterator[None]:
    """Turn a ``BadInputError`` into one line on standard error and exit code 2."""
    try:
        yield
    except BadInputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE) from None
