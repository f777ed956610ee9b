"""Types of command-line arguments that several scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
"""What ``--dtype`` may name, and the ``param_dtype`` of a setting: ``None`` is the model's own."""


def at_least(least: int) -> Callable[[str], int]:
    """Type of an argument that counts something."""

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
    """Type of an argument such as ``4,8,16``: whole numbers above 0."""
    return [at_least(1)(part) for part in text.split(",")]
