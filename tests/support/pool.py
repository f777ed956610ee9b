"""A pool of ranks: processes started once, reused by every test that needs ranks.

They are forked from a server that has imported torch, so to start them anew takes no time.
A job is a top-level function ``fn(rank, world_size, *args)``. The first ``world_size``
processes form a fresh default gloo group for it, run it, and give its return values back.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing as mp
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import durability

MAX_RANKS = 4
RATES = {
    "link": {"latency_ms": 0.1, "bytes_per_ms": 1e6},
    "device": {"flops_per_ms": 3e7, "bytes_per_ms": 5e6},
}
"""In place of what is measured: where collectives go must not depend on the machine."""

_PRELOADED = ["pytest", "torch._inductor.compile_fx", "torch.distributed.checkpoint", "fsdp_dynamo"]

_jobs = itertools.count()


class RankFailedError(AssertionError):
    """A rank raised, on whatever thread, or did not answer in time."""


def _resolve(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    target: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        target = getattr(target, part)
    return target


def _collect_unhandled() -> list[str]:
    """Tracebacks of what fails in threads and destructors from now on, where none is raised."""
    found: list[str] = []

    def in_thread(args: threading.ExceptHookArgs) -> None:
        lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        found.append(f"unhandled in thread {args.thread and args.thread.name}:\n{''.join(lines)}")

    def unraisable(args: Any) -> None:
        lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        found.append(f"{args.err_msg or 'unraisable'} in {args.object!r}:\n{''.join(lines)}")

    threading.excepthook, sys.unraisablehook = in_thread, unraisable
    return found


def _serve(rank: int, pipe: Connection, paths: list[str]) -> None:
    """Main loop of one rank."""
    sys.path[:0] = [p for p in paths if p not in sys.path]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("FSDP_DYNAMO_FLIGHT", "0")  # what fails in tests is meant to
    import torch
    import torch.distributed as dist
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.utils._pytree import tree_map_only

    from fsdp_dynamo.graph_mode import calibration

    # A failed assertion in a rank shows its values, as it does in pytest's own process.
    install_importhook(get_config()).fnpats[:] = ["test_*.py"]
    torch.set_num_threads(1)
    calibration.measured = functools.wraps(calibration.measured)(lambda group, device: RATES)
    calibration.measured_formats = functools.wraps(calibration.measured_formats)(
        lambda group, device, formats: {}
    )
    durability.check_checkpoints()
    unhandled = _collect_unhandled()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if job is None:
            return
        name, world_size, store, args, timeout = job
        answer: tuple[bool, Any]
        faulthandler.dump_traceback_later(timeout * 0.9)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
            # A rank whose job communicates nothing may end before another has connected to it.
            dist.barrier()
            torch.manual_seed(0)
            found = _resolve(name)(rank, world_size, *args)
            # A DTensor has no memory of its own, and cannot be sent.
            answer = (True, tree_map_only(DTensor, lambda value: value.detach().to_local(), found))
        except BaseException:  # noqa: BLE001  # the test gets the traceback, whatever it was
            answer = (False, traceback.format_exc())
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.unfreeze()  # what a census has frozen
            _clear_sharding_prop_cache()  # it has meshes, by what they look like, of dead groups
            torch._dynamo.reset()
        if not torch.is_grad_enabled():  # the next job would compare less, without a word
            torch.set_grad_enabled(True)
            unhandled.append("the job left gradients disabled")
        if unhandled:  # in this job, or since the one before
            texts = [*unhandled, *([] if answer[0] else [answer[1]])]
            answer = (False, "\n".join(texts))
            unhandled.clear()
        pipe.send(answer)


def _failures(answers: Mapping[int, tuple[bool, Any]]) -> list[str]:
    """Tracebacks of the ranks that failed."""
    return [f"rank {rank}:\n{text}" for rank, (ok, text) in answers.items() if not ok]


class RankPool:
    """Starts ranks when first needed; restarts them all after a failure or a hang."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Connection]] = []

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 240.0,
    ) -> list[Any]:
        """Run ``fn`` on ``world_size`` ranks; returns what each returned.

        Raises:
            RankFailedError: with the tracebacks of all ranks that failed.
        """
        with self._job(fn, world_size, args, timeout):
            answers = self._answers(range(world_size), timeout)
            if failed := _failures(answers):
                raise RankFailedError("\n".join(failed))
        return [value for _, value in answers.values()]

    def run_and_kill(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        victims: Sequence[int],
        when: Callable[[], None],
        timeout: float = 60.0,
    ) -> dict[int, tuple[bool, Any]]:
        """Start a job, and ``kill -9`` some ranks when ``when`` returns.

        Returns:
            Of each other rank, whether it has returned, and what, or its traceback.

        Raises:
            RankFailedError: one of the others hangs or has died.
        """
        with self._job(fn, world_size, args, timeout):
            when()
            for rank in victims:
                self._ranks[rank][0].kill()
            for rank in victims:
                self._ranks[rank][0].join()
            others = [rank for rank in range(world_size) if rank not in victims]
            answers = self._answers(others, timeout)
        self.stop()
        return answers

    @contextmanager
    def _job(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float
    ) -> Iterator[None]:
        self._start(world_size)
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / f"store{next(_jobs)}")
            name = f"{fn.__module__}:{fn.__qualname__}"
            for _, pipe in self._ranks[:world_size]:
                pipe.send((name, world_size, store, args, timeout))
            try:
                yield
            except BaseException:
                self.stop()  # else the next job would get the answers of this one
                raise

    def _answers(self, ranks: Iterable[int], timeout: float) -> dict[int, tuple[bool, Any]]:
        """Of each rank, whether its job has returned, and what, or its traceback.

        Raises:
            RankFailedError: a rank has died, or not answered in time.
        """
        deadline = time.monotonic() + timeout
        answers: dict[int, tuple[bool, Any]] = {}
        lost: list[str] = []
        for rank in ranks:
            _, pipe = self._ranks[rank]
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    answers[rank] = pipe.recv()
                else:
                    lost.append(f"rank {rank}: no answer within {timeout:g} s")
            except (EOFError, ConnectionResetError):
                lost.append(f"rank {rank}: the process died")
        if lost:
            raise RankFailedError("\n".join([*lost, *_failures(answers)]))
        return answers

    def _start(self, count: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        while len(self._ranks) < count:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(len(self._ranks), theirs, list(sys.path)), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def stop(self) -> None:
        """End all ranks."""
        for _, pipe in self._ranks:
            pipe.close()  # a rank that waits for a job ends by itself
        deadline = time.monotonic() + 3
        for process, _ in self._ranks:
            process.join(max(0, deadline - time.monotonic()))
            process.terminate()
        for process, _ in self._ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._ranks = []


def on_ranks(world_size: int, timeout: float = 240.0) -> Callable[[Callable[..., None]], Any]:
    """Make a test of a function that every rank runs and that asserts in place.

    The function takes ``rank`` first, then parameters and fixtures that can be pickled, such as
    ``tmp_path``::

        @pytest.mark.parametrize("mode", MODES)
        @on_ranks(2)
        def test_gradients(rank: int, mode: str) -> None: ...
    """

    def decorate(body: Callable[..., None]) -> Any:
        parameters = [*inspect.signature(body).parameters.values()][1:]

        @functools.wraps(body)
        def on_rank(rank: int, world_size: int, *args: Any) -> None:
            body(rank, *args)

        on_rank.__qualname__ = f"{body.__qualname__}.on_rank"

        @functools.wraps(body)
        def test(ranks: RankPool, **arguments: Any) -> None:
            in_order = [arguments[parameter.name] for parameter in parameters]
            ranks.run(on_rank, world_size, *in_order, timeout=timeout)

        fixture = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        test.__signature__ = inspect.Signature([fixture, *keywords])  # type: ignore[attr-defined]
        test.on_rank = on_rank  # type: ignore[attr-defined]
        del test.__wrapped__  # type: ignore[attr-defined]
        return test

    return decorate
