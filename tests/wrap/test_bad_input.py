"""Wrong arguments and accidents: a clear error, nothing changed, nothing left behind."""

from __future__ import annotations

import copy
import re
import types
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Block, Transformer, batch, loss_of, make_transformer, train, wrap
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.tensor import DTensor

from fsdp_dynamo import FSDP, CPUOffload, FSDPError, ShardingStrategy, fully_shard
from fsdp_dynamo.core.original_parameter import OriginalParameter
from fsdp_dynamo.wrap import build, deferred_init
from fsdp_dynamo.wrap.arguments import warn_of_cpu_start
from fsdp_dynamo.wrap_policy import CustomPolicy, ModuleWrapPolicy


def _without_values() -> nn.Module:
    """A model whose class has no ``reset_parameters`` for the one parameter on the meta device."""
    model = make_transformer(num_blocks=1)
    model.scale = nn.Parameter(torch.empty(1, device="meta"))
    return model


def _two_devices() -> None:
    """What ``FSDP`` checks of parameters, without a second device at hand."""
    on = [types.SimpleNamespace(device=torch.device(d), is_meta=False) for d in ("cpu", "cuda:0")]
    originals = [OriginalParameter(p, f"{p.device.type}.weight") for p in on]  # type: ignore[arg-type]
    build._check_devices("block", originals)


def _cpu_tensors_with_nccl() -> None:
    """A group of ranks that, as an NCCL group, serves no CPU."""
    with mock.patch.object(deferred_init, "serves_cpu", return_value=False):
        FSDP(nn.Linear(2, 2), sync_module_states=True)


def _wrap_in_compiled_mode(backend: str, fullgraph: bool, **kwargs: Any) -> None:
    model = wrap(make_transformer(num_blocks=1), **kwargs)
    torch.compile(model, backend=backend, fullgraph=fullgraph)(batch(0, 0))


def _tied_to_a_nested_unit(shard: Callable[[nn.Module], nn.Module]) -> None:
    model = make_transformer(num_blocks=2)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[0] = shard(model.blocks[0])
    shard(model)


def _wrap_in_inference_mode() -> None:
    module = nn.Linear(2, 2)
    with torch.inference_mode():
        fully_shard(module)


HYBRID = ShardingStrategy.HYBRID_SHARD
ARGUMENTS: list[tuple[str, Any, str]] = [
    ("device_mesh", "nodes", "argument 'device_mesh': expected a DeviceMesh, got 'nodes'"),
    ("auto_wrap_policy", ModuleWrapPolicy({Block}), "got a policy that matches nothing"),
    ("auto_wrap_policy", CustomPolicy(lambda _: 3), "expected True, False or a dict"),
    ("auto_wrap_policy", CustomPolicy(lambda _: {"device_id": 1}), "one of sharding_strategy"),
    (
        "auto_wrap_policy",
        CustomPolicy(lambda _: {"sharding_strategy": HYBRID}),
        "expected a strategy that goes with the root's FULL_SHARD",
    ),
    ("sharding_strategy", "FULL", "Pass one of FULL_SHARD"),
    ("sharding_strategy", HYBRID, "expected a known number of ranks per node"),
    ("process_group", "x", "a torch.distributed.ProcessGroup"),
    ("mixed_precision", torch.bfloat16, "expected a MixedPrecision or None"),
    ("param_init_fn", 3, "expected a function of a module"),
    ("device_id", CPUOffload(), "expected a number, a torch.device or its name"),
    ("ignored_modules", ["weight"], "argument 'ignored_modules' or 'ignored_states'"),
]
CASES: dict[str, tuple[Callable[[], object], str]] = {
    "not a module": (lambda: FSDP(torch.zeros(2)), "argument 'module': expected a torch.nn.Module"),
    "wrapped twice": (lambda: FSDP(FSDP(nn.Linear(2, 2))), "expected a module that is no unit yet"),
    "two devices": (_two_devices, "'block.cuda.weight' on cuda:0"),
    "CPU tensors with NCCL": (
        _cpu_tensors_with_nccl,
        "got a CPU tensor with an NCCL group. Pass device_id=",
    ),
    "meta": (lambda: FSDP(_without_values()), "reset_parameters() method, got none for 'scale'"),
    "instances in a policy": (
        lambda: ModuleWrapPolicy({nn.Linear(2, 2)}),  # type: ignore[arg-type]
        "expected classes derived from torch.nn.Module",
    ),
    "hybrid pair": (
        lambda: FSDP(
            nn.Linear(2, 2),
            process_group=(dist.group.WORLD, dist.group.WORLD),
            sharding_strategy=HYBRID,
        ),
        "that share this rank only",
    ),
    "pair of groups": (
        lambda: FSDP(nn.Linear(2, 2), process_group=(dist.group.WORLD, dist.group.WORLD)),
        "a tuple of groups, which is for HYBRID_SHARD",
    ),
    "reduction group": (
        lambda: FSDP(
            nn.Linear(2, 2),
            reduction_group=dist.new_group([dist.get_rank()], use_local_synchronization=True),
        ),
        "expected a group of the shard group's ranks, [0, 1], in that order",
    ),
    "param_init_fn": (
        lambda: FSDP(nn.Linear(2, 2, device="meta"), param_init_fn=lambda m: None),
        "to be initialised, got no values for 'weight', 'bias'",
    ),
    "ignored unit": (
        lambda: FSDP(nn.Linear(2, 2), ignored_modules=[FSDP(nn.Linear(2, 2))]),
        "expected modules that are no units",
    ),
    "tied to DTensors of a nested unit": (
        lambda: _tied_to_a_nested_unit(fully_shard),
        "parameter 'blocks.1.up.weight': expected a parameter that no unit holds yet",
    ),
    "tied to a nested unit": (
        lambda: _tied_to_a_nested_unit(FSDP),
        "parameter 'blocks.1.up.weight': expected a parameter that no unit holds yet",
    ),
    "use_orig_params, hooks mode": (
        lambda: _wrap_in_compiled_mode("aot_eager", False, use_orig_params=False),
        "expected use_orig_params=True under torch.compile",
    ),
    "use_orig_params, graph mode": (
        lambda: _wrap_in_compiled_mode("fsdp_dynamo_aot_eager", True, use_orig_params=False),
        "expected use_orig_params=True under torch.compile",
    ),
    "fullgraph with another backend": (
        lambda: _wrap_in_compiled_mode("aot_eager", True),
        'expected backend="fsdp_dynamo"',
    ),
    "max_norm": (
        lambda: FSDP(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))),
        "UnsupportedError: parameter '0.weight': expected an embedding with max_norm=None",
    ),
    "sparse gradients": (
        lambda: fully_shard(nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True))),
        "UnsupportedError: parameter '0.weight': expected an embedding with sparse=False",
    ),
    "inference mode, wrapper": (
        torch.inference_mode(lambda: FSDP(nn.Linear(2, 2))),
        "FSDPStateError: parameter 'weight': expected a module that is made and wrapped outside",
    ),
    "inference mode, composable": (
        _wrap_in_inference_mode,
        "FSDPStateError: a Linear: expected a module that is made and wrapped outside",
    ),
    "Join": (
        lambda: Join([FSDP(nn.Linear(2, 2))]),
        "UnsupportedError: the root unit: expected as many batches on all ranks",
    ),
    "no such parameter": (
        lambda: FSDP(nn.Linear(2, 2)).flat_parameter_of("nothing"),
        "expected the FQN of a parameter",
    ),
}


@on_ranks(2)
def test_wrong_values_of_one_argument(rank: int) -> None:
    for argument, value, words in ARGUMENTS:
        with pytest.raises(FSDPError, match=re.escape(words)):
            FSDP(nn.Sequential(nn.Linear(2, 2)), **{argument: value})


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_wrong_arguments(rank: int, name: str) -> None:
    action, words = CASES[name]
    with pytest.raises(FSDPError) as error:
        action()
    assert words in f"{type(error.value).__name__}: {error.value}"


@on_ranks(2)
def test_a_refused_wrap_changes_nothing(rank: int) -> None:
    model = _without_values()
    modules = list(model.modules())
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(FSDPError, match="meta"):
        wrap(model)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert [p.shape for p in model.parameters()] == shapes


def test_cpu_start_warns() -> None:
    class AcceleratorGroup:
        _device_types = (torch.device("cuda"),)

    group: Any = AcceleratorGroup()
    with pytest.warns(UserWarning, match="pass device_id, or move the module"):
        warn_of_cpu_start(nn.Linear(2, 2), group, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_cpu_start(nn.Linear(2, 2), group, 0)


@pytest.mark.parametrize("is_root", [True, False])
@on_ranks(2)
def test_ignoring_the_root_warns(rank: int, is_root: bool) -> None:
    plain = make_transformer(num_blocks=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = FSDP(plain, ignored_modules=[plain if is_root else plain.head])
    texts = [str(warning.message) for warning in caught]
    assert any("nothing will be sharded" in text for text in texts) is is_root
    assert any(isinstance(p, DTensor) for p in wrapped.parameters()) is not is_root


@on_ranks(2)
def test_offload_on_cpu_is_accepted(rank: int) -> None:
    FSDP(nn.Linear(2, 2), cpu_offload=CPUOffload(offload_params=True))


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("shape", "eager"), ("dtype", "eager"), ("shape", "graph"), ("dtype", "hooks")],
)
@on_ranks(2)
def test_parameter_changed_behind_the_back(rank: int, kind: str, mode: str) -> None:
    wrapped = wrap(make_transformer(num_blocks=2))
    model = in_mode(wrapped, mode)
    loss_of(model, batch(rank, 0)).backward()
    given = {"shape": torch.zeros(16, 32), "dtype": torch.zeros(32, 16, dtype=torch.float64)}
    wrapped.blocks[1].up.weight = nn.Parameter(given[kind])
    words = "parameter 'blocks.1.up.weight': expected the wrapped parameter"
    with pytest.raises(FSDPError, match=words):
        model(batch(rank, 0))


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_goes_on_after_a_refused_forward(rank: int, mode: str) -> None:
    expected, _ = train(wrap(make_transformer(num_blocks=2)), rank, steps=2)
    wrapped = wrap(make_transformer(num_blocks=2))
    model = in_mode(wrapped, mode)
    scale = wrapped.scale
    wrapped.module.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(FSDPError, match="parameter 'scale': expected the wrapped parameter"):
        model(batch(rank, 0))
    wrapped.module.scale = scale
    assert train(model, rank, steps=2)[0] == pytest.approx(expected, rel=1e-6)


class Failing(Transformer):
    """Raises in the middle of its forward when asked to."""

    fail_at = -1

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == self.fail_at:
                raise ValueError("as asked")
        return self.head(self.norm(x)) * self.scale


@pytest.mark.parametrize("mode", ["eager", "hooks"])
@on_ranks(2)
def test_forward_that_raises(rank: int, mode: str) -> None:
    torch.manual_seed(7)
    plain = Failing(num_blocks=3)
    expected, _ = train(wrap(copy.deepcopy(plain)), rank, steps=2)
    wrapped = wrap(plain)
    model = in_mode(wrapped, mode)
    plain.fail_at = 1
    with pytest.raises(Exception, match="as asked"):
        model(batch(rank, 0))
    assert not any(flat.is_allocated for unit in wrapped._fsdp_root.units for flat in unit.flats)
    plain.fail_at = -1
    assert train(model, rank, steps=2)[0] == pytest.approx(expected, rel=1e-6)


class FailsInBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError("as asked")


@on_ranks(2)
def test_backward_that_raises(rank: int) -> None:
    expected, _ = train(wrap(make_transformer(num_blocks=3)), rank, steps=2)
    model = wrap(make_transformer(num_blocks=3))
    handle = model.blocks[0].register_forward_hook(lambda m, a, out: FailsInBackward.apply(out))
    with pytest.raises(ValueError, match="as asked"):
        loss_of(model, batch(rank, 0)).backward()
    handle.remove()
    assert train(model, rank, steps=2)[0] == expected


@on_ranks(2)
def test_calls_in_a_wrong_state(rank: int) -> None:
    model = wrap(make_transformer(num_blocks=1))
    for call, words in (
        (lambda output: output.sum().backward(), "Do not call backward.* inside the forward"),
        (lambda output: model.state_dict(), "expected state_dict.* between two steps"),
    ):
        handle = model.module.head.register_forward_hook(lambda m, a, out, call=call: call(out))
        with pytest.raises(FSDPError, match=words):
            model(batch(rank, 0))
        handle.remove()
    train(model, rank, steps=1)
