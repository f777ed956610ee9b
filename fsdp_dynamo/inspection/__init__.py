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
from fsdp_dynamo.artifacts import Artifact, record_artifacts
from fsdp_dynamo.errors import FSDPStateError, FSDPValueError, explain
from fsdp_dynamo.events import COLLECTIVE_KINDS, COMPUTE_KINDS, Event, record_events
from fsdp_dynamo.findings import Findings, UnitFacts, measured_of
from fsdp_dynamo.inspection.decompiled import emit_decompiled, require_depyf
from fsdp_dynamo.inspection.listings import Listing, listings_of
from fsdp_dynamo.inspection.page import page_of
from fsdp_dynamo.planning import PlanLog, record_plans
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
    step fails, what was compiled before is written all the same.

    Args:
        folder: made if it is missing.
        rank: which rank writes; ``None``: every one, into ``rank0`` and so on inside the folder.

    Yields:
        What is filled on leaving.

    Raises:
        FSDPError: depyf is not installed.
        FSDPValueError: there is no such rank.
        FSDPStateError: on leaving, if nothing was compiled inside.
    """
    depyf = require_depyf()
    found = Inspection(_folder_of_this_rank(Path(folder), rank))
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
                _write(found.folder, found.listings, _findings(plans, log, artifacts))
    if completed and not found.listings:
        raise _nothing_compiled()


_NO_CACHES = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


def _folder_of_this_rank(folder: Path, rank: int | None) -> Path | None:
    own = _own_rank()
    if rank is not None and not 0 <= rank < _world_size():
        raise FSDPValueError(
            explain(
                expected=f"a rank from 0 to {_world_size() - 1}, or None for all",
                got=repr(rank),
                where="inspect_graphs(), 'rank'",
                fix="The rank that is named writes the files.",
            )
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


def _nothing_compiled() -> FSDPStateError:
    return FSDPStateError(
        explain(
            expected="a step of a compiled model inside the context",
            got="none: nothing was compiled",
            where="inspect_graphs()",
            fix="Call what torch.compile returned inside the context, not the model itself.",
        )
    )


def _findings(
    plans: PlanLog, log: Sequence[Event], artifacts: Sequence[Artifact]
) -> tuple[Findings, str]:
    """What was planned, what the last step took, and a word about that."""
    step = _last_step([e for e in log if e.kind in COLLECTIVE_KINDS or e.kind in COMPUTE_KINDS])
    compiled = max(artifact.made_ns for artifact in artifacts)
    is_clean = bool(step) and step[0].issued_ns > compiled
    note = "" if is_clean else "With compilation: run two steps in the context to see one without."
    units = dict.fromkeys(event.unit for event in log)
    findings = Findings(
        path="graph" if plans else "hooks",
        backend="",
        device="",
        world_size=_world_size(),
        units=tuple(UnitFacts(unit, "", 0, 0, 0) for unit in units),
        num_graphs=len(plans),
        graph_breaks={},
        graphs=tuple(report_of(planned) for planned in plans),
        measured=measured_of(step),
    )
    return findings, note


def _last_step(log: Sequence[Event]) -> Sequence[Event]:
    """From the last forward that comes after a backward."""
    begins = (i for i in range(len(log) - 1, 0, -1) if log[i].phase == "forward")
    return log[next((i for i in begins if log[i - 1].phase == "backward"), 0) :]


def _write(folder: Path, listings: Sequence[Listing], found: tuple[Findings, str]) -> None:
    findings, note = found
    for listing in listings:
        (folder / listing.file_name).write_text(listing.text, encoding="utf-8")
    owners = {(x.unit, x.graph) for x in listings}
    facts = (
        f"{findings.path} path, rank {_own_rank()} of "
        f"{findings.world_size}, {len(findings.units)} units, {len(owners)} graphs and parts, "
        f"torch {torch.__version__}"
    )
    page = page_of(listings, findings, facts, note)
    (folder / "index.html").write_text(page, encoding="utf-8")


__all__ = ["Inspection", "Listing", "inspect_graphs"]
