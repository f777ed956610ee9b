"""The campaign of models: it finds faults, survives crashes and hangs, and resumes."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import pytest
import torch
from pool import RankPool

from benchmarks import models
from benchmarks.command_line import BadInputError
from benchmarks.measure.models import failures, tables
from benchmarks.measure.models.cell import Cell, Outcome, Result, cells_of
from benchmarks.measure.models.comparison import result_of
from benchmarks.measure.models.measuring import Answer, merged, with_plain
from benchmarks.measure.models.page import page
from benchmarks.measure.models.records import Record
from benchmarks.measure.models.training import Trace, reference, sharded
from benchmarks.measure.models.workers import Ranks
from benchmarks.workloads.architectures import catalogue

CELL = Cell("scatter_network", "defaults", "eager")
WEIGHT = "layers.0.message.weight"


def planted(rank: int, world_size: int) -> dict[str, Result]:
    """Outcome of a real training, as it is and with one fault each."""
    architecture = catalogue.of_name(CELL.architecture)
    expected = reference(architecture, CELL, rank)

    def with_fault(fault: str) -> Trace:
        trace = sharded(architecture, CELL, rank)
        gradients = trace.gradients[2]
        gradient = gradients[WEIGHT]
        assert gradient is not None
        if fault == "scaled":
            gradient.mul_(1 + 1e-3)
        elif fault == "none":
            gradients[WEIGHT] = None
        elif fault == "missing":
            del gradients[WEIGHT]
        elif fault == "buffer":
            trace.buffers["norm.running_mean"] += 1e-2
        elif fault == "rounded":
            gradient.mul_(1 + 1e-6)
        elif fault == "not a number":
            gradient.view(-1)[0] = float("nan")
        return trace

    faults = ("nothing", "scaled", "none", "missing", "buffer", "rounded", "not a number")
    return {fault: result_of(with_fault(fault), expected, "defaults") for fault in faults}


def test_a_planted_fault_is_found(ranks: RankPool) -> None:
    for found in ranks.run(planted, 2):
        assert found["nothing"] == Result(Outcome.EQUAL)
        assert found["rounded"].outcome is Outcome.CLOSE
        for fault in ("scaled", "none", "missing", "not a number"):
            assert found[fault].outcome is Outcome.DIFFERS, fault
            assert found[fault].reason.startswith(f"step 3: gradient of {WEIGHT} "), fault
        assert found["scaled"].largest == pytest.approx(1e-3, rel=0.01)
        assert found["buffer"].outcome is Outcome.DIFFERS
        assert found["buffer"].worst == "buffer norm.running_mean"


def _trace(gradient: torch.Tensor | None) -> Trace:
    return Trace([1.0], {0: {"large": torch.full((4,), 100.0), "small": gradient}}, {})


def test_zeros_in_place_of_none_are_told_apart() -> None:
    zeros, values, none = _trace(torch.zeros(3)), _trace(torch.ones(3)), _trace(None)
    assert result_of(zeros, none, "defaults").outcome is Outcome.ZEROS
    assert result_of(values, none, "defaults").outcome is Outcome.DIFFERS
    assert result_of(none, zeros, "defaults").outcome is Outcome.DIFFERS
    assert result_of(none, none, "defaults").outcome is Outcome.EQUAL


def test_rounding_of_what_is_zero_in_exact_arithmetic_is_close() -> None:
    ours, reference = _trace(torch.full((3,), 1e-7)), _trace(torch.full((3,), -1e-7))
    assert result_of(ours, reference, "defaults").outcome is Outcome.CLOSE


def test_the_plain_model_explains_as_much_as_it_differs() -> None:
    ours = Result(Outcome.DIFFERS, "a", 0.2)
    assert with_plain(ours, Result(Outcome.DIFFERS, "b", 0.1)).outcome is Outcome.PLAIN
    assert with_plain(ours, Result(Outcome.DIFFERS, "b", 0.001)) == ours
    assert with_plain(ours, Result(Outcome.CLOSE, "", 0.0)) == ours
    error = Result(Outcome.ERROR, "Unsupported: x")
    assert with_plain(error, Result(Outcome.ERROR, "Unsupported: y")).plain == "Unsupported: y"
    assert with_plain(error, Result(Outcome.DIFFERS, "b", 0.1)) == error


def test_the_first_error_is_the_reason() -> None:
    later = Answer(Result(Outcome.ERROR, "connection closed"), 2.0)
    first = Answer(Result(Outcome.ERROR, "the cause"), 1.0)
    assert merged([later, first]).reason == "the cause"
    assert merged([Answer(Result(Outcome.EQUAL), 3.0), later]).outcome is Outcome.ERROR


def test_messages_have_no_paths_of_the_machine() -> None:
    text = (
        f"in {failures.ROOT}/fsdp_dynamo/api.py and /a/lib/site-packages/torch/x.py, at 0x7f00aa11"
    )
    assert failures.without_paths(text) == "in fsdp_dynamo/api.py and torch/x.py, at 0x..."


def misbehave(cell: Cell, rank: int) -> Answer:
    """A measurement that does what the architecture's name says, on rank 1."""
    if rank == 1 and cell.architecture == "hangs":
        time.sleep(60)
    if rank == 1 and cell.architecture == "dies":
        os._exit(3)
    return Answer(Result(Outcome.EQUAL), time.monotonic())


def test_ranks_survive_a_crash_and_a_hang() -> None:
    ranks = Ranks(2, misbehave)
    try:
        outcomes = [
            ranks.run(Cell(name, "defaults", "eager"), 4.0 if name == "hangs" else 60.0).outcome
            for name in ("works", "dies", "works", "hangs", "works")
        ]
    finally:
        ranks.stop()
    works = Outcome.EQUAL
    assert outcomes == [works, Outcome.ERROR, works, Outcome.TIMEOUT, works]


class _KilledRanks:
    """Stand-in for ranks whose campaign is killed at the third cell."""

    measured: list[str] = []
    is_killed = True

    def __init__(self, world_size: int) -> None:
        pass

    def run(self, cell: Cell, seconds: float) -> Result:
        if self.is_killed and len(self.measured) == 2:
            raise KeyboardInterrupt
        self.measured.append(cell.key)
        return Result(Outcome.EQUAL)

    def stop(self) -> None:
        pass


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "Ranks", _KilledRanks)
    monkeypatch.setattr(_KilledRanks, "measured", [])
    path = tmp_path / "models.json"
    some = catalogue.named(["tied_weights"])
    options = argparse.Namespace(
        settings="defaults,frozen", modes=None, world_size=2, timeout=1, again=False, bad=False
    )
    with pytest.raises(KeyboardInterrupt):
        models.run(options, some, Record(path))
    assert len(json.loads(path.read_text())["cells"]) == 2
    monkeypatch.setattr(_KilledRanks, "is_killed", False)
    models.run(options, some, Record(path))
    every = [cell.key for cell in cells_of(some[0], ("defaults", "frozen"))]
    assert sorted(_KilledRanks.measured) == sorted(every)
    models.run(options, some, Record(path))
    assert len(_KilledRanks.measured) == len(every)
    options.again = True
    models.run(options, some, Record(path))
    assert len(_KilledRanks.measured) == 2 * len(every)
    assert [path.name for path in tmp_path.iterdir()] == ["models.json"]


def test_table_and_page() -> None:
    some = catalogue.named(["llama", "tied_weights"])
    results = {
        Cell("llama", "defaults", "eager"): Result(Outcome.EQUAL),
        Cell("llama", "defaults", "graph"): Result(Outcome.PLAIN, "a", plain="b"),
        Cell("tied_weights", "frozen", "hooks"): Result(Outcome.DIFFERS, "c", 0.5, "d"),
    }
    records = {"": {"versions": {"torch": "2.13.0"}}}
    for text in (tables.terminal(some, results), page(some, results, records)):
        assert "tied_weights hooks (frozen)" in text
        assert "a; plain: b" in text
    assert "torch 2.13.0" in page(some, results, records)


def test_names_are_unique_and_patterns_are_checked() -> None:
    names = [one.name for one in catalogue.all_architectures()]
    assert len(set(names)) == len(names) >= 60
    assert [one.name for one in catalogue.named(["mamb*"])] == ["mamba", "mamba2"]
    with pytest.raises(BadInputError, match="--only"):
        catalogue.named(["no_such_model"])
