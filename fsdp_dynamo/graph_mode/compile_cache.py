"""The compile cache of Inductor and AOTAutograd: one compilation a machine.

Ranks of a machine share the cache folder, and graphs contain nothing specific to a rank. The first
process that meets a graph compiles it; the others wait and then load the result. They wait for a
file lock, which the system releases when its holder dies, and never longer than ``_PATIENCE_S``. A
process that then finds nothing in the cache compiles. No rank is asked anything, so ranks with
different folders or caches only finish at different times.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import fx
from torch._inductor.runtime.cache_dir_utils import cache_dir

import graph_passes
from fsdp_dynamo.health.store import PREFIX, default_store
from graph_passes.graph_utils import source_digest
from graph_passes.markers import BODY, UNIT
from graph_passes.scheduling.plan import GraphPlan, graph_from
from graph_passes.scheduling.schedule import launches_of

Result = TypeVar("Result")

_PATIENCE_S = 900
"""A process waits no longer than this for another one to compile."""
_POLL_S = 0.05


def own_folder() -> Path:
    """Return the folder of our files in the cache: measured rates and locks."""
    return Path(cache_dir()) / "fsdp_dynamo"


def own_file(suffix: str, *what: str) -> Path:
    """Return the path of a file in ``own_folder()`` that is named by a digest of ``what``."""
    digest = hashlib.sha256("\n".join(what).encode()).hexdigest()[:24]
    return own_folder() / f"{digest}{suffix}"


def graph_key(gm: fx.GraphModule, inputs: Sequence[Any], *parts: str) -> str:
    """Return a key of Dynamo's graph, the same on all ranks that can share its code.

    Generated code names its device, so ranks on ``cuda:0`` and ``cuda:1`` have different keys.
    ``parts`` are what else the compilation depends on.
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
    """Compile a graph, or let another process that shares the cache compile it first.

    Args:
        key: ``graph_key`` of the graph; ``None``: do not wait for other processes.
        compile_: compiles, or loads from the cache. It must not wait for another rank.
    """
    with nullcontext() if key is None else _one_compiles(key):
        return compile_()


@contextmanager
def _one_compiles(key: str) -> Iterator[None]:
    """Let one process at a time run the body, until one has finished it; afterwards all may.

    The lock is a file for each graph. It is not empty once the graph has been compiled.
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
            fcntl.flock(file, fcntl.LOCK_UN)  # processes may load at the same time
        yield
        if has_lock:
            with suppress(OSError):
                file.write(b"compiled\n")


def _is_compiled(file: BinaryIO) -> bool:
    return os.fstat(file.fileno()).st_size > 0


def _lock(file: BinaryIO) -> bool:
    """Take the lock; return false if the file system has no locks or it takes too long."""
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


__all__: Sequence[str] = [
    "compile_once",
    "graph_key",
    "own_file",
    "own_folder",
]


# -- cache keys ------------------------------------------------------------------------------------
# Parts of cache keys: digests of source files, and of the marks of a graph.


_MARKS = (BODY, UNIT)


def source_key() -> str:
    """Digest of the code that partitions, rewrites and lowers graphs."""
    passes = Path(graph_passes.__path__[0])
    return f"{source_digest(Path(__file__).parent)}.{source_digest(passes)}"


def marks_key(gm: fx.GraphModule) -> str:
    """Digest of all marks of a graph, in order.

    Cache keys of Inductor and AOTAutograd ignore annotations, but partition and generated code
    depend on them: graphs that differ only in their units must not share code.
    """
    digest = hashlib.sha256()
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                custom = node.meta.get("custom") or {}
                digest.update(repr([custom.get(key) for key in _MARKS]).encode())
    return digest.hexdigest()


# -- shared plans ----------------------------------------------------------------------------------
# One plan for all ranks, even if their batches have different sizes.
#
# A plan follows from compute times, and so from the size of this rank's batch. Ranks with batches
# of different lengths would launch collectives in different orders. They also compile at different
# times, each when it first sees a length, so a rank cannot ask the others. Instead, the first rank
# to plan a graph of these units writes its plan to the store, and all ranks follow it from then
# on::
#
#     rank 0, 480 tokens   decides first and publishes its plan
#     rank 1, 512 tokens   decides, then takes rank 0's order where its own differs
#
# The plan of code from a cache counts as this rank's decision. If the ranks of this run follow
# another plan, the code is compiled again for that plan.


class SharedPlans:
    """Plans that ranks follow in the graphs that are made of one graph of Dynamo's.

    Args:
        marks: marks of its collectives; graphs with equal marks share their plans.
        decided_by: text of everything else that plans depend on, the same on all ranks.
    """

    def __init__(self, marks: Sequence[str], decided_by: str) -> None:
        parts = (*marks, decided_by, source_key(), str(torch.is_grad_enabled()))
        self._key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        self._others: dict[str, str] = {}

    def __call__(self, plan: GraphPlan) -> GraphPlan:
        """Return the plan of the rank that came first, which may be this one."""
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
        """Return a key of the plans that code from the cache did not have."""
        return json.dumps(self._others, sort_keys=True) if self._others else ""

    def are_followed(self, plans: Iterable[GraphPlan]) -> bool:
        """Return whether the ranks follow these plans; if not, ``cache_key`` changes."""
        agreed = [(plan, _digest(self(plan))) for plan in plans]
        others = {plan.phase: digest for plan, digest in agreed if digest != _digest(plan)}
        self._others |= others
        return not others


def _digest(plan: GraphPlan) -> str:
    """Digest of the part of a plan that all ranks must have in common."""
    return hashlib.sha256(repr(launches_of(plan)).encode()).hexdigest()[:32]
