"""Output besides times: traces, autograd graphs, order of events, graph counts."""

from __future__ import annotations

import difflib
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.utils import counters
from torch.profiler import profile

from benchmarks.command_line import BadInputError
from benchmarks.measure.step_profile import without_announcements
from fsdp_dynamo import record_events
from fsdp_dynamo.dynamo.progress import is_recompile


def check_backend(name: str) -> None:
    """Refuse a backend that Dynamo does not know."""
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        near = difflib.get_close_matches(name, known) or known
        raise BadInputError(
            f"--dynamo: expected a Dynamo backend, got {name!r}; did you mean {' or '.join(near)}?"
        )


def check_torchviz() -> None:
    """Refuse to draw without the package that draws."""
    if importlib.util.find_spec("torchviz") is None:
        raise BadInputError("--torchviz needs the package 'torchviz': pip install torchviz")


def draw(loss: torch.Tensor, model: nn.Module, path: Path) -> Path:
    """Write the autograd graph as a ``.dot`` file, and as SVG where Graphviz is installed."""
    import torchviz

    graph = torchviz.make_dot(loss, params=dict(model.named_parameters()))
    path.parent.mkdir(parents=True, exist_ok=True)
    graph.save(filename=path.name, directory=str(path.parent))
    if shutil.which("dot"):
        return Path(graph.render(filename=path.name, directory=str(path.parent), format="svg"))
    return path


def write_trace(step: Callable[[], None], path: Path | None) -> None:
    """Profile one step; write its trace where there is a path (ranks without one just step)."""
    profiler = profile(record_shapes=True)
    with without_announcements():
        profiler.start()
    step()
    with without_announcements():
        profiler.stop()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))


def event_order(step: Callable[[], None]) -> str:
    """Unshards, reshards, collectives and compute of one step, in order of issue."""
    with record_events() as events:
        step()
    return "\n".join(f"  {e.phase:9} {e.kind:15} {e.unit or '(root)'}" for e in events)


_recompiles: list[str] = []


def count_recompiles() -> None:
    """Count from now on what Dynamo compiles anew; ``dynamo_counts`` has the number."""
    callback_handler.register_start_callback(_note)


def _note(args: CallbackArgs) -> None:
    if is_recompile(args):
        _recompiles.append(args.compile_id)


def dynamo_counts() -> dict[str, int]:
    """Graphs and graph breaks of this process so far, and the recompiles that were counted."""
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph breaks": sum(counters["graph_break"].values()),
        "recompiles": len(_recompiles),
    }
