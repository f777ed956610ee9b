"""Errors of fsdp_dynamo.

Every message says what was expected, what came, which unit or parameter (by FQN)
is meant, and what to do.
"""

from __future__ import annotations

from typing import Any, Literal, overload

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
    "checkpointing-around-a-unit",
    "another-graph-on-one-rank",
    "other-units-on-one-rank",
]
"""The most common mistakes: headings of docs/troubleshooting.md, as links spell them."""

TROUBLESHOOTING = "docs/troubleshooting.md"


class FSDPError(RuntimeError):
    """Base class of all errors that fsdp_dynamo raises on purpose.

    Takes the four parts of ``error_message``, or a whole message that another rank has sent.
    """

    @overload
    def __init__(self, text: str, /) -> None: ...

    @overload
    def __init__(
        self, *, expected: str, got: str, where: str, fix: str, see: Mistake | None = None
    ) -> None: ...

    def __init__(self, *text: str, **parts: Any) -> None:
        super().__init__(*(text or [error_message(**parts)]))


class FSDPTypeError(FSDPError, TypeError):
    """An argument of the wrong type."""


class FSDPValueError(FSDPError, ValueError):
    """An argument or a tensor with a wrong value."""


class FSDPStateError(FSDPError):
    """A call that is not allowed in the present training state."""


class DivergenceError(FSDPError):
    """Ranks are about to run different collectives."""


class RankFailedError(DivergenceError):
    """Another rank has failed, has been killed, or does not come."""


class CheckpointError(FSDPError):
    """A checkpoint that cannot be written, or is not what should be loaded."""


class UnsupportedError(FSDPError, NotImplementedError):
    """An argument, a model or a call that this version does not support."""


def error_message(
    *, expected: str, got: str, where: str, fix: str, see: Mistake | None = None
) -> str:
    """An error message with the four parts that every error here has.

    Args:
        expected: what should have come.
        got: what came.
        where: the FQN, unit, argument or rank that is meant.
        fix: what the user can do about it.
        see: the paragraph of the troubleshooting page that says more.
    """
    text = f"{where}: expected {expected}, got {got}. {fix}"
    if see is None:
        return text
    return f"{text} See {TROUBLESHOOTING}#{see} (python -m fsdp_dynamo.troubleshooting {see})."


def unit_name(fqn: str) -> str:
    """How a unit is called in a message (the root's FQN is the empty string)."""
    return f"unit '{fqn}'" if fqn else "the root unit"
