"""Errors of fsdp_dynamo.

A message names the place (unit or parameter by FQN, argument, rank), what was expected, what was
found and how to fix it: ``where: expected ..., got .... Fix.``
"""

from __future__ import annotations

from typing import Literal

Mistake = Literal[
    "no-process-group",
    "wrapped-twice",
    "a-policy-that-matches-nothing",
    "no-values-on-the-meta-device",
    "tied-to-a-unit-wrapped-before",
    "a-parameter-changed-after-wrapping",
    "a-forward-inside-summon_full_params",
    "another-backend-with-fullgraph",
    "compiled-without-original-parameters",
    "another-graph-on-one-rank",
    "other-units-on-one-rank",
]
"""Common mistakes, by the anchors of their headings in docs/troubleshooting.md."""

TROUBLESHOOTING = "docs/troubleshooting.md"


class FSDPError(RuntimeError):
    """Base class of all errors that fsdp_dynamo raises deliberately.

    Args:
        text: the message.
        see: section of the troubleshooting page to refer to.
    """

    def __init__(self, text: str, *, see: Mistake | None = None) -> None:
        super().__init__(text if see is None else with_section(text, see))


class FSDPTypeError(FSDPError, TypeError):
    """Argument of the wrong type."""


class FSDPValueError(FSDPError, ValueError):
    """Argument or tensor with a wrong value."""


class FSDPStateError(FSDPError, AssertionError, ValueError):
    """Call that is not allowed in the current training state.

    FSDP1 raises one of the base classes, depending on the call.
    """


class DivergenceError(FSDPError):
    """Ranks are about to run different collectives."""


class RankFailedError(DivergenceError):
    """Another rank has failed, was killed, or does not arrive."""


class CheckpointError(FSDPError):
    """Checkpoint that cannot be written or loaded."""


class UnsupportedError(FSDPError, NotImplementedError):
    """Argument, model or call that this version does not support."""


def with_section(text: str, see: Mistake) -> str:
    """Append a reference to a section of the troubleshooting page."""
    return f"{text} See {TROUBLESHOOTING}#{see} (python -m fsdp_dynamo troubleshoot {see})."


def how_to_install(extra: str) -> str:
    """Command that installs an extra; no public index has the package."""
    return f"pip install -e '.[{extra}]' in a clone of fsdp_dynamo"


def first_line(value: object) -> str:
    """First line of another library's message."""
    return str(value).partition("\n")[0]


def unit_name(fqn: str) -> str:
    """Name of a unit in messages (the root's FQN is the empty string)."""
    return f"unit '{fqn}'" if fqn else "the root unit"
