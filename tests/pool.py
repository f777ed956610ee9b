"""A pool of ranks: processes started once, reused by every test that needs ranks.

They are forked from a server that has imported torch, so to start them anew takes no time.
A job is a top-level function ``fn(rank, world_size, *args)``. The first ``world_size``
processes form a fresh default gloo group for it, run it, and give its return values back.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MAX_RANKS = 4
RATES = {
    "link": {"latency_ms": 0.1, "bytes_per_ms": 1e6},
    "device": {"flops_per_ms": 3e7, "bytes_per_ms": 5e6},
}
"""In place of what is measured: where collectives go must not depend on the machine."""

_PRELOADED = ["torch._inductor.compile_fx", "torch.distributed.checkpoint", "fsdp_dynamo"]

_jobs = itertools.count()


class RankFailedError(AssertionError):
    """A rank raised, or did not answer in time."""


def _resolve(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    target: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        target = getattr(target, part)
    return target


def _serve(rank: int, pipe: Connection, paths: list[str]) -> None:
    """Main loop of one rank."""
    sys.path[:0] = [p for p in paths if p not in sys.path]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("FSDP_DYNAMO_FLIGHT", "0")  # what fails in tests is meant to
    import torch
    import torch.distributed as dist

    from fsdp_dynamo import probe

    torch.set_num_threads(1)
    probe.measured = lambda group, device: RATES  # type: ignore[assignment]
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if job is None:
            return
        name, world_size, store, args, timeout = job
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
            answer = (True, _resolve(name)(rank, world_size, *args))
        except BaseException:  # noqa: BLE001  # the test gets the traceback, whatever it was
            answer = (False, traceback.format_exc())
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()
            torch._dynamo.reset()
        pipe.send(answer)


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
            answers = [self._answer(pipe, timeout) for _, pipe in self._ranks[:world_size]]
        failed = [f"rank {r}:\n{text}" for r, (ok, text) in enumerate(answers) if not ok]
        if failed:
            self.stop()
            raise RankFailedError("\n".join(failed))
        return [value for _, value in answers]

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
        """
        with self._job(fn, world_size, args, timeout):
            when()
            for rank in victims:
                self._ranks[rank][0].kill()
            for rank in victims:
                self._ranks[rank][0].join()
            others = [rank for rank in range(world_size) if rank not in victims]
            answers = {rank: self._answer(self._ranks[rank][1], timeout) for rank in others}
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
            yield

    @staticmethod
    def _answer(pipe: Connection, timeout: float) -> tuple[bool, Any]:
        try:
            if pipe.poll(timeout):
                answer: tuple[bool, Any] = pipe.recv()
                return answer
        except EOFError:
            return False, "the process died"
        return False, f"no answer within {timeout} s"

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
