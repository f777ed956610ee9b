"""``inspect_graphs``: the compiled graphs after every stage, as files and as an HTML page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_dynamo import events
from fsdp_dynamo.dynamo.artifacts import Artifact, record_artifacts
from fsdp_dynamo.errors import FSDPStateError, FSDPValueError
from fsdp_dynamo.events import EventLog, record_events
from fsdp_dynamo.graph_path.planning import PlanLog, record_plans
from fsdp_dynamo.observe.explanation import StepReport, UnitSummary, measured_events
from fsdp_dynamo.observe.inspection.decompiled import (
    emit_decompiled,
    find_depyf,
    warn_without_depyf,
)
from fsdp_dynamo.observe.inspection.listings import Listing, listings_of
from fsdp_dynamo.observe.inspection.page import TimelineData, render_page
from fsdp_dynamo.observe.inspection.recorded_step import last_step
from fsdp_dynamo.observe.inspection.stages import describe_stages
from graph_passes.report import report_of


@dataclass
class Inspection:
    """Result of ``inspect_graphs``, filled when the context is left.

    Attributes:
        folder: folder of the files; ``None`` on ranks that write none.
        listings: every graph at every stage, on all ranks.
    """

    folder: Path | None
    listings: list[Listing] = field(default_factory=list)


@contextmanager
def inspect_graphs(folder: str | Path, rank: int | None = 0) -> Iterator[Inspection]:
    """Write every graph that ``torch.compile`` makes of the steps inside:

        with fsdp_dynamo.inspect_graphs("out/"):
            step(batch).sum().backward()

    The folder then holds one file per graph and stage, named by unit, phase and stage
    (``layers.3.backward.after_planner.py``; ``_whole`` is a whole step, ``_root`` the root), and
    an ``index.html`` that shows stages side by side and the timeline of the last step.

    All ranks must enter the context, because all of them compile: existing compiled code is
    compiled again, without caches. Results do not change. Older files with these names are
    overwritten. If a step fails, the graphs compiled before the failure are still written.
    Without depyf (the extra ``inspection``) the decompiled code is left out, with a warning.

    Args:
        folder: created if it does not exist.
        rank: the rank that writes; ``None``: every rank, into ``rank0``, ``rank1`` and so on.

    Yields:
        The inspection, which is filled on exit.

    Raises:
        FSDPValueError: there is no such rank.
        FSDPStateError: on exit, if nothing was compiled inside.
    """
    inspection = Inspection(_folder_of_this_rank(Path(folder), rank))
    depyf = find_depyf()
    if depyf is None and inspection.folder is not None:
        warn_without_depyf(stacklevel=3)
    torch.compiler.reset()
    completed = False
    with ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch(_NO_CACHES))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        plans = stack.enter_context(record_plans())
        log = stack.enter_context(record_events()) if events.recorder is None else events.recorder
        artifacts = stack.enter_context(record_artifacts())
        stack.enter_context(emit_decompiled(depyf))
        try:
            yield inspection
            completed = True
        finally:  # after a failed compilation the graphs before it matter most
            inspection.listings = listings_of(artifacts)
            if inspection.listings and inspection.folder is not None:
                timeline = _timeline_data(plans, log, artifacts)
                _write(inspection.folder, inspection.listings, artifacts, timeline)
    if completed and not inspection.listings:
        raise nothing_compiled("Call what torch.compile returned inside, not the model itself.")


_NO_CACHES = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


def _folder_of_this_rank(folder: Path, rank: int | None) -> Path | None:
    own = _own_rank()
    if rank is not None and not 0 <= rank < _world_size():
        raise FSDPValueError(
            expected=f"a rank from 0 to {_world_size() - 1}, or None for all",
            got=repr(rank),
            where="inspect_graphs(), 'rank'",
            fix="Name the rank that should write the files.",
        )
    if rank is None:
        folder = folder / f"rank{own}"
    elif rank != own:
        return None
    folder.mkdir(parents=True, exist_ok=True)  # fails before the first step
    return folder


def _own_rank() -> int:
    """This rank, also without a process group."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    """Number of ranks, also without a process group."""
    known = dist.is_initialized()
    return dist.get_world_size() if known else int(os.environ.get("WORLD_SIZE", "1"))


class NothingCompiledError(FSDPStateError):
    """Nothing was compiled inside the context."""


def nothing_compiled(fix: str) -> NothingCompiledError:
    """The error, with its remedy."""
    return NothingCompiledError(
        expected="a step of a compiled model inside the context",
        got="none: nothing was compiled",
        where="inspect_graphs()",
        fix=fix,
    )


def _timeline_data(plans: PlanLog, log: EventLog, artifacts: Sequence[Artifact]) -> TimelineData:
    """The plans, and the last recorded step, of a recording that is still open."""
    log.read_clock()
    step = last_step(log, (artifact.made_ns for artifact in artifacts))
    units = dict.fromkeys(event.unit for event in log)
    report = StepReport(
        mode="graph" if plans else "hooks",
        backend="",
        device="",
        world_size=_world_size(),
        units=tuple(UnitSummary(unit, "", 0, 0, 0, 0) for unit in units),
        num_graphs=len(plans),
        graph_breaks={},
        graphs=tuple(report_of(planned) for planned in plans),
        measured=measured_events(step.events),
    )
    return TimelineData(report, step.note, step.cuts)


def _write(
    folder: Path,
    listings: Sequence[Listing],
    artifacts: Sequence[Artifact],
    timeline: TimelineData,
) -> None:
    for listing in listings:
        (folder / listing.file_name).write_text(listing.text, encoding="utf-8")
    report = timeline.report
    num_graphs = len({(x.unit, x.graph) for x in listings})
    subtitle = (
        f"{report.mode} mode, rank {_own_rank()} of {report.world_size}, "
        f"{len(report.units)} units, {num_graphs} graphs and parts, torch {torch.__version__}"
    )
    descriptions = describe_stages(artifacts, [x.stage for x in listings])
    page = render_page(listings, timeline, subtitle, descriptions)
    (folder / "index.html").write_text(page, encoding="utf-8")


__all__ = ["Inspection", "Listing", "inspect_graphs"]
