"""Wrong arguments and accidents: a clear error, nothing changed, nothing left behind."""

from __future__ import annotations

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
from pool import RankPool
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_dynamo import FSDP, CPUOffload, FSDPError, ShardingStrategy, fully_shard
from fsdp_dynamo.core.original_parameter import OriginalParameter
from fsdp_dynamo.wrap import build, deferred_init
from fsdp_dynamo.wrap.arguments import warn_of_cpu_start
from fsdp_dynamo.wrap_policy import CustomPolicy, ModuleWrapPolicy


def _message(action: Callable[[], object]) -> str:
    try:
        action()
    except FSDPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


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


def _tied_to_a_nested_unit() -> None:
    model = make_transformer(num_blocks=2)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[0] = FSDP(model.blocks[0])
    FSDP(model)


def _tied_to_dtensors() -> None:
    model = make_transformer(num_blocks=2)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    fully_shard(model.blocks[0])
    fully_shard(model)


def _wrap_in_inference_mode() -> None:
    module = nn.Linear(2, 2)
    with torch.inference_mode():
        fully_shard(module)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "not a module": (lambda: FSDP(torch.zeros(2)), "argument 'module': expected a torch.nn.Module"),
    "wrapped twice": (lambda: FSDP(FSDP(nn.Linear(2, 2))), "expected a module that is no unit yet"),
    "two devices": (_two_devices, "'block.cuda.weight' on cuda:0"),
    "CPU tensors with NCCL": (
        _cpu_tensors_with_nccl,
        "argument 'sync_module_states': expected parameters on the accelerator, got a CPU tensor "
        "with an NCCL group. Pass device_id=",
    ),
    "meta": (lambda: FSDP(_without_values()), "reset_parameters() method, got none for 'scale'"),
    "policy matches nothing": (
        lambda: FSDP(nn.Linear(2, 2), auto_wrap_policy=ModuleWrapPolicy({Block})),
        "expected modules of class Block in the module tree, got a policy that matches nothing",
    ),
    "no policy": (lambda: FSDP(nn.Linear(2, 2), auto_wrap_policy=3), "expected a WrapPolicy or a"),
    "instances in a policy": (
        lambda: ModuleWrapPolicy({nn.Linear(2, 2)}),  # type: ignore[arg-type]
        "expected classes derived from torch.nn.Module",
    ),
    "custom policy": (
        lambda: FSDP(nn.Linear(2, 2), auto_wrap_policy=CustomPolicy(lambda m: 3)),
        "expected True, False or a dict",
    ),
    "custom argument": (
        lambda: FSDP(
            nn.Sequential(nn.Linear(2, 2)),
            auto_wrap_policy=CustomPolicy(lambda m: {"device_id": 1}),
        ),
        "a policy's dict of constructor arguments: expected one of sharding_strategy",
    ),
    "strategy": (lambda: FSDP(nn.Linear(2, 2), sharding_strategy="FULL"), "one of FULL_SHARD"),
    "hybrid": (
        lambda: FSDP(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD),
        "expected a known number of ranks per node",
    ),
    "hybrid group": (
        lambda: FSDP(
            nn.Linear(2, 2),
            process_group=dist.group.WORLD,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        ),
        "expected a pair of process groups (shard, replicate)",
    ),
    "hybrid pair": (
        lambda: FSDP(
            nn.Linear(2, 2),
            process_group=(dist.group.WORLD, dist.group.WORLD),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        ),
        "that share this rank only",
    ),
    "hybrid mesh": (
        lambda: FSDP(
            nn.Linear(2, 2),
            device_mesh=init_device_mesh("cpu", (2,)),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        ),
        "expected a 2-D device mesh (replicas, shards)",
    ),
    "pair of groups": (
        lambda: FSDP(nn.Linear(2, 2), process_group=(dist.group.WORLD, dist.group.WORLD)),
        "a tuple of groups, which is for HYBRID_SHARD",
    ),
    "hybrid unit": (
        lambda: FSDP(
            nn.Sequential(nn.Linear(2, 2)),
            auto_wrap_policy=CustomPolicy(
                lambda m: {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
            ),
        ),
        "expected a strategy that goes with the root's FULL_SHARD",
    ),
    "reduction group": (
        lambda: FSDP(
            nn.Linear(2, 2),
            reduction_group=dist.new_group([dist.get_rank()], use_local_synchronization=True),
        ),
        "expected a group of the shard group's ranks, [0, 1], in that order",
    ),
    "group": (lambda: FSDP(nn.Linear(2, 2), process_group="x"), "a torch.distributed.ProcessGroup"),
    "mixed precision": (
        lambda: FSDP(nn.Linear(2, 2), mixed_precision=torch.bfloat16),
        "expected a MixedPrecision or None",
    ),
    "param_init_fn": (
        lambda: FSDP(nn.Linear(2, 2, device="meta"), param_init_fn=lambda m: None),
        "to be initialised, got no values for 'weight', 'bias'",
    ),
    "param_init_fn that is no function": (
        lambda: FSDP(nn.Linear(2, 2), param_init_fn=3),  # type: ignore[arg-type]
        "argument 'param_init_fn': expected a function of a module",
    ),
    "device_id": (
        lambda: FSDP(nn.Linear(2, 2), device_id=CPUOffload()),  # type: ignore[arg-type]
        "argument 'device_id': expected a number, a torch.device or its name",
    ),
    "ignored unit": (
        lambda: FSDP(nn.Linear(2, 2), ignored_modules=[FSDP(nn.Linear(2, 2))]),
        "expected modules that are no units",
    ),
    "ignored something": (
        lambda: FSDP(nn.Linear(2, 2), ignored_modules=["weight"]),
        "argument 'ignored_modules' or 'ignored_states'",
    ),
    "tied to DTensors of a nested unit": (
        _tied_to_dtensors,
        "parameter 'blocks.1.up.weight': expected a parameter that no unit holds yet, "
        "got one that is tied to 'up.weight'",
    ),
    "tied to a nested unit": (
        _tied_to_a_nested_unit,
        "parameter 'blocks.1.up.weight': expected a parameter that no unit holds yet, "
        "got one that is tied to 'up.weight'",
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


def _case(rank: int, world_size: int, name: str) -> str:
    return _message(CASES[name][0])


@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments(ranks: RankPool, name: str) -> None:
    for message in ranks.run(_case, 2, name):
        assert CASES[name][1] in message


def _nothing_changed(rank: int, world_size: int) -> bool:
    model = _without_values()
    modules = [id(m) for m in model.modules()]
    shapes = [p.shape for p in model.parameters()]
    message = _message(lambda: wrap(model))
    assert "meta" in message
    return modules == [id(m) for m in model.modules()] and shapes == [
        p.shape for p in model.parameters()
    ]


def test_a_refused_wrap_changes_nothing(ranks: RankPool) -> None:
    assert ranks.run(_nothing_changed, 2) == [True, True]


def test_cpu_start_warns() -> None:
    class AcceleratorGroup:
        _device_types = (torch.device("cuda"),)

    group: Any = AcceleratorGroup()
    with pytest.warns(UserWarning, match="pass device_id, or move the module"):
        warn_of_cpu_start(nn.Linear(2, 2), group, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_cpu_start(nn.Linear(2, 2), group, 0)


def _root_ignored(rank: int, world_size: int, inside: bool) -> tuple[list[str], int]:
    """Warnings of ignoring the root (or a module in it); how many parameters are sharded."""
    plain = make_transformer(num_blocks=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = FSDP(plain, ignored_modules=[plain.head if inside else plain])
    num_sharded = sum(isinstance(p, DTensor) for p in wrapped.parameters())
    return [str(w.message) for w in caught if "ignored" in str(w.message)], num_sharded


def test_ignoring_the_root_warns(ranks: RankPool) -> None:
    for messages, num_sharded in ranks.run(_root_ignored, 2, False):
        assert messages == [
            "ignored_modules names the wrapped module itself: nothing will be sharded"
        ]
        assert num_sharded == 0
    for messages, num_sharded in ranks.run(_root_ignored, 2, True):
        assert messages == []
        assert num_sharded > 0


def _offload(rank: int, world_size: int) -> bool:
    FSDP(nn.Linear(2, 2), cpu_offload=CPUOffload(offload_params=True))
    return True


def test_offload_on_cpu_is_accepted(ranks: RankPool) -> None:
    assert ranks.run(_offload, 2) == [True, True]


def _replaced(rank: int, world_size: int, mode: str, kind: str) -> str:
    wrapped = wrap(make_transformer(num_blocks=2))
    model = in_mode(wrapped, mode)
    loss_of(model, batch(rank, 0)).backward()
    given = {"shape": torch.zeros(16, 32), "dtype": torch.zeros(32, 16, dtype=torch.float64)}
    wrapped.blocks[1].up.weight = nn.Parameter(given[kind])
    return _message(lambda: model(batch(rank, 0)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["shape", "dtype"])
def test_parameter_changed_behind_the_back(ranks: RankPool, kind: str, mode: str) -> None:
    for message in ranks.run(_replaced, 2, mode, kind):
        assert "parameter 'blocks.1.up.weight': expected the wrapped parameter" in message


def _refused_then_mended(rank: int, world_size: int, mode: str) -> tuple[str, Any, Any]:
    expected, _ = train(wrap(make_transformer(num_blocks=2)), rank, steps=2)
    wrapped = wrap(make_transformer(num_blocks=2))
    model = in_mode(wrapped, mode)
    scale = wrapped.scale
    wrapped.module.scale = nn.Parameter(torch.ones(3))
    message = _message(lambda: model(batch(rank, 0)))
    wrapped.module.scale = scale
    return message, expected, train(model, rank, steps=2)[0]


@pytest.mark.parametrize("mode", MODES)
def test_goes_on_after_a_refused_forward(ranks: RankPool, mode: str) -> None:
    for message, expected, got in ranks.run(_refused_then_mended, 2, mode):
        assert "parameter 'scale': expected the wrapped parameter" in message
        assert got == pytest.approx(expected, rel=1e-6)


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


def _failing(rank: int, world_size: int, mode: str) -> tuple[Any, Any, int]:
    torch.manual_seed(7)
    expected, _ = train(wrap(Failing(num_blocks=3)), rank, steps=2)
    torch.manual_seed(7)
    wrapped = wrap(Failing(num_blocks=3))
    model = in_mode(wrapped, mode)
    wrapped.module.fail_at = 1
    with pytest.raises(Exception, match="as asked"):
        model(batch(rank, 0))
    alive = sum(f.is_allocated for u in wrapped._fsdp_root.units for f in u.flats)
    wrapped.module.fail_at = -1
    got, _ = train(model, rank, steps=2)
    return expected, got, alive


@pytest.mark.parametrize("mode", ["eager", "hooks"])
def test_forward_that_raises(ranks: RankPool, mode: str) -> None:
    for expected, got, alive in ranks.run(_failing, 2, mode):
        assert got == pytest.approx(expected, rel=1e-6)
        assert alive == 0


class FailsInBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError("as asked")


def _failing_backward(rank: int, world_size: int) -> tuple[Any, Any]:
    expected, _ = train(wrap(make_transformer(num_blocks=3)), rank, steps=2)
    model = wrap(make_transformer(num_blocks=3))
    handle = model.blocks[0].register_forward_hook(lambda m, a, out: FailsInBackward.apply(out))
    with pytest.raises(ValueError, match="as asked"):
        loss_of(model, batch(rank, 0)).backward()
    handle.remove()
    return expected, train(model, rank, steps=2)[0]


def test_backward_that_raises(ranks: RankPool) -> None:
    for expected, got in ranks.run(_failing_backward, 2):
        assert got == expected


def _states(rank: int, world_size: int) -> list[str]:
    model = wrap(make_transformer(num_blocks=1))
    messages = []

    def backward_inside(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.sum().backward()

    handle = model.module.head.register_forward_hook(backward_inside)
    messages.append(_message(lambda: model(batch(rank, 0))))
    handle.remove()

    def state_dict_inside(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        model.state_dict()

    handle = model.module.head.register_forward_hook(state_dict_inside)
    messages.append(_message(lambda: model(batch(rank, 0))))
    handle.remove()
    train(model, rank, steps=1)
    return messages


def test_calls_in_a_wrong_state(ranks: RankPool) -> None:
    for backward, state_dict in ranks.run(_states, 2):
        assert "got FORWARD -> BACKWARD" in backward
        assert "Do not call backward() inside the forward" in backward
        assert "expected state_dict() between two steps, got a call in state FORWARD" in state_dict
