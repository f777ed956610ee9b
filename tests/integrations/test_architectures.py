"""Models of other people beside DDP: losses, gradients and buffers, in all three modes.

The campaign ``benchmarks/models.py`` measures these and more, in more settings; its record says how
each cell is expected to end.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from pool import RankPool

from benchmarks.measure.models.cell import Cell, Outcome, Result
from benchmarks.measure.models.measuring import SEVERITY, Answer, explained, measure, merged
from benchmarks.measure.models.records import Record
from benchmarks.workloads.architectures import catalogue

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "models.json"

EQUAL, CLOSE, PLAIN_TOO = Outcome.EQUAL, Outcome.CLOSE, Outcome.PLAIN
QUICK: dict[str, dict[str, Outcome]] = {
    "llama": {"graph": EQUAL},
    "gpt2": {"eager": EQUAL},
    "tied_weights": {"graph": EQUAL},
    "spectral_norm": {"eager": EQUAL, "graph": EQUAL},
    "weight_norm_old": {"eager": EQUAL, "hooks": EQUAL},
    "codebook": {"hooks": EQUAL, "graph": EQUAL},
    "scatter_network": {"graph": EQUAL},
    "output_nested": {"hooks": EQUAL, "graph": EQUAL},
    "cache": {"eager": EQUAL, "hooks": CLOSE, "graph": EQUAL},
    "lstm": {"eager": EQUAL, "graph": PLAIN_TOO},  # Dynamo supports no LSTM
    "replaced_buffer": {"eager": EQUAL, "graph": EQUAL},
}
"""Outcomes with default settings."""

OTHERS = [one for one in catalogue.all_architectures() if one.name not in QUICK]


def measured(rank: int, world_size: int, cell: Cell) -> Answer:
    """A cell on one rank."""
    return measure(cell, rank)


def _result(ranks: RankPool, cell: Cell) -> Result:
    def run(cell: Cell) -> Result:
        return merged(ranks.run(measured, 2, cell))

    return explained(cell, run(cell), run)


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in QUICK for mode in QUICK[name]])
def test_equals_ddp(ranks: RankPool, name: str, mode: str) -> None:
    result = _result(ranks, Cell(name, "defaults", mode))
    assert result.outcome is QUICK[name][mode], result


@cache
def _record() -> Record:
    return Record(RECORD)


def _mode(index: int) -> str:
    """Every other architecture eagerly, a fourth in each compiled mode: CI has no hour for all."""
    return ("hooks", "eager", "graph", "eager")[index % 4]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [(one.name, _mode(i)) for i, one in enumerate(OTHERS)])
def test_ends_as_recorded(ranks: RankPool, name: str, mode: str) -> None:
    architecture = catalogue.of_name(name)
    if missing := architecture.missing():
        pytest.skip(f"needs {', '.join(missing)}")
    cell = Cell(name, "defaults", mode)
    recorded = _record().result(cell)
    if recorded is None:
        pytest.skip("not in the record")
    result = _result(ranks, cell)
    assert SEVERITY.index(result.outcome) <= SEVERITY.index(recorded.outcome), result


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hooks", "graph"])
def test_under_inductor(ranks: RankPool, mode: str) -> None:
    result = _result(ranks, Cell("llama", "inductor", mode))
    assert result.outcome in (Outcome.EQUAL, Outcome.CLOSE), result
