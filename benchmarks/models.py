"""Models of other people in the three modes, each beside DistributedDataParallel.

    python benchmarks/models.py [--only llama,vision,timm_*] [--settings frozen]

Every architecture of ``workloads/architectures`` is built tiny, with random weights, and trained
for three steps on two gloo ranks; losses, gradients and buffers are compared with those of
``DistributedDataParallel``. A cell is an architecture in a setting and a mode. Each is recorded as
soon as it is measured, and recorded cells are skipped: a run that was killed goes on where it was.
Cells that a change may have mended are measured again with ``--again``, or with ``--bad`` only
those that were neither equal nor close.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import at_least, one_line_on_bad_input, output_file, some_of
from benchmarks.measure.models import tables
from benchmarks.measure.models.cell import GOOD, MODES, Cell, Result, cells_of
from benchmarks.measure.models.measuring import explained
from benchmarks.measure.models.page import page
from benchmarks.measure.models.records import Record
from benchmarks.measure.models.workers import Ranks
from benchmarks.workloads.architectures import catalogue
from benchmarks.workloads.architectures.base import SETTINGS, Architecture

RECORD = Path(__file__).parent / "results" / "models.json"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="names or families, joined by commas; * stands for any text")
    parser.add_argument("--settings", help=f"joined by commas, of {', '.join(SETTINGS)}")
    parser.add_argument("--modes", help=f"joined by commas, of {', '.join(MODES)}")
    parser.add_argument("--again", action="store_true", help="measure recorded cells anew")
    parser.add_argument(
        "--bad", action="store_true", help="of recorded cells, only those not equal or close"
    )
    parser.add_argument("--list", action="store_true", help="show the architectures and leave")
    parser.add_argument("--table", action="store_true", help="show what is recorded and leave")
    parser.add_argument("--json", type=output_file, default=RECORD, help="the record")
    parser.add_argument("--markdown", type=Path, help="write the record as a page")
    parser.add_argument("--world_size", type=at_least(1), default=2)
    parser.add_argument("--timeout", type=at_least(1), default=120, help="seconds per cell")
    return parser.parse_args()


def chosen(text: str | None, known: Sequence[str], option: str) -> list[str]:
    """Names of an option, in the order of ``known``."""
    names = list(known) if text is None else some_of(option, text, known)
    return [name for name in known if name in names]


def measured(cell: Cell, ranks: Ranks, seconds: float) -> Result:
    """Result of a cell; where a compiled one is not as it should be, of the plain model too."""
    return explained(cell, ranks.run(cell, seconds), lambda plain: ranks.run(plain, seconds))


def run(options: argparse.Namespace, architectures: Sequence[Architecture], record: Record) -> None:
    """Measure all cells that are not recorded yet."""
    settings = chosen(options.settings, tuple(SETTINGS), "--settings")
    modes = chosen(options.modes, MODES, "--modes")
    todo = [(one, cell) for one in architectures for cell in cells_of(one, settings, modes)]
    todo = [(one, cell) for one, cell in todo if _is_due(record.result(cell), options)]
    ranks = Ranks(options.world_size)
    try:
        for index, (architecture, cell) in enumerate(todo):
            began = time.monotonic()
            result = measured(cell, ranks, options.timeout)
            seconds = time.monotonic() - began
            record.add(cell, result, seconds, architecture.packages)
            line = f"{index + 1}/{len(todo)} {cell.key}: {result.outcome.value} {result.reason}"
            print(f"{line} ({seconds:.1f} s)", flush=True)
    finally:
        ranks.stop()


def _is_due(known: Result | None, options: argparse.Namespace) -> bool:
    if known is None or options.again:
        return True
    return bool(options.bad) and known.outcome not in GOOD


def show(
    options: argparse.Namespace, architectures: Sequence[Architecture], record: Record
) -> None:
    """Print the table of what is recorded, and write the page."""
    results = {
        cell: result
        for one in architectures
        for cell in cells_of(one)
        if (result := record.result(cell)) is not None
    }
    print(tables.terminal(architectures, results))
    if options.markdown is not None:
        options.markdown.write_text(page(architectures, results, record.cells))


def main() -> None:
    """The command."""
    options = parse_arguments()
    with one_line_on_bad_input():
        every = catalogue.named(options.only.split(",") if options.only else ["*"])
        if options.list:
            print(
                "\n".join(
                    f"{one.name:32} {one.family:14} {', '.join(one.settings)}" for one in every
                )
            )
            return
        record = Record(options.json)
        if not options.table:
            for package, names in catalogue.left_out(every).items():
                print(f"left out, since {package} is not installed: {', '.join(names)}")
            run(options, [one for one in every if not one.missing()], record)
        show(options, every, record)


if __name__ == "__main__":
    main()
