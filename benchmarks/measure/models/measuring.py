"""Measure one cell on one rank, and make one result of all ranks'."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.measure.models.cell import Cell, Outcome, Result
from benchmarks.measure.models.comparison import result_of
from benchmarks.measure.models.failures import message, place
from benchmarks.measure.models.training import reference, sharded
from benchmarks.workloads.architectures import catalogue

SEVERITY = tuple(Outcome)
AS_MUCH = 3.0
"""Where dropout masks differ, the size of a difference is random: this factor is "as much"."""


@dataclass(frozen=True)
class Answer:
    """Result of one rank.

    Attributes:
        result: the outcome there.
        ended: when, on the clock that all processes of a machine share.
    """

    result: Result
    ended: float


def measure(cell: Cell, rank: int) -> Answer:
    """Train in the cell's mode and compare with DDP; never raises what the model raises."""
    architecture = catalogue.of_name(cell.architecture)
    torch.compiler.reset()
    is_plain = cell.mode.startswith("plain")
    try:
        expected = reference(architecture, Cell(cell.architecture, cell.setting, "eager"), rank)
    except Exception as error:
        return _answer(Result(Outcome.NO_REFERENCE, message(error)))
    try:
        with torch._inductor.config.patch(fallback_random=True):
            got = (reference if is_plain else sharded)(architecture, cell, rank)
    except Exception as error:
        return _answer(Result(Outcome.ERROR, message(error), where=place(error)))
    return _answer(result_of(got, expected, cell.setting))


def explained(cell: Cell, ours: Result, measured: Callable[[Cell], Result]) -> Result:
    """Our result, or ``PLAIN`` where the plain model, compiled alike, does no better.

    Args:
        cell: the cell of the result.
        ours: its result.
        measured: gives the result of a cell of the plain model.
    """
    if ours.outcome in (Outcome.DIFFERS, Outcome.ERROR, Outcome.TIMEOUT):
        for plain in cell.plain():
            found = with_plain(ours, measured(plain))
            if found.outcome is Outcome.PLAIN:
                return found
    return ours


def merged(answers: Sequence[Answer]) -> Result:
    """The worst result; of several errors the first, since others follow from it."""
    worst = max(answers, key=lambda one: (SEVERITY.index(one.result.outcome), -one.ended))
    close = [one.result for one in answers if one.result.outcome is worst.result.outcome]
    if worst.result.outcome in (Outcome.ERROR, Outcome.NO_REFERENCE):
        return worst.result
    return max(close, key=lambda one: one.largest or 0.0)


def with_plain(ours: Result, plain: Result) -> Result:
    """Tell apart what the plain model fails at as well, or differs by as much."""
    fails = plain.outcome in (Outcome.ERROR, Outcome.TIMEOUT)
    both = ours.outcome is Outcome.DIFFERS and plain.outcome is Outcome.DIFFERS
    differs = both and _size(ours) <= AS_MUCH * _size(plain)
    if ours.outcome is Outcome.ZEROS or not (fails or differs):
        return ours
    reason = plain.reason or plain.outcome.value
    return Result(Outcome.PLAIN, ours.reason, ours.largest, ours.worst, ours.where, reason)


def _size(result: Result) -> float:
    """Largest difference; one without a number, such as ``None`` beside values, is infinite."""
    return float("inf") if result.largest is None else result.largest


def _answer(result: Result) -> Answer:
    return Answer(result, time.monotonic())
