"""``torch.utils.checkpoint`` called around units, against DDP and against checkpoints inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import different, error_of, fit_squares, gradients, whole_gradients
from models import VOCABULARY, Block, Transformer, batch, loss_of
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp_dynamo import FSDP, FSDPStateError, record_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


class _Around(Transformer):
    """Calls ``checkpoint`` around its blocks."""

    arguments: dict[str, Any] = {"use_reentrant": False}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x)) * self.scale

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, **self.arguments)


class _Reentrant(_Around):
    arguments = {"use_reentrant": True}


def _save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def save_products() -> Any:
    """Contexts in which matrix products are saved and everything else is computed again."""
    return create_selective_checkpoint_contexts(_save_products)


class _Selective(_Around):
    arguments = {"use_reentrant": False, "context_fn": save_products}


class _More(_Around):
    """The body holds more than the unit, random numbers too."""

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: F.dropout(block(2 * y), 0.2), x, use_reentrant=False)


class _Counting(_Around):
    """Its bodies append to a list: no graph has them."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen: list[int] = []
        return super().forward(tokens)

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def body(y: torch.Tensor) -> torch.Tensor:
            self.seen.append(len(self.seen))
            return block(y)

        return checkpoint(body, x, use_reentrant=False)


class _Inside(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def _inside(num_blocks: int) -> Transformer:
    model = Transformer(num_blocks=num_blocks)
    for block in model.blocks:
        block.__class__ = _Inside
    return model


class _Pair(nn.Module):
    """A unit of two, of which it checkpoints one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second, self.mix = Block(dim), Block(dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.first(x))
        return x + checkpoint(self.second, x, use_reentrant=False)


class _Nested(nn.Module):
    """Checkpointed units of units, one of which is called once more, in a checkpoint of its own."""

    def __init__(self, num_blocks: int, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, dim), nn.Linear(dim, VOCABULARY)
        self.pairs = nn.ModuleList(_Pair(dim) for _ in range(num_blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for pair in self.pairs:
            x = checkpoint(pair, x, use_reentrant=False)
        return self.head(checkpoint(self.again, x, use_reentrant=False))

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self.pairs[0].first(x).sin()


def _make(cls: Any) -> nn.Module:
    torch.manual_seed(7)
    return cls(num_blocks=1 if cls is _Nested else 2)


def _wrap(plain: nn.Module) -> FSDP:
    return FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({_Pair, Block, _Inside}))


def _run(net: nn.Module, owner: nn.Module, rank: int) -> tuple[list[float], list[Any]]:
    """Losses of two steps, and the collectives of the last."""
    optimizer = torch.optim.SGD(owner.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        with record_events() as log:
            loss = loss_of(net, batch(rank, step))
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, sorted(log.keys("all_gather", "reduce_scatter"))


def _assert_equals_ddp(
    cls: Any, rank: int, mode: str, rel: float = 0.0, **options: bool
) -> tuple[list[Any], int]:
    """Returns the collectives of a step, and the number of graphs."""
    plain, other = _make(cls), _make(cls)
    expected, _ = _run(DistributedDataParallel(plain), plain, rank)
    model = _wrap(other)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses, collectives = _run(in_mode(model, mode, **options), model, rank)
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert losses == pytest.approx(expected, rel=rel, abs=0), cls
    assert different(whole_gradients(model), gradients(plain)) == [], cls
    return collectives, num_graphs


FORMS: dict[str, list[Any]] = {
    "eager": [_More, _Reentrant, _Selective, _Counting],
    "hooks": [_More, _Counting],
    "graph": [_More, _Selective],  # Dynamo itself refuses what counts
}


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_equals_ddp(rank: int, mode: str) -> None:
    """Compare bitwise with DDP; collectives and the number of graphs equal those of checkpoints
    inside units, so what the root computes is compiled, too."""
    inside = _assert_equals_ddp(_inside, rank, mode)
    for cls in FORMS[mode]:
        found = _assert_equals_ddp(cls, rank, mode)
        if mode != "eager" and cls is not _Counting:  # eager counts recomputation as forward
            assert found == inside, cls
    if mode == "graph":
        _assert_equals_ddp(_Around, rank, mode, regions=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hooks-inductor", "graph-inductor"])
@on_ranks(2, timeout=500)
def test_inductor_equals_ddp(rank: int, mode: str) -> None:
    for cls in (_Around, _Nested):
        _assert_equals_ddp(cls, rank, mode, rel=1e-5)
    model = _wrap(_make(_More))  # draws other random numbers than DDP
    _run(in_mode(model, mode), model, rank)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_nested_units(rank: int, mode: str) -> None:
    """A unit that is called twice is recomputed after its first backward."""
    _assert_equals_ddp(_Nested, rank, mode, rel=1e-6)  # one gradient is a sum of two


class _Branching(Transformer):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        (block,) = self.blocks
        x = torch.cond(x.sum() > 0, lambda y: block(y), lambda y: y.sin(), (x,))
        return self.head(self.norm(x)) * self.scale


@pytest.mark.parametrize("mode", ["hooks", "graph"])
@on_ranks(2)
def test_a_unit_in_a_branch_is_refused(rank: int, mode: str) -> None:
    model = _wrap(_Branching(num_blocks=1))
    message = error_of(lambda: in_mode(model, mode)(batch(rank, 0)))
    assert "expected a unit called where it runs once a step" in message
    assert "in the body of the operator cond" in message


# -- buffers that a checkpointed body changes ------------------------------------------------------


class _Normed(nn.Module):
    """Batch norm, and a buffer whose old value the backward needs, checkpointed or not."""

    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.register_buffer("gain", torch.full((6,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body = self.body
        return x + (checkpoint(body, x, use_reentrant=False) if self.checkpointed else body(x))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.norm(x).relu()) * self.gain.clone()
        with torch.no_grad():
            self.gain.mul_(0.5)
        return y.sin()


def _make_normed(checkpointed: bool) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 6), _Normed(), _Normed(), nn.Linear(6, 3))
    for layer in model[1:3]:
        layer.checkpointed = checkpointed
    return model


def _assert_steps_equal_ddps(model: nn.Module, run: nn.Module, plain: nn.Module) -> None:
    """Losses and buffers of three steps. The batches are the same on all ranks, so DDP's exchange
    of statistics makes no difference."""
    losses = []
    for net, owner in ((DistributedDataParallel(plain), plain), (run, model)):
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.1)
        losses.append(fit_squares(net, optimizer, (5, 4), range(3)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    buffers = dict(model.named_buffers())
    assert different(buffers, dict(plain.named_buffers()), rtol=1e-5) == []


@pytest.mark.parametrize(
    ("mode", "checkpointed"),
    [
        ("graph", True),
        ("graph", False),
        pytest.param("graph-inductor", True, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_a_buffer_that_changes_is_recomputed_from_as_it_was(
    rank: int, mode: str, checkpointed: bool
) -> None:
    """And changes once a step, as under torch.compile, as if there were no checkpoint."""
    model = FSDP(_make_normed(checkpointed), auto_wrap_policy=ModuleWrapPolicy({_Normed}))
    _assert_steps_equal_ddps(model, in_mode(model, mode), _make_normed(False))


class _Unit(nn.Sequential):
    pass


class _Stage(nn.Sequential):
    """A unit and batch norms beside it, checkpointed together."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(4), _Unit(nn.Linear(4, 4)), nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("mode", ["eager", "hooks"])
@on_ranks(2)
def test_statistics_beside_units(rank: int, mode: str) -> None:
    """They change twice a step, in the recomputation too, as under DDP."""
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(4, 4), _Stage(), _Stage(), nn.Linear(4, 3))
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({_Unit}))
    _assert_steps_equal_ddps(model, in_mode(model, mode), plain)


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = _Unit(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y, m: self.unit(y * m), x, mask, use_reentrant=False)


@on_ranks(2)
def test_an_input_that_the_user_changes_is_noticed(rank: int) -> None:
    model = FSDP(_Masked(), auto_wrap_policy=ModuleWrapPolicy({_Unit}))
    mask = torch.ones(4)
    loss = in_mode(model, "hooks")(torch.ones(2, 4, requires_grad=True), mask).sum()
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_inputs_made_to_require_gradients(rank: int, mode: str) -> None:
    """As transformers' ``enable_input_require_grads`` does for frozen embeddings (PEFT)."""
    torch.manual_seed(7)
    plain = _Around(num_blocks=2)
    plain.embed.requires_grad_(False)
    model: Any = _wrap(copy.deepcopy(plain))
    hook = model.embed.register_forward_hook(lambda module, args, output: output.requires_grad_())
    run = in_mode(model, mode)
    if mode == "graph":
        with pytest.raises(FSDPStateError, match="disable_input_require_grads"):
            run(batch(rank, 0))
        hook.remove()
    loss_of(run, batch(rank, 0)).backward()
    for other in range(2):
        (loss_of(plain, batch(other, 0)) / 2).backward()
    assert different(whole_gradients(model), gradients(plain)) == []
    with torch.no_grad():
        torch.testing.assert_close(run(batch(rank, 0)), model(batch(rank, 0)))


@pytest.mark.parametrize(
    ("mode", "is_graph"),
    [
        ("eager", False),
        ("hooks", True),
        ("graph", False),
        ("graph-inductor", True),
    ],
)
@on_ranks(2)
def test_saved_tensor_hooks_around_a_step(rank: int, mode: str, is_graph: bool) -> None:
    """Hooks that are graphs are compiled into the forward and the backward."""

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 0  # however much is saved: no gradient is left

    pair: list[Any] = [torch.clone, unpack]
    if is_graph:
        pair = [make_fx(hook)(torch.ones(2)) for hook in pair]
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
    for parameter in plain.parameters():
        nn.init.constant_(parameter, 0.1)
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    for run in (plain, in_mode(model, mode)):
        with torch.autograd.graph.saved_tensors_hooks(*pair):
            loss = run(x).square().sum()
        loss.backward()
    assert different(whole_gradients(model), gradients(plain)) == []
