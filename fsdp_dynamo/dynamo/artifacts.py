"""Artifacts of compilation in torch's own trace log.

Graphs are emitted at every stage of the pass pipeline, under names such as
``fsdp_dynamo.backward.after_planner``, beside torch's artifacts. ``TORCH_TRACE=DIR`` with ``tlparse
DIR``, or ``record_artifacts``, shows them. Without a listener no text is made.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx
from torch._dynamo.callback import callback_handler  # tells when compilation begins and ends

# Private: there is no public way to add to what tlparse reads.
from torch._logging._internal import trace_structured

from fsdp_dynamo.dynamo.untraced import UNDER_LOCK, untraced
from graph_passes.graph_utils import is_backward
from graph_passes.text.listing import listing

PREFIX = "fsdp_dynamo."
DECOMPILED = PREFIX + "dynamo.decompiled"
STAGES = PREFIX + "stages"

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


def emit_stages(stages: Mapping[str, str]) -> None:
    """Emit one line of description for each stage of a pipeline, by name."""
    emit(STAGES, lambda: json.dumps(dict(stages)))


class _Listener(logging.Handler):
    def __init__(self, artifacts: list[Artifact]) -> None:
        super().__init__(logging.DEBUG)
        self._artifacts = artifacts

    def emit(self, record: logging.LogRecord) -> None:
        for each in _open:  # a reset of Dynamo dropped the callbacks; register them again
            each.listen()
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


@dataclass(frozen=True)
class Compilation:
    """Span of a compilation, in ``time.perf_counter_ns``."""

    begin_ns: int
    end_ns: int


@contextmanager
def record_compilations() -> Iterator[list[Compilation]]:
    """Collect the spans in which Dynamo, or a backward that is compiled later, compiles."""
    recording = _CompilationRecording()
    _open.append(recording)
    for each in _open:  # a reset of Dynamo may have dropped the callbacks of outer contexts
        each.listen()
    try:
        yield recording.found
    finally:
        _open.remove(recording)
        recording.stop()


class _CompilationRecording:
    def __init__(self) -> None:
        self.found: list[Compilation] = []
        self._began_ns = 0

    @untraced(UNDER_LOCK)
    def _begin(self, _: Any) -> None:
        self._began_ns = time.perf_counter_ns()

    @untraced(UNDER_LOCK)
    def _end(self, _: Any) -> None:
        self.found.append(Compilation(self._began_ns, time.perf_counter_ns()))

    def listen(self) -> None:
        if self._begin not in callback_handler.start_callbacks:
            self._began_ns = time.perf_counter_ns()
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    def stop(self) -> None:
        if self._begin in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._begin)
            callback_handler.remove_end_callback(self._end)


_open: list[_CompilationRecording] = []


def is_recording() -> bool:
    """Whether artifacts are being recorded, so that no code may come from a cache."""
    return any(isinstance(handler, _Listener) for handler in _trace_log.handlers)


__all__ = [
    "DECOMPILED",
    "PREFIX",
    "STAGES",
    "Artifact",
    "Compilation",
    "Frame",
    "emit",
    "emit_graph",
    "emit_stages",
    "is_recording",
    "record_artifacts",
    "record_compilations",
    "unit_now",
]
