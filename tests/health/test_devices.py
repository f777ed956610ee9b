"""Ranks whose hosts run ahead of their devices: what goes apart is noticed, what is late is not."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Block, Branching, batch, loss_of
from modes import in_mode
from pool import RankPool, on_ranks
from running_ahead import Device, running_ahead
from torch import nn

from fsdp_dynamo import FSDP, DivergenceError, RankFailedError, checkpoint
from fsdp_dynamo.comm import (
    collective_log,
    collectives,
    point_to_point,
    process_groups,
    watchdog,
)
from fsdp_dynamo.comm import device_waits as device_module
from fsdp_dynamo.comm.device_waits import DeviceWaits, device_waits
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.comm.point_to_point import all_reduce_max
from fsdp_dynamo.comm.watchdog import SideGroup, gone_ranks
from fsdp_dynamo.events import num_steps
from fsdp_dynamo.health import flight_recorder, periodic_comparison
from fsdp_dynamo.health.collective_order import Comparison
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

PERIOD_S = 0.1
LIMIT_S = 20.0


@contextmanager
def _on_device(mode: str) -> Iterator[tuple[Device, Any, Any]]:
    """A device, a model that has made a step there, and what runs it."""
    torch.manual_seed(7)
    with running_ahead() as device, mock.patch.object(watchdog, "PERIOD_S", PERIOD_S):
        model: Any = FSDP(Branching(num_blocks=3), auto_wrap_policy=ModuleWrapPolicy({Block}))
        run = in_mode(model, mode)
        loss_of(run, batch(dist.get_rank(), 0)).backward()
        assert device.synchronize()
        yield device, model, run


def _wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _has_failed() -> bool:
    return device_waits().has_failed


def _step_unseen(device: Device, run: Any, rank: int) -> None:
    """A step during which nothing is noticed: it is over before the device stands still."""
    device.is_watched = False
    loss_of(run, batch(rank, 1)).backward()
    device.is_watched = True


def _error_of_a_step(run: Any, rank: int, step: int) -> tuple[str, str]:
    try:
        loss_of(run, batch(rank, step)).backward()
    except DivergenceError as error:
        return type(error).__name__, str(error)
    return "", ""


def _skip(rank: int, world_size: int, mode: str, folder: str) -> tuple[str, str]:
    """Rank 1 leaves a unit out: the error of the next step, and what this rank has printed
    meanwhile; its flight record has the same."""
    printed: list[str] = []
    recorder = flight_recorder._Recorder(Path(folder))
    with (
        _on_device(mode) as (device, model, run),
        mock.patch.object(flight_recorder, "_recorder", recorder),
        mock.patch.object(flight_recorder, "_print_error", printed.append),
    ):
        model.module.skipped = frozenset({1}) if rank == 1 else frozenset()
        _step_unseen(device, run, rank)
        step = num_steps()
        device.synchronize(until=recorder.path.exists)
        _wait_until(recorder.path.exists)
        model.module.skipped = frozenset()
        kind, message = _error_of_a_step(run, rank, 2)
    assert kind == DivergenceError.__name__
    for part in ("unit 'blocks.1'", f"step {step}", "rank 1", "rank 0"):
        assert part in message
    assert json.loads(recorder.path.read_text())["reason"] == f"{kind}: {message}"
    (told,) = [line for line in printed if message in line]
    return message, told


@pytest.mark.parametrize("mode", ["eager", "hooks"])
def test_a_unit_left_out(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    answers = ranks.run(_skip, 2, mode, str(tmp_path))
    assert answers[0][0] == answers[1][0]
    for rank, (_, told) in enumerate(answers):
        assert told.startswith(f"rank {rank}: ")


@on_ranks(2)
def test_a_graph_that_one_rank_alone_compiles(rank: int) -> None:
    """Its host waits until graphs are compared; the other rank's device waits in a gather."""
    with _on_device("graph") as (_, model, run):
        step = num_steps()
        model.module.skipped = frozenset({1}) if rank == 1 else frozenset()
        kind, message = _error_of_a_step(run, rank, 1)
        if rank == 0:
            assert kind == ""
            _wait_until(_has_failed)
            kind, message = _error_of_a_step(run, rank, 2)
    assert kind == DivergenceError.__name__
    for part in (f"step {step + 1}", "rank 1", "the comparison of compiled graphs"):
        assert part in message


@on_ranks(2)
def test_a_rank_that_dies(rank: int) -> None:
    store: Any = dist.distributed_c10d._get_default_store()
    with _on_device("eager") as (device, _, run):
        if rank == 1:
            store.wait(["stepped"], timedelta(seconds=LIMIT_S))  # or the step itself would raise
            store.set("step", str(num_steps()))
            error = ValueError("no more data")
            sys.excepthook(type(error), error, None)  # as the interpreter does
            store.wait(["learned"], timedelta(seconds=LIMIT_S))
            return
        _step_unseen(device, run, rank)
        store.set("stepped", "")
        _wait_until(_has_failed)
        kind, message = _error_of_a_step(run, rank, 2)
        store.set("learned", "")
    assert kind == RankFailedError.__name__
    for part in ("rank 1", "no more data", f"step {store.get('step').decode()}"):
        assert part in message


@on_ranks(2)
def test_a_late_rank_is_waited_for(rank: int) -> None:
    """Until the other one has compared what they have issued, twice."""
    store: Any = dist.distributed_c10d._get_default_store()
    compare, compared = Comparison.message, []

    def compare_and_tell(*args: Any) -> str | None:
        result = compare(*args)
        compared.append(result)
        if len(compared) == 2:
            store.set("compared", "")
        return result

    with (
        _on_device("eager") as (device, _, run),
        mock.patch.object(Comparison, "message", compare_and_tell),
    ):
        if rank == 1:
            store.wait(["compared"], timedelta(seconds=LIMIT_S))
        assert _error_of_a_step(run, rank, 1) == ("", "")
        assert device.synchronize()
    assert rank == 1 or len(compared) >= 2


class _Point:
    is_reached = False


def test_what_is_overdue() -> None:
    waits, group, first, second = DeviceWaits(), mock.Mock(), _Point(), _Point()
    waits.add(group, first)
    waits.add(group, second)
    assert [waits.look() for _ in range(5)] == [[(group, late, 0)] for late in (0, 0, 0, 1, 2)]
    first.is_reached = True
    assert waits.look() == [(group, 0, 0)]  # it moves: another one may take as long
    assert waits
    second.is_reached = True
    assert [waits.look() for _ in range(2)] == [[(group, 0, 1)], [(group, 0, 2)]]
    assert not waits
    waits.add(group, _Point())
    assert waits
    del group  # it is not kept
    assert not waits


def test_a_rank_that_is_gone_is_looked_for_again_and_again() -> None:
    """As one that is late may be killed later."""
    watching = watchdog._Watchdog()
    waits = mock.MagicMock(has_failed=False)
    with (
        mock.patch.object(watchdog, "device_waits", return_value=waits),
        mock.patch.object(watchdog, "_failure_of_gone", return_value=None) as probe,
    ):
        for period in range(1, 61):
            waits.look.return_value = [(mock.Mock(), period, 0)]
            watching._look_at_devices()
    assert probe.call_count == len([8, 12, 15, 18, 30, 45, 60])


# -- what ends a host that its device blocks -------------------------------------------------------


def _leave_a_unit_out(model: Any, device: Device, run: Any, rank: int) -> None:
    model.module.skipped = frozenset({1}) if rank == 1 else frozenset()
    _step_unseen(device, run, rank)


@on_ranks(2)
def test_an_abort_frees_a_host_that_its_device_blocks(rank: int) -> None:
    with _on_device("eager") as (device, model, run):
        _leave_a_unit_out(model, device, run, rank)
        assert device.synchronize()  # on rank 0 the stream stood still behind a gather
        _wait_until(_has_failed)  # rank 1 hears of it
        kind, message = _error_of_a_step(run, rank, 2)
        for use in torch.optim.SGD(model.parameters(), lr=0.1).step, model.state_dict:
            with pytest.raises(DivergenceError, match="go on from a checkpoint"):
                use()
    assert kind == DivergenceError.__name__
    assert "unit 'blocks.1'" in message


@pytest.mark.parametrize(("aborts", "is_blocked"), [(True, True), (True, False), (False, True)])
def test_a_process_that_no_abort_frees_ends(aborts: bool, is_blocked: bool) -> None:
    waits, group, point = DeviceWaits(), mock.Mock(), mock.Mock(is_reached=False)
    waits.add(group, point)
    waits.fail(DivergenceError("ranks differ"), lambda _: None)
    with (
        mock.patch.object(device_module, "abort_communicators") as abort,
        mock.patch.object(device_module, "end_process") as end,
    ):
        for look in range(70):
            assert not end.called or look > 60
            point.is_reached = not is_blocked and look > 10
            waits.look_after_failure(aborts)
    assert abort.call_count == int(aborts)
    assert end.called == (aborts and is_blocked)


@pytest.mark.parametrize("aborts", [True, False])
@on_ranks(2)
def test_an_error_is_reported_before_a_host_goes_on(rank: int, aborts: bool) -> None:
    """What the host reads then is worthless. Without aborts it stays for a debugger."""
    order: list[str] = []
    abort = device_module.abort_communicators

    def note_and_abort() -> None:
        order.append("abort")
        abort()

    with (
        _on_device("eager") as (device, model, run),
        mock.patch.object(device_module, "abort_communicators", note_and_abort),
        mock.patch.object(flight_recorder, "_print_error", order.append),
        mock.patch.object(watchdog._watchdog, "aborts", aborts),
    ):
        _leave_a_unit_out(model, device, run, rank)
        _wait_until(lambda: bool(order))
        time.sleep(20 * PERIOD_S)
    assert "unit 'blocks.1'" in order[0]
    is_blocked = rank == 0
    assert order[1:] == (["abort"] if aborts and is_blocked else [])


# -- the stand-in itself --------------------------------------------------------------------------


@on_ranks(2)
def test_the_stand_in_matches_messages_by_order_and_size(rank: int) -> None:
    """Whatever their tags; and a message of another size holds back the stream, not the host."""
    group: Any = dist.group.WORLD
    with running_ahead() as device:
        tags = [1, 2] if rank == 0 else [2, 1]
        first, second = (
            point_to_point.issue_all_gathers([(torch.empty(2), torch.ones(1) * tag)], group, tag)
            for tag in tags
        )
        for (work,) in (first, second):
            work.wait()
        assert device.synchronize()
        assert [work._buffers[0].tolist() for (work,) in (first, second)] == [[1, 2], [2, 1]]
        shard = torch.ones(1 + rank)
        (odd,) = point_to_point.issue_all_gathers([(torch.empty(2 * len(shard)), shard)], group, 3)
        odd.wait()
        with pytest.raises(AssertionError, match="the device stands still"):
            device.synchronize(limit_s=1.0)


# -- where no rank waits ---------------------------------------------------------------------------


class _TwoPaths(nn.Module):
    """Runs its two blocks of equal size in this order, or the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.is_reversed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks) if self.is_reversed else self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("mode", ["eager", "hooks"])
@on_ranks(2)
def test_units_of_equal_size_in_another_order(rank: int, mode: str) -> None:
    """Every rank issues as many collectives of the same sizes, so none of them waits."""
    torch.manual_seed(7)
    with running_ahead() as device, mock.patch.object(collective_log, "COMPARED_EVERY", 20):
        model: Any = FSDP(_TwoPaths(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        run = in_mode(model, mode)

        def make_steps(count: int) -> None:
            for _ in range(count):
                run(torch.ones(2, 4)).sum().backward()
                assert device.synchronize()

        make_steps(4)
        first = num_steps() + 1
        model.module.is_reversed = rank == 1
        with pytest.raises(DivergenceError) as caught:
            make_steps(8)
    message = str(caught.value)
    assert "unit 'blocks.0': expected rank 1 to issue what rank 0 does" in message
    assert rank == 1 or message.startswith(f"step {first}, ")  # ranks of the pool count apart


@on_ranks(2)
def test_what_ranks_have_mixed_up_is_not_saved(rank: int, tmp_path: Path) -> None:
    """Though too few collectives were issued for the periodic comparison."""
    torch.manual_seed(7)
    with running_ahead() as device:
        model: Any = FSDP(_TwoPaths(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        checkpoint.save(tmp_path, model, step=0)
        model.module.is_reversed = rank == 1
        model(torch.ones(2, 4)).sum().backward()
        assert device.synchronize()
        with pytest.raises(DivergenceError, match=r"unit 'blocks\.0': expected rank 1 to issue"):
            checkpoint.save(tmp_path, model, step=1)
    assert [step for step, _ in checkpoint.complete(tmp_path)] == [0]


@on_ranks(2)
def test_ranks_that_agree_are_compared_without_a_word(rank: int) -> None:
    started = mock.Mock(side_effect=periodic_comparison._started)
    with (
        _on_device("eager") as (device, _, run),
        mock.patch.object(collective_log, "COMPARED_EVERY", 16),
        mock.patch.object(periodic_comparison, "_started", started),
    ):
        for step in range(7):
            loss_of(run, batch(rank, step)).backward()
        assert device.synchronize()
    assert started.call_count >= 3


# -- what a backend says, and what it does not say -------------------------------------------------


@on_ranks(2)
def test_an_error_of_nccl_names_the_collective(rank: int) -> None:
    def launch(async_op: bool) -> Any:
        raise dist.DistBackendError("NCCL error: remote process exited or")

    group: Any = dist.group.WORLD
    collective_log.record(group, "all_gather", "blocks.0", 8, "forward")
    with pytest.raises(RankFailedError, match=r"all-gather of unit 'blocks\.0'"):
        collectives._launched([launch], group, torch.device("cpu"))


def _killed(rank: int, world_size: int, folder: str) -> tuple[bool, tuple[str, str]]:
    with _on_device("eager") as (device, _, run):
        if rank == 0:
            _step_unseen(device, run, rank)
        (Path(folder) / f"ready{rank}").touch()
        if rank == 1:
            time.sleep(600)
        is_free = device.synchronize()
        return is_free, _error_of_a_step(run, rank, 2)


def test_a_rank_that_is_killed(ranks: RankPool, tmp_path: Path) -> None:
    """The others' streams stand still: the connections of the side group tell."""

    def both_are_ready() -> None:
        _wait_until(lambda: len(list(tmp_path.iterdir())) == 2)

    answers = ranks.run_and_kill(_killed, 2, str(tmp_path), victims=[1], when=both_are_ready)
    ok, found = answers[0]
    assert ok, found
    is_free, (kind, message) = found
    assert is_free
    assert kind == RankFailedError.__name__
    assert "rank 1: expected its part of" in message


@on_ranks(4)
def test_groups_without_connections_get_a_side_group(rank: int) -> None:
    """It is made when a model is wrapped; here the default group is said not to serve the CPU."""
    group: Any = dist.group.WORLD
    FSDP(nn.Linear(2, 2))
    assert state_of(group, SideGroup).group is None
    with mock.patch.object(process_groups, "serves_cpu", return_value=False):
        process_groups.make_side_group(group, torch.device("cpu"))
    side = state_of(group, SideGroup).group
    assert side is not None
    assert side.size() == 4
    assert gone_ranks(group) == []


@pytest.mark.parametrize("where", ["_find_network", "all_reduce_max"])
@on_ranks(3)
def test_one_rank_without_a_network_leaves_all_without_a_side_group(rank: int, where: str) -> None:
    """Else ranks would compare graphs in different groups. Names of later groups stay equal."""
    group: Any = dist.group.WORLD
    act = getattr(process_groups, where)

    def fails_on_one_rank(*args: Any) -> None:
        if rank == 1:
            raise RuntimeError("no route")
        act(*args)

    with (
        mock.patch.object(process_groups, "serves_cpu", return_value=False),
        mock.patch.object(process_groups, where, fails_on_one_rank),
        mock.patch.object(process_groups, "_MAX_CONNECTING_S", 1),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):  # the second time nothing is tried
            process_groups.make_side_group(group, torch.device("cpu"))
    (one,) = [str(one.message) for one in caught if "no gloo group beside" in str(one.message)]
    assert ("no route" in one) == (rank == 1)
    assert state_of(group, SideGroup).group is None
    later = dist.new_group(range(3), use_local_synchronization=True)
    dist.barrier(later)


@on_ranks(2)
def test_a_side_group_of_a_group_that_does_not_serve_the_module(rank: int) -> None:
    """A module may be on the CPU still: ranks exchange what they found on the group's device."""
    default: Any = dist.group.WORLD
    group = process_groups.new_group([default], range(2), "a test", "cuda:gloo")
    make, devices = torch.tensor, []

    def make_on_cpu(value: Any, device: torch.device) -> torch.Tensor:
        devices.append(device.type)
        return make(value)

    with (
        mock.patch.object(torch, "tensor", make_on_cpu),
        mock.patch.object(dist, "all_reduce"),
    ):
        assert process_groups._first_failure(group, torch.device("cpu"), lambda: None) is None
    assert devices == ["cuda"]


def test_connections_of_a_side_group_grow_with_the_logarithm_of_its_ranks() -> None:
    """Each of 16 ranks has seven: at distances of 1, 2 and 4 both ways, and of 8."""

    def num_sockets() -> int:
        links = [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        return sum(link.readlink().name.startswith("socket") for link in links)

    def group_of(rank: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=LIMIT_S))

    size, store, before = 16, dist.HashStore(), num_sockets()
    values = [torch.tensor([float(rank)]) for rank in range(size)]
    with process_groups._connecting_on_demand(), ThreadPoolExecutor(size) as threads:
        groups = list(threads.map(group_of, range(size)))
        list(threads.map(all_reduce_max, values, groups, [1] * size))
    assert num_sockets() - before == size * (1 + 7)
    assert all(value.item() == size - 1 for value in values)
