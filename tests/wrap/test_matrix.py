"""Equal to DDP: what the library can do, a row for each, in the modes for which its code differs.

A second table has the combinations of strategy, precision, checkpointing and frozen parameters.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from loops import gradients, whole_gradients
from models import (
    Block,
    Transformer,
    average_gradients,
    batch,
    loss_of,
    make_transformer,
    wrap,
)
from modes import INDUCTOR_MODES, MODES, in_mode
from pool import on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed._composable.replicate import replicate as replicate_of_torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_dynamo import (
    FSDP,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    record_events,
    replicate,
)
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.events import EventLog
from fsdp_dynamo.module_tree import plain_fqn
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

STEPS = 2

Loss = Callable[[nn.Module, int, int], torch.Tensor]


def _of_tokens(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return loss_of(model, batch(rank, step))


def _of_numbers(*shape: int) -> Loss:
    """The sum of the squares of what a model makes of random numbers."""

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return model(torch.randn(*shape, generator=generator)).square().sum()

    return loss


def _nothing_else(model: Any, log: EventLog, plain: Any) -> None:
    """Equal numbers are all."""


class Row(NamedTuple):
    """What is trained by a sharded and by a plain model.

    Attributes:
        modes: those for which the library's code differs.
        make: the plain model, alike on all ranks.
        shard: makes units of it.
        loss: of a model, a rank and a step.
        also: what else must be true: of the sharded model, the last step's events, the plain model.
        rel: tolerance for losses.
        plain_loss: that of the plain model, where it is another one.
    """

    modes: tuple[str, ...]
    make: Callable[[], nn.Module] = partial(make_transformer, num_blocks=2)
    shard: Callable[[Any], Any] = wrap
    loss: Loss = _of_tokens
    also: Callable[[Any, EventLog, Any], None] = _nothing_else
    rel: float = 1e-6
    plain_loss: Loss | None = None


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        torch.manual_seed(3)
        return make()

    return seeded


def _units(*classes: type[nn.Module], door: Any = FSDP, **kwargs: Any) -> Callable[[Any], Any]:
    name = "auto_wrap_policy" if door is FSDP else "policy"
    return partial(door, **{name: ModuleWrapPolicy(set(classes))}, **kwargs)


# -- frozen parameters -----------------------------------------------------------------------------


def _partly_frozen() -> Transformer:
    model = make_transformer(num_blocks=2)
    model.embed.weight.requires_grad_(False)
    for block in model.blocks:
        block.qkv.weight.requires_grad_(False)
        block.norm1.bias.requires_grad_(False)
    return model


def _costs_no_gradients(model: Any, log: EventLog, plain: Any) -> None:
    """Reduced bytes and gradients' memory are those of the trained part, up to padding."""
    root = [*plain.head.parameters(), *plain.norm.parameters(), plain.scale]
    units = {"": root} | {f"blocks.{i}": [*plain.blocks[i].parameters()] for i in range(2)}
    sent = {e.unit: e.num_bytes for e in log if e.kind == "reduce_scatter"}
    assert sent.keys() == units.keys()
    for unit, params in units.items():
        trained = 4 * sum(param.numel() for param in params if param.requires_grad)
        assert trained <= sent[unit] <= trained + 256
    grads = sum(local_of(p.grad).nbytes for p in model.parameters() if p.grad is not None)
    assert grads <= sum(sent.values()) // 2
    assert all(p.requires_grad for p in model.parameters() if p.grad is not None)


# -- sharing ---------------------------------------------------------------------------------------


class TiedBlocks(Transformer):
    """Two blocks share a weight; the unit above both must own it."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.blocks[1].up.weight = self.blocks[0].up.weight


def _owned_above(model: Any, log: EventLog, plain: Any) -> None:
    """The unit above all users gathers once for all of them."""
    assert model.flat_parameter_of("blocks.1.up.weight").unit_fqn == ""
    state = model.state_dict()
    assert torch.equal(state["blocks.0.up.weight"], state["blocks.1.up.weight"])
    gathered = [event.unit for event in log if event.kind == "all_gather"]
    assert gathered.count("") == 1
    assert set(gathered) == {"", "blocks.0", "blocks.1"}


# -- unusual models --------------------------------------------------------------------------------


class OddBlock(nn.Module):
    """Takes a keyword, returns a nested dict, has an unused layer and one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.no_parameters = nn.ReLU()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        y = self.no_parameters(self.linear(x)) * scale
        return {"hidden": y, "none": None, "twice": [(2 * y, None)]}


class OddModel(nn.Module):
    """Calls one unit twice, one never, one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never = OddBlock(), OddBlock()
        self.empty = nn.Sequential(nn.Tanh())
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().mean()
        once = self.first(x, scale=scale)
        twice = self.first(self.empty(once["hidden"]), scale=scale)
        return self.last(once["twice"][0][0] + twice["twice"][0][0]).sum()


class Scaled(nn.Module):
    """Convolutions in channels-last memory, with scalars that are trained and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.block = nn.Sequential(nn.Conv2d(6, 5, 3), nn.Tanh())
        self.block.to(memory_format=torch.channels_last)
        self.shift = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.conv(x) * self.scale).mean((2, 3)) + self.shift


class Own(nn.Parameter):
    """A parameter with behaviour of its own, as another library's quantised weights are."""


class Based(nn.Module):
    """A layer above a frozen base whose weight has two parts, as a quantised one may have."""

    def __init__(self, base: nn.Parameter | None = None) -> None:
        super().__init__()
        parts = TwoTensor(torch.rand(4, 4), torch.rand(4, 4))  # type: ignore[no-untyped-call]
        self.base = nn.Parameter(parts, requires_grad=False) if base is None else base
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = x @ self.base
        return self.layer(y.a + y.b if isinstance(y, TwoTensor) else y)


def _based_on_own() -> Based:
    return Based(Own(torch.rand(4, 4), requires_grad=False))


def _base_ignored(model: Any) -> FSDP:
    return FSDP(model, ignored_states=[model.base])


# -- what is ignored or replicated -----------------------------------------------------------------


def _partly_ignored(model: Any) -> FSDP:
    model.blocks[0] = FSDP(model.blocks[0], ignored_modules=[model.blocks[0].up])
    return FSDP(model, ignored_modules=[model.head], ignored_states=[model.scale])


def _of_equal_tokens(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """What is ignored is not reduced."""
    return loss_of(model, batch(0, step))


def _ignored_are_whole(model: Any, log: EventLog, plain: Any) -> None:
    for name in ("head.weight", "blocks.0.up.weight"):
        assert model.get_parameter(name).shape == plain.get_parameter(name).shape
    managed = {o.fqn for unit in model._fsdp_root.units for o in unit.originals()}
    assert managed.isdisjoint({"head.weight", "scale", "up.weight"})


def _replicated(make_replicas: Callable[[nn.Module], object]) -> Callable[[Any], Any]:
    """The first block is a unit, the second one a replica."""

    def shard(model: Any) -> Any:
        make_replicas(model.blocks[1])
        fully_shard(model, policy=lambda module, recurse, **_: recurse or module is model.blocks[0])
        return model

    return shard


def _holds_no_replicas(model: Any, log: EventLog, plain: Any) -> None:
    root = model._fsdp_root.units[0]
    held = [f"{root.fqn}.{original.fqn}" for original in root.originals()]
    assert not any("blocks.1." in name for name in held)
    assert any("head." in name for name in held)


# -- checkpointed blocks ---------------------------------------------------------------------------


def _checkpoint_before(model: Any) -> FSDP:
    reentrant = CheckpointImpl.REENTRANT
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=reentrant)
    return wrap(model)


def _checkpoint_inside(model: Any) -> FSDP:
    wrapped = wrap(model)
    apply_activation_checkpointing(wrapped, check_fn=lambda m: isinstance(m, Block))
    return wrapped


def _no_surplus(model: Any, log: EventLog, plain: Any) -> None:
    """Blocks are gathered twice, the root once."""
    assert (len(log.keys("all_gather")), len(log.keys("reduce_scatter"))) == (5, 3)


# -- blocks that are compiled first, as scripts for FSDP2 do it ------------------------------------


def _compiled_in_place(model: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block)
    return fully_shard(model)


def _compiled_and_replaced(model: Any) -> nn.Module:
    for name, block in model.blocks.named_children():
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        model.blocks.register_module(name, compiled)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def _compiled_and_wrapped(model: Any) -> FSDP:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FSDP(torch.compile(block, backend="aot_eager", fullgraph=True))
    return FSDP(model)


def _one_graph_for_all(model: Any, log: EventLog, plain: Any) -> None:
    """All blocks share the graph of a training step; a copy's evaluation has one more."""
    if isinstance(model.blocks[0], Block):  # not torch.compile's module
        copied = copy.deepcopy(model)
        torch.testing.assert_close(loss_of(copied, batch(0, 9)), loss_of(model, batch(0, 9)))
    assert counters["stats"]["unique_graphs"] <= 2


ALL = tuple(MODES)
TEN_BLOCKS = partial(make_transformer, num_blocks=10)  # more than Dynamo compiles of one frame
NO_SHARD = ShardingStrategy.NO_SHARD
IMAGES = _of_numbers(2, 4, 8, 8)
ROWS: dict[str, Row] = {
    # The eager mode has its own tests of the first four, and so has SHARD_GRAD_OP.
    "FULL_SHARD": Row(("hooks", "graph")),
    "NO_SHARD": Row(("hooks", "graph"), shard=partial(wrap, sharding_strategy=NO_SHARD)),
    "Inductor": Row(("graph-inductor", "hooks-inductor"), rel=1e-5),
    "one unit": Row(("eager",), shard=_units()),
    "frozen": Row(("eager", "graph"), _partly_frozen, also=_costs_no_gradients),
    "tied across units": Row(("eager", "graph"), _seeded(TiedBlocks), also=_owned_above),
    "odd outputs and uses": Row(
        ALL, _seeded(OddModel), _units(OddBlock, nn.Sequential), _of_numbers(3, 6), rel=1e-5
    ),
    "ignored": Row(
        ("eager", "graph"),
        shard=_partly_ignored,
        loss=_of_equal_tokens,
        also=_ignored_are_whole,
    ),
    "ignored tensor subclass": Row(ALL, _seeded(Based), _base_ignored, _of_numbers(2, 4)),
    "ignored parameter subclass": Row(
        ("eager", "graph"), _seeded(_based_on_own), _base_ignored, _of_numbers(2, 4)
    ),
    "channels last": Row(("eager", "hooks"), _seeded(Scaled), _units(nn.Sequential), IMAGES),
    "channels last, fully_shard": Row(
        ("graph",), _seeded(Scaled), _units(nn.Sequential, door=fully_shard), IMAGES
    ),
    "replicate": Row(("eager", "graph"), shard=_replicated(replicate), also=_holds_no_replicas),
    "torch's replicate": Row(
        ("eager",), shard=_replicated(replicate_of_torch), also=_holds_no_replicas
    ),
    "checkpointed before": Row(("eager",), shard=_checkpoint_before, also=_no_surplus),
    "checkpointed inside": Row(ALL, shard=_checkpoint_inside, also=_no_surplus),
    "compiled in place": Row(("eager",), TEN_BLOCKS, _compiled_in_place, also=_one_graph_for_all),
    "compiled and replaced": Row(
        ("eager",), TEN_BLOCKS, _compiled_and_replaced, also=_one_graph_for_all
    ),
    "compiled and wrapped": Row(
        ("eager",), TEN_BLOCKS, _compiled_and_wrapped, also=_one_graph_for_all
    ),
}


def _check(row: Row, rank: int, mode: str) -> None:
    counters.clear()
    plain = row.make()
    model = row.shard(row.make())
    run = in_mode(model, mode)
    nets = (plain, model)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.step()  # of the step before
            optimizer.zero_grad()
        expected = (row.plain_loss or row.loss)(plain, rank, step)
        expected.backward()
        average_gradients(plain)
        with record_events() as log:
            loss = row.loss(run, rank, step)
            loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=row.rel), row
    got = {plain_fqn(fqn): grad for fqn, grad in whole_gradients(model).items()}
    tolerances = (1e-4, 1e-6) if row.rel < 1e-2 else (row.rel, row.rel / 10)
    torch.testing.assert_close(
        got, gradients(plain), rtol=tolerances[0], atol=tolerances[1], msg=lambda m: f"{row}\n{m}"
    )
    row.also(model, log, plain)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=pytest.mark.slow if mode == "hooks-inductor" else ())
        for mode in (*MODES, *INDUCTOR_MODES)  # the quickest first
        for name, row in ROWS.items()
        if mode in row.modes
    ],
)
@on_ranks(2)
def test_equals_ddp(rank: int, name: str, mode: str) -> None:
    _check(ROWS[name], rank, mode)


# -- combinations ----------------------------------------------------------------------------------


class Case(NamedTuple):
    strategy: ShardingStrategy
    low_precision: bool
    checkpointed: bool
    frozen: bool

    @property
    def needs_grid(self) -> bool:
        return self.strategy.is_hybrid or self.strategy.is_hierarchical

    @property
    def has_pairs(self) -> bool:
        """An even number of features: of any two of them, such cases have all combinations."""
        return sum(self[1:]) % 2 == 0


CASES = [Case(*values) for values in itertools.product(ShardingStrategy, *[(False, True)] * 3)]


def _in_bf16(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """With low parameters, and gradients of those that they were cast from."""
    low = {name: param.bfloat16() for name, param in model.named_parameters()}
    return loss_of(partial(functional_call, model, low), batch(rank, step))


def _sharded(case: Case, model: Any) -> FSDP:
    if case.checkpointed:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2)) if case.needs_grid else None
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return wrap(
        model,
        sharding_strategy=case.strategy,
        device_mesh=mesh,
        mixed_precision=low if case.low_precision else None,
    )


def _gathers_no_more(case: Case, model: Any, log: EventLog, plain: Any) -> None:
    # A unit with a frozen part has two flat parameters.
    roots, flats = 1 + case.frozen, 2 * (1 + case.frozen)
    wanted = roots + flats * (1 + case.strategy.reshards_after_forward)
    if case.strategy is ShardingStrategy.NO_SHARD:
        wanted = 0
    if case.strategy.is_hierarchical:
        wanted += roots + flats  # between nodes
    assert len(log.keys("all_gather")) <= wanted


def _check_case(case: Case, rank: int, mode: str) -> None:
    _check(
        Row(
            (mode,),
            _partly_frozen if case.frozen else partial(make_transformer, num_blocks=2),
            partial(_sharded, case),
            plain_loss=_in_bf16 if case.low_precision else _of_tokens,
            also=partial(_gathers_no_more, case),
            rel=2e-2 if case.low_precision else 1e-6,
        ),
        rank,
        mode,
    )


@on_ranks(2)
def test_every_combination_on_two_ranks(rank: int) -> None:
    for case in CASES:
        if not case.needs_grid:
            _check_case(case, rank, "eager")


@on_ranks(4)
def test_pairs_of_features_on_four_ranks(rank: int) -> None:
    """With every strategy, every two of the three features together."""
    for case in CASES:
        if case.needs_grid and case.has_pairs:
            _check_case(case, rank, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hooks", "graph"])
@on_ranks(4)
def test_pairs_of_features_compiled(rank: int, mode: str) -> None:
    for case in CASES:
        if case.has_pairs:
            _check_case(case, rank, mode)
            torch._dynamo.reset()
            dist.barrier()
