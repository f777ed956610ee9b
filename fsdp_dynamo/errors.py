"""Errors of fsdp_dynamo.

Every message has four parts: what was expected, what was found, where (unit or parameter, by FQN),
and how to fix it.
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
    "another-graph-on-one-rank",
    "other-units-on-one-rank",
]
"""The most common mistakes: anchors of headings in docs/troubleshooting.md."""

TROUBLESHOOTING = "docs/troubleshooting.md"


class FSDPError(RuntimeError):
    """Base class of all errors that fsdp_dynamo raises deliberately.

    Takes the four parts of ``error_message``, or a complete message from another rank.
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


class FSDPStateError(FSDPError, AssertionError, ValueError):
    """A call that is not allowed in the current training state.

    FSDP1 raises one of these bases, depending on the call.
    """


class DivergenceError(FSDPError):
    """Ranks are about to run different collectives."""


class RankFailedError(DivergenceError):
    """Another rank has failed, was killed, or does not arrive."""


class CheckpointError(FSDPError):
    """A checkpoint that cannot be written or loaded."""


class UnsupportedError(FSDPError, NotImplementedError):
    """An argument, a model or a call that this version does not support."""


def error_message(
    *, expected: str, got: str, where: str, fix: str, see: Mistake | None = None
) -> str:
    """An error message of four parts.

    Args:
        expected: the expected value or state.
        got: the actual one.
        where: FQN, unit, argument or rank.
        fix: sentences that say what the user can do.
        see: section of the troubleshooting page with more.
    """
    text = f"{where}: expected {expected}, got {got}. {fix}"
    if see is None:
        return text
    return f"{text} See {TROUBLESHOOTING}#{see} (python -m fsdp_dynamo.troubleshooting {see})."


def unit_name(fqn: str) -> str:
    """A unit's name in messages (the root's FQN is the empty string)."""
    return f"unit '{fqn}'" if fqn else "the root unit"
