"""What the phases and stages are, in one line each, for those who see them for the first time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from fsdp_dynamo.dynamo.artifacts import STAGES, Artifact
from fsdp_dynamo.observe.inspection.listings import Listing

MEANING_OF_PHASES: dict[str, str] = {
    "dynamo": "What Dynamo, the front of torch.compile, read from your Python code.",
    "joint": "Forward and backward together, before they are parted.",
    "forward": "The graph of the forward.",
    "backward": "The graph of the backward.",
}
_OF_TORCH: dict[str, str] = {
    "captured": "The graph that Dynamo handed over: the calls of your model, without gradients.",
    "decompiled": "What Dynamo runs in place of your function, as Python again (by depyf).",
    "traced": "Forward and backward as one graph of small operators, made by autograd.",
    "partition": "This phase's own graph, cut out of the joint graph; no pass has run yet.",
    "lowered": "As it is run: collectives and writes are calls into fsdp_dynamo.",
    "inductor": "The code that Inductor generated from the graph.",
}
"""Stages that are no pass."""

_AFTER = "after_"


def meanings_of(artifacts: Iterable[Artifact], stages: Iterable[str]) -> dict[str, str]:
    """One line about each stage.

    Args:
        artifacts: some of them say what passes there are, with the first lines of docstrings.
        stages: names of the stages to be explained.
    """
    passes: dict[str, str] = {}
    for artifact in artifacts:
        if artifact.name == STAGES:
            passes.update(json.loads(artifact.text))
    return {stage: _meaning(stage, passes) for stage in dict.fromkeys(stages)}


def _meaning(stage: str, passes: Mapping[str, str]) -> str:
    if not stage.startswith(_AFTER):
        return _OF_TORCH.get(stage, "")
    name = stage.removeprefix(_AFTER)
    return f"Pass {name}: {passes.get(stage) or 'it has no docstring.'}"


def telling(listings: Sequence[Listing]) -> int:
    """Which stage of a phase to show first, beside the one before it.

    The planner's, which is the last pass, if it changed something; else the last pass that did;
    else the last stage.

    Args:
        listings: of one phase, in order; there is at least one.
    """
    places = range(len(listings) - 1, 0, -1)
    return next((i for i in places if is_change(listings, i)), len(listings) - 1)


def is_change(listings: Sequence[Listing], place: int) -> bool:
    """Whether a stage is behind a pass that changed something."""
    listing = listings[place]
    return listing.stage.startswith(_AFTER) and listing.text != listings[place - 1].text
