"""FSDP2's setters and arguments, beside torch's own: gradients and collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as upstream
from loops import different, gradients, whole_gradients
from models import Block, Transformer, average_gradients, batch, loss_of, make_transformer, train
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from user_collectives import gather_of_the_user, scatter_of_the_user

import fsdp_dynamo
from benchmarks.streams.program import COMPUTING, Wait
from benchmarks.streams.recording import record_program
from fsdp_dynamo import FSDP, FSDPError, StateDictType, fully_shard, record_events
from fsdp_dynamo.comm.registered_memory import RegisteredMemory
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

POLICY = ModuleWrapPolicy({Block})


def _shard(library: Any, shape: tuple[int, ...]) -> Any:
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = make_transformer(num_blocks=2)
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh)
    return library.fully_shard(model, mesh=mesh)


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
    model.set_allocate_memory_from_process_group_for_comm(True)  # gloo has no allocator
    if hasattr(model, "set_keep_unsharded_storage") and isinstance(model, fsdp_dynamo.FSDPModule):
        model.set_keep_unsharded_storage(True)
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


def _assert_equal_torchs(mode: str, shape: tuple[int, ...], steps: Steps, rank: int) -> None:
    theirs, ours = _shard(upstream, shape), _shard(fsdp_dynamo, shape)
    steps(theirs, theirs, rank)
    steps(ours, in_mode(ours, mode), rank)
    assert different(whole_gradients(ours), gradients(theirs)) == []


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *(("eager", name) for name in CASES),
        ("hooks", "accumulated"),
        ("graph", "divided"),
    ],
)
@on_ranks(2)
def test_gradients_equal_torchs(rank: int, mode: str, name: str) -> None:
    _assert_equal_torchs(mode, (2,), CASES[name], rank)


@on_ranks(4)
def test_replicas(rank: int) -> None:
    for steps in (_all_reduced_once, _divided, _hooked):
        _assert_equal_torchs("eager", (2, 2), steps, rank)
    model = _shard(fsdp_dynamo, (2, 2))
    for is_wanted, count in ((False, 0), (True, 3)):
        model.set_requires_all_reduce(is_wanted)
        with record_events() as log:
            _backwards(model, rank, 0)
        assert len(log.keys("all_reduce")) == count


@pytest.mark.parametrize(
    ("shape", "frozen"), [((2, 2), "blocks.0.up.bias"), ((2, 2), "blocks.0"), ((4, 1), "blocks.0")]
)
@on_ranks(4)
def test_a_parameter_frozen_before_the_mean_over_replicas(
    rank: int, shape: tuple[int, ...], frozen: str
) -> None:
    """Its gradient of the first step waits for no later backward, which may not come to it."""

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
    assert different(whole_gradients(model), gradients(plain)) == []


# -- arguments -------------------------------------------------------------------------------------

Arguments = Callable[[Any, Transformer], dict[str, Any]]
HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def _policy(library: Any, **fields: Any) -> Any:
    return library.MixedPrecisionPolicy(**fields)


ARGUMENTS: dict[str, Arguments] = {
    "ignored": lambda library, model: {"ignored_params": {model.scale, model.blocks[0].up.bias}},
    "precision": lambda library, model: {"mp_policy": _policy(library, **HALF)},
    "output": lambda library, model: {
        "mp_policy": _policy(library, **HALF, output_dtype=torch.float32)
    },
    "inputs as they are": lambda library, model: {
        "mp_policy": _policy(library, reduce_dtype=torch.bfloat16, cast_forward_inputs=False)
    },
}
LOW = ("precision", "output", "inputs as they are")


def _shard_with(library: Any, arguments: Arguments) -> Any:
    model = make_transformer(num_blocks=2)
    given = {"mesh": init_device_mesh("cpu", (2,)), **arguments(library, model)}
    inner = dict(given)
    if "mp_policy" in given:  # blocks give what the next block takes
        inner["mp_policy"] = dataclasses.replace(given["mp_policy"], output_dtype=None)
    for block in model.blocks:
        library.fully_shard(block, **inner)
    return library.fully_shard(model, **given)


def _step(model: Any, run: nn.Module, rank: int) -> tuple[torch.dtype, float, dict[str, Any]]:
    """The dtype of the output, the loss, and whole gradients."""
    with torch.no_grad():
        dtype = model(batch(rank, 9)).dtype
    loss = loss_of(run, batch(rank, 0))
    loss.backward()
    return dtype, loss.item(), gradients(model)


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *(("eager", name) for name in ARGUMENTS),
        ("graph", "output"),
    ],
)
@on_ranks(2)
def test_arguments_as_torchs(rank: int, mode: str, name: str) -> None:
    theirs, ours = _shard_with(upstream, ARGUMENTS[name]), _shard_with(fsdp_dynamo, ARGUMENTS[name])
    dtype, loss, expected = _step(theirs, theirs, rank)
    own_dtype, own_loss, got = _step(ours, in_mode(ours, mode), rank)
    rtol, atol = (2e-2, 2e-3) if name in LOW else (1e-4, 1e-6)
    assert own_dtype == dtype
    assert own_loss == pytest.approx(loss, rel=rtol)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


# -- what is gathered, and when --------------------------------------------------------------------


def _gathers(action: Callable[[], Any]) -> list[str]:
    with record_events() as log:
        action()
    return [event.unit for event in log if event.kind == "all_gather"]


@on_ranks(2)
def test_what_is_gathered(rank: int) -> None:
    model: Any = fully_shard(make_transformer(num_blocks=2), policy=POLICY, forward_prefetch=False)
    first, second = model.blocks
    step = partial(_backwards, model, rank, 0)
    forward = ["", "blocks.0", "blocks.1"]
    assert _gathers(step) == [*forward, "blocks.1", "blocks.0"]
    model.set_modules_to_forward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([model])
    assert _gathers(step) == ["", "blocks.1", "blocks.0", "blocks.1", "blocks.0"]
    model.set_modules_to_forward_prefetch([])
    second.set_modules_to_backward_prefetch([])
    first.set_unshard_in_backward(False)
    with torch.no_grad():
        assert _gathers(lambda: loss_of(model, batch(rank, 0))) == forward
    first.set_unshard_in_backward(True)
    model.set_reshard_after_forward(True)  # the root, too
    assert _gathers(step) == [*forward, "", "blocks.1", "blocks.0"]
    model.set_reshard_after_forward(False)
    assert _gathers(step) == forward
    model.set_reshard_after_backward(False)
    assert _gathers(step) == forward
    assert _gathers(step) == []
    with torch.no_grad():
        first.up.bias.add_(1.0)  # this rank's part, empty or not
    assert _gathers(step) == ["blocks.0"]
    model.set_reshard_after_backward(True)
    step()
    first.unshard()
    assert _gathers(step) == ["", "blocks.1"]


class _Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(x))


@on_ranks(2)
def test_an_embedding_is_not_gathered_for_its_backward(rank: int) -> None:
    model: Any = _Embedded()
    fully_shard(model.embed)
    fully_shard(model)
    for is_wanted, gathered in ((True, ["embed"]), (False, [])):
        model.embed.set_unshard_in_backward(is_wanted)
        loss = model(torch.arange(4)).sum()
        assert _gathers(loss.backward) == gathered


# -- the user's collectives, handles ---------------------------------------------------------------


@pytest.mark.parametrize("has_handle", [True, False])
@on_ranks(2)
def test_collectives_and_ends_by_the_user(rank: int, has_handle: bool) -> None:
    expected = train(make_transformer(num_blocks=2), 0, steps=2)[0]
    model: Any = fully_shard(make_transformer(num_blocks=2), policy=POLICY)
    gather = gather_of_the_user(has_handle=has_handle)
    scatter = scatter_of_the_user(has_handle=has_handle)
    model.blocks[0].set_custom_all_gather(gather)
    model.blocks[0].set_custom_reduce_scatter(scatter)
    assert train(model, 0, steps=2)[0] == pytest.approx(expected, rel=1e-6)
    assert (gather.calls, scatter.calls) == (4, 2)
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    _backwards(model, rank, 0, 1)
    model.set_requires_gradient_sync(True)
    model.finalize_backward(async_op=True).wait()
    model.set_manual_backward_finalization(False)
    assert (gather.calls, scatter.calls) == (8, 3)
    plain = make_transformer(num_blocks=2)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        plain.load_state_dict(model.state_dict())
    _backwards(plain, rank, 0, 1)
    average_gradients(plain)
    assert different(whole_gradients(model), gradients(plain)) == []


@on_ranks(1)
def test_an_optimizers_event(rank: int) -> None:
    """The parameters' device waits for it, whichever is current; a CPU's events are ``None``."""
    model: Any = fully_shard(nn.Linear(2, 2))
    model.set_post_optim_event(torch.cpu.current_stream().record_event())
    with record_program(is_elsewhere=True) as recorder:
        event = recorder.new_stream("cpu").record_event()
        model.set_post_optim_event(event)
    assert recorder.program[-1] == Wait(COMPUTING, event.number)


@on_ranks(2)
def test_reductions_at_a_time(rank: int) -> None:
    model = _shard(fsdp_dynamo, (2,))
    for number in (1, 2, 3):
        model.set_reduce_scatter_max_input_buffers(number)
        with record_events() as log:
            _backwards(model, rank, 0)
        reductions = [one for one in log if one.kind == "reduce_scatter"]
        at_a_time = [
            sum(other.issued_ns <= one.issued_ns < other.waited_ns for other in reductions)
            for one in reductions
        ]
        assert max(at_a_time) == number


# -- what is refused -------------------------------------------------------------------------------

EAGER_ONLY: dict[str, Callable[[Any], None]] = {
    "set_requires_all_reduce": lambda model: model.set_requires_all_reduce(False),
    "set_reshard_after_backward": lambda model: model.set_reshard_after_backward(False),
    "set_keep_unsharded_storage": lambda model: model.set_keep_unsharded_storage(True),
    "forward_prefetch": lambda model: model.set_modules_to_forward_prefetch([model]),
    "backward_prefetch": lambda model: model.set_modules_to_backward_prefetch([model]),
    "max_input_buffers": lambda model: model.set_reduce_scatter_max_input_buffers(3),
    "set_force_sum": lambda model: model.set_force_sum_reduction_for_comms(True),
    "set_all_reduce_hook": lambda model: model.set_all_reduce_hook(print),
    "set_symm_mem_for_comm": lambda model: model._fsdp_set(
        False, memory=RegisteredMemory(None, torch.device("cpu"))
    ),
    "set_custom_all_gather": lambda model: model.set_custom_all_gather(gather_of_the_user()),
    "set_custom_reduce_scatter": lambda model: model.set_custom_reduce_scatter(
        scatter_of_the_user()
    ),
}
ALWAYS: dict[str, Callable[[Any], object]] = {
    "current stream": lambda model: model.set_all_reduce_hook(print, stream=1),
    "got 'NCCL', and parameters on cpu": lambda model: model.set_symm_mem_for_comm(),
    "got a collective of your own": lambda model: (
        model.set_custom_all_gather(gather_of_the_user()),
        model.set_allocate_memory_from_process_group_for_comm(False),  # raises in FSDP2, too
    ),
    "which has a method allocate": lambda model: model.set_custom_reduce_scatter(print),
    "an int": lambda model: model.set_reduce_scatter_max_input_buffers(True),
    "1 or more": lambda model: model.set_reduce_scatter_max_input_buffers(0),
    "reduction_group=": lambda model: model.set_separate_reduce_scatter_group(),
    "a positive number": lambda model: model.set_gradient_divide_factor(0),
    "a bool": lambda model: model.set_reshard_after_forward(2),
    "modules of fully_shard": lambda model: model.set_modules_to_forward_prefetch([nn.ReLU()]),
}


@on_ranks(2)
def test_refused(rank: int) -> None:
    for words, change in ALWAYS.items():
        with pytest.raises(FSDPError, match=words):
            change(fully_shard(nn.Linear(2, 2)))
    for words, change in EAGER_ONLY.items():
        model = fully_shard(nn.Linear(2, 2))
        change(model)
        with pytest.raises(FSDPError, match=words):
            in_mode(model, "graph")(torch.ones(1, 2))
