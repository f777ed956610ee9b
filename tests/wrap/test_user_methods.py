"""Communication hooks, registered methods, copies, initialisation, gradient scaling, order."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loops import different, gradients, whole_gradients
from models import Transformer, batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import (
    FSDP,
    DivergenceError,
    FSDPError,
    ShardingStrategy,
    record_events,
)
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

# -- communication hooks -----------------------------------------------------------------------


def _decompress(state: default_hooks.LowPrecisionState, grad: torch.Tensor) -> None:
    """torch's, but for streams, which CPU tensors do not have."""
    grad.data = grad.data.to(state.parameter_type)


@pytest.mark.parametrize(
    ("hook", "strategy", "mode", "rel"),
    [
        ("allreduce_hook", "NO_SHARD", "eager", 1e-6),
        ("reduce_scatter_hook", "FULL_SHARD", "eager", 1e-6),
        ("bf16_compress_hook", "SHARD_GRAD_OP", "eager", 2e-2),
        ("bf16_compress_hook", "NO_SHARD", "eager", 2e-2),
        ("fp16_compress_hook", "FULL_SHARD", "hooks", 5e-3),
    ],
)
@on_ranks(2)
def test_torchs_hooks(rank: int, hook: str, strategy: str, mode: str, rel: float) -> None:
    expected, _ = ddp_losses(rank, num_blocks=1)
    model = wrap(make_transformer(num_blocks=1), sharding_strategy=ShardingStrategy[strategy])
    state = default_hooks.LowPrecisionState(model.process_group)
    model.register_comm_hook(state, getattr(default_hooks, hook))
    with mock.patch.object(default_hooks, "_decompress", _decompress):
        got, _ = train(in_mode(model, mode), rank)
    assert got == pytest.approx(expected, rel=rel)
    assert "compress" not in hook or got != expected


@on_ranks(2)
def test_a_hook_of_the_users(rank: int) -> None:
    """It is called once a unit, with the state that the user gave."""
    calls: list[tuple[int, ...]] = []

    def halved(state: list[Any], grad: torch.Tensor, output: torch.Tensor) -> None:
        state.append((grad.numel(), output.numel()))
        dist.reduce_scatter_tensor(output, grad)
        output.div_(2 * dist.get_world_size())

    plain, model = wrap(make_transformer(num_blocks=2)), wrap(make_transformer(num_blocks=2))
    model.register_comm_hook(calls, halved)
    loss_of(plain, batch(rank, 0)).backward()
    with record_events() as log:
        loss_of(model, batch(rank, 0)).backward()
    doubled = {name: 2 * grad for name, grad in whole_gradients(model).items()}
    assert different(doubled, whole_gradients(plain), rtol=1e-5) == []
    assert len(log.keys("reduce_scatter")) == len(calls) == 3
    assert all(whole == 2 * part for whole, part in calls)
    mesh = init_device_mesh("cpu", (1, 2))
    replicas = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    hybrid = wrap(make_transformer(num_blocks=1), **replicas)
    graph = in_mode(model, "graph")
    for action, words in (
        (lambda: plain.register_comm_hook(calls, "mean"), "expected a callable"),
        (lambda: hybrid.register_comm_hook(calls, halved), "a strategy without replicas"),
        (lambda: graph(batch(rank, 0)), "no communication hook in graph mode"),
    ):
        with pytest.raises(FSDPError, match=words):
            action()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_a_hook_sees_each_gradient_once(rank: int, strategy: str) -> None:
    """Two reduced steps, one under ``no_sync()`` and another, by a hook that doubles."""

    def doubled(state: None, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
        dist.all_reduce(grad)  # a sum over two ranks is twice the mean
        if output is not None:
            output.copy_(grad.chunk(2)[rank])

    plain = make_transformer(num_blocks=1)
    for step in range(4):
        for each in range(2):
            loss_of(plain, batch(each, step)).backward()
    model = wrap(make_transformer(num_blocks=1), sharding_strategy=ShardingStrategy[strategy])
    model.register_comm_hook(object(), doubled)
    loss_of(model, batch(rank, 0)).backward()
    loss_of(model, batch(rank, 1)).backward()
    with model.no_sync():
        loss_of(model, batch(rank, 2)).backward()
    loss_of(model, batch(rank, 3)).backward()
    assert different(whole_gradients(model), gradients(plain)) == []


# -- registered methods --------------------------------------------------------------------------


@on_ranks(2)
def test_generate_of_different_lengths(rank: int) -> None:
    """Each rank generates until its own end token comes; then a training step."""
    import hf_models

    ends = {f"{kind}_token_id": 0 for kind in ("bos", "eos", "pad")}
    sizes: dict[str, Any] = {"vocab_size": 24, "n_positions": 48, "use_cache": True}
    plain, layer = hf_models.make("gpt2", **sizes, **ends)
    model = FSDP(copy.deepcopy(plain.eval()), auto_wrap_policy=ModuleWrapPolicy({layer}))
    model.register_forward_method("generate")
    prompt = torch.randint(1, 24, (1, 4), generator=torch.Generator().manual_seed(rank))
    how: dict[str, Any] = {"do_sample": True, "max_new_tokens": 30, "max_length": None}
    how["attention_mask"] = torch.ones_like(prompt)
    how["eos_token_id"] = [0] if rank else list(range(8))  # rank 0 ends early
    torch.manual_seed(100 + rank)
    expected = plain.generate(prompt, **how)
    torch.manual_seed(100 + rank)
    got = model.generate(prompt, **how)
    assert got.tolist() == expected.tolist()
    lengths = [0, 0]
    dist.all_gather_object(lengths, got.shape[1])
    assert lengths[0] != lengths[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # generate()'s order of units is none to compare with
        loss = model(input_ids=prompt, labels=prompt).loss
        loss.backward()
    expected_loss = plain(input_ids=prompt, labels=prompt).loss
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)


class WithScore(Transformer):
    def score(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * self(tokens).square().mean()


@on_ranks(2)
def test_a_registered_method_trains(rank: int) -> None:
    torch.manual_seed(7)
    plain = WithScore(num_blocks=2)
    model: Any = wrap(copy.deepcopy(plain))
    with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor and DTensor"):  # torch's
        model.score(batch(0, 0))
    model.register_forward_method("score")
    for net in (plain, model):
        net.score(batch(0, 0), scale=2.0).backward()
    assert different(whole_gradients(model), gradients(plain)) == []
    for name in ("nothing", "scale"):
        with pytest.raises(FSDPError, match="expected the name of a method of WithScore"):
            model.register_forward_method(name)


# -- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_a_copy_trains_alike_and_alone(rank: int, mode: str) -> None:
    model = wrap(make_transformer(num_blocks=1, tied=True))
    run = in_mode(model, mode)
    train(run, rank, steps=1)
    loss_of(run, batch(rank, 5)).backward()  # as in nn.Module, a copy has no gradients
    twin = copy.deepcopy(model)
    buffers = [flat for unit in twin._fsdp_root.units for flat in unit.flats]
    assert not any(flat.is_allocated for flat in buffers)
    losses, _ = train(run, rank, steps=2)
    assert train(in_mode(twin, mode), rank, steps=2)[0] == losses
    with pytest.raises(FSDPError, match="expected a copy of the outermost unit's module"):
        copy.deepcopy(model.blocks[0])


# -- initialisation --------------------------------------------------------------------------------


@on_ranks(2)
def test_apply_sees_whole_parameters(rank: int) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            nn.init.constant_(module.bias, 0.5)

    plain, model = make_transformer(num_blocks=2), wrap(make_transformer(num_blocks=2))
    for net in (plain, model):
        torch.manual_seed(4)
        assert net.apply(init) is net
    expected, got = plain.state_dict(), model.state_dict()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


# -- order -----------------------------------------------------------------------------------------


class Swapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
        self.swapped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.b, self.a) if self.swapped else (self.a, self.b)
        out: torch.Tensor = second(first(x))
        return out


@contextmanager
def _debug_level(level: str) -> Iterator[None]:
    try:
        with mock.patch.dict("os.environ", {"TORCH_DISTRIBUTED_DEBUG": level}):
            dist.set_debug_level_from_env()
            yield
    finally:
        dist.set_debug_level_from_env()


def _orders(mode: str) -> tuple[Any, list[str]]:
    """Units in the order of the first forward; what warns in each of five steps."""
    plain = Swapping()
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    run = in_mode(model, mode)
    messages = []
    for swapped, trains in (
        (False, True),
        (False, True),
        (True, False),
        (True, True),
        (True, True),
    ):
        plain.swapped = swapped
        model.train(trains)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(torch.ones(2, 4)).sum().backward()
            with torch.no_grad():
                run(torch.ones(2, 4))
        found = [str(w.message) for w in caught]
        messages.append(" ".join(text for text in found if "at position" in text))
    return model._fsdp_root.execution_order.fqns, messages


@pytest.mark.parametrize("mode", ["eager", "hooks"])
@on_ranks(2)
def test_another_order_warns_once(rank: int, mode: str) -> None:
    """In debug level DETAIL, and in training: upstream's conditions."""
    assert _orders(mode)[1] == [""] * 5
    with _debug_level("DETAIL"):
        fqns, messages = _orders(mode)
    assert fqns == ("", "a", "b")
    assert [bool(message) for message in messages] == [False, False, False, True, False]
    assert "expected unit 'a' at position 1, got unit 'b'" in messages[3]


def _run_swapped_on_one_rank(rank: int, world_size: int) -> str:
    plain = Swapping()
    with _debug_level("DETAIL"):
        model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
        plain.swapped = rank == 1  # equal shapes: nothing would hang, and all would be wrong
        with pytest.raises(DivergenceError) as error:
            model(torch.ones(2, 4))
    return str(error.value)


def test_ranks_compare_their_order_in_debug_level_detail(ranks: RankPool) -> None:
    first, second = ranks.run(_run_swapped_on_one_rank, 2)
    assert first == second
    # By which of the two comparisons: whichever is first to see it.
    assert "order of units in the forward" in first or "to issue what rank" in first
