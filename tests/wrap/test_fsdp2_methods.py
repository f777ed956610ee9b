"""FSDP2's setters on modules of fully_shard, beside torch's own: gradients and collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as upstream
from models import Block, average_gradients, batch, loss_of, make_transformer, train
from modes import in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_dynamo
from benchmarks.streams.program import COMPUTING, Wait
from benchmarks.streams.recording import record_program
from fsdp_dynamo import FSDP, FSDPError, StateDictType, fully_shard, record_events
from fsdp_dynamo.version import all_gather_single, reduce_scatter_single
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

POLICY = ModuleWrapPolicy({Block})


def _shard(library: Any, shape: tuple[int, ...], **given: Any) -> Any:
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = make_transformer(num_blocks=2)
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh, **given)
    return library.fully_shard(model, mesh=mesh, **given)


def _grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    def whole(grad: Any) -> torch.Tensor | None:
        return grad.full_tensor() if isinstance(grad, DTensor) else grad

    if not isinstance(model, fsdp_dynamo.FSDPModule):
        return {name: whole(param.grad) for name, param in model.named_parameters()}
    with FSDP.summon_full_params(model, with_grads=True):
        return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


# -- settings and their gradients ------------------------------------------------------------------

Steps = Callable[[Any, nn.Module, int], None]
"""Runs backwards of a model, in the mode of the second argument."""


def _backwards(run: nn.Module, rank: int, *steps: int) -> None:
    for step in steps:
        loss_of(run, batch(rank, step)).backward()


def _divided(model: Any, run: nn.Module, rank: int) -> None:
    for module in model.modules():  # gloo has no other reduction that FSDP2 would take for it
        if isinstance(module, upstream.FSDPModule) and not isinstance(
            module, fsdp_dynamo.FSDPModule
        ):
            module.set_force_sum_reduction_for_comms(True)
    _backwards(run, rank, 0)
    model.set_gradient_divide_factor(5.0)
    model.blocks[1].set_gradient_divide_factor(0.5)
    _backwards(run, rank, 1, 2)


def _accumulated(model: Any, run: nn.Module, rank: int) -> None:
    """Some units reduce nothing in the first backward, all do in the last."""
    model.set_requires_gradient_sync(False)
    _backwards(run, rank, 0)
    model.blocks[0].set_requires_gradient_sync(True)
    _backwards(run, rank, 1)
    model.set_requires_gradient_sync(True, recurse=False)
    _backwards(run, rank, 2)
    model.set_requires_gradient_sync(True)
    _backwards(run, rank, 3)


def _last_backward(model: Any, run: nn.Module, rank: int) -> None:
    model.set_is_last_backward(False)
    _backwards(run, rank, 0, 1)
    model.set_is_last_backward(True)
    _backwards(run, rank, 2)


def _kept(model: Any, run: nn.Module, rank: int) -> None:
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    _backwards(run, rank, 0, 1)
    model.set_reshard_after_forward(True)
    model.set_reshard_after_backward(True)
    _backwards(run, rank, 2)


def _prefetched(model: Any, run: nn.Module, rank: int) -> None:
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    _backwards(run, rank, 0, 1)


def _all_reduced_once(model: Any, run: nn.Module, rank: int) -> None:
    model.set_requires_all_reduce(False)
    _backwards(run, rank, 0, 1)
    model.set_requires_all_reduce(True)
    _backwards(run, rank, 2)


def _hooked(model: Any, run: nn.Module, rank: int) -> None:
    model.blocks[0].set_all_reduce_hook(lambda grad: grad.mul_(3.0))
    _backwards(run, rank, 0, 1)


def _sums(model: Any, run: nn.Module, rank: int) -> None:
    model.blocks[1].set_force_sum_reduction_for_comms(True)
    _backwards(run, rank, 0)


def _others(model: Any, run: nn.Module, rank: int) -> None:
    model.set_allocate_memory_from_process_group_for_comm(False)
    if hasattr(model, "set_keep_unsharded_storage") and isinstance(model, fsdp_dynamo.FSDPModule):
        model.set_keep_unsharded_storage(True)
        model.set_reduce_scatter_unused_params(True)
    _backwards(run, rank, 0, 1)


CASES: dict[str, Steps] = {
    "divided": _divided,
    "accumulated": _accumulated,
    "last backward": _last_backward,
    "kept": _kept,
    "prefetched": _prefetched,
    "hooked": _hooked,
    "sums": _sums,
    "others": _others,
}


def _differences(
    name: str, mode: str, shape: tuple[int, ...], steps: Steps, rank: int
) -> list[str]:
    theirs, ours = _shard(upstream, shape), _shard(fsdp_dynamo, shape)
    steps(theirs, theirs, rank)
    steps(ours, in_mode(ours, mode), rank)
    expected, got = _grads(theirs), _grads(ours)
    return [
        f"{name} in {mode}: {key}"
        for key in expected
        if not torch.allclose(got[key], expected[key], rtol=1e-4, atol=1e-6)
    ]


def _beside(rank: int, world_size: int, mode: str, names: tuple[str, ...]) -> list[str]:
    return [one for name in names for one in _differences(name, mode, (2,), CASES[name], rank)]


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("eager", tuple(CASES)),
        ("hooks", ("accumulated",)),
        ("graph", ("divided",)),
        pytest.param("hooks", ("kept", "prefetched"), marks=pytest.mark.slow),
        pytest.param("graph", ("accumulated",), marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_torchs(ranks: RankPool, mode: str, names: tuple[str, ...]) -> None:
    for wrong in ranks.run(_beside, 2, mode, names):
        assert wrong == []


def _replicas(rank: int, world_size: int) -> tuple[list[str], list[int]]:
    """Gradients, and the all-reduces of a backward that leaves them out, then of another one."""
    wrong = []
    for name, steps in {"once": _all_reduced_once, "divided": _divided, "hook": _hooked}.items():
        wrong += _differences(name, "eager", (2, 2), steps, rank)
    model, counts = _shard(fsdp_dynamo, (2, 2)), []
    for wanted in (False, True):
        model.set_requires_all_reduce(wanted)
        with record_events() as log:
            _backwards(model, rank, 0)
        counts.append([event.kind for event in log].count("all_reduce"))
    return wrong, counts


def test_replicas(ranks: RankPool) -> None:
    for wrong, counts in ranks.run(_replicas, 4):
        assert wrong == []
        assert counts == [0, 3]


def _frozen_before_the_mean(
    rank: int, world_size: int, shape: tuple[int, ...], frozen: str
) -> list[str]:
    """Names of gradients that are not one process's: of what is frozen, the first step's."""

    def accumulate(model: Any, wait_for_replicas: Callable[[bool], None]) -> None:
        wait_for_replicas(False)
        _backwards(model, rank, 0)
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
        wait_for_replicas(True)
        _backwards(model, rank, 1)

    plain = make_transformer(num_blocks=2)
    accumulate(plain, lambda _: None)
    average_gradients(plain)
    model = _shard(fsdp_dynamo, shape)
    accumulate(model, model.set_requires_all_reduce)
    got = _grads(model)
    return [
        name
        for name, param in plain.named_parameters()
        if got[name] is None or not torch.allclose(got[name], param.grad, 1e-4, 1e-6)
    ]


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@pytest.mark.parametrize("frozen", ["blocks.0.up.bias", "blocks.0"])
def test_a_parameter_frozen_before_the_mean_over_replicas(
    ranks: RankPool, shape: tuple[int, ...], frozen: str
) -> None:
    """What it has waits for no later backward, which may not come to it."""
    assert ranks.run(_frozen_before_the_mean, 4, shape, frozen) == [[]] * 4


# -- what is gathered, and when --------------------------------------------------------------------


def _gathers(action: Callable[[], Any]) -> list[str]:
    with record_events() as log:
        action()
    return [event.unit for event in log if event.kind == "all_gather"]


def _gathered(rank: int, world_size: int) -> dict[str, list[str]]:
    model: Any = fully_shard(make_transformer(num_blocks=2), policy=POLICY, forward_prefetch=False)
    first, second = model.blocks
    step = partial(_backwards, model, rank, 0)
    found = {"by default": _gathers(step)}
    model.set_modules_to_forward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([model])
    found["prefetched"] = _gathers(step)
    model.set_modules_to_forward_prefetch([])
    second.set_modules_to_backward_prefetch([])
    first.set_unshard_in_backward(False)
    with torch.no_grad():
        found["not in the backward"] = _gathers(lambda: loss_of(model, batch(rank, 0)))
    first.set_unshard_in_backward(True)
    model.set_reshard_after_forward(True)
    found["the root, too"] = _gathers(step)
    model.set_reshard_after_forward(False)
    found["not after the forward"] = _gathers(step)
    model.set_reshard_after_backward(False)
    found["for the last time"] = _gathers(step)
    found["not after the backward"] = _gathers(step)
    with torch.no_grad():
        first.up.bias.add_(1.0)  # this rank's part, empty or not
    found["one that has changed"] = _gathers(step)
    model.set_reshard_after_backward(True)
    step()
    first.unshard()
    found["by hand"] = _gathers(step)
    return found


def test_what_is_gathered(ranks: RankPool) -> None:
    for found in ranks.run(_gathered, 2):
        forward = ["", "blocks.0", "blocks.1"]
        assert found == {
            "by default": [*forward, "blocks.1", "blocks.0"],
            "prefetched": ["", "blocks.1", "blocks.0", "blocks.1", "blocks.0"],
            "not in the backward": forward,
            "the root, too": [*forward, "", "blocks.1", "blocks.0"],
            "not after the forward": forward,
            "for the last time": forward,
            "not after the backward": [],
            "one that has changed": ["blocks.0"],
            "by hand": ["", "blocks.1"],
        }


class _Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(x))


def _not_in_backward(rank: int, world_size: int) -> list[list[str]]:
    model: Any = _Embedded()
    fully_shard(model.embed)
    fully_shard(model)
    found = []
    for wanted in (True, False):
        model.embed.set_unshard_in_backward(wanted)
        loss = model(torch.arange(4)).sum()
        found.append(_gathers(loss.backward))
    return found


def test_an_embedding_is_not_gathered_for_its_backward(ranks: RankPool) -> None:
    assert ranks.run(_not_in_backward, 2) == [[["embed"], []]] * 2


# -- the user's collectives, handles ---------------------------------------------------------------


class _Comm:
    """FSDP2's ``AllGather`` or ``ReduceScatter``; without a handle it returns ``None``."""

    def __init__(self, collective: Callable[..., Any], has_handle: bool) -> None:
        self.collective = collective
        self.has_handle = has_handle
        self.calls = 0

    def __call__(self, output: Any, given: Any, group: Any, *args: Any, async_op: bool) -> Any:
        self.calls += 1
        return self.collective(output, given, *args, group=group, async_op=self.has_handle)


def _by_the_user(
    rank: int, world_size: int, has_handle: bool
) -> tuple[Any, Any, list[int], list[bool]]:
    expected = train(make_transformer(num_blocks=2), 0, steps=2)[0]
    model: Any = fully_shard(make_transformer(num_blocks=2), policy=POLICY)
    gather = _Comm(all_gather_single, has_handle)
    scatter = _Comm(reduce_scatter_single, has_handle)
    model.blocks[0].set_custom_all_gather(gather)
    model.blocks[0].set_custom_reduce_scatter(scatter)
    got = train(model, 0, steps=2)[0]
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    _backwards(model, rank, 0, 1)
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    handle.wait()
    model.set_manual_backward_finalization(False)
    by_hand, plain = _grads(model), make_transformer(num_blocks=2)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        plain.load_state_dict(model.state_dict())
    for one in range(world_size):
        _backwards(plain, one, 0, 1)
    close = [
        torch.allclose(by_hand[n], p.grad / 2, 1e-4, 1e-6) for n, p in plain.named_parameters()
    ]
    return expected, got, [gather.calls, scatter.calls], close


@pytest.mark.parametrize("has_handle", [True, False])
def test_collectives_and_ends_by_the_user(ranks: RankPool, has_handle: bool) -> None:
    for expected, got, calls, close in ranks.run(_by_the_user, 2, has_handle):
        assert got == pytest.approx(expected, rel=1e-6)
        assert calls == [8, 3]  # twice and once in each of two steps; then twice for one reduction
        assert all(close)


@on_ranks(1)
def test_an_optimizers_event(rank: int) -> None:
    """The parameters' device waits for it, whichever is current; a CPU's events are ``None``."""
    model: Any = fully_shard(nn.Linear(2, 2))
    model.set_post_optim_event(torch.cpu.current_stream().record_event())
    with record_program(is_elsewhere=True) as recorder:
        event = recorder.new_stream("cpu").record_event()
        model.set_post_optim_event(event)
    assert recorder.program[-1] == Wait(COMPUTING, event.number)


# -- what is refused -------------------------------------------------------------------------------

EAGER_ONLY: dict[str, Callable[[Any], None]] = {
    "set_requires_all_reduce": lambda model: model.set_requires_all_reduce(False),
    "set_reshard_after_backward": lambda model: model.set_reshard_after_backward(False),
    "set_keep_unsharded_storage": lambda model: model.set_keep_unsharded_storage(True),
    "forward_prefetch": lambda model: model.set_modules_to_forward_prefetch([model]),
    "backward_prefetch": lambda model: model.set_modules_to_backward_prefetch([model]),
    "set_force_sum": lambda model: model.set_force_sum_reduction_for_comms(True),
    "set_all_reduce_hook": lambda model: model.set_all_reduce_hook(print),
    "set_custom_all_gather": lambda model: model.set_custom_all_gather(print),
    "set_custom_reduce_scatter": lambda model: model.set_custom_reduce_scatter(print),
}
ALWAYS: dict[str, Callable[[Any], None]] = {
    "current stream": lambda model: model.set_all_reduce_hook(print, stream=1),
    "there are no buffers": lambda model: model.set_symm_mem_for_comm(),
    "flat parameters themselves": lambda model: (
        model.set_allocate_memory_from_process_group_for_comm(True)
    ),
    "two reductions": lambda model: model.set_reduce_scatter_max_input_buffers(3),
    "reduction_group=": lambda model: model.set_separate_reduce_scatter_group(),
    "one tensor": lambda model: model.set_reduce_scatter_unused_params(False),
    "a positive number": lambda model: model.set_gradient_divide_factor(0),
    "a bool": lambda model: model.set_reshard_after_forward(2),
    "modules of fully_shard": lambda model: model.set_modules_to_forward_prefetch([nn.ReLU()]),
}


def _refused(rank: int, world_size: int) -> list[str]:
    missing = []
    for words, change in ALWAYS.items():
        model = fully_shard(nn.Linear(2, 2))
        try:
            change(model)
            missing.append(words)
        except FSDPError as error:
            missing += [] if words in str(error) else [f"{words}: {error}"]
    for words, change in EAGER_ONLY.items():
        model = fully_shard(nn.Linear(2, 2))
        change(model)
        run = in_mode(model, "graph")
        try:
            run(torch.ones(1, 2))
            missing.append(words)
        except FSDPError as error:
            missing += [] if words in str(error) else [f"{words}: {error}"]
    return missing


def test_refused(ranks: RankPool) -> None:
    for missing in ranks.run(_refused, 2):
        assert missing == []
