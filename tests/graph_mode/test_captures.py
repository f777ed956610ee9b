"""CUDA graphs in graph mode, on a stand-in: a replay runs the code again on the same addresses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from captures import StandIn, captures_on_cpu
from loops import classification_loss, examples, make_classifier, shard, whole_gradients
from modes import in_mode
from pool import on_ranks
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_dynamo import (
    FSDP,
    CollectivePrecision,
    FSDPStateError,
)
from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.graph_mode.captures import WARM_UP, phase_of
from fsdp_dynamo.graph_mode.offloading import TO_HOST

_BODIES = torch.ops.higher_order


def _model(extra: Callable[[], nn.Module] | None = None, **kwargs: Any) -> FSDP:
    torch._dynamo.reset()
    plain = make_classifier()
    if extra is not None:
        plain[0].append(extra())
    return shard(plain, **kwargs)


def _captured(model: FSDP, **options: Any) -> Any:
    return in_mode(model, "graph", cuda_graphs=True, **options)


def _train(step: Any, model: FSDP, rank: int, steps: int = 6) -> tuple[list[Any], dict[str, Any]]:
    """Losses, which are looked at in the end only, and the last gradients."""
    torch.manual_seed(3 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        losses.append(classification_loss(step, examples(rank, number)))
        losses[-1].backward()
        optimizer.step()
    return [float(loss) for loss in losses], whole_gradients(model)


def _same_with_captures(make: Callable[[], FSDP], train: Callable[[FSDP, Any], object]) -> StandIn:
    """Require that ``train`` returns bitwise the same with captures; return those."""
    found = []
    for captured in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        with captures_on_cpu() as stand_in:
            found.append(train(model, _captured(model) if captured else in_mode(model, "graph")))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    return stand_in


def _check(stand_in: StandIn, phases: int, replays: int) -> None:
    """A device could replay what was captured."""
    assert [len(stand_in.captured), len(stand_in.replayed)] == [phases, replays]
    for replayed in stand_in.replayed:
        assert replayed in stand_in.captured  # addresses and numbers, too
    assert not any(one.reads_on_host for operators in stand_in.captured for one in operators)


@pytest.mark.parametrize(
    "extra", [None, partial(nn.Dropout, 0.3), partial(nn.BatchNorm1d, 12)], ids=str
)
@on_ranks(2)
def test_values_and_addresses(rank: int, extra: Callable[[], nn.Module] | None) -> None:
    """As without captures; each replay does what was captured, on the same addresses."""
    model = _model(extra)
    expected = _train(in_mode(model, "graph"), model, rank)
    buffers = dict(model.named_buffers())
    model = _model(extra)
    with captures_on_cpu() as stand_in:
        losses, gradients = _train(_captured(model), model, rank)
    assert losses == expected[0]
    torch.testing.assert_close(gradients, expected[1], rtol=0, atol=0)
    torch.testing.assert_close(dict(model.named_buffers()), buffers, rtol=0, atol=0)
    _check(stand_in, 2, 2 * (6 - WARM_UP))


def _two_forwards(step: Any, rank: int, number: int) -> None:
    first = classification_loss(step, examples(rank, number))
    (first + 2 * classification_loss(step, examples(rank, number + 100))).backward()


def _forwards_in_turn(step: Any, rank: int, number: int) -> None:
    """As a pipeline that keeps one microbatch ahead."""
    losses = [classification_loss(step, examples(rank, number))]
    for other in range(100, 103):
        losses.append(classification_loss(step, examples(rank, number + other)))
        losses.pop(0).backward()
    losses.pop().backward()


def _retained(step: Any, rank: int, number: int) -> None:
    loss = classification_loss(step, examples(rank, number))
    loss.backward(retain_graph=True)
    classification_loss(step, examples(rank, number + 100)).backward()
    loss.backward()


def _accumulated(step: Any, rank: int, number: int) -> None:
    for other in range(3):
        classification_loss(step, examples(rank, number + 100 * other)).backward()


def _dropped(step: Any, rank: int, number: int) -> None:
    classification_loss(step, examples(rank, number + 100))
    classification_loss(step, examples(rank, number)).backward()


def _evaluated(step: Any, rank: int, number: int) -> None:
    loss = classification_loss(step, examples(rank, number))
    with torch.no_grad():
        before = classification_loss(step, examples(rank, number + 100))
        assert before != classification_loss(step, examples(rank, number + 200))
    loss.backward()


def _summed(step: Any, rank: int, number: int) -> None:
    """The tangent is an expanded scalar."""
    step(examples(rank, number)[0]).sum().backward()


_PROGRAMS: dict[str, tuple[Callable[[Any, int, int], None], int, int]] = {
    # captured phases, and replays in five steps
    "two forwards": (_two_forwards, 2, 8),
    "forwards in turn": (_forwards_in_turn, 2, 18),
    "retained": (_retained, 2, 12),
    "accumulated": (_accumulated, 2, 26),
    "dropped": (_dropped, 1, 4),
    "evaluated": (_evaluated, 3, 14),
    "summed": (_summed, 2, 6),
}


@pytest.mark.parametrize("name", _PROGRAMS)
@on_ranks(2)
def test_programs(rank: int, name: str) -> None:
    """Gradients of several steps, as without captures, whatever forwards wait for a backward."""
    program, phases, replays = _PROGRAMS[name]

    def train(model: FSDP, step: Any) -> list[Any]:
        each = []
        for number in range(5):
            model.zero_grad()
            program(step, rank, number)
            each.append(whole_gradients(model))
        return each

    _check(_same_with_captures(_model, train), phases, replays)


@on_ranks(2)
def test_a_backward_that_comes_too_late(rank: int) -> None:
    """Its saved tensors were overwritten: an error, not wrong gradients."""
    model = _model()
    with captures_on_cpu():
        step = _captured(model)
        for number in range(3):
            late = classification_loss(step, examples(rank, number))
        classification_loss(step, examples(rank, 3)).backward()
        classification_loss(step, examples(rank, 4)).backward()
        with pytest.raises(FSDPStateError, match="the backward of forward 3 before forward 5"):
            late.backward()
        model.zero_grad()
        classification_loss(step, examples(rank, 5)).backward()  # nothing is left behind


@on_ranks(2)
def test_what_the_user_keeps_stays_as_it_is(rank: int) -> None:
    model = _model()
    with captures_on_cpu() as stand_in:
        step = _captured(model)
        kept = []
        for number in range(6):
            model.zero_grad()
            loss = classification_loss(step, examples(rank, number))
            loss.backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            kept.append(([loss.detach(), *grads], [loss.item(), *[g.clone() for g in grads]]))
    for values, then in kept:
        torch.testing.assert_close([values[0].item(), *values[1:]], then, rtol=0, atol=0)
    _check(stand_in, 2, 8)


class _Branches(nn.Module):
    """Runs the first of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


@on_ranks(2)
def test_unused_parameters_stay_without_gradients(rank: int) -> None:
    torch.manual_seed(0)
    model = FSDP(_Branches())
    with captures_on_cpu() as stand_in:
        step = _captured(model)
        for number in range(5):
            model.zero_grad()
            step(examples(rank, number)[0]).square().sum().backward()
            with FSDP.summon_full_params(model, with_grads=True):
                assert model.second.weight.grad is None
                assert model.first.weight.grad is not None
    _check(stand_in, 2, 6)


@on_ranks(2)
def test_gradients_that_wait_for_a_reduction(rank: int) -> None:
    """Two graphs, each with captures of its own: with and without reductions."""

    def train(model: FSDP, step: Any) -> dict[str, torch.Tensor]:
        for number in range(5):
            model.zero_grad()
            with model.no_sync():
                classification_loss(step, examples(rank, number)).backward()
            classification_loss(step, examples(rank, number + 100)).backward()
        return whole_gradients(model)

    _check(_same_with_captures(_model, train), 4, 12)


@on_ranks(2)
def test_shards_that_move_are_captured_anew(rank: int) -> None:

    def train(model: FSDP, step: Any) -> list[Any]:
        before = _train(step, model, rank, 4)
        model.half().float()
        return [before, _train(step, model, rank, 4)]

    assert len(_same_with_captures(_model, train).captured) == 4


class _WithIgnored(nn.Module):
    """A layer that no unit manages, and a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored, self.unit = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unit(torch.tanh(self.ignored(x)))  # type: ignore[no-any-return]


def _with_ignored() -> FSDP:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = _WithIgnored()
    return shard(plain, ignored_modules=[plain.ignored])


@on_ranks(2)
def test_parameters_whose_data_is_replaced(rank: int) -> None:
    """The object stays, the address does not."""

    def train(model: FSDP, step: Any) -> list[float]:
        losses = []
        for number in range(7):
            weight = model.module.ignored.weight
            if number == 4:
                weight.data = weight.data * 2
            losses.append(classification_loss(step, examples(rank, number)))
            losses[-1].backward()
        return [loss.item() for loss in losses]

    _check(_same_with_captures(_with_ignored, train), 4, 10)


class _Saved(torch.autograd.Function):
    """Sum of sines; the gradient is computed in the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0]  # type: ignore[no-any-return]


class _ComputesGradient(nn.Module):
    """The gradient of its input is a saved tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.detach()) + _Saved.apply(x)


@on_ranks(2)
def test_gradients_that_are_saved_tensors(rank: int) -> None:
    """They are copied, since the next forward overwrites what it saved."""

    def train(model: FSDP, step: Any) -> list[torch.Tensor | None]:
        inputs = [examples(rank, number)[0].requires_grad_() for number in range(5)]
        for x in inputs:
            step(x).sum().backward()
        return [x.grad for x in inputs]

    _check(_same_with_captures(lambda: FSDP(_ComputesGradient()), train), 2, 6)


@on_ranks(2)
def test_a_late_backward_after_a_new_capture(rank: int) -> None:
    model = _model()
    with captures_on_cpu():
        step = _captured(model)
        for number in range(3):
            late = classification_loss(step, examples(rank, number))
        for number in range(3, 5):
            classification_loss(step, examples(rank, number)).backward()
        model.double().float()
        classification_loss(step, examples(rank, 5)).backward()
        with pytest.raises(FSDPStateError, match="before forward 6, got it afterwards"):
            late.backward()


@on_ranks(2)
def test_outputs_that_share_memory(rank: int) -> None:
    """Their copies share it, too, and keep their strides."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = self.layer(x)
            return h, h[:, 3:], (2 * h)[:, :3]

    torch._dynamo.reset()
    model = FSDP(Pair())
    with captures_on_cpu() as stand_in, torch.no_grad():
        step = _captured(model)
        for number in range(5):
            whole, part, other = step(examples(rank, number)[0])
            assert part.stride() == other.stride() == (6, 1)
            whole.zero_()
            assert not part.any()
            assert other.all()
    _check(stand_in, 1, 3)


@on_ranks(2)
def test_graphs_that_train_nothing(rank: int) -> None:
    """Only the input gets a gradient: each phase is warmed up, and captured."""

    def train(model: FSDP, step: Any) -> list[torch.Tensor | None]:
        model.requires_grad_(False)
        inputs = [examples(rank, number)[0].requires_grad_() for number in range(5)]
        for x in inputs:
            step(x).sum().backward()
        return [x.grad for x in inputs]

    _check(_same_with_captures(_model, train), 2, 6)


@on_ranks(2)
def test_ranks_log_replays(rank: int) -> None:
    model = _model()
    with captures_on_cpu():
        step = _captured(model)
        with mock.patch.object(collective_log, "record", wraps=collective_log.record) as record:
            for number in range(4):
                classification_loss(step, examples(rank, number)).backward()
    kinds = [call.args[1] for call in record.call_args_list]
    assert kinds.count("graph_replay") == 4


@pytest.mark.slow
@on_ranks(2)
def test_programs_of_inductor(rank: int) -> None:
    model = _model()
    expected = _train(in_mode(model, "graph-inductor"), model, rank)
    model = _model()
    with captures_on_cpu() as stand_in:
        step = in_mode(model, "graph-inductor", cuda_graphs=True)
        assert _train(step, model, rank)[0] == expected[0]
    assert len(stand_in.captured) == 2


# -- what is not captured --------------------------------------------------------------------------


class _Condition(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # type: ignore[no-any-return]


class _Read(nn.Module):
    """Positive values, as many as there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x[x > 0].sum()


def _int8() -> FSDP:
    precision = CollectivePrecision(reduce_scatter="int8", stochastic_rounding=True)
    return _model(collective_precision=precision)


_REFUSED: dict[str, tuple[Callable[[], FSDP], str, int]] = {
    # with the number of captured phases
    "stochastic rounding": (_int8, "stochastic rounding draws its noise on the host", 1),
    "a condition": (partial(_model, _Condition), "cond reads values on the host", 0),
    "a read": (partial(_model, _Read), "reads values on the host", 0),
}


@pytest.mark.parametrize("name", _REFUSED)
@on_ranks(2)
def test_what_is_not_captured(rank: int, name: str) -> None:
    """It runs as without the option, and a warning says why."""
    make, reason, phases = _REFUSED[name]
    model = make()
    expected = _train(in_mode(model, "graph"), model, rank, 4)[0]
    model = make()
    with captures_on_cpu() as stand_in, pytest.warns(UserWarning, match=reason):
        assert _train(_captured(model), model, rank, 4)[0] == expected
    assert len(stand_in.captured) == phases


@pytest.mark.parametrize(
    ("target", "device", "reason"),
    [
        (TO_HOST, "cuda", "shards are offloaded"),
        (torch.ops.aten.neg.default, "cpu", "its tensors are on cpu and cuda"),
        (_BODIES.run_and_save_rng_state, "cuda", "a state of random numbers"),
        (torch.ops.aten.nonzero.default, "cuda", "nonzero.default reads values on the host"),
        (torch.ops.aten.neg.default, "cuda", ""),
    ],
)
def test_obstacles(target: Any, device: str, reason: str) -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(2, device="cuda")
        node = graph.call_function(target, (x,))
        node.meta["val"] = torch.empty(2, device=device)
        graph.output((node,))
    refused = phase_of(graph).refused
    assert refused.startswith(reason) or reason in refused
    assert bool(refused) == bool(reason)


@on_ranks(2)
def test_sizes_that_change(rank: int) -> None:
    model = _model()
    with captures_on_cpu() as stand_in:
        step = _captured(model)
        for size in (2, 3, 4):
            classification_loss(step, examples(rank, size=size)).backward()
        with pytest.warns(UserWarning, match="sizes or numbers change"):
            classification_loss(step, examples(rank, size=5)).backward()
    assert not stand_in.captured


@on_ranks(2)
def test_cpus_capture_nothing(rank: int) -> None:
    model = _model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train(_captured(model), model, rank, 4)
    found = [str(one.message) for one in caught if "cuda_graphs" in str(one.message)]
    assert len(found) == 1
    assert "a forward runs without a graph: it runs on cpu, and only CUDA has graphs." in found[0]
