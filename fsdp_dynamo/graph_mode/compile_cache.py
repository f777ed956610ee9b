"""The compile cache of Inductor and AOTAutograd: a folder that can be used, and one compilation.

Ranks of a machine share the folder, and graphs hold nothing of a rank: the first process that
meets a graph compiles it, the others wait for it and load what it has written. They wait for a lock
of the file system, which goes with the process that holds it, and never for long; whoever does not
find the graph compiles it. No rank is asked anything, so ranks with other folders, or with code in
their cache that others lack, only differ in when they are done.

A folder that cannot be written (read-only, full), or whose files are damaged, would end the run. It
is left for a temporary one, with a warning that says why.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import fx
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache

import graph_passes
from fsdp_dynamo.health.store import PREFIX, default_store
from graph_passes.graph_utils import source_digest
from graph_passes.markers import BODY, UNIT
from graph_passes.scheduling.plan import GraphPlan, graph_from
from graph_passes.scheduling.schedule import launches_of

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

_UNWRITABLE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
_PATIENCE_S = 900
"""After this a process no longer waits for another to compile: it may have been stopped."""
_POLL_S = 0.05
_MAX_SHOWN = 300

_temporary: ExitStack | None = None
"""Leaves the temporary folder of this process; ``None``: it uses the one it was given."""


def own_folder() -> Path:
    """Our files in the cache's folder: measured rates, marks of probes, and locks.

    Raises:
        OSError: the cache's folder cannot be made.
    """
    return Path(cache_dir()) / "fsdp_dynamo"


def own_file(suffix: str, *what: str) -> Path:
    """A file in ``own_folder()``: another one where one of the texts differs.

    Raises:
        OSError: as ``own_folder()``.
    """
    digest = hashlib.sha256("\n".join(what).encode()).hexdigest()[:24]
    return own_folder() / f"{digest}{suffix}"


def require_usable_folder() -> None:
    """Use a temporary folder if no file can be written to the cache's."""
    if _temporary is not None:
        return
    try:
        own_folder().mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=own_folder()) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        _use_temporary_folder(_reason(error), with_files=True)


def graph_key(gm: fx.GraphModule, inputs: Sequence[Any], *parts: str) -> str:
    """Key of a graph as Dynamo has traced it, the same on all ranks that can share its code.

    (Generated code names its device: ranks with ``cuda:0`` and ``cuda:1`` need not wait.)

    Args:
        gm: the graph.
        inputs: tensors and sizes that it is traced with.
        parts: of what compiles it.
    """
    shown = [
        f"{tuple(one.shape)} {one.dtype} {one.device}"
        if isinstance(one, torch.Tensor)
        else str(one)
        for one in inputs
    ]
    codes = [each.code for each in gm.modules() if isinstance(each, fx.GraphModule)]
    text = "\0".join((torch.__version__, *parts, *shown, *codes))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def compile_once(key: str | None, compile_: Callable[[], Result]) -> Result:
    """Compile a graph, or let a process that shares the cache do so first.

    Args:
        key: of the graph, from ``graph_key``; ``None``: every process compiles.
        compile_: compiles, or loads from the cache. It must wait for no other rank. Called once
            more where the cache's folder was at fault.

    Raises:
        Exception: what ``compile_`` raised the first time.
    """
    try:
        with nullcontext() if key is None else _one_compiles(key):
            return compile_()
    except Exception as error:
        cause = _fault_of_folder(error)
        if cause is None or _temporary is not None:
            raise
        unwritable = isinstance(cause, OSError) and cause.errno in _UNWRITABLE
        _use_temporary_folder(_reason(cause), with_files=unwritable)
        try:
            return compile_()
        except Exception as again:
            _leave_temporary_folder()  # it was not the folder
            raise error from again


# -- one process compiles ----------------------------------------------------------------------


@contextmanager
def _one_compiles(key: str) -> Iterator[None]:
    """Open in one process at a time until one has come to the end; later in all of them.

    A file for each graph is the lock, and no longer empty when the graph has been compiled.
    """
    try:
        own_folder().mkdir(exist_ok=True)
        file = (own_folder() / f"{key}.lock").open("ab", buffering=0)
    except OSError:
        yield
        return
    with file:
        has_lock = not _is_compiled(file) and _lock(file)
        if has_lock and _is_compiled(file):
            has_lock = False
            fcntl.flock(file, fcntl.LOCK_UN)  # what others load, they load side by side
        yield
        if has_lock:
            with suppress(OSError):
                file.write(b"compiled\n")


def _is_compiled(file: BinaryIO) -> bool:
    return os.fstat(file.fileno()).st_size > 0


def _lock(file: BinaryIO) -> bool:
    """Whether this process holds the lock; false if the file system has none or it takes long."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)
        except OSError:
            return False
        else:
            return True
    return False


# -- another folder ----------------------------------------------------------------------------


def _fault_of_folder(error: BaseException) -> BaseException | None:
    """The error in a chain of them that the cache's folder is to blame for, if any."""
    try:
        folder = cache_dir()
    except OSError as cause:
        return cause
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and one not in seen:
            seen.append(one)
            inner = getattr(one, "inner_exception", None)  # Inductor keeps the cause there
            waiting += [one.__context__, one.__cause__, inner]
    for one in reversed(seen):
        if isinstance(one, OSError) and one.errno in _UNWRITABLE:
            return one
    return next((one for one in reversed(seen) if folder in _text(one)), None)


def _text(error: BaseException) -> str:
    """The message, and the file of the module that lacks something: code that was cut off."""
    return f"{error} {getattr(getattr(error, 'obj', None), '__file__', '')}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:_MAX_SHOWN]


def _use_temporary_folder(reason: str, with_files: bool) -> None:
    """Go on in a folder that is removed at the end of the process.

    Args:
        reason: of the warning.
        with_files: whether what the other folder holds can be read.
    """
    global _temporary
    left = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "the default folder")
    _temporary = ExitStack()
    _temporary.enter_context(fresh_cache())
    atexit.register(_leave_temporary_folder)
    if with_files and Path(left).is_dir():
        _link_files(left, cache_dir())
    _log.warning(
        "%s",
        f"TORCHINDUCTOR_CACHE_DIR, {left}: expected a compile cache that can be read and "
        f"written, got {reason}. This process goes on with a temporary folder, and compiles "
        "anew what it needs; results are the same. Free space, make the folder writable, or "
        "remove it.",
    )


def _link_files(source: str, target: str) -> None:
    """Links to all files, so that what was compiled is found; new files come beside them."""
    with suppress(OSError, shutil.Error):
        shutil.copytree(
            source,
            target,
            copy_function=os.symlink,
            ignore=lambda folder, names: [n for n in names if n.endswith(".lock")],
            dirs_exist_ok=True,
        )


def _leave_temporary_folder() -> None:
    global _temporary
    if _temporary is not None:
        stack, _temporary = _temporary, None
        stack.close()
        atexit.unregister(_leave_temporary_folder)


__all__: Sequence[str] = [
    "compile_once",
    "graph_key",
    "own_file",
    "own_folder",
    "require_usable_folder",
]


# -- cache keys ------------------------------------------------------------------------------------
# Parts of compile-cache keys: source files, and the marks of a graph.


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


# -- shared plans ----------------------------------------------------------------------------------
# One plan for all ranks, also where their batches have different sizes.
#
# Places follow from the time that a graph computes, and so from the size of this rank's batch.
# Ranks whose batches differ in length would launch collectives in different orders. They also
# compile at different times, each when a length is new to it, so nobody can be asked: the rank
# that is the first to plan a graph of some units writes its plan to the store, and all follow it
# from then on::
#
#     rank 0, 480 tokens   decides, is the first: its plan
#     rank 1, 512 tokens   decides, and takes rank 0's order where its own differs
#
# Code from a cache has been planned before. Its plan counts as a decision, too: if it is not the
# one that the ranks of this run follow, the code is compiled for that one.


class SharedPlans:
    """The plans that ranks follow in the graphs that are made of one of Dynamo's.

    Args:
        marks: of the collectives; graphs with the same ones share their plans.
        decided_by: what plans follow from besides it, the same on all ranks.
    """

    def __init__(self, marks: Sequence[str], decided_by: str) -> None:
        parts = (*marks, decided_by, source_key(), str(torch.is_grad_enabled()))
        self._key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        self._others: dict[str, str] = {}

    def __call__(self, plan: GraphPlan) -> GraphPlan:
        """The plan of the rank that was first; it may be this one's."""
        store = default_store()
        if store is None:
            return plan
        key, own = f"{PREFIX}/plan/{self._key}/{plan.phase}", _digest(plan)
        first = store.get(key).decode() if store.check([key]) else ""
        if not first:
            store.set(f"{key}/{own}", json.dumps(asdict(replace(plan, digest=""))))
            first = store.compare_set(key, "", own).decode()
        if first == own:
            return plan
        return graph_from(json.loads(store.get(f"{key}/{first}").decode()))

    def cache_key(self) -> str:
        """Key of plans that code from the cache did not have."""
        return json.dumps(self._others, sort_keys=True) if self._others else ""

    def are_followed(self, plans: Iterable[GraphPlan]) -> bool:
        """Whether these are the ranks' plans; if not, ``cache_key`` is another one from now on."""
        agreed = [(plan, _digest(self(plan))) for plan in plans]
        others = {plan.phase: digest for plan, digest in agreed if digest != _digest(plan)}
        self._others |= others
        return not others


def _digest(plan: GraphPlan) -> str:
    """Digest of the part of a plan that all ranks must have in common."""
    return hashlib.sha256(repr(launches_of(plan)).encode()).hexdigest()[:32]
