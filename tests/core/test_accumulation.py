"""Accumulation, under no_sync() and outside it; sums are reduced once, in whatever order."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as upstream
from loops import different, gradients, whole_gradients
from models import batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fsdp_dynamo
from fsdp_dynamo import FSDP, FSDPStateError, ShardingStrategy, record_events
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def _kept_bytes(model: FSDP) -> int:
    """Of gradients and their sums."""
    flats = [flat for unit in model._fsdp_root.units for flat in unit.flats]
    kept = [local_of(p.grad) for p in model.parameters() if p.grad is not None]
    kept += [f.grad_sum.total for f in flats if f.grad_sum.total is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in kept}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("first", "last"),
    [("eager", "eager"), ("hooks", "hooks"), ("graph", "graph"), ("eager", "graph")],
)
@on_ranks(2)
def test_accumulation(rank: int, first: str, last: str) -> None:
    """Two steps in one mode, then one in another: inside ``no_sync()``, nothing is reduced and all
    gradients are kept; outside it, one shard of them is."""
    reference = DistributedDataParallel(make_transformer(num_blocks=1))
    for step in range(3):
        loss_of(reference, batch(rank, step)).backward()
    expected = gradients(reference.module)
    model = wrap(make_transformer(num_blocks=1))
    early, late = in_mode(model, first), in_mode(model, last)
    units = model._fsdp_root.units
    unsharded = sum(flat.reduce_bytes for unit in units for flat in unit.flats)
    for waits in (False, True, True):
        model.zero_grad()
        with record_events() as log, model.no_sync() if waits else nullcontext():
            for step in range(2):
                loss_of(early, batch(rank, step)).backward()
        assert len(log.keys("reduce_scatter")) == (0 if waits else 2 * len(units))
        assert _kept_bytes(model) == (unsharded if waits else unsharded // 2)
        with record_events() as log:
            loss_of(late, batch(rank, 2)).backward()
        assert len(log.keys("reduce_scatter")) == len(units)
        assert all(flat.grad_sum.total is None for unit in units for flat in unit.flats)
        assert different(whole_gradients(model), expected, rtol=1e-5) == []


# -- scripts ---------------------------------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Training:
    """A model, and methods that are the words of scripts."""

    def __init__(self, model: Any, run: nn.Module, rank: int) -> None:
        self.model, self.run, self.rank, self.batches = model, run, rank, 0
        self.losses: list[torch.Tensor] = []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def play(self, script: str) -> None:
        for word in script.split():
            getattr(self, word)()

    def forward(self) -> None:
        self.batches += 1
        x = torch.arange(8.0).view(2, 4).sin() * (self.batches + 3 * self.rank)
        self.losses.append(self.run(x).square().sum())

    def forward_only(self) -> None:
        self.forward()
        self.losses.pop()

    def backward(self) -> None:
        """Of the first forward that has had none."""
        self.losses.pop(0).backward()

    def backward_to_repeat(self) -> None:
        self.losses[0].backward(retain_graph=True)

    def backward_of_all(self) -> None:
        torch.stack(self.losses).sum().backward()

    def step(self) -> None:
        self.forward()
        self.losses.pop().backward()

    def unsynced(self) -> None:
        with self.model.no_sync():
            self.step()

    def update(self) -> None:
        self.optimizer.step()

    def drop(self) -> None:
        self.optimizer.zero_grad()

    def drop_by_model(self) -> None:
        self.model.zero_grad()

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def drop_first(self) -> None:
        next(iter(self.model.parameters())).grad = None

    def drop_third(self) -> None:
        list(self.model.parameters())[2].grad = None

    def scale(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.25)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)


AS_DDP = (
    "unsynced drop step",
    "unsynced drop_by_model unsynced step",
    "unsynced zero step",
    "unsynced drop_first unsynced drop_third step",
    "unsynced scale unsynced scale step",
    "unsynced forward drop backward",
    "unsynced forward scale backward",
    "unsynced clip step",
    "step unsynced scale step",
    "step unsynced drop unsynced step",
    "step forward drop backward step",
    "step forward zero backward step",
    2 * "unsynced step update zero " + "unsynced step",
)
AS_ONE_PROCESS_EACH = (  # DDP's hooks take every backward for that of the same forward
    "forward unsynced backward scale step",
    "unsynced forward forward backward_of_all",
    "unsynced forward forward backward backward",
    "unsynced forward backward_to_repeat backward",
    "unsynced forward unsynced backward step",
    "unsynced forward_only forward step",
)


class _OneProcess(nn.Module):
    """A plain model with DDP's names."""

    def __init__(self) -> None:
        super().__init__()
        self.module = _model()

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)

    def no_sync(self) -> Any:
        return nullcontext()


def _expected(script: str, rank: int) -> dict[str, torch.Tensor]:
    if script in AS_DDP:
        ddp = DistributedDataParallel(_model())
        Training(ddp, ddp, rank).play(script)
        return gradients(ddp.module)
    total: dict[str, torch.Tensor] = {}
    for other in range(2):
        alone = _OneProcess()
        Training(alone, alone, other).play(script)
        for name, p in alone.module.named_parameters():
            assert p.grad is not None
            total[name] = total.get(name, 0) + p.grad / 2
    return total


@pytest.mark.parametrize(
    ("mode", "strategy"),
    [
        ("eager", "FULL_SHARD"),
        ("eager", "NO_SHARD"),
        ("hooks", "FULL_SHARD"),
        ("graph", "FULL_SHARD"),
    ],
)
@on_ranks(2)
def test_scripts(rank: int, mode: str, strategy: str) -> None:
    """A sum is added once; what the user drops or scales of it is dropped or scaled."""
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(_model(), auto_wrap_policy=policy, sharding_strategy=ShardingStrategy[strategy])
    run, initial = in_mode(model, mode), copy.deepcopy(model.state_dict())
    wrong = {}
    for script in (*AS_DDP, *AS_ONE_PROCESS_EACH):
        model.load_state_dict(initial)
        model.zero_grad()
        expected = _expected(script, rank)
        Training(model, run, rank).play(script)
        wrong[script] = different(whole_gradients(model), expected)
    assert not any(wrong.values()), wrong


# -- what else reads sums --------------------------------------------------------------------------


@on_ranks(2)
def test_require_backward_grad_sync(rank: int) -> None:
    """DDP's attribute in place of ``no_sync()``."""
    reference = DistributedDataParallel(_model())
    model = FSDP(_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    x = torch.arange(8.0).view(2, 4)
    for one in (reference, model):
        for sync in (False, True):
            one.require_backward_grad_sync = sync
            assert one.require_backward_grad_sync is sync
            with record_events() as log:
                one(x + rank + sync).square().sum().backward()
            assert one is reference or len(log.keys("reduce_scatter")) == (2 if sync else 0)
    assert different(whole_gradients(model), gradients(reference.module)) == []
    with pytest.raises(FSDPStateError, match="the outermost unit"):
        next(m for m in model.module if isinstance(m, FSDP)).require_backward_grad_sync = False


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_what_looks_at_gradients_reduces_them(rank: int, mode: str) -> None:
    """In a window: whole gradients, and the norm; the steps that follow add to what it leaves."""
    x = torch.arange(8.0).view(2, 4)
    reference = DistributedDataParallel(_model())
    model = FSDP(_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    run = in_mode(model, mode)
    reference(x + rank).square().sum().backward()
    with model.no_sync():
        run(x + rank).square().sum().backward()
    assert different(whole_gradients(model), gradients(reference.module)) == []
    expected = float(nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
    with model.no_sync():
        run(0 * x).sum().mul(0.0).backward()
    assert float(model.clip_grad_norm_(0.5)) == pytest.approx(expected, rel=1e-5)
    for step in (reference, run):
        step(x - rank).square().sum().backward()
    expected = float(nn.utils.clip_grad_norm_(reference.parameters(), 1.0))
    assert float(model.clip_grad_norm_(1.0)) == pytest.approx(expected, rel=1e-5)


@on_ranks(2)
def test_conversions_and_replaced_gradients(rank: int) -> None:
    """A sum follows ``.double()``; a gradient in its place is refused."""
    x = torch.arange(8.0).view(2, 4)
    plain, model = _model(), FSDP(_model())
    sum(plain(x + r).square().sum() / 2 for r in range(2)).backward()  # type: ignore[union-attr]
    plain.double()
    sum(plain((x - r).double()).square().sum() / 2 for r in range(2)).backward()  # type: ignore[union-attr]
    with model.no_sync():
        model(x + rank).square().sum().backward()
    model.double()
    model((x - rank).double()).square().sum().backward()
    norm = model.clip_grad_norm_(1e9)
    assert norm.dtype == torch.float64
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    assert float(norm) == pytest.approx(expected, rel=1e-6)
    model.zero_grad()
    with model.no_sync():
        model(x.double()).sum().backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    wanted = r"parameter '0\.weight': expected the gradient that steps under no_sync\(\)"
    with pytest.raises(FSDPStateError, match=f"{wanted}.*Change it in place"):
        model(x.double()).sum().backward()


class _Twice(nn.Module):
    """A model whose unit runs twice in one forward, the first time with gradients or without."""

    def __init__(self, grad_first: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3))
        self.head = nn.Linear(3, 1)
        self.grad_first = grad_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.grad_first):
            x = self.block(x)
        return self.head(self.block(x))


@pytest.mark.parametrize(
    ("mode", "grad_first"),
    [("eager", True), ("eager", False), ("hooks", False), ("graph", True)],
)
@on_ranks(2)
def test_the_sum_of_a_unit_called_twice_is_added_once(
    rank: int, mode: str, grad_first: bool
) -> None:
    plain = DistributedDataParallel(_Twice(grad_first))
    model = FSDP(copy.deepcopy(plain.module), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    for one, whole in ((plain, plain), (in_mode(model, mode), model)):
        with whole.no_sync():
            one(torch.full((2, 3), rank + 1.0)).square().sum().backward()
        one(torch.full((2, 3), rank + 2.0)).square().sum().backward()
    assert different(whole_gradients(model), gradients(plain.module)) == []


class _OfOneRow(nn.Module):
    """Uses a parameter in some steps, of which only the first rank has a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.row = nn.Parameter(torch.ones(1, 4))

    def forward(self, x: torch.Tensor, uses_row: bool) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y * self.row if uses_row else y


@pytest.mark.parametrize(
    ("mode", "strategy"),
    [("eager", "FULL_SHARD"), ("eager", "HYBRID_SHARD"), ("graph", "FULL_SHARD")],
)
@on_ranks(4)
def test_ranks_without_rows_have_gradients_too(rank: int, mode: str, strategy: str) -> None:
    """Or torch's clipping would wait for a norm that they do not take part in."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None
    model = FSDP(_OfOneRow(), sharding_strategy=ShardingStrategy[strategy], device_mesh=mesh)
    run, x = in_mode(model, mode), torch.ones(2, 4) + rank

    def have_gradients() -> list[str]:
        return sorted(name for name, p in model.named_parameters() if p.grad is not None)

    with model.no_sync():
        run(x, True).sum().backward()
    run(x, False).sum().backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 100.0))
    assert norm == pytest.approx(float(model.clip_grad_norm_(100.0)), rel=1e-5)
    assert have_gradients() == ["linear.bias", "linear.weight", "row"]
    model.zero_grad()
    run(x, False).sum().backward()
    assert have_gradients() == ["linear.bias", "linear.weight"]
    model.zero_grad()
    with model.no_sync():
        run(x, True).sum().backward()
    model.clip_grad_norm_(100.0)  # reduces the sum alone
    assert have_gradients() == ["linear.bias", "linear.weight", "row"]


# -- precision -------------------------------------------------------------------------------------

LOW = torch.bfloat16
NUM_SMALL = 17
SMALL = 2.0**-9  # added to 1, it is lost in bfloat16
TRUE = 1 + NUM_SMALL * SMALL
PRECISIONS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "low reduction": ({"reduce_dtype": LOW}, torch.float32),
    "low reduction kept": ({"reduce_dtype": LOW, "keep_low_precision_grads": True}, torch.float32),
    "low parameters": ({"param_dtype": LOW, "reduce_dtype": torch.float32}, torch.float32),
    "both low": ({"param_dtype": LOW}, LOW),
}
"""Arguments of ``MixedPrecision``, and the dtype that sums shall have."""


def _in_precision(library: Any, precision: dict[str, Any], **arguments: Any) -> Any:
    net = nn.Linear(4, 4, bias=False)
    nn.init.ones_(net.weight)
    low = library.MixedPrecision(**precision)
    return library.FullyShardedDataParallel(
        net, mixed_precision=low, use_orig_params=True, **arguments
    )


def _accumulated(model: Any, run: Any, ends_with_step: bool) -> tuple[set[torch.dtype], float]:
    """Dtypes of ``.grad`` before the reduction; an element of the reduced gradient."""
    scales = [1.0, *[SMALL] * NUM_SMALL]
    x = torch.ones(1, 4)
    waiting = scales[:-1] if ends_with_step else scales
    with model.no_sync():
        for scale in waiting:
            (run(x).float().sum() * scale).backward()
    shown = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    if ends_with_step:
        (run(x).float().sum() * scales[-1]).backward()
    else:
        model.clip_grad_norm_(1e9)
    (grad,) = [p.grad for p in model.parameters()]
    return shown, float(grad.view(-1)[0])


@pytest.mark.parametrize("name", PRECISIONS)
@on_ranks(2)
def test_sums_are_as_precise_as_upstreams(rank: int, name: str) -> None:
    """What waits for a reduction loses nothing that FSDP1's does, in any mode."""
    precision, dtype = PRECISIONS[name]
    upstreams = _in_precision(upstream, precision, device_id=torch.device("cpu"))
    _, theirs = _accumulated(upstreams, upstreams, ends_with_step=True)
    for mode in MODES:
        model = _in_precision(fsdp_dynamo, precision)
        run = in_mode(model, mode)
        for ends_with_step in (True, False):
            shown, grad = _accumulated(model, run, ends_with_step)
            assert shown == {dtype}, mode
            assert abs(grad - TRUE) <= abs(theirs - TRUE), mode
            if dtype is torch.float32:  # rounded at most once
                assert grad == pytest.approx(TRUE, abs=2.0**-8), mode
            model.zero_grad()


# -- after a failure -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_methods_after_a_caught_failure(rank: int, mode: str) -> None:
    """After a backward that raised, the model is as usable as before it."""
    x = torch.arange(8.0).view(2, 4)
    plain = _model()
    plain(x).square().sum().backward()
    expected = gradients(plain)
    model = FSDP(_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    run = in_mode(model, mode)

    def step_without_sync() -> None:
        with model.no_sync():
            run(0 * x).sum().mul(0.0).backward()

    def fail(*_: Any) -> None:
        raise ValueError("in the backward")

    for use in (
        step_without_sync,
        lambda: model.to(torch.float64).to(torch.float32),
        lambda: model.load_state_dict(_model().state_dict()),
        lambda: model.clip_grad_norm_(1.0),
    ):
        inputs = x.clone().requires_grad_()
        inputs.register_hook(fail)
        with pytest.raises(ValueError, match="in the backward"):
            run(inputs).square().sum().backward()
        model.zero_grad()
        use()
        run(x).square().sum().backward()
        assert different(whole_gradients(model), expected) == []
        model.zero_grad()
