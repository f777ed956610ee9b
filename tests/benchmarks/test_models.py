"""The campaign of models: it finds faults, and tells what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import on_ranks

from benchmarks.measure.models.cell import Cell, Outcome, Result
from benchmarks.measure.models.comparison import result_of
from benchmarks.measure.models.measuring import Answer, merged, with_plain
from benchmarks.measure.models.training import Trace, reference, sharded
from benchmarks.workloads.architectures import catalogue

CELL = Cell("scatter_network", "defaults", "eager")
WEIGHT = "layers.0.message.weight"


@on_ranks(2)
def test_a_planted_fault_is_found(rank: int) -> None:
    """Outcome of a real training, as it is and with one fault each."""
    architecture = catalogue.of_name(CELL.architecture)
    expected = reference(architecture, CELL, rank)

    def outcome_of(plant: Callable[[Trace, dict[str, Any]], object]) -> Result:
        trace = sharded(architecture, CELL, rank)
        plant(trace, trace.gradients[2])
        return result_of(trace, expected, "defaults")

    faults: dict[str, Callable[[Trace, dict[str, Any]], object]] = {
        "scaled": lambda trace, grads: grads[WEIGHT].mul_(1 + 1e-3),
        "none": lambda trace, grads: grads.update({WEIGHT: None}),
        "missing": lambda trace, grads: grads.pop(WEIGHT),
        "not a number": lambda trace, grads: grads[WEIGHT].view(-1)[:1].fill_(float("nan")),
    }
    for name, plant in faults.items():
        found = outcome_of(plant)
        assert found.outcome is Outcome.DIFFERS, name
        assert found.reason.startswith(f"step 3: gradient of {WEIGHT} "), name
        assert name != "scaled" or found.largest == pytest.approx(1e-3, rel=0.01)
    assert outcome_of(lambda trace, grads: None) == Result(Outcome.EQUAL)
    rounded = outcome_of(lambda trace, grads: grads[WEIGHT].mul_(1 + 1e-6))
    assert rounded.outcome is Outcome.CLOSE
    moved = outcome_of(lambda trace, grads: trace.buffers["norm.running_mean"].add_(1e-2))
    assert (moved.outcome, moved.worst) == (Outcome.DIFFERS, "buffer norm.running_mean")


def _trace(gradient: torch.Tensor | None) -> Trace:
    return Trace([1.0], {0: {"large": torch.full((4,), 100.0), "small": gradient}}, {})


def test_outcomes() -> None:
    """Zeros in place of none are told apart; rounding of what is zero in exact arithmetic is close.

    A plain model explains as much as it differs, and the first error is the reason.
    """
    zeros, values, none = _trace(torch.zeros(3)), _trace(torch.ones(3)), _trace(None)
    assert result_of(zeros, none, "defaults").outcome is Outcome.ZEROS
    assert result_of(values, none, "defaults").outcome is Outcome.DIFFERS
    assert result_of(none, zeros, "defaults").outcome is Outcome.DIFFERS
    rounded, reference = _trace(torch.full((3,), 1e-7)), _trace(torch.full((3,), -1e-7))
    assert result_of(rounded, reference, "defaults").outcome is Outcome.CLOSE

    ours = Result(Outcome.DIFFERS, "a", 0.2)
    assert with_plain(ours, Result(Outcome.DIFFERS, "b", 0.1)).outcome is Outcome.PLAIN
    assert with_plain(ours, Result(Outcome.DIFFERS, "b", 0.001)) == ours
    assert with_plain(ours, Result(Outcome.CLOSE, "", 0.0)) == ours
    error = Result(Outcome.ERROR, "Unsupported: x")
    assert with_plain(error, Result(Outcome.ERROR, "Unsupported: y")).plain == "Unsupported: y"
    assert with_plain(error, Result(Outcome.DIFFERS, "b", 0.1)) == error

    later = Answer(Result(Outcome.ERROR, "connection closed"), 2.0)
    first = Answer(Result(Outcome.ERROR, "the cause"), 1.0)
    assert merged([later, first]).reason == "the cause"
    assert merged([Answer(Result(Outcome.EQUAL), 3.0), later]).outcome is Outcome.ERROR
