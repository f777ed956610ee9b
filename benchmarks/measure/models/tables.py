"""The campaign's results as text for a terminal and as a page in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.measure.models.cell import GOOD, MODES, Cell, Outcome, Result
from benchmarks.measure.models.records import counts
from benchmarks.measure.report import table
from benchmarks.workloads.architectures.base import SETTINGS, Architecture

SYMBOLS = {
    Outcome.EQUAL: "=",
    Outcome.CLOSE: "~",
    Outcome.ZEROS: "0",
    Outcome.DIFFERS: "D",
    Outcome.ERROR: "E",
    Outcome.TIMEOUT: "T",
    Outcome.PLAIN: "p",
    Outcome.NO_REFERENCE: "-",
}
NOT_RUN = "?"
DOES_NOT_APPLY = "."

LEGEND = ", ".join(f"{symbol} {outcome.value}" for outcome, symbol in SYMBOLS.items())
LEGEND += f", {NOT_RUN} not run, {DOES_NOT_APPLY} does not apply"

Results = Mapping[Cell, Result]

_MODEL_LINE = re.compile(r" \[[\w/.]+:\d+\]$")


def settings_of(architectures: Sequence[Architecture]) -> list[str]:
    """The settings that apply to at least one, in order."""
    return [s for s in SETTINGS if any(s in one.settings for one in architectures)]


def symbols(
    architecture: Architecture, mode: str, results: Results, settings: Sequence[str]
) -> str:
    """A symbol per setting."""

    def symbol(setting: str) -> str:
        if setting not in architecture.settings or (setting == "inductor" and mode == "eager"):
            return DOES_NOT_APPLY
        found = results.get(Cell(architecture.name, setting, mode))
        return NOT_RUN if found is None else SYMBOLS[found.outcome]

    return "".join(map(symbol, settings))


def _count_rows(results: Results) -> list[list[str]]:
    by_mode = counts(results)
    return [
        [
            mode,
            *(str(by_mode[mode][outcome]) for outcome in Outcome),
            str(sum(by_mode[mode].values())),
        ]
        for mode in MODES
        if mode in by_mode
    ]


def reasons(results: Results) -> Iterator[tuple[list[Cell], Result]]:
    """Results that are neither equal nor close; cells with the same reason together."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell, result in results.items():
        if result.outcome not in GOOD:
            groups.setdefault((result.outcome.value, *_essence(cell, result)), []).append(cell)
    for cells in groups.values():
        yield cells, results[cells[0]]


def _essence(cell: Cell, result: Result) -> tuple[str, ...]:
    """What makes two reasons the same: not the name of a parameter or the size of an error."""
    if result.outcome in (Outcome.DIFFERS, Outcome.ZEROS):
        return (cell.architecture, result.worst)
    return (_MODEL_LINE.sub("", result.reason), result.where, _MODEL_LINE.sub("", result.plain))


def where_of(cells: Sequence[Cell]) -> str:
    """``llama graph (defaults, frozen), t5 hooks (defaults)``."""
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        groups.setdefault((cell.architecture, cell.mode), []).append(cell.setting)
    return ", ".join(f"{name} {mode} ({', '.join(s)})" for (name, mode), s in groups.items())


def text_of(result: Result) -> str:
    """The reason, our line, and the plain model's reason where it is another one."""
    where = f" [{result.where}]" if result.where else ""
    if not result.plain:
        return f"{result.reason}{where}"
    plain = "the same" if result.plain == result.reason else result.plain
    return f"{result.reason}{where}; plain: {plain}"


def terminal(architectures: Sequence[Architecture], results: Results) -> str:
    """Counts, table and reasons."""
    settings = settings_of(architectures)
    rows = [
        [one.name, *(symbols(one, mode, results, settings) for mode in MODES)]
        for one in architectures
    ]
    head = [outcome.value for outcome in Outcome]
    parts = [
        table(["architecture", *MODES], rows),
        f"Symbols by setting, in this order: {', '.join(settings)}\n{LEGEND}",
        table(["mode", *head, "all"], _count_rows(results)),
    ]
    listed = [
        f"{where_of(cells)}\n    {result.outcome.value}: {text_of(result)}"
        for cells, result in reasons(results)
    ]
    return "\n\n".join([*parts, "\n".join(listed)])
