"""All architectures, and those that a command line names."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from benchmarks.command_line import BadInputError
from benchmarks.workloads.architectures import (
    audio,
    convolutional,
    diffusion,
    experts,
    language,
    multimodal,
    odd_ones,
    research,
    state_space,
    torch_layers,
    vision,
)
from benchmarks.workloads.architectures.base import Architecture

FAMILIES = (
    language,
    experts,
    state_space,
    vision,
    audio,
    multimodal,
    convolutional,
    diffusion,
    torch_layers,
    odd_ones,
    research,
)


def all_architectures() -> list[Architecture]:
    """The whole catalogue."""
    return [one for family in FAMILIES for one in family.architectures()]


def named(patterns: Sequence[str]) -> list[Architecture]:
    """Architectures whose name or family matches one of the patterns.

    Raises:
        BadInputError: a pattern matches none.
    """
    known = all_architectures()
    chosen: set[str] = set()
    for pattern in patterns:
        found = {
            one.name
            for one in known
            if fnmatch.fnmatch(one.name, pattern) or fnmatch.fnmatch(one.family, pattern)
        }
        if not found:
            raise BadInputError(f"--only: expected names or families as in --list, got {pattern!r}")
        chosen |= found
    return [one for one in known if one.name in chosen]


def of_name(name: str) -> Architecture:
    """One architecture."""
    return next(one for one in all_architectures() if one.name == name)


def left_out(architectures: Sequence[Architecture]) -> dict[str, list[str]]:
    """Names of architectures that cannot be built here, by the package that is missing."""
    missing: dict[str, list[str]] = {}
    for one in architectures:
        for package in one.missing():
            missing.setdefault(package, []).append(one.name)
    return missing
