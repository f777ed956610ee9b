"""``inspect_graphs``: what was compiled, stage by stage, as files and as a page to look at."""

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
from fsdp_dynamo.events import Event, record_events
from fsdp_dynamo.graph_path.planning import PlanLog, record_plans
from fsdp_dynamo.observe.explanation import Findings, UnitFacts, measured_of
from fsdp_dynamo.observe.inspection.decompiled import (
    emit_decompiled,
    find_depyf,
    warn_without_depyf,
)
from fsdp_dynamo.observe.inspection.listings import Listing, listings_of
from fsdp_dynamo.observe.inspection.page import Recorded, page_of
from fsdp_dynamo.observe.inspection.recorded import RecordedStep, last_step
from fsdp_dynamo.observe.inspection.stages import meanings_of
from graph_passes.report import report_of


@dataclass
class Inspection:
    """What ``inspect_graphs`` yields; it is filled when the context is left.

    Attributes:
        folder: where the files are; ``None`` on ranks that write none.
        listings: every graph at every stage, also on those.
    """

    folder: Path | None
    listings: list[Listing] = field(default_factory=list)


@contextmanager
def inspect_graphs(folder: str | Path, rank: int | None = 0) -> Iterator[Inspection]:
    """Write down what ``torch.compile`` makes of the steps inside:

        with fsdp_dynamo.inspect_graphs("out/"):
            step(batch).sum().backward()

    In the folder is then a file for every graph at every stage, named by unit, phase and stage
    (``layers.3.backward.after_planner.py``; ``_whole`` is a whole step, ``_root`` the root), and
    an ``index.html`` with all of them side by side and the timeline of the last step.

    All ranks must enter it, since all compile: what was compiled before is compiled again, without
    caches. What is computed does not change. Older files of those names are overwritten. Where a
    step fails, what was compiled before is written all the same. Without depyf (the extra
    ``inspection``) the code that it decompiles is left out, with a warning.

    Args:
        folder: made if it is missing.
        rank: which rank writes; ``None``: every one, into ``rank0`` and so on inside the folder.

    Yields:
        What is filled on leaving.

    Raises:
        FSDPValueError: there is no such rank.
        FSDPStateError: on leaving, if nothing was compiled inside.
    """
    found = Inspection(_folder_of_this_rank(Path(folder), rank))
    depyf = find_depyf()
    if depyf is None and found.folder is not None:
        warn_without_depyf(stacklevel=3)
    torch._dynamo.reset()
    completed = False
    with ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch(_NO_CACHES))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        plans = stack.enter_context(record_plans())
        log = stack.enter_context(record_events()) if events.recorder is None else events.recorder
        artifacts = stack.enter_context(record_artifacts())
        stack.enter_context(emit_decompiled(depyf))
        try:
            yield found
            completed = True
        finally:  # where a compilation fails, what came before it is wanted most
            found.listings = listings_of(artifacts)
            if found.listings and found.folder is not None:
                _write(found.folder, found.listings, artifacts, _recorded(plans, log, artifacts))
    if completed and not found.listings:
        raise nothing_compiled("Call what torch.compile returned inside, not the model itself.")


_NO_CACHES = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


def _folder_of_this_rank(folder: Path, rank: int | None) -> Path | None:
    own = _own_rank()
    if rank is not None and not 0 <= rank < _world_size():
        raise FSDPValueError(
            expected=f"a rank from 0 to {_world_size() - 1}, or None for all",
            got=repr(rank),
            where="inspect_graphs(), 'rank'",
            fix="The rank that is named writes the files.",
        )
    if rank is None:
        folder = folder / f"rank{own}"
    elif rank != own:
        return None
    folder.mkdir(parents=True, exist_ok=True)  # a folder that can't be made is told before a step
    return folder


def _own_rank() -> int:
    """Also where the process group is yet to be made, or gone again."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    """As ``_own_rank``."""
    known = dist.is_initialized()
    return dist.get_world_size() if known else int(os.environ.get("WORLD_SIZE", "1"))


class NothingCompiledError(FSDPStateError):
    """Nothing was compiled in the context."""


def nothing_compiled(fix: str) -> NothingCompiledError:
    """The error, with what the user can do about it."""
    return NothingCompiledError(
        expected="a step of a compiled model inside the context",
        got="none: nothing was compiled",
        where="inspect_graphs()",
        fix=fix,
    )


def _recorded(plans: PlanLog, log: Sequence[Event], artifacts: Sequence[Artifact]) -> Recorded:
    """What was planned, and what the last step took."""
    step = last_step(log, (artifact.made_ns for artifact in artifacts))
    return Recorded(_findings(plans, log, step), step.note, step.cuts)


def _findings(plans: PlanLog, log: Sequence[Event], step: RecordedStep) -> Findings:
    units = dict.fromkeys(event.unit for event in log)
    return Findings(
        path="graph" if plans else "hooks",
        backend="",
        device="",
        world_size=_world_size(),
        units=tuple(UnitFacts(unit, "", 0, 0, 0) for unit in units),
        num_graphs=len(plans),
        graph_breaks={},
        graphs=tuple(report_of(planned) for planned in plans),
        measured=measured_of(step.events),
    )


def _write(
    folder: Path,
    listings: Sequence[Listing],
    artifacts: Sequence[Artifact],
    recorded: Recorded,
) -> None:
    for listing in listings:
        (folder / listing.file_name).write_text(listing.text, encoding="utf-8")
    findings = recorded.findings
    owners = {(x.unit, x.graph) for x in listings}
    facts = (
        f"{findings.path} path, rank {_own_rank()} of "
        f"{findings.world_size}, {len(findings.units)} units, {len(owners)} graphs and parts, "
        f"torch {torch.__version__}"
    )
    meanings = meanings_of(artifacts, [x.stage for x in listings])
    page = page_of(listings, recorded, facts, meanings)
    (folder / "index.html").write_text(page, encoding="utf-8")


__all__ = ["Inspection", "Listing", "inspect_graphs"]
