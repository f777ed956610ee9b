"""Order on an accelerator's streams, in programs recorded on CPUs; planted faults are reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from user_collectives import gather_of_the_user, scatter_of_the_user

from benchmarks.streams import recorder as recorders
from benchmarks.streams.order import unordered
from benchmarks.streams.program import COMPUTING, ELSEWHERE, HostWait, Launch, Record, Wait
from benchmarks.streams.recorder import Recorder
from benchmarks.streams.recording import record_program
from fsdp_dynamo import (
    FSDP,
    CollectivePrecision,
    CPUOffload,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    record_events,
)
from fsdp_dynamo.comm import collectives, streams
from fsdp_dynamo.comm.in_flight import InFlight
from fsdp_dynamo.comm.process_groups import part_of
from fsdp_dynamo.comm.registered_memory import RegisteredMemory
from fsdp_dynamo.comm.streams import HostCopy, SideStreams, StreamEvent
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.reduction import PendingReduce
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.events import COLLECTIVE_KINDS
from fsdp_dynamo.wrap import arguments

STEPS = 3
LOW = {"mixed_precision": MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)}
INT8 = {
    "collective_precision": CollectivePrecision(
        "int8", "int8", stochastic_rounding=False, all_reduce="int8"
    )
}
BY_DEMAND = {"forward_prefetch": False}
OFFLOADED = {"cpu_offload": CPUOffload(offload_params=True)}
WHOLE, HYBRID, NODES = (
    {"sharding_strategy": ShardingStrategy[name]}
    for name in ("NO_SHARD", "HYBRID_SHARD", "HIERARCHICAL_SHARD")
)
CASES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "by demand": BY_DEMAND,
    "low precision": LOW,
    "low precision by demand": LOW | BY_DEMAND,
    "kept": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "not sharded": WHOLE | LOW,
    "called twice": BY_DEMAND,
    "offloaded": OFFLOADED | LOW,
    "offloaded, called twice": OFFLOADED,
    "offloaded, not sharded": OFFLOADED | WHOLE | LOW,
    "in int8": INT8,
    "in int8, low precision": INT8 | LOW,
}
OF_FOUR_RANKS: dict[str, dict[str, Any]] = {
    "hybrid": HYBRID,
    "gathered again among few": {},
    "in int8, hybrid": INT8 | HYBRID,
    "on nodes": NODES,
    "on nodes, low precision": NODES | LOW,
    "on nodes, in int8": NODES | INT8,
}


def _offloads(case: str) -> bool:
    return case.startswith("offloaded")


def _wrapped(case: str) -> FSDP:
    kwargs = (CASES | OF_FOUR_RANKS)[case]
    if "sharding_strategy" in kwargs and case in OF_FOUR_RANKS:
        kwargs = kwargs | {"device_mesh": init_device_mesh("cpu", (2, 2))}
    model = make_transformer(num_blocks=3 if dist.get_world_size() == 4 else 2)
    if case.endswith("called twice"):
        model.blocks.append(model.blocks[-1])
    with mock.patch.object(arguments, "offloads", lambda given, device: given.offload_params):
        wrapped = wrap(model, **kwargs)
    if case == "gathered again among few":
        for unit in wrapped._fsdp_root.units:
            unit.settings.regathers_among = part_of(unit.config.groups.shard, 2)
    return wrapped


def _train(
    model: torch.nn.Module, call: Any, rank: int, first: int, case: str, mode: str
) -> list[torch.Tensor]:
    """Losses of some steps of SGD with clipping; a step under ``no_sync()`` among them."""
    no_sync = mode != "graph"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[torch.Tensor] = []
    for step in range(first, first + STEPS):
        with model.no_sync() if no_sync and step == first else nullcontext():  # type: ignore[operator]
            loss = loss_of(call, batch(rank, step))
            loss.backward()
        if not no_sync or step != first:
            if not _offloads(case):  # its norms stop the host
                model.clip_grad_norm_(0.5)  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())  # not read: that would stop the host
    return losses


def _built(case: str, mode: str, is_direct: bool) -> tuple[Any, Any]:
    """The model, and what runs it."""
    with mock.patch.dict(collectives.DIRECT_BYTES, point_to_point=1 if is_direct else None):
        model = _wrapped(case)
    return model, in_mode(model, mode)


def _recorded(
    rank: int,
    case: str,
    mode: str = "eager",
    fault: Callable[[], Any] = nullcontext,
    *,
    is_elsewhere: bool = False,
    built: tuple[Any, Any] | None = None,
) -> tuple[list[torch.Tensor], Recorder]:
    """Losses of steps that are not recorded, and of others that are."""
    model, call = built or _built(case, mode, is_direct=mode == "graph")
    losses = _train(model, call, rank, 0, case, mode)
    with ExitStack() as stack:
        recorder = stack.enter_context(record_program(is_elsewhere=is_elsewhere))
        stack.enter_context(fault())
        if _offloads(case):
            for unit in model._fsdp_root.units:
                for flat in unit.flats:
                    recorder.lives_on_host(flat.sharded)
        losses += _train(model, call, rank, STEPS, case, mode)
    return losses, recorder


def _check_order(rank: int, case: str, mode: str = "eager", is_direct: bool = False) -> Recorder:
    """Nothing is unordered, and losses are those without a recording."""
    model, call = _built(case, mode, is_direct)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    expected = [
        loss for first in (0, STEPS) for loss in _train(model, call, rank, first, case, mode)
    ]
    if mode == "eager":
        model, call = _built(case, mode, is_direct)
    else:  # so as not to compile again
        model.load_state_dict(start)
    got, recorder = _recorded(rank, case, mode, built=(model, call))
    assert unordered(recorder.program) == [], case
    # The recorded program reduces by the library, which adds more than two ranks in another order.
    rtol = 1e-6 if dist.get_world_size() > 2 else 0.0
    torch.testing.assert_close(torch.stack(got), torch.stack(expected), rtol=rtol, atol=0.0)
    launches = [step for step in recorder.program if isinstance(step, Launch)]
    # A norm that clips is one number, which the computing stream needs at once.
    collecting = {step.stream for step in launches if step.group and step.num_bytes > 8}
    assert collecting, case
    assert COMPUTING not in collecting, case
    assert not any(name.startswith("communicator") for name in collecting), case
    assert COMPUTING not in _copying(recorder), case
    assert bool(_copying(recorder)) == _offloads(case), case
    stops = [step.name for step in recorder.program if isinstance(step, HostWait)]
    assert set(stops) == ({"synchronize"} if _offloads(case) else set()), case
    assert mode != "graph" or len(stops) in (0, STEPS), case
    return recorder


def _copying(recorder: Recorder) -> set[str]:
    """Streams with work that reads or writes the host's memory."""
    works = [s for s in recorder.program if isinstance(s, Launch) and s.name != "empty_like"]
    return {one.stream for one in works if recorder.is_on_host(*one.reads, *one.writes)}


@pytest.mark.parametrize(
    ("mode", "is_direct", "cases"),
    [
        ("eager", False, tuple(CASES)),
        ("eager", True, ("sharded", "by demand", "low precision", "kept", "offloaded", "in int8")),
        ("hooks", False, ("sharded", "low precision")),
        ("graph", False, ("low precision", "in int8", "offloaded, not sharded")),
        ("graph", True, ("sharded", "offloaded", "offloaded, called twice")),
    ],
    ids=["packed-eager", "direct-eager", "packed-hooks", "packed-graph", "direct-graph"],
)
@on_ranks(2)
def test_everything_is_ordered(
    rank: int, mode: str, is_direct: bool, cases: tuple[str, ...]
) -> None:
    for case in cases:
        recorder = _check_order(rank, case, mode, is_direct)
        if (mode, case) == ("graph", "offloaded, not sharded"):
            _check_that_copies_go_ahead(recorder)


def _check_that_copies_go_ahead(recorder: Recorder) -> None:
    """Each but the first of a graph starts before what the one before brought is used."""
    program = recorder.program
    between = []  # of each copy to the device, what is computed from its start to the wait for it
    for begin, copy in enumerate(program):
        if not isinstance(copy, Launch) or recorder.is_on_host(*copy.writes):
            continue
        if not recorder.is_on_host(*copy.reads):
            continue
        event = next(one.event for one in program[begin:] if isinstance(one, Record))
        (end,) = [n for n, one in enumerate(program) if one == Wait(COMPUTING, event)]
        on = [one for one in program[begin:end] if isinstance(one, Launch)]
        between.append(len([one for one in on if one.stream == COMPUTING]))
    assert len(between) == 3 * STEPS  # two blocks and the root, whose copies are kept
    assert between.count(0) <= STEPS, between


@on_ranks(4)
def test_everything_is_ordered_with_two_communicators(rank: int) -> None:
    for case in OF_FOUR_RANKS:
        _check_order(rank, case)


# -- another device is current, other streams are, others' collectives -----------------------------


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        ("eager", "low precision"),
        ("eager", "in int8"),
        ("eager", "offloaded"),
        ("graph", "offloaded"),
    ],
)
@on_ranks(2)
def test_another_device_is_current(rank: int, mode: str, case: str) -> None:
    """The device of the parameters is named wherever a stream or an event is asked for."""
    _, recorder = _recorded(rank, case, mode, is_elsewhere=True)
    assert unordered(recorder.program) == []
    used = {step.stream for step in recorder.program if isinstance(step, (Launch, Record, Wait))}
    assert ELSEWHERE not in used
    assert COMPUTING not in (_copying(recorder) if _offloads(case) else ())


@on_ranks(1)
def test_the_watchdog_asks_on_the_device_of_the_event(rank: int) -> None:
    """A thread begins on the first device; a query there makes a context on it."""
    with record_program() as recorder:
        event = SideStreams(torch.device("cpu")).after_current()
        recorder.is_elsewhere = True
        assert not event.is_reached
        assert recorder.is_elsewhere


def test_the_watchdog_asks_while_another_thread_captures_a_graph() -> None:
    """In CUDA's mode for that; CUDA returns the mode of before, which is restored."""
    modes = [0]

    def exchange(mode: Any) -> None:
        mode = mode._obj
        given, mode.value = mode.value, modes[-1]
        modes.append(given)

    event = mock.Mock(query=lambda: modes[-1] == 1)
    with mock.patch.object(streams, "_exchange_capture_mode", return_value=exchange):
        assert StreamEvent(mock.MagicMock(), event).is_reached
    assert modes == [0, 1, 0]


class _Switch(torch.autograd.Function):
    """Make another stream current. Autograd runs the nodes behind it on that stream, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, branches: _Branches, to: Any, waits: bool) -> Any:
        ctx.branches, ctx.between = branches, (torch.cpu.current_stream(), to)
        branches.switch(*ctx.between, waits=waits)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        before, after = ctx.between
        ctx.branches.switch(after, before)
        ctx.branches.kept.append(grad)
        return grad, None, None, None


class _CallerIsCurrent(torch.autograd.Function):
    """Lets the end of the backward find its caller's stream current, as autograd does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, branches: _Branches) -> Any:
        ctx.branches, ctx.caller = branches, torch.cpu.current_stream()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        def switch() -> None:
            ctx.branches.switch(None, ctx.caller, waits=False)

        torch.autograd.Variable._execution_engine.queue_callback(switch)  # type: ignore[attr-defined]
        return grad, None


class _Branches(nn.Module):
    """Two units that run at once, each on a stream of the user's; ``kept`` outlives a step.

    (Autograd keeps the memory of gradients until another stream has read them; recordings do not.)
    """

    def __init__(self, *, is_shared: bool) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = self.left if is_shared else nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.kept: list[torch.Tensor] = []
        self.begin(None)

    def begin(self, recorder: Recorder | None) -> None:
        """Make the streams of a recording, or of none."""
        self.recorder = recorder
        self.beside = [torch.cpu.Stream(), torch.cpu.Stream()]

    def switch(self, before: Any, to: Any, *, waits: bool = True) -> None:
        if self.recorder is not None:
            if waits:
                to.wait_stream(before)
            self.recorder._current[False] = to

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        caller = torch.cpu.current_stream()
        outputs = []
        for module, stream in zip((self.left, self.right), self.beside, strict=True):
            on_stream = module(_Switch.apply(x, self, stream, True))
            outputs.append(_Switch.apply(on_stream, self, caller, False))
        for stream in self.beside:
            caller.wait_stream(stream)
        self.kept += [x, *outputs]
        return self.head(outputs[0] * outputs[1])  # type: ignore[no-any-return]


def _train_branches(model: Any, branches: _Branches) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        with model.no_sync() if step == 0 else nullcontext():
            loss = _CallerIsCurrent.apply(model(torch.ones(2, 8)).sum(), branches)
            loss.backward()  # type: ignore[no-untyped-call]
        branches.kept.clear()
        if step:
            optimizer.step()
            for stream in branches.beside:  # gradients have memory of theirs
                stream.wait_stream(torch.cpu.current_stream())
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    ("case", "is_shared"),
    [("sharded", True), ("kept", False), ("low precision by demand", False)],
)
@on_ranks(2)
def test_units_on_two_streams_at_once(rank: int, case: str, is_shared: bool) -> None:
    def wrapped() -> tuple[Any, _Branches]:
        torch.manual_seed(0)
        branches, policy = _Branches(is_shared=is_shared), ModuleWrapPolicy({nn.Linear})
        return FSDP(branches, auto_wrap_policy=policy, **CASES[case]), branches

    expected = _train_branches(*wrapped())
    model, branches = wrapped()
    with record_program() as recorder:
        branches.begin(recorder)
        got = _train_branches(model, branches)
    assert unordered(recorder.program) == []
    assert torch.equal(torch.stack(got), torch.stack(expected))


@pytest.mark.parametrize("case", ["sharded", "on nodes", "gathered again among few"])
@pytest.mark.parametrize("memory", ["the user's", "registered"])
@on_ranks(4)
def test_tensors_of_collectives_in_other_memory(rank: int, case: str, memory: str) -> None:
    """Of the user's collectives, which work on the current stream, and of registered pools."""
    model, _ = _built(case, "eager", is_direct=memory == "registered")
    for unit in model._fsdp_root.units:
        if memory == "registered":
            unit.settings.memory = RegisteredMemory(None, torch.device("cpu"))
        else:
            unit.settings.all_gather = gather_of_the_user()
            unit.settings.reduce_scatter = scatter_of_the_user()
    use_no_pool = mock.patch.object(torch.cuda, "use_mem_pool", return_value=nullcontext())
    with use_no_pool, record_program() as recorder:
        _train(model, model, rank, 0, case, "eager")
    assert unordered(recorder.program) == []
    streams = {
        s.stream for s in recorder.program if isinstance(s, Launch) and s.kind == "all_gather"
    }
    assert COMPUTING not in streams


# -- planted faults --------------------------------------------------------------------------------


def _replace(owner: Any, name: str, new: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, new)


def _free_at_once(streams: SideStreams, storages: Any, readers: Any = ()) -> None:
    for storage in storages:
        storage.resize_(0)


def _collect_at_once(streams: SideStreams, group: Any, *, gathers: bool) -> Any:
    return streams._gathers, streams.gathering()


def _record_before_local_work(logged: Any, works: Any, local: Any) -> StreamEvent:
    end: StreamEvent = logged.streams.after_current()
    END(logged, works, local)
    return end


def _advance_without_holding(pending: PendingReduce, streams: SideStreams) -> None:
    with streams.over_replicas():
        pending.advance()


def _wait_only_beside(unit: Unit) -> None:
    """So that packed parameters are copied into place."""
    if torch.cpu.current_stream() != torch.cpu.default_stream():
        WAIT_GATHERS(unit)


def _allocate_on_the_computing_stream(unit: Unit, phase: Any) -> Any:
    streams = unit._side_streams()
    assert streams is not None
    with streams._module.stream(streams._module.default_stream()):
        for flat in unit.flats:
            flat.allocate()
    return ISSUE(unit, phase)


def _forget_buffers(handle: Any, works: Any, buffers: Any = (), *args: Any, **kwargs: Any) -> None:
    INIT(handle, works, tuple(torch.empty(0) for _ in buffers), *args, **kwargs)


def _finish_without_waiting(pending: PendingReduce) -> Any:
    pending.in_flight._works = []
    return FINISH(pending)


def _take_without_waiting(flat: FlatParameter) -> Any:
    assert flat.kept_shard is not None
    return flat.kept_shard.tensor, flat.kept_shard.group


WAIT_GATHERS, ISSUE = Unit._wait_gathers, Unit._issue_gathers
INIT, FINISH = InFlight.__init__, PendingReduce.finish
END = collectives._Enqueued.end

FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a gather is not waited for": ("sharded", _replace(Unit, "_wait_gathers", _wait_only_beside)),
    "unsharded parameters are freed at once": (
        "sharded", _replace(SideStreams, "free_later", _free_at_once)),
    "unsharded parameters are of the computing stream's pool": (
        "by demand", _replace(Unit, "_issue_gathers", _allocate_on_the_computing_stream)),
    "a cast shard is given back while it is sent": (
        "low precision by demand", _replace(SideStreams, "free_pending", lambda *_: None)),
    "a reduction is not waited for": (
        "sharded", _replace(PendingReduce, "finish", _finish_without_waiting)),
    "a reduction does not wait for its gradient": (
        "sharded", _replace(SideStreams, "collecting", _collect_at_once)),
    "copies behind a gather are not waited for": (
        "sharded", _replace(collectives._Enqueued, "end", _record_before_local_work)),
    "a gradient is given back while it is sent": (
        "sharded", _replace(InFlight, "__init__", _forget_buffers)),
    "offload: the host reads before the copy is there": (
        "offloaded", _replace(HostCopy, "wait", lambda copy: copy.host)),
}  # fmt: skip

IN_REPLICAS: dict[str, tuple[str, Callable[[], Any]]] = {
    "replicas: the gradient is given back while it is sent": (
        "hybrid", _replace(PendingReduce, "advance_on_side_stream", _advance_without_holding)),
    "nodes: a secondary shard is not waited for": (
        "on nodes", _replace(FlatParameter, "kept_shard_to_gather", _take_without_waiting)),
}  # fmt: skip

IN_GRAPHS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a shard's copy is gathered into memory that is in use": (
        "offloaded", _replace(SideStreams, "free_pending", lambda *_: None)),
    "a copy that is not gathered is not waited for": (
        "offloaded, not sharded", _replace(StreamEvent, "wait", lambda event: None)),
}  # fmt: skip
"""Faults of offload in graph mode."""


def _require_reports(rank: int, faults: dict[str, tuple[str, Any]], mode: str = "eager") -> None:
    for fault, (case, plant) in faults.items():
        _, recorder = _recorded(rank, case, mode, plant)
        assert unordered(recorder.program), fault


@on_ranks(2)
def test_planted_faults_are_reported(rank: int) -> None:
    _require_reports(rank, FAULTS)


@on_ranks(4)
def test_planted_faults_of_replicas_are_reported(rank: int) -> None:
    _require_reports(rank, IN_REPLICAS)


@on_ranks(2)
def test_planted_faults_of_graphs_are_reported(rank: int) -> None:
    _require_reports(rank, IN_GRAPHS, "graph")


@on_ranks(4)
def test_exposed_time_is_that_of_the_computing_stream(rank: int) -> None:
    """Each of its waits takes 2 ms. With replicas, reduce-scatters are waited for elsewhere."""
    for case, elsewhere in (("sharded", 0), ("hybrid", 4)):
        model = _wrapped(case)
        loss_of(model, batch(rank, 0)).backward()
        elapsed = mock.patch.object(recorders.Event, "elapsed_time", return_value=2.0)
        with elapsed, record_program(), record_events() as events:
            loss_of(model, batch(rank, 1)).backward()
        kinds = Counter(one.kind for one in events if one.kind in COLLECTIVE_KINDS)
        assert kinds["reduce_scatter"] == 4
        assert kinds["all_reduce"] == elsewhere
        assert events.exposed_ms() == pytest.approx(2.0 * (kinds.total() - elsewhere))
