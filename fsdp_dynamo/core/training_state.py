"""Training states of units and roots, and the one table of legal transitions."""

from __future__ import annotations

from enum import Enum, auto
from typing import Generic, TypeVar

from fsdp_dynamo.errors import FSDPStateError, unit_name


class UnitState(Enum):
    """What a unit is doing.

    - ``IDLE``: sharded (unless its strategy keeps it unsharded until the backward).
    - ``FORWARD``: unsharded, inside its forward.
    - ``BACKWARD_PRE``: unsharded, its backward runs.
    - ``BACKWARD_POST``: resharded, its gradient is being reduced.
    - ``SUMMON_FULL_PARAMS``: unsharded on the user's request.
    """

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()
    SUMMON_FULL_PARAMS = auto()

    __hash__ = object.__hash__  # Enum's own is Python code, and every hook looks a state up


class RootState(Enum):
    """What a root is doing.

    - ``IDLE``: nothing, or it waits for the backward of a forward that has ended.
    - ``FORWARD``: the outermost forward runs.
    - ``BACKWARD``: the engine runs; recomputed forwards are part of it.
    """

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()

    __hash__ = object.__hash__


_U = UnitState
_R = RootState

# (from, to); `_HINTS` says what the user most likely did where a transition is illegal.
_LEGAL: frozenset[tuple[Enum, Enum]] = frozenset(
    {
        (_U.IDLE, _U.FORWARD),
        (_U.FORWARD, _U.IDLE),
        (_U.IDLE, _U.BACKWARD_PRE),
        (_U.BACKWARD_PRE, _U.BACKWARD_PRE),  # the backward of a second forward call began
        (_U.BACKWARD_PRE, _U.BACKWARD_POST),
        (_U.IDLE, _U.BACKWARD_POST),  # none of the outputs carried a hook
        (_U.BACKWARD_POST, _U.BACKWARD_PRE),  # a second forward call of the same step
        (_U.BACKWARD_POST, _U.FORWARD),  # one is recomputed: activation checkpointing around it
        (_U.BACKWARD_POST, _U.BACKWARD_POST),
        (_U.BACKWARD_POST, _U.IDLE),
        (_U.BACKWARD_PRE, _U.IDLE),  # no parameter of the unit took part in the backward
        (_U.IDLE, _U.IDLE),
        (_U.IDLE, _U.SUMMON_FULL_PARAMS),
        (_U.SUMMON_FULL_PARAMS, _U.IDLE),
        (_R.IDLE, _R.FORWARD),
        (_R.FORWARD, _R.IDLE),
        (_R.IDLE, _R.BACKWARD),
        (_R.BACKWARD, _R.IDLE),
    }
)

_HINTS: dict[Enum, str] = {
    _U.FORWARD: "Do not call a unit from inside its own forward or its backward.",
    _U.BACKWARD_PRE: "Do not call backward() inside the forward of a wrapped module.",
    _U.BACKWARD_POST: "Do not call backward() inside the forward of a wrapped module.",
    _U.SUMMON_FULL_PARAMS: "Ask for full parameters or a state dict between two steps only.",
    _R.FORWARD: "Do not call a unit from inside its own forward or its backward.",
    _R.BACKWARD: "Do not call backward() inside the forward of a wrapped module.",
    _U.IDLE: "Leave the context manager that summoned the parameters first.",
    _R.IDLE: "Let the forward or backward that runs end first.",
}

StateT = TypeVar("StateT", UnitState, RootState)


class StateMachine(Generic[StateT]):
    """One state; ``advance`` checks the table, ``reset`` does not."""

    def __init__(self, initial: StateT, fqn: str) -> None:
        self.state: StateT = initial
        self.fqn = fqn
        self._initial: StateT = initial

    def advance(self, wanted: StateT) -> None:
        """Go to ``wanted``; raises ``FSDPStateError`` where the table has no such transition."""
        if (self.state, wanted) not in _LEGAL:
            raise FSDPStateError(
                expected=f"a state from which {wanted.name} can be reached",
                got=f"{self.state.name} -> {wanted.name}",
                where=unit_name(self.fqn),
                fix=_HINTS[wanted],
            )
        self.state = wanted

    def reset(self) -> None:
        """Back to the initial state, after an error or at the end of a pass."""
        self.state = self._initial
