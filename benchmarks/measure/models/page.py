"""The record as a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure.models.cell import MODES, Cell, Outcome, Result
from benchmarks.measure.models.comparison import TOLERANCE, TOLERANCES
from benchmarks.measure.models.records import counts
from benchmarks.measure.models.tables import (
    LEGEND,
    Results,
    reasons,
    settings_of,
    symbols,
    text_of,
    where_of,
)
from benchmarks.workloads.architectures.base import SETTINGS, Architecture

HEAD = """# Models of other people

Architectures of transformers, diffusers, timm, torchvision, vit-pytorch, x-transformers and
`torch.nn`, and small ones that each do one unusual thing, trained unchanged in the three modes.
This page is written by

```
pip install ".[models]"
python benchmarks/models.py --markdown docs/decisions/records/models.md
```

which measures what [the record](../../../benchmarks/results/models.json) does not have yet
(`--again`: everything; `--bad`: what was not equal or close; `--list`: the names). A killed run
goes on where it was. Nothing is downloaded: each model is built tiny from a configuration, with
random weights.

A cell is an architecture in a setting and a mode: three SGD steps on two gloo ranks, each with its
own batches, beside `DistributedDataParallel(find_unused_parameters=True)` with the same weights and
seeds. Compared are the losses of all steps, the whole gradients of all parameters after the first
and the last backward, by name, and the buffers afterwards. Hooks mode is
`torch.compile(model, backend="aot_eager")`, graph mode
`torch.compile(model, fullgraph=True, backend="fsdp_dynamo_aot_eager")`. Units are the model's own
`_no_split_modules`, or its layers.
"""

MEANINGS = {
    Outcome.EQUAL: "bitwise",
    Outcome.CLOSE: "the largest relative difference of a tensor, norm(a - b) / norm(b), is at most "
    f"{TOLERANCE:g}; "
    + ", ".join(f"with {setting} {value:g}" for setting, value in TOLERANCES.items()),
    Outcome.ZEROS: "equal or close, but some gradients are zeros where DDP has `None`",
    Outcome.DIFFERS: "a larger difference",
    Outcome.ERROR: "an exception, or a rank died",
    Outcome.TIMEOUT: "no answer in time",
    Outcome.PLAIN: "not equal or close, and neither is the plain model below DDP with the same "
    "backend: as it is or block by block for hooks mode, in one graph for graph mode",
    Outcome.NO_REFERENCE: "DDP in eager mode cannot train the model in this setting",
}


def page(
    architectures: Sequence[Architecture], results: Results, records: Mapping[str, Any]
) -> str:
    """The page in Markdown."""
    parts = [
        HEAD,
        _definitions("setting", SETTINGS),
        _definitions("outcome", {outcome.value: text for outcome, text in MEANINGS.items()}),
        "## Counts",
        _counts(architectures, results),
        f"Versions: {_versions(records)}.",
        "## Table",
        _table(architectures, results),
        "## Reasons",
        _reasons(architectures, results),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _definitions(head: str, meanings: Mapping[str, str]) -> str:
    rows = [_row([head, "meaning"]), _row(["---", "---"])]
    return "\n".join([*rows, *(_row([name, text]) for name, text in meanings.items())])


def _versions(records: Mapping[str, Any]) -> str:
    """All versions in the record, by package."""
    found: dict[str, set[str]] = {}
    for one in records.values():
        for package, version in one["versions"].items():
            found.setdefault(package, set()).add(str(version))
    return ", ".join(f"{name} {' and '.join(sorted(found[name]))}" for name in sorted(found))


def _counts(architectures: Sequence[Architecture], results: Results) -> str:
    by_mode = counts(results)
    head = ["mode", *(outcome.value for outcome in Outcome), "all"]
    rows = [_row(head), _row(["---"] * len(head))]
    for mode in MODES:
        found = by_mode.get(mode, {})
        numbers = [found.get(outcome, 0) for outcome in Outcome]
        rows.append(_row([mode, *map(str, numbers), str(sum(numbers))]))
    return f"{len(architectures)} architectures.\n\n" + "\n".join(rows)


def _table(architectures: Sequence[Architecture], results: Results) -> str:
    settings = settings_of(architectures)
    rows = [
        f"One symbol per setting, in this order: {', '.join(settings)}. {LEGEND}.",
        "",
        _row(["family", "architecture", *MODES]),
        _row(["---"] * (2 + len(MODES))),
    ]
    for one in architectures:
        cells = [f"`{symbols(one, mode, results, settings)}`" for mode in MODES]
        rows.append(_row([one.family, one.name, *cells]))
    return "\n".join(rows)


def _reasons(architectures: Sequence[Architecture], results: Results) -> str:
    """A section per outcome, in it a line per reason, with the notes of the catalogue."""
    notes = {one.name: one.note for one in architectures}
    sections: dict[Outcome, list[str]] = {}
    for cells, result in reasons(results):
        note = notes[cells[0].architecture]
        line = _reason(cells, result) + (f" ({note})" if note else "")
        sections.setdefault(result.outcome, []).append(line)
    return "\n\n".join(
        f"### {outcome.value.capitalize()}\n\n" + "\n".join(sections[outcome])
        for outcome in Outcome
        if outcome in sections
    )


def _reason(cells: Sequence[Cell], result: Result) -> str:
    text = text_of(result).replace("`", "'").replace("|", "\\|")
    return f"- **{where_of(cells)}**: `{text}`"
