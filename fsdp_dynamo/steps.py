"""The step under way: an outermost forward of a model, with its backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

NO_GRAPH_TASK = -1


def current_graph_task() -> int:
    """Autograd's number of the backward that runs in this thread, or ``NO_GRAPH_TASK``."""
    task: int = torch._C._current_graph_task_id()
    return task


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return current_graph_task() != NO_GRAPH_TASK


@dataclass(frozen=True, eq=False)
class Model:
    """Identity of a sharded model, by which steps are told apart.

    Attributes:
        name: class of the outermost module.
    """

    name: str


class Step:  # without a constructor in Python, whose frame Dynamo would look at
    """One outermost forward of a model, and its backward if there is one.

    Attributes:
        model: whose.
        number: of outermost forwards in this process that had begun, this one included.
    """

    model: Model
    number: int


_num_steps = 0
_in_forward: Step | None = None
_in_backward: Step | None = None  # says nothing outside of a backward: one may have failed


def num_steps() -> int:
    """Number of outermost forwards that have begun in this process."""
    return _num_steps


def current_step() -> Step | None:
    """The step whose forward is under way, or else whose backward is."""
    return _in_forward or (_in_backward if is_in_backward() else None)


def begin_forward(model: Model) -> Step | None:
    """Begin a forward: a new step, unless a forward or backward of the model is under way.

    Returns:
        What ``end_forward`` is to be given: the step around it.
    """
    global _in_forward, _num_steps
    around = now = _in_forward
    if now is None and torch._C._current_graph_task_id() != NO_GRAPH_TASK:
        now = _in_backward  # a recomputation
    if now is None or now.model is not model:
        _num_steps += 1
        now = Step()
        now.model, now.number = model, _num_steps
    _in_forward = now
    return around


def end_forward(around: Step | None) -> None:
    """End what ``begin_forward`` began."""
    global _in_forward
    _in_forward = around


def enter_backward(step: Step | None) -> None:
    """Attribute events of the running backward to a step, from now on."""
    global _in_backward
    _in_backward = step


@contextmanager
def continued(step: Step | None) -> Iterator[None]:
    """Attribute events in the context to a step whose backward has ended."""
    global _in_forward
    around, _in_forward = _in_forward, step
    try:
        yield
    finally:
        _in_forward = around
