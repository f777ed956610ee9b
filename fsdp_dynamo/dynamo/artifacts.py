"""Artifacts of compilation in torch's own trace log.

Graphs are emitted at every stage of the pass pipeline, under names such as
``fsdp_dynamo.backward.after_planner``, beside torch's artifacts. ``TORCH_TRACE=DIR`` with ``tlparse
DIR``, or ``record_artifacts``, shows them. Without a listener no text is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

# Private: there is no public way to add to what tlparse reads.
from torch._logging._internal import trace_structured

from graph_passes.graph_utils import is_backward
from graph_passes.text.listing import listing

PREFIX = "fsdp_dynamo."
DECOMPILED = PREFIX + "dynamo.decompiled"

_trace_log = logging.getLogger("torch.__trace")

unit_now: ContextVar[str] = ContextVar("unit_now", default="")
"""FQN of the unit whose body runs in hooks mode."""


class Frame(NamedTuple):
    """Number of a compilation in Dynamo's count; -1 where there is none."""

    number: int
    recompile: int


@dataclass(frozen=True)
class Artifact:
    """Entry of torch's trace log.

    Attributes:
        name: name of the artifact, or the kind of entry (``"aot_joint_graph"``).
        frame: compilation that wrote it.
        unit: FQN of the unit whose body ran; ``""`` for the root, and in graph mode.
        text: payload.
    """

    name: str
    frame: Frame
    unit: str
    text: str


def emit(name: str, text: Callable[[], str]) -> None:
    """Write an artifact to torch's trace log; ``text`` is called only if there is a listener."""

    def metadata() -> dict[str, Any]:
        return {"name": name, "encoding": "string"}

    trace_structured("artifact", metadata, payload_fn=text, expect_trace_id=False)


def emit_graph(graph: fx.Graph, stage: str, phase: str = "") -> None:
    """Emit a graph in its current form.

    Args:
        graph: the graph.
        stage: name of the stage, such as ``"partition"`` or ``"after_planner"``.
        phase: by default ``"forward"`` or ``"backward"``, read off the graph.
    """

    def text() -> str:
        return listing(graph, phase)

    phase = phase or ("backward" if is_backward(graph) else "forward")
    emit(f"{PREFIX}{phase}.{stage}", text)


class _Listener(logging.Handler):
    def __init__(self, artifacts: list[Artifact]) -> None:
        super().__init__(logging.DEBUG)
        self._artifacts = artifacts

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None)
        payload = getattr(record, "payload", None)
        if not isinstance(metadata, dict) or not isinstance(payload, str):
            return
        kind = next(iter(metadata), "")
        name = metadata[kind].get("name", "") if kind == "artifact" else kind
        frame = Frame(metadata.get("frame_id", -1), metadata.get("frame_compile_id", -1))
        self._artifacts.append(Artifact(name, frame, unit_now.get(), payload))


@contextmanager
def record_artifacts() -> Iterator[list[Artifact]]:
    """Collect what is written to torch's trace log in the context, in order."""
    listener = _Listener([])
    _trace_log.addHandler(listener)
    try:
        yield listener._artifacts
    finally:
        _trace_log.removeHandler(listener)


def is_recording() -> bool:
    """Whether artifacts are being recorded, so that no code may come from a cache."""
    return any(isinstance(handler, _Listener) for handler in _trace_log.handlers)


__all__ = [
    "DECOMPILED",
    "PREFIX",
    "Artifact",
    "Frame",
    "emit",
    "emit_graph",
    "is_recording",
    "record_artifacts",
    "unit_now",
]
