"""``inspect_graphs``: compiled graphs after every stage, as files and as an HTML page."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_dynamo.dynamo.artifacts import (
    Artifact,
    Compilation,
    record_artifacts,
    record_compilations,
)
from fsdp_dynamo.errors import FSDPStateError, FSDPValueError, how_to_install
from fsdp_dynamo.events import EventLog, Model, record_events
from fsdp_dynamo.graph_mode.planning import PlanLog, record_plans
from fsdp_dynamo.observe.explain import RecordedStep, reports_of, steps_in
from fsdp_dynamo.observe.explanation import StepReport, UnitSummary
from fsdp_dynamo.observe.inspection.listings import (
    Listing,
    describe_stages,
    emit_decompiled,
    find_depyf,
    listings_of,
)
from fsdp_dynamo.observe.inspection.page import ShownStep, render_page


@dataclass
class Inspection:
    """Result of ``inspect_graphs``, filled when the context exits.

    Attributes:
        folder: folder of the files; ``None`` on ranks that write none.
        listings: every graph at every stage; every rank has them.
    """

    folder: Path | None
    listings: list[Listing] = field(default_factory=list)


@contextmanager
def inspect_graphs(folder: str | Path, rank: int | None = 0) -> Iterator[Inspection]:
    """Write every graph that ``torch.compile`` makes of the steps inside; all ranks must enter it.

    ::

        with fsdp_dynamo.inspect_graphs("out/"):
            step(batch).sum().backward()

    The folder gets one file per graph and stage, named by unit, phase and stage
    (``layers.3.backward.after_planner.py``; ``_whole`` is a whole step, ``_root`` the root), and
    an ``index.html`` with the stages side by side and the timeline of the last step. Existing files
    of these names are overwritten. If a step fails, the graphs compiled before it are written.

    Everything is compiled again, without caches; results do not change. Without depyf (the extra
    ``inspection``) the decompiled code is left out, with a warning.

    Args:
        folder: created if it does not exist.
        rank: the rank that writes; ``None``: every rank, into ``rank0``, ``rank1`` and so on.

    Raises:
        FSDPValueError: there is no such rank.
        FSDPStateError: on exit, if nothing was compiled inside.
    """
    inspection = Inspection(_folder_of_this_rank(Path(folder), rank))
    depyf = find_depyf()
    if depyf is None and inspection.folder is not None:
        warnings.warn(
            "inspect_graphs(): depyf is not installed, so the decompiled code "
            "(*.dynamo.decompiled.py) is left out; everything else is written. "
            f"To get it: {how_to_install('inspection')}.",
            stacklevel=3,
        )
    torch.compiler.reset()
    completed = False
    with ExitStack() as stack:
        no_caches = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
        stack.enter_context(torch._inductor.config.patch(no_caches))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        plans = stack.enter_context(record_plans())
        log = stack.enter_context(record_events())
        artifacts = stack.enter_context(record_artifacts())
        compilations = stack.enter_context(record_compilations())
        stack.enter_context(emit_decompiled(depyf))
        try:
            yield inspection
            completed = True
        finally:  # also after an error: the graphs before a failed compilation help to find it
            inspection.listings = listings_of(artifacts)
            if inspection.listings and inspection.folder is not None:
                steps = _last_steps(plans, log, compilations)
                _write(inspection.folder, inspection.listings, artifacts, steps)
    if completed and not inspection.listings:
        raise nothing_compiled("Call what torch.compile returned inside, not the model itself.")


def _folder_of_this_rank(folder: Path, rank: int | None) -> Path | None:
    own = _own_rank()
    if rank is not None and not 0 <= rank < _world_size():
        raise FSDPValueError(
            f"inspect_graphs(), 'rank': expected a rank from 0 to {_world_size() - 1}, or None for "
            f"all, got {rank!r}. Name the rank that should write the files."
        )
    if rank is None:
        folder = folder / f"rank{own}"
    elif rank != own:
        return None
    folder.mkdir(parents=True, exist_ok=True)  # now, to fail before the first step
    return folder


def _own_rank() -> int:
    """Return this rank, from torchrun's variables if there is no process group."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    """Return the number of ranks, from torchrun's variables if there is no process group."""
    known = dist.is_initialized()
    return dist.get_world_size() if known else int(os.environ.get("WORLD_SIZE", "1"))


class NothingCompiledError(FSDPStateError):
    """Error if nothing was compiled inside ``inspect_graphs``."""


def nothing_compiled(fix: str) -> NothingCompiledError:
    """Return the error with a remedy."""
    return NothingCompiledError(
        "inspect_graphs(): expected a step of a compiled model inside the context, got none: "
        f"nothing was compiled. {fix}"
    )


def _last_steps(
    plans: PlanLog, log: EventLog, compilations: Sequence[Compilation]
) -> list[ShownStep]:
    """Return the last step of each model; the recording is still open."""
    log.read_clock()
    recorded = steps_in(log, compilations)
    names = _names_of(recorded)
    return [
        ShownStep(
            _report_of(_shown_of(of_model)[-1], plans, model.name),
            names[model] if len(names) > 1 else "",
            _note_on(of_model),
        )
        for model, of_model in recorded.items()
    ]


def _shown_of(recorded: Sequence[RecordedStep]) -> Sequence[RecordedStep]:
    """Return the steps with a backward, or all steps if none has one; the page shows the last."""
    return [step for step in recorded if step.has_backward] or recorded


def _names_of(models: Iterable[Model]) -> dict[Model, str]:
    """Name models by their classes; the second and later models of a class are numbered."""
    taken: Counter[str] = Counter()
    names = {}
    for model in models:
        taken[model.name] += 1
        number = taken[model.name]
        names[model] = f"{model.name} {number}" if number > 1 else model.name
    return names


def _report_of(step: RecordedStep, plans: PlanLog, model: str) -> StepReport:
    graphs = reports_of(plans, step)
    return StepReport(
        mode="graph" if step.is_graph_mode else "hooks",
        backend="",
        device="",
        world_size=_world_size(),
        units=tuple(UnitSummary(unit, "", 0, 0, 0, 0) for unit in step.units),
        num_graphs=len(graphs),
        graph_breaks=(),
        graphs=graphs,
        measured=step.measured(),
        model=model,
        cuts=step.cuts(),
    )


def _note_on(recorded: Sequence[RecordedStep]) -> str:
    """Say which of a model's steps is shown, and whether it contains compilation."""
    shown = _shown_of(recorded)
    several = len(shown) > 1
    which = f"The last of {len(shown)} recorded steps" if several else "The only recorded step"
    if not shown[-1].has_backward:
        which += ", all without a backward" if several else ", without a backward"
    elif len(shown) < len(recorded):
        which += " with a backward"
    compiled_ms = sum(cut.ms for cut in shown[-1].cuts())
    if not compiled_ms:
        return f"{which}."
    return (
        f"{which}, with compilation ({compiled_ms / 1e3:.1f} s, cut out where hatched). "
        "Run one more step in the context to avoid it."
    )


def _write(
    folder: Path,
    listings: Sequence[Listing],
    artifacts: Sequence[Artifact],
    steps: Sequence[ShownStep],
) -> None:
    for listing in listings:
        (folder / listing.file_name).write_text(listing.text, encoding="utf-8")
    modes = dict.fromkeys(step.report.mode for step in steps)
    num_units = sum(len(step.report.units) for step in steps)
    num_graphs = len({(x.unit, x.graph) for x in listings})
    models = f"{len(steps)} models, " if len(steps) > 1 else ""
    subtitle = (
        f"{' and '.join(modes)} mode, rank {_own_rank()} of {_world_size()}, {models}"
        f"{num_units} units, {num_graphs} graphs and parts, torch {torch.__version__}"
    )
    descriptions = describe_stages(artifacts, [x.stage for x in listings])
    page = render_page(listings, steps, subtitle, descriptions)
    (folder / "index.html").write_text(page, encoding="utf-8")


__all__ = ["Inspection", "Listing", "inspect_graphs"]
