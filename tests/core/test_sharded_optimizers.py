"""Optimizers on sharded parameters: steps, states and resuming as of one process; compiled ones,
those that step on shards or need whole tensors; and what does not fit is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import classification_loss, error_of, examples, fit, make_classifier, shard
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool, on_ranks
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from examples.muon import Muon
from fsdp_dynamo import (
    FSDP,
    FSDPValueError,
    MixedPrecision,
    ShardedGradScaler,
    ShardingStrategy,
    fully_shard,
    step_on_shards,
)
from fsdp_dynamo.core.dtensors import local_of


class _Odd(nn.Module):
    """Rows that do not divide, none on some ranks, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)))) * self.scale


def _even() -> nn.Module:
    """Rows divide: of others, torch's caches of compiled code give a rank the code of another."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 6))


class _Beside:
    """A model on three ranks beside one process's, each with an optimizer of its own."""

    def __init__(
        self, rank: int, plain: nn.Module, make: Callable[[Any], Any], on_shards: bool = False
    ) -> None:
        self.rank, self.make, self.on_shards = rank, make, on_shards
        self.reference, self.model = plain, fully_shard(copy.deepcopy(plain))
        self.of_reference = make(self.reference.parameters())
        self.optimizer = self._made()

    def _made(self) -> Any:
        made = self.make(self.model.parameters())
        return step_on_shards(made) if self.on_shards else made

    def train(self, steps: range, step: Callable[[], object] | None = None) -> None:
        for number in steps:
            for optimizer in (self.of_reference, self.optimizer):
                optimizer.zero_grad()
            batches = [torch.linspace(-1, 2, 20).view(4, 5) * (r + number + 1) for r in range(3)]
            sum(self.reference(x).pow(2).mean() / 3 for x in batches).backward()  # type: ignore[union-attr]
            self.model(batches[self.rank]).pow(2).mean().backward()
            self.of_reference.step()
            (step or self.optimizer.step)()

    def resume(self) -> None:
        """With another optimizer, and another rate."""
        saved = get_optimizer_state_dict(self.model, self.optimizer)
        self.optimizer = self._made()
        set_optimizer_state_dict(self.model, self.optimizer, saved)
        for optimizer in (self.of_reference, self.optimizer):
            optimizer.param_groups[0]["lr"] *= 0.5

    def check(self, atol: float = 1e-5) -> None:
        """Values and states are one process's."""
        options = StateDictOptions(full_state_dict=True)
        states = get_optimizer_state_dict(self.model, self.optimizer, options=options)["state"]
        for name, param in self.reference.named_parameters():
            own: Any = self.model.get_parameter(name)
            torch.testing.assert_close(own.full_tensor(), param, rtol=0, atol=atol, msg=name)
            for key, value in self.of_reference.state[param].items():
                if isinstance(value, torch.Tensor):
                    got = states[name][key]
                    torch.testing.assert_close(got, value, rtol=1e-4, atol=atol, msg=name + key)
            for value in self.optimizer.state[own].values() if own.ndim else ():
                if isinstance(value, torch.Tensor):
                    assert isinstance(value, DTensor) is bool(value.ndim)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {"foreach": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    "fused AdamW": (torch.optim.AdamW, {"fused": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {"foreach": True}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "foreach": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "fused SGD": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
}


@pytest.mark.parametrize("on_shards", [False, True])
@on_ranks(3)
def test_equals_one_process(rank: int, on_shards: bool) -> None:
    """On and after resuming."""
    names = OPTIMIZERS.keys() - {"fused SGD", "Rprop"}
    if on_shards:
        names = {"Adam", "fused AdamW", "fused SGD", "Adagrad", "Rprop"}
    for name in sorted(names):
        make, options = OPTIMIZERS[name]
        beside = _Beside(rank, _Odd(), partial(make, lr=0.05, **options), on_shards)
        beside.train(range(2))
        beside.resume()
        beside.train(range(2, 4))
        beside.check()


@on_ranks(3)
def test_torchs_muon(rank: int) -> None:
    """Of which torch takes no fewer rows than ranks; its products are in bfloat16."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in params if p.ndim == 2])

    beside = _Beside(rank, plain, make)
    beside.train(range(1))
    beside.check(atol=2e-3)


# -- compiled --------------------------------------------------------------------------------------


@on_ranks(3)
def test_compiled_step(rank: int) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    make, options = OPTIMIZERS["Adam"]
    beside = _Beside(rank, _even(), partial(make, lr=1e-2, **options))
    step = torch.compile(beside.optimizer.step, backend=counter)
    beside.train(range(2), step)
    graphs = counter.frame_count
    assert graphs > 0
    beside.train(range(2, 4), step)
    assert counter.frame_count == graphs
    beside.check()


class _OwnStates(torch.optim.Optimizer):
    """SGD with momentum whose states it makes as torchao's optimizers do theirs."""

    def __init__(self, params: Any, update: Callable[..., None]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["momentum"] = self._zeros(param)
            rate = self.param_groups[0]["lr"]
            self.update(param.detach(), param.grad, state["momentum"], rate)

    def _zeros(self, param: torch.Tensor) -> torch.Tensor:
        if not isinstance(param, DTensor):
            return torch.zeros_like(param)
        return DTensor.from_local(
            torch.zeros_like(param.to_local()),
            param.device_mesh,
            param.placements,
            shape=param.shape,
            stride=param.stride(),
        )


def _step_with_own_state(
    p: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, rate: float
) -> None:
    new = momentum.float().lerp(grad.float(), 0.5)
    momentum.copy_(new)
    p.copy_(p - rate * new)


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(3)
def test_states_that_an_optimizer_makes(rank: int, compiled: bool) -> None:
    """They are of the parameter's kind, whole in state dicts, and go on after resuming."""
    step = _step_with_own_state
    if compiled:
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    beside = _Beside(rank, nn.Linear(5, 12, bias=False), partial(_OwnStates, update=step))
    beside.train(range(3))
    parts = get_optimizer_state_dict(beside.model, beside.optimizer)
    weight: Any = beside.model.weight
    assert type(parts["state"]["weight"]["momentum"]) is type(weight.data)
    beside.resume()
    beside.train(range(3, 6))
    beside.check(atol=1e-6)


# -- on shards -------------------------------------------------------------------------------------


@on_ranks(2)
def test_writes_are_noticed(rank: int) -> None:
    """A unit that stays unsharded is gathered again."""
    model: Any = fully_shard(_Odd(), reshard_after_forward=False)
    optimizer = step_on_shards(torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.ones(2, 5)
    losses = []
    for _ in range(2):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] != losses[1]


class _Counting(torch.optim.Optimizer):
    """Momentum beside the states, by parameter, and a number of steps, as many are written."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.momentum: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["steps"] = state.get("steps", 0) + 1
                state["mean"] = 0.5 * state.get("mean", 0.0) + param.grad
                momentum = self.momentum.setdefault(param, torch.zeros_like(param))
                momentum.mul_(0.9).add_(state["mean"])
                param.add_(momentum, alpha=-group["lr"] / state["steps"])


def _other_memory(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        value: Any = state.get("exp_avg")
        if isinstance(value, DTensor):
            value._local_tensor = torch.ones_like(value._local_tensor)


def _swapped(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        if "exp_avg" in state:
            torch.utils.swap_tensors(state["exp_avg"], torch.ones_like(state["exp_avg"]))


def _dropped(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][0])


def _in_a_plain_dict(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = dict(optimizer.state)  # type: ignore[assignment]


@pytest.mark.parametrize("make", [torch.optim.Adam, _Counting])
@on_ranks(2)
def test_equals_steps_on_dtensors(rank: int, make: Any) -> None:
    """What a user changes between steps holds; what an optimizer keeps by parameter stays."""
    models: list[Any] = [fully_shard(_Odd()) for _ in range(2)]
    optimizers = [make(model.parameters(), lr=0.05) for model in models]
    step_on_shards(optimizers[1], is_elementwise=True)
    changes = (lambda _: None, _other_memory, _swapped, _dropped, _in_a_plain_dict, lambda _: None)
    for step, change in enumerate(changes):
        x = torch.linspace(-1, 1, 10).view(2, 5) * (step + rank + 1)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            change(optimizer)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one.to_local(), other.to_local()), step


@on_ranks(2)
def test_a_refused_gradient_is_not_used_later(rank: int) -> None:
    model: Any = fully_shard(_Odd())
    optimizer = step_on_shards(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(2, 5)).sum().backward()
    model.scale.grad._local_tensor = torch.ones(3)
    assert "assign a gradient of size" in error_of(optimizer.step)
    optimizer.zero_grad()
    before = [param.to_local().clone() for param in model.parameters()]
    optimizer.step()
    after = [param.to_local() for param in model.parameters()]
    assert all(map(torch.equal, before, after))


class _Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError


@on_ranks(2)
def test_a_failed_step_changes_nothing(rank: int) -> None:
    model: Any = fully_shard(_Odd())
    optimizer = step_on_shards(_Failing(model.parameters()), is_elementwise=True)
    model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    held = optimizer.param_groups[0]["params"]
    assert all(one is own for one, own in zip(held, model.parameters(), strict=True))


@on_ranks(2)
def test_step_on_shards_refuses(rank: int) -> None:
    model: Any = fully_shard(_Odd())
    error = error_of(lambda: step_on_shards(torch.optim.Muon([model.first.weight])))
    assert "expected an optimizer of torch that updates element by element" in error
    optimizer = step_on_shards(torch.optim.SGD(model.parameters()))
    assert "expected no closure" in error_of(lambda: optimizer.step(lambda: 0.0))
    optimizer.register_step_pre_hook(lambda *_: None)
    assert "expected no hooks of a step" in error_of(optimizer.step)


# -- on whole tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@on_ranks(4)
def test_muon_equals_one_process(rank: int, strategy: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None
    plain = make_transformer(num_blocks=1, tied=True)
    model = wrap(
        make_transformer(num_blocks=1, tied=True),
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=mesh,
    )
    reference, optimizer = Muon(plain), Muon(model)
    for step in range(3):
        plain.zero_grad()
        optimizer.zero_grad()
        for other in range(4):
            (loss_of(plain, batch(other, step)) / 4).backward()
        loss_of(model, batch(rank, step)).backward()
        reference.step()
        optimizer.step()
    values, expected = model.state_dict(), plain.state_dict()
    assert list(values) == list(expected)
    torch.testing.assert_close(dict(values), dict(expected), rtol=1e-4, atol=1e-5)


def _shared_out(rank: int, world_size: int) -> dict[str, int]:
    model = wrap(make_transformer(num_blocks=1))
    plain = dict(make_transformer(num_blocks=1).named_parameters())
    updated_here: dict[str, int] = {}

    def negated(name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert torch.equal(tensor, plain[name])
        updated_here[name] = tensor.numel()
        return -tensor

    parts = {name: param.detach() for name, param in model.named_parameters()}
    back = model.update_whole(parts, negated)
    assert all(torch.equal(local_of(back[name]), -local_of(parts[name])) for name in parts)
    return updated_here


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_work_is_spread(ranks: RankPool, world_size: int) -> None:
    """Each tensor is updated once, and all ranks have about as much to do."""
    answers = ranks.run(_shared_out, world_size)
    updated = [name for here in answers for name in here]
    assert sorted(updated) == sorted(dict(make_transformer(num_blocks=1).named_parameters()))
    loads = [sum(here.values()) for here in answers]
    assert max(loads) <= 1.5 * min(loads)


@on_ranks(2)
def test_wrong_parts(rank: int) -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16)
    model = wrap(make_transformer(num_blocks=1), mixed_precision=low)
    for name, message in (("nothing", "'nothing'"), ("head.weight", "placed as 'head.weight'")):
        with pytest.raises(FSDPValueError, match=message):
            model.update_whole({name: torch.ones(1)}, lambda _, whole: whole)


# -- what does not fit -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_made_of_other_parameters(rank: int, strategy: str) -> None:
    """Of those before wrapping, or of those that a context shows, which then are no model's."""
    plain = make_classifier()
    before = torch.optim.AdamW(plain.parameters(), lr=0.05)
    model = shard(plain, sharding_strategy=ShardingStrategy[strategy])
    with FSDP.summon_full_params(model):
        inside = torch.optim.SGD(model.parameters(), lr=0.05)
    classification_loss(model, examples(rank)).backward()
    for optimizer in (before, inside):
        message = error_of(optimizer.step)
        assert "expected parameters of the sharded model" in message
        assert "Make the optimizer of the sharded model's parameters()" in message


@on_ranks(2)
def test_a_file_of_another_rank(rank: int) -> None:
    """Its rows are as many, so only the mesh tells."""
    files = []
    model, fresh = (shard(make_classifier()) for _ in range(2))
    for one in (model, fresh):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.05)
        fit(one, optimizer, rank, range(2))
        files.append(io.BytesIO())
        torch.save(optimizer.state_dict(), files[-1])
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, files[0].getvalue())
    for number in (rank, 1 - rank):
        state = torch.load(io.BytesIO(everyone[number]), weights_only=False)
        optimizer.load_state_dict(state)
        message = error_of(optimizer.step)
        assert (message == "") is (number == rank)
    assert f"got one saved by the rank at ({1 - rank},)" in message
    assert "parameter '0.0.weight'" in message


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("SGD", "FULL_SHARD"),
        ("Adagrad", "FULL_SHARD"),
        ("AdamW", "NO_SHARD"),
    ],
)
@on_ranks(2)
def test_state_from_before_wrapping(rank: int, kind: str, strategy: str) -> None:
    """A plain optimizer's state dict loads, and its states are cut to this rank's parts."""
    options = {"momentum": 0.9} if kind == "SGD" else {}
    found = []
    for wraps in (False, True):
        model: Any = make_classifier()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **options)
        fit(model, optimizer, 0, range(2))
        if wraps:
            state = optimizer.state_dict()
            model = shard(model, sharding_strategy=ShardingStrategy[strategy])
            optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **options)
            optimizer.load_state_dict(state)
        found.append(fit(model, optimizer, 0, range(2, 4)))  # the same batches on every rank
    assert found[1] == pytest.approx(found[0], rel=1e-4)


SCALERS: dict[str, tuple[type[torch.amp.GradScaler], dict[str, Any]]] = {
    "torch's": (torch.amp.GradScaler, {}),
    "ours": (ShardedGradScaler, {"fused": True}),
    "disabled": (torch.amp.GradScaler, {}),
}


@pytest.mark.parametrize("kind", SCALERS)
@on_ranks(2)
def test_gradient_scalers(rank: int, kind: str) -> None:
    """Where one rank has an infinity, no rank makes a step."""
    make, options = SCALERS[kind]
    scaler = make("cpu", 4.0, enabled=kind != "disabled")
    model = shard(make_classifier())
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    scaler.scale(classification_loss(model, examples(0))).backward()
    own: Any = [p for p in model.parameters() if p.grad is not None and p.to_local().numel()][-1]
    if rank == 1 and scaler.is_enabled():
        own.grad.to_local().view(-1)[0] = torch.inf
    before = own.to_local().clone()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0 if scaler.is_enabled() else 1.0)
    assert torch.equal(own.to_local(), before) is scaler.is_enabled()
