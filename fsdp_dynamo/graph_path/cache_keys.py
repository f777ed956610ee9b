"""Parts of compile-cache keys: source files, and the marks of a graph."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import fx

import graph_passes
from graph_passes.markers import BODY, UNIT
from graph_passes.source_digest import source_digest

_MARKS = (BODY, UNIT)


def source_key() -> str:
    """Digest of the code that partitions, rewrites and lowers graphs."""
    passes = Path(graph_passes.__path__[0])
    return f"{source_digest(Path(__file__).parent)}.{source_digest(passes)}"


def marks_key(gm: fx.GraphModule) -> str:
    """Digest of all marks in order.

    Cache keys of Inductor and AOTAutograd know nothing of annotations, but partition and generated
    code hold what is made of them: two graphs that differ in their units alone must not share code.
    """
    digest = hashlib.sha256()
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                custom = node.meta.get("custom") or {}
                digest.update(repr([custom.get(key) for key in _MARKS]).encode())
    return digest.hexdigest()
