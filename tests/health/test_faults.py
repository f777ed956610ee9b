"""One rank fails: the others learn it in time, and say which one it was and what happened."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from census import Census
from loops import error_of
from models import Block, Transformer, batch, loss_of, make_transformer, wrap
from modes import in_mode
from namespaces import join_host, needs_link, set_link
from pool import RankPool, on_ranks

from benchmarks import link
from fsdp_dynamo import FSDP, RankFailedError
from fsdp_dynamo.comm.watchdog import STORE_TIMEOUT_S
from fsdp_dynamo.events import num_steps
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

LIMIT_S = 10.0

# -- a rank that raises ----------------------------------------------------------------------------

_armed = ""


def _fail_if(*faults: str) -> None:
    if _armed in faults:
        if _armed == "memory":
            torch.empty(1 << 46)  # more than any machine has: the allocator raises
        raise ValueError(f"as asked in {_armed}")


@torch.library.custom_op("faults::point", mutates_args=())
def _point(x: torch.Tensor) -> torch.Tensor:
    """A place in the forward, and one in the backward, that fail at run time, also compiled."""
    _fail_if("forward", "memory")
    return x.clone()


@torch.library.custom_op("faults::point_in_backward", mutates_args=())
def _point_in_backward(grad: torch.Tensor) -> torch.Tensor:
    _fail_if("backward")
    return grad.clone()


_point.register_fake(torch.empty_like)
_point_in_backward.register_fake(torch.empty_like)
_point.register_autograd(lambda ctx, grad: _point_in_backward(grad))


class _Faulty(Transformer):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = _point(block(x))
        return self.head(self.norm(x)) * self.scale


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    loss = loss_of(model, tokens)
    loss.register_hook(lambda grad: _fail_if("hook"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _uncaught(error: Exception) -> None:
    """Handle an exception as the interpreter does if it is not caught."""
    sys.excepthook(type(error), error, error.__traceback__)


def _train_until_failure(rank: int, mode: str, fault: str) -> tuple[str, str, float, int]:
    global _armed
    _armed = ""
    torch.manual_seed(7)
    model = FSDP(_Faulty(num_blocks=2), auto_wrap_policy=ModuleWrapPolicy({Block}))
    run = in_mode(model, mode)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: _fail_if("optimizer"))
    _step(run, optimizer, batch(rank, 0))
    _armed = fault if rank == 1 else ""
    began = time.monotonic()
    try:
        for step in range(1, 4):
            _step(run, optimizer, batch(rank, step))
    except Exception as error:
        seconds = time.monotonic() - began
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            _uncaught(error)  # its process goes on: the others learn it all the same
            store.wait(["learned"], timedelta(seconds=2 * LIMIT_S))
        else:
            store.set("learned", "")
        return type(error).__name__, str(error), seconds, num_steps()
    return "", "", 0.0, 0


def _fail(rank: int, world_size: int, mode: str, fault: str) -> tuple[str, str, float, int]:
    """The rank's error. No more tensors are left than after a run without a failure."""
    left = []
    for what in ("", fault):
        census = Census()
        found = _train_until_failure(rank, mode, what)
        torch._dynamo.reset()
        gc.collect()
        left.append(census.count())
    assert left[1] <= left[0]
    return found


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("eager", "forward"),
        ("eager", "hook"),
        ("eager", "backward"),
        ("eager", "optimizer"),
        ("graph", "memory"),
        pytest.param("hooks", "backward", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_raises(ranks: RankPool, mode: str, fault: str) -> None:
    answers = ranks.run(_fail, 2, mode, fault)
    (kind, message, seconds, _), (raised, cause, _, step) = answers
    assert ("allocate" if fault == "memory" else f"as asked in {fault}") in cause
    assert kind == RankFailedError.__name__, message
    after = re.match(
        rf"rank 1 after the (all-gather|reduce-scatter) of (unit '[\w.]+'|the root unit) \(\d+ "
        rf"elements, \w+, step {step}\): expected all ranks to go on, got {raised}",
        message,
    )
    assert after is not None, message
    assert cause[:100] in message
    assert seconds < LIMIT_S


# -- a rank that is killed or stopped --------------------------------------------------------------

TIMEOUT_S = 2.0


def _lose(
    rank: int, world_size: int, victim: int, mode: str, number: int, told: Path, port: int | None
) -> tuple[str, str, float, int]:
    """One rank gets a signal in the third step; ``port``: of a store that rank 0 serves."""
    if port is not None:
        dist.destroy_process_group()
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    timeout_s = TIMEOUT_S if number == signal.SIGSTOP else 600.0  # not reached
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    model = in_mode(wrap(make_transformer(num_blocks=1), process_group=group), mode)
    for step in range(2):
        loss_of(model, batch(rank, step)).backward()
    if rank == victim:
        os.kill(os.getpid(), number)
    began = time.monotonic()
    try:
        loss_of(model, batch(rank, 2)).backward()
    except Exception as error:
        found = type(error).__name__, str(error), time.monotonic() - began, num_steps()
        (told / str(rank)).touch()
        return found
    return "", "", 0.0, 0


def _all_exist(paths: Sequence[Path]) -> Callable[[], None]:
    def wait() -> None:
        until = time.monotonic() + 30
        while not all(path.exists() for path in paths) and time.monotonic() < until:
            time.sleep(0.05)

    return wait


_CLOSED = "got a closed connection. It has ended or was killed"
_LATE = f"got nothing within {TIMEOUT_S:g} s. It may not have called the model at all"


def _answers_without(
    ranks: RankPool, victim: int, mode: str, number: int, told: Path, port: int | None = None
) -> list[tuple[str, str, float, int]]:
    """Of the others of three ranks."""
    others = [told / str(rank) for rank in range(3) if rank != victim]
    arguments = (victim, mode, number, told, port)
    found = ranks.run_and_kill(_lose, 3, *arguments, victims=[victim], when=_all_exist(others))
    assert all(is_answer for is_answer, _ in found.values()), found
    return [answer for _, answer in found.values()]


@pytest.mark.parametrize(
    ("mode", "number", "got"),
    [
        ("eager", signal.SIGKILL, _CLOSED),
        ("graph", signal.SIGKILL, _CLOSED),
        ("eager", signal.SIGSTOP, _LATE),
    ],
)
def test_a_rank_that_is_gone(
    ranks: RankPool, tmp_path: Path, mode: str, number: signal.Signals, got: str
) -> None:
    steps = set()
    for kind, message, seconds, own_step in _answers_without(ranks, 1, mode, number, tmp_path):
        assert kind == RankFailedError.__name__, message
        assert message.startswith("rank 1: expected its part of the all-gather of ")
        steps.add(own_step)
        assert got in message
        assert seconds < LIMIT_S
    step = re.search(r"step (\d+)\)", message)
    assert step is not None
    assert int(step[1]) in steps  # processes that have run other tests count from another number


@pytest.mark.slow
def test_the_rank_of_the_store_is_stopped(ranks: RankPool, tmp_path: Path) -> None:
    """The store does not answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    answers = _answers_without(ranks, 0, "eager", signal.SIGSTOP, tmp_path, port)
    for kind, message, seconds, _ in answers:
        assert kind == RankFailedError.__name__, message
        assert re.match("rank [012]: expected its part of the ", message)
        assert seconds < TIMEOUT_S + 3 * STORE_TIMEOUT_S


def _step_after_a_loss(rank: int, world_size: int, told: Path) -> str:
    """The last rank is killed; the others begin a step when they know its connection is closed."""
    group, victim = dist.new_group(), world_size - 1
    model = wrap(make_transformer(num_blocks=1), process_group=group)
    model(batch(rank, 0))
    (told / f"began-{rank}").touch()
    until = time.monotonic() + 30
    with suppress(RuntimeError):
        while rank == victim or time.monotonic() < until:
            group.recv([torch.empty(1)], victim, 7)
            time.sleep(0.05)
    return error_of(lambda: model(batch(rank, 1)))


def test_a_rank_that_is_known_to_be_gone(ranks: RankPool, tmp_path: Path) -> None:
    """gloo refuses the messages, and does not say of which rank."""
    began = [tmp_path / f"began-{rank}" for rank in range(3)]
    found = ranks.run_and_kill(_step_after_a_loss, 3, tmp_path, victims=[2], when=_all_exist(began))
    for _, answer in found.values():
        assert answer.startswith("RankFailedError: rank 2: expected its part of the all-gather of ")


@on_ranks(2)
def test_a_rank_that_evaluates_alone(rank: int) -> None:
    """The others are in a barrier. The message names the call that they have not made."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    model = wrap(make_transformer(num_blocks=1), process_group=group)
    text = error_of(lambda: model(batch(rank, 0))) if rank == 0 else ""
    dist.barrier()
    if rank == 0:
        assert "RankFailedError: rank 1: expected its part of the all-gather of the root" in text
        assert "(if rank == 0: evaluate(model))" in text


# -- a link that is cut ----------------------------------------------------------------------------

_STEPS = 40


def _train_over_link(
    rank: int, world_size: int, hosts: Sequence[link.Host], folder: Path, timeout_s: float
) -> tuple[list[float], str, str]:
    """Losses, and how it ended; says when it has gone a quarter of the way."""
    join_host(rank, world_size, hosts[rank], folder / "store", timeout_s)
    model = wrap(make_transformer(num_blocks=2))
    losses: list[float] = []
    try:
        for step in range(_STEPS):
            loss = loss_of(model, batch(rank, step))
            loss.backward()
            losses.append(loss.item())
            if step == _STEPS // 4:
                (folder / str(rank)).touch()
            time.sleep(0.01)  # so that the link is cut within the run
    except Exception as error:
        return losses, type(error).__name__, str(error)
    return losses, "", ""


def _run_and_cut(
    ranks: RankPool, folder: Path, cut_s: float | None, timeout_s: float
) -> list[tuple[list[float], str, str]]:
    """Two ranks over a link that is cut, and restored after ``cut_s``."""
    with link.two_hosts(link.Shape()) as hosts:

        def cut() -> None:
            _all_exist([folder / "0", folder / "1"])()
            set_link(hosts[0], "down")
            if cut_s is not None:
                time.sleep(cut_s)
                set_link(hosts[0], "up")

        found = ranks.run_and_kill(
            _train_over_link, 2, hosts, folder, timeout_s, victims=[], when=cut
        )
    assert all(is_answer for is_answer, _ in found.values()), found
    return [found[rank][1] for rank in range(2)]


@needs_link
def test_a_link_that_is_cut_for_a_while(ranks: RankPool, tmp_path: Path) -> None:
    for losses, kind, message in _run_and_cut(ranks, tmp_path, cut_s=1.0, timeout_s=30.0):
        assert kind == "", message
        assert len(losses) == _STEPS


@needs_link
def test_a_link_that_stays_cut(ranks: RankPool, tmp_path: Path) -> None:
    answers = _run_and_cut(ranks, tmp_path, cut_s=None, timeout_s=2.0)
    assert {kind for _, kind, _ in answers} == {RankFailedError.__name__}, answers
    for losses, _, message in answers:  # of the other, or what that one has told of this one
        assert len(losses) < _STEPS
        assert re.match("rank [01]: expected its part of the ", message)
