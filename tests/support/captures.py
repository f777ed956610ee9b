"""Stand-in for CUDA graphs on CPUs: a replay runs the code again, on the addresses of the capture.

``recorded`` holds the operators of a capture, or of a replay, with what they read and write. So a
test can tell whether a device could replay the capture: the same operators with the same numbers,
on inputs at the same addresses and on what was made inside, without a read by the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_dynamo.graph_mode.captures import Captures

HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Operator(NamedTuple):
    """An operator that ran.

    Attributes:
        name: of its overload.
        numbers: arguments that are no tensors.
        external: addresses that it reads and that nothing inside has made.
        reads_on_host: whether the host waits for its result.
    """

    name: str
    numbers: tuple[Any, ...]
    external: tuple[int, ...]
    reads_on_host: bool


class Recorder(TorchDispatchMode):
    """Records operators, and which storages they make."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self._made: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes back

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs or {}))
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        storages = [one.untyped_storage().data_ptr() for one in tensors if one.numel()]
        self.operators.append(
            Operator(
                str(func),
                tuple(one for one in given if isinstance(one, (int, float, str, torch.dtype))),
                tuple(one for one in storages if one not in self._made),
                bool(HOST_READS.intersection(func.tags)),
            )
        )
        result = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if storage.data_ptr() not in storages:
                    self._made[storage.data_ptr()] = storage
        return result


class StandIn:
    """Captures that were made, and replays of them, by operators."""

    def __init__(self) -> None:
        self.captured: list[list[Operator]] = []
        self.replayed: list[list[Operator]] = []

    def capture(self, _: Captures, run: partial[Any], device: torch.device) -> Any:
        """Take the place of ``Captures.capture``."""
        with _undone(run), Recorder() as recorder:
            results = [*run()]
        self.captured.append(recorder.operators)
        tensors = [one for one in run.args[0] if isinstance(one, torch.Tensor)]
        inputs = {one.untyped_storage().data_ptr() for one in tensors}
        written = [
            isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in inputs
            for one in results
        ]

        def replay() -> None:
            with Recorder() as recorder:
                outputs = run()
            run.func.__self__._absent.clear()  # a device does nothing on the host
            self.replayed.append(recorder.operators)
            for old, new, is_written in zip(results, outputs, written, strict=True):
                if is_written:
                    old.data.copy_(new)  # ``data``: a device writes unknown to autograd

        for result, is_written in zip(results, written, strict=True):
            if is_written:
                result.data.fill_(float("nan") if result.is_floating_point() else 0)
        return replay, results


@contextmanager
def _undone(run: partial[Any]) -> Iterator[None]:
    """A capture computes nothing: take back what it writes to its inputs, and random numbers."""
    (given,) = run.args
    before = [one.clone() if isinstance(one, torch.Tensor) else one for one in given]
    with torch.random.fork_rng(devices=[]):
        yield
    for one, old in zip(given, before, strict=True):
        if isinstance(one, torch.Tensor) and 0 not in one.stride():
            one.data.copy_(old)


@contextmanager
def captures_on_cpu() -> Iterator[StandIn]:
    """Let graph mode capture and replay on CPUs."""
    stand_in = StandIn()
    with (
        mock.patch.object(Captures, "capture", lambda *args: stand_in.capture(*args)),
        mock.patch.object(Captures, "refusal", lambda self, *_: self.refused),
    ):
        yield stand_in
