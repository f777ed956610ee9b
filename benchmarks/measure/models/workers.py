"""Processes that measure cells: ranks that are started anew when one hangs, dies or fails."""

from __future__ import annotations

import itertools
import logging
import multiprocessing as mp
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.measure import ranks
from benchmarks.measure.models.cell import Cell, Outcome, Result
from benchmarks.measure.models.measuring import Answer, measure, merged

PRELOADED = [
    "torch._inductor.compile_fx",
    "torch._dynamo.backends.common",
    "torch.distributed.nn.functional",
    "fsdp_dynamo",
    "benchmarks.measure.models.measuring",
    "benchmarks.workloads.architectures.preload",
]
CELLS_OF_A_PROCESS = 40
"""After so many cells the ranks are started anew: compilers keep what they have seen."""

Measure = Callable[[Cell, int], Answer]

_stores = itertools.count()


def _serve(
    rank: int, world_size: int, pipe: Connection, measure: Measure, paths: list[str]
) -> None:
    """Main loop of one rank."""
    sys.path[:0] = [path for path in paths if path not in sys.path]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("FSDP_DYNAMO_FLIGHT", "0")  # many cells are expected to fail
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    while True:
        try:
            cell, store, seconds = pipe.recv()
        except EOFError:
            return
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=seconds),
        )
        dist.barrier()
        with suppress(BrokenPipeError):  # the campaign was killed
            pipe.send(measure(cell, rank))
        dist.destroy_process_group()


class Ranks:
    """The ranks of one machine; ``run`` measures a cell on all of them.

    Args:
        world_size: number of ranks.
        measure: what a rank does with a cell; a function that can be pickled.
    """

    def __init__(self, world_size: int, measure: Measure = measure) -> None:
        self._world_size = world_size
        self._measure = measure
        self._ranks: list[tuple[Any, Connection]] = []
        self._num_cells = 0

    def run(self, cell: Cell, seconds: float) -> Result:
        """Measure a cell; a hang or a dead process is a result too."""
        if self._num_cells >= CELLS_OF_A_PROCESS:
            self.stop()
        self._start()
        self._num_cells += 1
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / f"store{next(_stores)}")
            answers = self._answers((cell, store, seconds), seconds)
        if isinstance(answers, Result):
            self.stop()
            return answers
        result = merged(answers)
        if result.outcome in (Outcome.ERROR, Outcome.NO_REFERENCE):
            self.stop()  # ranks may be out of step
        return result

    def _answers(self, job: tuple[Any, ...], seconds: float) -> list[Answer] | Result:
        deadline = time.monotonic() + seconds
        answers: list[Answer] = []
        try:
            for _, pipe in self._ranks:
                pipe.send(job)
            for _, pipe in self._ranks:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    return self._late(answers, seconds)
                answers.append(pipe.recv())
        except (EOFError, ConnectionError):
            codes = [process.exitcode for process, _ in self._ranks]
            return Result(Outcome.ERROR, f"a rank has died (exit codes {codes})")
        return answers

    def _late(self, answers: list[Answer], seconds: float) -> Result:
        """A hang; what the other ranks have said by then is its reason."""
        for _, pipe in self._ranks[len(answers) :]:
            if pipe.poll(0):
                answers.append(pipe.recv())
        said = "; ".join(one.result.reason for one in answers if one.result.reason)
        where = "; ".join(one.result.where for one in answers if one.result.where)
        reason = f"no answer within {seconds:g} s"
        return Result(
            Outcome.TIMEOUT, f"{reason}; another rank: {said}" if said else reason, where=where
        )

    def _start(self) -> None:
        for name, value in ranks.QUIET.items():
            os.environ.setdefault(name, value)  # read when the server imports torch
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        while len(self._ranks) < self._world_size:
            ours, theirs = context.Pipe()
            rank = len(self._ranks)
            process = context.Process(
                target=_serve,
                args=(rank, self._world_size, theirs, self._measure, list(sys.path)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def stop(self) -> None:
        """End the ranks; the next cell starts others."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks, self._num_cells = [], 0
