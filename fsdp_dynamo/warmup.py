"""Compile before the first step, on all ranks together."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.core.unit_modules import clear_gradients, preserve_state, roots_in, units_in
from fsdp_dynamo.dynamo.private_api import compiled_parts
from fsdp_dynamo.dynamo.progress import told
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.graph_mode.compile_cache import require_usable_folder, source_key
from fsdp_dynamo.graph_mode.options import GraphOptions
from fsdp_dynamo.graph_mode.planning import adopt_rates, known_rates
from fsdp_dynamo.graph_mode.traced_unit import groups_in_graph
from fsdp_dynamo.health.comparison import first_difference, require_same, share_from_first
from fsdp_dynamo.observe.training_step import sum_of
from fsdp_dynamo.state_dict.methods import uncompiled
from fsdp_dynamo.version import __version__

Step = Callable[[Any, Any], torch.Tensor]
"""Called with the model and a batch; returns the loss, a scalar."""


def warmup(
    model: nn.Module,
    batches: Iterable[Any],
    step: Step | None = None,
    *,
    accumulation: bool = False,
    evaluation: bool = False,
) -> None:
    """Run a forward and a backward of each batch, so that all that they need is compiled.

    Every rank calls it with as many batches, before the first step. No rank begins a batch before
    all have done the one before, and none is called late while another compiles. Parameters,
    gradients, buffers and random states are afterwards what they were; under ``torch.no_grad()``
    only the forwards run. A batch that takes more than 5 s is told on rank 0's stderr.

    Args:
        model: compiled or not.
        batches: one of each shape that will come: a tensor, or a tuple of positional or a dict of
            keyword inputs.
        step: the loss of ``(model, batch)``, as the training computes it; by default the sum of
            all outputs.
        accumulation: also compile what a step under ``no_sync()`` needs, and the step that
            reduces what such steps have left.
        evaluation: also compile a forward in evaluation mode without gradients.

    Raises:
        FSDPValueError: no module of ``model`` is a unit; ``step`` returns no loss; without
            ``step``, no output depends on a parameter.
        DivergenceError: ranks give different numbers of batches, or one does not come.
    """
    given = list(batches)
    module = uncompiled(model)
    units = _units_of(module)
    groups = units[0].config.groups.all

    def run(batch: Any) -> None:
        loss = _loss_of_outputs(model, batch) if step is None else step(model, batch)
        if torch.is_grad_enabled():
            _require_loss(loss)
            loss.backward()  # type: ignore[no-untyped-call]

    with preserve_state(module, units):
        for number, batch in enumerate(given, 1):
            for group in groups:
                require_same(group, "batch to warm up", f"{number} of {len(given)}")
            with told(f"warming up with batch {number} of {len(given)}"):
                run(batch)
                if accumulation:
                    with ExitStack() as stack:
                        for root in roots_in(module):
                            stack.enter_context(root.no_sync())
                        run(batch)
                    run(batch)
                clear_gradients(list(module.parameters()), units)
                if evaluation:
                    with _in_evaluation(module), torch.no_grad():
                        run(batch)
    for group in groups:
        require_same(group, "end of the warm-up", "reached")


@contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    were_training = [one for one in module.modules() if one.training]
    module.eval()
    try:
        yield
    finally:
        for one in were_training:
            one.training = True


def _require_loss(loss: object) -> None:
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return
    got = f"a tensor {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
    raise FSDPValueError(
        "warmup(): expected a loss, one number that depends on a parameter, from step, got "
        f"{got}. Let step return the loss; warmup() calls backward()."
    )


def _units_of(module: nn.Module) -> list[Unit]:
    units = units_in(module)
    if not units:
        raise FSDPValueError(
            f"warmup(): expected a model with units, got {type(module).__name__}. Wrap it first: "
            "FSDP(model), or fully_shard(model)."
        )
    return units


def _loss_of_outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    if not torch.is_grad_enabled():
        return torch.zeros(())
    return sum_of(output, "warmup()", "Pass step=, which returns the loss.")


# -- precompiled -----------------------------------------------------------------------------------
# Compiled code in one file: written by one job, loaded by every rank of later ones.
#
# The file is a zip of a compile cache that has been filled by ``warmup`` alone, and of what it is
# good for. Graphs hold nothing of a rank, so what the first rank has compiled serves all. Kernels
# hold nothing of the number of ranks, either: in groups of other sizes graphs are divided and
# planned anew, and most of their stretches are found in the file.


_log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_FILES = "cache/"
_WHAT = "precompiled file"

_Facts = dict[str, Any]


def precompile(
    model: nn.Module, batches: Iterable[Any], path: str | Path, step: Step | None = None
) -> None:
    """Compile all that batches need as ``warmup`` does, and write the code to one file.

    Every rank calls it; the first one compiles for the file, with an empty cache, and writes it.
    What this process had compiled before is compiled again.

    Args:
        model: ``torch.compile(model, fullgraph=True, backend="fsdp_dynamo")``.
        batches: see ``warmup``.
        path: of the file; one that exists is replaced.
        step: see ``warmup``.

    Raises:
        FSDPValueError: the model is not compiled so, or see ``warmup``.
        DivergenceError: on the other ranks, when the first one cannot write; see also ``warmup``.
        OSError: on the first rank, which cannot write.
    """
    module, facts = _facts_of(model, "precompile()")
    units = units_in(module)
    groups = _groups_of(units)
    group = units[0].config.groups.all[0]
    torch.compiler.reset()
    with ExitStack() as stack:
        if dist.get_rank() == dist.get_process_group_ranks(group)[0]:
            stack.enter_context(fresh_cache())
        warmup(model, batches, step)
        sizes = [one.size() for one in groups]
        manifest = {"facts": facts, "ranks": sizes, "rates": known_rates(groups)}
        share_from_first(group, _WHAT, lambda: _write(Path(path), manifest))


def load_precompiled(model: nn.Module, path: str | Path) -> None:
    """Put the code of a file of ``precompile`` into this machine's compile cache.

    Every rank calls it, before the first step. The first step then traces the model and loads its
    code; whatever the file does not have is compiled as always. Where the job has another number of
    ranks than the file's, graphs are made anew, and their kernels are loaded. As code is run from
    it, load only files that you would run.

    Args:
        model: compiled as it was for ``precompile``.
        path: of the file.

    Raises:
        FSDPValueError: on all ranks: the file cannot be read, or is for another model, other
            options, versions, strategies or processor; the message says what differs.
        DivergenceError: on all ranks: they have different files.
    """
    module, facts = _facts_of(model, "load_precompiled()")
    units = units_in(module)
    require_usable_folder()
    refusal = None
    try:
        manifest, digest = _read(Path(path), facts)
    except FSDPValueError as error:
        refusal, digest = error, str(error).replace(str(path), "")  # ranks may name it otherwise
    for group in units[0].config.groups.all:
        require_same(group, _WHAT, digest)
    if refusal is not None:
        raise refusal
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.startswith(_FILES):
                _unpack(archive, name)
    groups = _groups_of(units)
    sizes = [one.size() for one in groups]
    if sizes == manifest["ranks"]:
        adopt_rates(groups, manifest["rates"])
    else:
        _log.info(
            "%s is of a job whose groups had %s ranks; these have %s. Graphs are made anew, "
            "kernels are loaded.",
            path,
            manifest["ranks"],
            sizes,
        )


# -- what the code is good for -------------------------------------------------------------------


def _facts_of(model: nn.Module, where: str) -> tuple[nn.Module, _Facts]:
    """The uncompiled model, and all that code compiled for it depends on.

    Raises:
        FSDPValueError: no model that the backend ``"fsdp_dynamo"`` compiles, or one without units.
    """
    module, backend, fullgraph = compiled_parts(model)
    name = getattr(backend, "compiler_name", None)
    units = units_in(module)
    if name != "fsdp_dynamo" or not fullgraph or not units:
        raise FSDPValueError(
            f'{where}: expected torch.compile(model, fullgraph=True, backend="fsdp_dynamo") of a '
            f"model with units, got {type(model).__name__} with backend {name!r} and {len(units)} "
            "units. Wrap the model, compile it so, and pass what torch.compile returns. Other "
            "backends keep no code."
        )
    arguments: dict[str, Any] = getattr(backend, "kwargs", {})
    return module, {
        "version of torch": torch.__version__,
        "version of fsdp_dynamo": f"{__version__}, sources {source_key()}",
        "version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "processor": _processor(units),
        "mode": arguments.get("mode", "default"),
        "options": GraphOptions.parse(arguments.get("options")).text(),
        "units": list(_lines_of(units)),
    }


def _processor(units: list[Unit]) -> str:
    """Code for a CPU is compiled for what that CPU can do."""
    device = units[0].flats[0].device if units[0].flats else torch.device("cpu")
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name())
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        described = ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", described, re.MULTILINE)
    digest = hashlib.sha256((flags[1] if flags else "").encode()).hexdigest()[:8]
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {digest}"


def _lines_of(units: list[Unit]) -> Iterator[str]:
    """A line for each parameter, with the groups that it is gathered and reduced in."""
    groups = _groups_of(units)
    for unit in units:
        for flat in unit.flats:
            dtypes = f"{flat.param_dtype}, reduced as {flat.reduce_dtype}"
            gathers, reductions = groups_in_graph(flat)
            reduced_in = ", ".join(str(groups.index(group)) for group in reductions)
            where = f"gathered in group {groups.index(gathers)}, reduced in {reduced_in or 'none'}"
            for original, slot in zip(flat.originals, flat.layout.slots, strict=True):
                shape = "x".join(map(str, slot.shape)) + (f" by {slot.dim}" if slot.dim else "")
                yield f"unit '{unit.fqn}': {original.fqn} {shape} {dtypes}, {where}"


def _groups_of(units: list[Unit]) -> list[dist.ProcessGroup]:
    """The groups of a model's graphs, in order."""
    pairs = [groups_in_graph(flat) for unit in units for flat in unit.flats]
    gathers = [group for group, _ in pairs]
    return list(dict.fromkeys([*gathers, *(group for _, groups in pairs for group in groups)]))


# -- the file ----------------------------------------------------------------------------------


def _write(path: Path, manifest: dict[str, Any]) -> str:
    """Write the file whole, or not at all; returns its path."""
    folder = Path(cache_dir())
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_MANIFEST, json.dumps(manifest, indent=1))
            for file in sorted(folder.rglob("*")):
                name = file.relative_to(folder)
                if file.is_file() and file.suffix != ".lock" and name.parts[0] != "fsdp_dynamo":
                    archive.write(file, _FILES + name.as_posix())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return str(path)


def _read(path: Path, facts: _Facts) -> tuple[dict[str, Any], str]:
    """The manifest of a file that is whole and good for ``facts``, and a digest of the file.

    Raises:
        FSDPValueError: it is not.
    """
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            manifest: dict[str, Any] = json.loads(archive.read(_MANIFEST))
        found = manifest["facts"]
    except (OSError, zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
        got = f"{type(error).__name__}: {error}"
        raise _refusal(path, "a file of precompile()", got) from error
    if damaged is not None:
        raise _refusal(path, "a file of precompile()", f"a damaged part, {damaged}")
    for name, wanted in facts.items():
        if found.get(name) != wanted:
            raise _refusal(path, *_difference(name, wanted, found.get(name)))
    return manifest, digest


def _difference(name: str, wanted: Any, found: Any) -> tuple[str, str]:
    """Expected and found value as text; of lists, the first item that differs."""
    if isinstance(wanted, list) and isinstance(found, list):
        position = first_difference(wanted, found) or 0
        wanted, found = (
            "".join(lines[position : position + 1]) or "no further parameter"
            for lines in (wanted, found)
        )
    return f"{name}: {wanted}", str(found)


def _refusal(path: Path, expected: str, got: str) -> FSDPValueError:
    return FSDPValueError(
        f"load_precompiled(), {path}: expected {expected}, got {got}. Write the file anew with "
        "precompile(), in a job like this one, or go on without it."
    )


def _unpack(archive: zipfile.ZipFile, name: str) -> None:
    """Write one file to the compile cache, whole, where it is not there yet."""
    folder = Path(cache_dir()).resolve()
    target = (folder / name.removeprefix(_FILES)).resolve()
    if not target.is_relative_to(folder) or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    with archive.open(name) as source, draft.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    draft.replace(target)


__all__ = ["Step", "load_precompiled", "precompile", "warmup"]
