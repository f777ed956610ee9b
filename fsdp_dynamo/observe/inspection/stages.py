"""One-line descriptions of phases and stages, for readers new to them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from fsdp_dynamo.dynamo.artifacts import STAGES, Artifact
from fsdp_dynamo.observe.inspection.listings import Listing

PHASE_DESCRIPTIONS: dict[str, str] = {
    "dynamo": "Dynamo, the front end of torch.compile, traces your Python code.",
    "joint": "Forward and backward in one graph, before the partition.",
    "forward": "The graph of the forward.",
    "backward": "The graph of the backward.",
}
_STAGE_DESCRIPTIONS: dict[str, str] = {
    "captured": "The graph that Dynamo captured: the calls of your model, without gradients.",
    "decompiled": "The code that Dynamo runs in place of your function, decompiled by depyf.",
    "traced": "Forward and backward in one graph of ATen operators, traced by AOTAutograd.",
    "partition": "This phase's graph, cut out of the joint graph; no pass has run yet.",
    "lowered": "The graph as it runs: collectives and writes are calls into fsdp_dynamo.",
    "inductor": "The code that Inductor generated from the graph.",
}
"""Stages that are not passes."""

_AFTER = "after_"


def describe_stages(artifacts: Iterable[Artifact], stages: Iterable[str]) -> dict[str, str]:
    """One line per stage.

    Args:
        artifacts: those of compilation; some list the passes with the first lines of docstrings.
        stages: names of the stages to describe.
    """
    passes: dict[str, str] = {}
    for artifact in artifacts:
        if artifact.name == STAGES:
            passes.update(json.loads(artifact.text))
    return {stage: _description(stage, passes) for stage in dict.fromkeys(stages)}


def _description(stage: str, passes: Mapping[str, str]) -> str:
    if not stage.startswith(_AFTER):
        return _STAGE_DESCRIPTIONS.get(stage, "")
    name = stage.removeprefix(_AFTER)
    return f"Pass {name}: {passes.get(stage) or 'no docstring.'}"


def initial_stage(listings: Sequence[Listing]) -> int:
    """Index of the stage that the page shows first, next to the stage before it.

    It is the last pass that changed the graph (usually the planner), or else the last stage.

    Args:
        listings: stages of one phase, in order; at least one.
    """
    indices = range(len(listings) - 1, 0, -1)
    return next((i for i in indices if is_changed(listings, i)), len(listings) - 1)


def is_changed(listings: Sequence[Listing], index: int) -> bool:
    """Whether a stage follows a pass that changed the graph."""
    listing = listings[index]
    return listing.stage.startswith(_AFTER) and listing.text != listings[index - 1].text
