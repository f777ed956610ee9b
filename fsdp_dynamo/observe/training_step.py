"""Training step of a separately compiled model for ``explain``, with its graph breaks."""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.core.unit_modules import units_in
from fsdp_dynamo.dynamo.artifacts import Artifact, Frame
from fsdp_dynamo.dynamo.private_api import (
    GRAPH_MODE,
    compile_again,
    compiled_parts,
    entry_of,
    mode_of,
)
from fsdp_dynamo.errors import FSDPStateError, FSDPTypeError, FSDPValueError
from fsdp_dynamo.graph_mode.backends import fsdp_dynamo_aot_eager
from fsdp_dynamo.observe.own_backend import OwnBackend
from fsdp_dynamo.pytree import tensors_of

Loss = Callable[[Any], torch.Tensor] | None


@dataclass(frozen=True)
class Target:
    """Model that is explained, with its units, outermost first.

    ``run`` calls the model compiled with ``backend``, inside of ``backend.apart_from``.
    """

    module: nn.Module
    run: Callable[..., Any]
    backend: OwnBackend
    is_graph_mode: bool
    units: tuple[Unit, ...]


def target_of(model: object, options: Mapping[str, Any] | None) -> Target:
    """Prepare to compile the user's model into separate code; for errors see ``explain``."""
    if not isinstance(model, nn.Module):
        raise FSDPTypeError(
            f"explain(): expected a model, or torch.compile(model), got {type(model)!r}. Pass the "
            "model that is trained."
        )
    if not torch.distributed.is_initialized():
        raise FSDPStateError(
            "explain(): expected a process group, got none. Call "
            "torch.distributed.init_process_group() first."
        )
    if torch.is_inference_mode_enabled():
        raise FSDPStateError(
            "explain(): expected a call where gradients are available, since it runs a backward, "
            "got torch.inference_mode(). Call it outside of that context."
        )
    module, backend, fullgraph = compiled_parts(model)
    units = tuple(units_in(module))
    if not units:
        raise FSDPValueError(
            "explain(): expected a model with a unit, got none. Shard it: "
            "FullyShardedDataParallel(...) or fully_shard(...)."
        )
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise FSDPValueError(
            "explain(): expected torch.compile(FullyShardedDataParallel(model), ...), got a model "
            "that was compiled before it was wrapped, or by model.compile(). Compile the wrapper "
            "by torch.compile for the explanation."
        )
    is_graph = backend is None or mode_of(backend) == GRAPH_MODE
    if options is not None and not is_graph:
        raise FSDPTypeError(
            f"explain(): expected no options in hooks mode, got {dict(options)!r}. They are those "
            'of backend="fsdp_dynamo" and "fsdp_dynamo_aot_eager".'
        )
    entry = entry_of(module, None)
    if backend is None:
        backend, fullgraph, options = fsdp_dynamo_aot_eager, True, options or {}
    own = OwnBackend(backend if options is None else getattr(backend, "compiler_fn", backend))
    run = compile_again(own, entry, fullgraph, options)
    return Target(module, run, own, is_graph, units)


def run_step(
    target: Target, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], loss_fn: Loss
) -> None:
    """Run a forward and a backward; raise ``FSDPValueError`` if there is no scalar loss."""
    with torch.enable_grad():
        output = target.run(*inputs, **kwargs)
        loss = sum_of(output) if loss_fn is None else loss_fn(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise FSDPValueError(
                "explain(): expected loss_fn(output) to be a scalar tensor that depends on the "
                f"parameters, got {getattr(loss, 'shape', type(loss))!r}. Return the loss itself."
            )
        loss.backward()  # type: ignore[no-untyped-call]


def sum_of(
    output: Any, where: str = "explain()", fix: str = "Give a loss_fn(output)."
) -> torch.Tensor:
    """Sum all floating-point outputs that require gradients.

    Raises:
        FSDPValueError: there is no such output; names the caller ``where`` and the remedy ``fix``.
    """
    tensors = [t for t in tensors_of(output) if t.is_floating_point() and t.requires_grad]
    if not tensors:
        raise FSDPValueError(
            f"{where}: expected a floating-point output that depends on the parameters, got "
            f"{type(output)!r}. {fix}"
        )
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


# -- graph breaks ----------------------------------------------------------------------------------
# Graph breaks and recompiles in the user's code, parsed from the texts of Dynamo's artifacts.


_PLACE = re.compile(r"Graph break in user code at (.+):(\d+)$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in .*\n\s*(.+)', re.MULTILINE)
_TRACEBACK = re.compile(r"^(?:User code traceback|.*in the following user code):\n", re.MULTILINE)
_REASON = re.compile(r"^Graph Break Reason: (.+(?:\n\n?.+)?)", re.MULTILINE)
_HOOKED = "_fsdp_run_hooked("  # runs a unit's hooks outside of any graph
_OF_UNIT = "the unit called here runs outside of the graph, for example since it changes an object"
_LIBRARIES = str(Path(torch.__file__).parent) + os.sep, sysconfig.get_path("stdlib") + os.sep
_OURS = tuple(
    str(Path(__file__).parents[2] / name) + os.sep for name in ("fsdp_dynamo", "graph_passes")
)


@dataclass(frozen=True)
class GraphBreak:
    """Place in the user's code where a graph ends.

    Attributes:
        file: path; empty if Dynamo names none.
        line: line number, from 1.
        code: text of the line.
        reason: Dynamo's reason, on one line.
        unit: in hooks mode, FQN of the first unit in whose body it occurred; ``""`` for the root.
    """

    file: str
    line: int
    code: str
    reason: str
    unit: str


@dataclass(frozen=True)
class Recompile:
    """Graph that was compiled again.

    Attributes:
        unit: as in ``GraphBreak``.
        guard: failed check, such as ``"tensor 'x' size mismatch at index 0. expected 3, ..."``.
    """

    unit: str
    guard: str


def graph_breaks_in(artifacts: Iterable[Artifact]) -> tuple[GraphBreak, ...]:
    """Return the places where graphs end, each once, in the order in which Dynamo met them.

    A break inside this package is reported only where a unit runs outside of the graph that calls
    it; the user's call of the unit is then the place.
    """
    found: dict[tuple[str, int, str], GraphBreak] = {}
    for artifact in artifacts:
        one = _break(artifact) if artifact.name == "dynamo_graph_break_reason" else None
        if one is not None:
            place = (one.file, one.line, "" if one.file else one.reason)
            found.setdefault(place, one)
    return tuple(found.values())


def _break(artifact: Artifact) -> GraphBreak | None:
    """Parse a graph break; ``None`` if it lies in this package and says nothing to the user."""
    text = artifact.text
    reason = _REASON.search(text)
    lines = reason[1].strip().splitlines() if reason else [text.strip().partition("\n")[0]]
    why, place = lines[-1].strip(), _PLACE.search(text)
    stack = _stack_in(text) or ([(place[1], place[2], "")] if place else [])
    file, line, code = stack[-1] if stack else ("", "0", "")
    if file.startswith(_OURS):
        callers = [frame for frame in stack if not frame[0].startswith(_OURS)]
        if _HOOKED not in code or not callers:
            return None
        (file, line, code), why = callers[-1], _OF_UNIT
    return GraphBreak(file, int(line), code.strip(), why, artifact.unit)


def _stack_in(text: str) -> list[tuple[str, str, str]]:
    """Return file, line and code of the frames of the user and this package, outermost first."""
    header = _TRACEBACK.search(text)
    if header is None:
        return []
    frames = _FRAME.findall(text[header.end() :].partition("\n\n")[0])
    ours = [i for i, (file, *_) in enumerate(frames) if file == __file__]
    return [f for f in frames[ours[-1] + 1 if ours else 0 :] if not _is_library(f[0])]


def _is_library(file: str) -> bool:
    """Return whether a file belongs to torch or the standard library."""
    return file.startswith(_LIBRARIES) and "site-packages" not in file.removeprefix(_LIBRARIES[0])


def recompiles_in(artifacts: Sequence[Artifact]) -> tuple[Recompile, ...]:
    """Return the recompiles of one backend, each once, in order.

    Dynamo also reports guards of code that another backend has compiled from the same function.
    Those are skipped: only a frame that is among ``artifacts`` counts as compiled before.
    """
    compiled: set[Frame] = set()
    found: dict[Recompile, None] = {}
    for artifact in artifacts:
        if artifact.name == "recompile_reasons":
            guard = _failed_guard(artifact.text, compiled)
            if guard:
                found[Recompile(artifact.unit, guard)] = None
        compiled.add(artifact.frame)
    return tuple(found)


def _failed_guard(text: str, compiled: set[Frame]) -> str:
    """Return the guard that failed in the newest of the ``compiled`` graphs, without its stack.

    Empty if there is none, or if the guard is on an object of this package.
    """
    reasons: Sequence[str] = json.loads(text) if text.lstrip().startswith("[") else [text]
    for reason in reasons:
        number = re.match(r"(\d+)/(\d+): ", reason)
        if number is None or Frame(int(number[1]), int(number[2])) not in compiled:
            continue
        guard, _, stack = reason[number.end() :].strip().partition("\n")
        frames = _FRAME.findall(stack)
        if frames and frames[-1][0].startswith(_OURS):
            return ""
        check, _, comment = guard.partition("  #")
        code = comment.rpartition("  #")[0].strip()
        return f"{check.strip()}  # {code}" if code else check.strip()
    return ""


__all__ = ["GraphBreak", "Recompile"]
