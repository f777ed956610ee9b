"""Communication hooks, registered methods, copies, initialisation, gradient scaling, order."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Transformer, batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_dynamo import (
    FSDP,
    DivergenceError,
    FSDPError,
    ShardedGradScaler,
    ShardingStrategy,
    record_events,
)
from fsdp_dynamo.comm import comm_hooks
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def _error(action: Callable[[], object]) -> str:
    try:
        action()
    except FSDPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- communication hooks -----------------------------------------------------------------------


def _with_hook(
    rank: int, world_size: int, hook: str, strategy: str, mode: str
) -> tuple[list[float], list[float]]:
    expected, _ = ddp_losses(rank, num_blocks=1)
    model = wrap(make_transformer(num_blocks=1), sharding_strategy=ShardingStrategy[strategy])
    model.register_comm_hook(None, getattr(comm_hooks, hook))
    return expected, train(in_mode(model, mode), rank)[0]


@pytest.mark.parametrize(
    ("hook", "strategy", "mode", "rel"),
    [
        ("default_hook", "FULL_SHARD", "eager", 1e-7),
        ("default_hook", "NO_SHARD", "hooks", 1e-6),
        ("bf16_compress_hook", "SHARD_GRAD_OP", "eager", 2e-2),
        ("bf16_compress_hook", "NO_SHARD", "eager", 2e-2),
        ("fp16_compress_hook", "FULL_SHARD", "hooks", 5e-3),
    ],
)
def test_hooks_average(ranks: RankPool, hook: str, strategy: str, mode: str, rel: float) -> None:
    for expected, got in ranks.run(_with_hook, 2, hook, strategy, mode):
        assert got == pytest.approx(expected, rel=rel)
        assert hook == "default_hook" or got != expected


def _own_hook(rank: int, world_size: int) -> tuple[list[str], list[tuple[int, ...]], list[str]]:
    """A hook with a state of its own is called once a unit; what is refused."""
    calls: list[tuple[int, ...]] = []

    def halved(state: list[Any], grad: torch.Tensor, output: torch.Tensor) -> None:
        state.append((grad.numel(), output.numel()))
        dist.reduce_scatter_tensor(output, grad)
        output.div_(2 * world_size)

    expected = wrap(make_transformer(num_blocks=2))
    loss_of(expected, batch(rank, 0)).backward()
    model = wrap(make_transformer(num_blocks=2))
    model.register_comm_hook(calls, halved)
    with record_events() as log:
        loss_of(model, batch(rank, 0)).backward()
    wrong = [
        name
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True)
        if not torch.allclose(2 * local_of(p.grad), local_of(q.grad), 1e-5, 1e-7)
    ]
    assert len(log.keys("reduce_scatter")) == 3
    hybrid = wrap(
        make_transformer(num_blocks=1),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh("cpu", (1, 2)),
    )
    graph = in_mode(model, "graph")
    refused = [
        _error(lambda: model.register_comm_hook(calls, halved)),
        _error(lambda: expected.blocks[0].register_comm_hook(calls, halved)),
        _error(lambda: expected.register_comm_hook(calls, "mean")),
        _error(lambda: hybrid.register_comm_hook(calls, halved)),
        _error(lambda: graph(batch(rank, 0))),
    ]
    return wrong, calls, refused


def test_a_hook_of_the_users(ranks: RankPool) -> None:
    for wrong, calls, refused in ranks.run(_own_hook, 2):
        assert wrong == []
        assert len(calls) == 3
        assert all(whole == 2 * part for whole, part in calls)
        for message, words in zip(
            refused,
            (
                "got the second one",
                "got a nested unit",
                "expected a callable",
                "expected a strategy without replicas",
                "expected no communication hook in graph mode",
            ),
            strict=True,
        ):
            assert words in message


def _doubled_once(rank: int, world_size: int, strategy: str) -> list[str]:
    """Gradients of a reduced step, one under ``no_sync()`` and another, by a hook that doubles."""

    def doubled(state: None, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
        dist.all_reduce(grad)
        grad.mul_(2 / world_size)
        if output is not None:
            output.copy_(grad.chunk(world_size)[rank])

    plain = make_transformer(num_blocks=1)
    for step in range(4):
        for each in range(world_size):
            (loss_of(plain, batch(each, step)) * 2 / world_size).backward()
    model = wrap(make_transformer(num_blocks=1), sharding_strategy=ShardingStrategy[strategy])
    model.register_comm_hook(object(), doubled)
    loss_of(model, batch(rank, 0)).backward()
    loss_of(model, batch(rank, 1)).backward()
    with model.no_sync():
        loss_of(model, batch(rank, 2)).backward()
    loss_of(model, batch(rank, 3)).backward()
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
        return [name for (name, p), q in pairs if not torch.allclose(p.grad, q.grad, 1e-4, 1e-6)]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_hook_sees_each_gradient_once(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(_doubled_once, 2, strategy) == [[], []]


# -- registered methods --------------------------------------------------------------------------


def _generate(rank: int, world_size: int) -> tuple[list[list[int]], list[list[int]], float, float]:
    """Each rank generates until its own end token comes; then a training step."""
    import hf_models

    ends = {f"{kind}_token_id": 0 for kind in ("bos", "eos", "pad")}
    sizes: dict[str, Any] = {"vocab_size": 24, "n_positions": 48, "use_cache": True}
    model, layer = hf_models.make("gpt2", **sizes, **ends)
    plain = copy.deepcopy(model.eval())
    generator = torch.Generator().manual_seed(rank)
    prompt = torch.randint(1, 24, (1, 4), generator=generator)
    how: dict[str, Any] = {"do_sample": True, "max_new_tokens": 30}
    how["attention_mask"] = torch.ones_like(prompt)
    how["eos_token_id"] = [0] if rank else list(range(8))  # rank 0 ends early
    torch.manual_seed(100 + rank)
    expected = plain.generate(prompt, **how, max_length=None)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({layer}))
    model.register_forward_method("generate")
    torch.manual_seed(100 + rank)
    got = model.generate(prompt, **how, max_length=None)
    plain_loss = plain(input_ids=prompt, labels=prompt).loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # generate()'s order of units is none to compare with
        loss = model(input_ids=prompt, labels=prompt).loss
        loss.backward()
    return expected.tolist(), got.tolist(), plain_loss.item(), loss.item()


def test_generate_of_different_lengths(ranks: RankPool) -> None:
    answers = ranks.run(_generate, 2)
    for expected, got, plain_loss, loss in answers:
        assert got == expected
        assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert len({len(got[0]) for _, got, _, _ in answers}) == 2


@on_ranks(2)
def test_a_method_that_is_not_registered(rank: int) -> None:
    model: Any = wrap(WithScore(num_blocks=2))
    with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor and DTensor"):  # torch's
        model.score(batch(0, 0))
    model.register_forward_method("score")
    model.score(batch(0, 0)).backward()


class WithScore(Transformer):
    def score(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * self(tokens).square().mean()


def _method(rank: int, world_size: int) -> tuple[bool, str, str]:
    torch.manual_seed(7)
    plain = WithScore(num_blocks=2)
    torch.manual_seed(7)
    model = wrap(WithScore(num_blocks=2))
    model.register_forward_method("score")
    plain.score(batch(0, 0), scale=2.0).backward()
    model.score(batch(0, 0), scale=2.0).backward()
    shown = dict(model.named_parameters())
    same = all(
        torch.allclose(shown[name].grad.full_tensor(), p.grad)
        for name, p in plain.named_parameters()
    )
    return (
        same,
        _error(lambda: model.register_forward_method("nothing")),
        _error(lambda: model.register_forward_method("scale")),
    )


def test_a_registered_method_trains(ranks: RankPool) -> None:
    for same, missing, no_method in ranks.run(_method, 2):
        assert same
        assert "expected the name of a method of WithScore" in missing
        assert "expected the name of a method of WithScore" in no_method


# -- copies --------------------------------------------------------------------------------------


def _copies(rank: int, world_size: int, mode: str) -> tuple[Any, Any, str]:
    model = wrap(make_transformer(num_blocks=2, tied=True))
    run = in_mode(model, mode)
    train(run, rank, steps=2)
    loss_of(run, batch(rank, 5)).backward()  # as in nn.Module, a copy has no gradients
    twin = copy.deepcopy(model)
    rest, _ = train(run, rank, steps=3)
    again, _ = train(in_mode(twin, mode), rank, steps=3)
    nested = _error(lambda: copy.deepcopy(model.blocks[0]))
    return rest, again, nested


@pytest.mark.parametrize("mode", ["eager", "hooks", "graph"])
def test_a_copy_trains_alike_and_alone(ranks: RankPool, mode: str) -> None:
    for rest, again, nested in ranks.run(_copies, 2, mode):
        assert again == rest
        assert "expected a copy of the outermost unit's module" in nested


def _averaged(rank: int, world_size: int) -> list[bool]:
    results = []
    for build in (lambda: make_transformer(num_blocks=1), None):
        model = build() if build else wrap(make_transformer(num_blocks=1))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        with torch.no_grad():
            for _ in range(2):
                for p in model.parameters():
                    p.add_(1.0)
                average.update_parameters(model)
        results.append(average.module.state_dict())
    plain, sharded = results
    return [torch.allclose(plain[name], sharded[name]) for name in plain]


def test_moving_average(ranks: RankPool) -> None:
    for same in ranks.run(_averaged, 2):
        assert all(same)


# -- initialisation --------------------------------------------------------------------------------


def _applied(rank: int, world_size: int) -> list[bool]:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            nn.init.constant_(module.bias, 0.5)

    plain, model = make_transformer(num_blocks=2), wrap(make_transformer(num_blocks=2))
    torch.manual_seed(4)
    plain.apply(init)
    torch.manual_seed(4)
    assert model.apply(init) is model
    expected, got = plain.state_dict(), model.state_dict()
    return [torch.equal(got[name], expected[name]) for name in expected]


def test_apply_sees_whole_parameters(ranks: RankPool) -> None:
    for same in ranks.run(_applied, 2):
        assert all(same)


# -- gradient scaling --------------------------------------------------------------------------


def _scaled(rank: int, world_size: int, mode: str) -> tuple[list[float], list[bool]]:
    """One rank's gradients overflow in the second of three steps."""
    model = wrap(make_transformer(num_blocks=1))
    run = in_mode(model, mode)
    scaler = ShardedGradScaler(device="cpu", init_scale=8.0, growth_interval=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, moved = [], []
    for step in range(3):
        before = _local_values(model)
        optimizer.zero_grad()
        scaler.scale(loss_of(run, batch(rank, step))).backward()
        if step == 1 and rank == 1:
            model.embed.weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        pairs = zip(_local_values(model), before, strict=True)
        moved.append(any(not torch.equal(p, q) for p, q in pairs))
    return scales, moved


def _local_values(model: nn.Module) -> list[torch.Tensor]:
    return [local_of(p).detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", ["eager", "hooks", "graph"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: RankPool, mode: str) -> None:
    for scales, moved in ranks.run(_scaled, 2, mode):
        assert scales == [8.0, 4.0, 4.0]
        assert moved == [True, False, True]


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


def _swapped(rank: int, world_size: int, mode: str) -> tuple[Any, list[str], list[str]]:
    _, silent = _orders(mode)
    with _debug_level("DETAIL"):
        return *_orders(mode), silent


def _orders(mode: str) -> tuple[Any, list[str]]:
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
def test_another_order_warns_once(ranks: RankPool, mode: str) -> None:
    """In debug level DETAIL, and in training: upstream's conditions."""
    for fqns, messages, silent in ranks.run(_swapped, 2, mode):
        assert fqns == ("", "a", "b")
        assert [bool(message) for message in messages] == [False, False, False, True, False]
        assert "expected unit 'a' at position 1, got unit 'b'" in messages[3]
        assert not any(silent)


def _swapped_on_one_rank(rank: int, world_size: int, mode: str) -> str:
    try:
        with _debug_level("DETAIL"):
            plain = Swapping()
            model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
            plain.swapped = rank == 1  # equal shapes: nothing would hang, and all would be wrong
            in_mode(model, mode)(torch.ones(2, 4))
    except DivergenceError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("mode", ["eager", "hooks"])
def test_ranks_compare_their_order_in_debug_level_detail(ranks: RankPool, mode: str) -> None:
    first, second = ranks.run(_swapped_on_one_rank, 2, mode)
    assert first == second
    # By which of the two comparisons: whichever is first to see it.
    assert "order of units in the forward" in first or "to issue what rank" in first


# -- fine-tuning -----------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen linear layer and a trainable product of two narrow ones."""

    def __init__(self, linear: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def _adapted() -> Transformer:
    model = make_transformer(num_blocks=2).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = LowRank(block.up), LowRank(block.down)
    return model


def _fine_tuned(rank: int, world_size: int, mode: str) -> tuple[Any, Any, dict[str, int], int, int]:
    expected, _ = train(nn.parallel.DistributedDataParallel(_adapted()), rank)
    model = wrap(_adapted())
    run = in_mode(model, mode)
    got, _ = train(run, rank)
    with record_events() as log:
        loss_of(run, batch(rank, 0)).backward()
    sent = {e.unit: e.num_bytes for e in log if e.kind == "reduce_scatter"}
    trainable = sum(p.numel() for p in _adapted().blocks[0].parameters() if p.requires_grad)
    grads = sum(local_of(p.grad).nbytes for p in model.parameters() if p.grad is not None)
    return expected, got, sent, 4 * trainable, grads


@pytest.mark.parametrize("mode", ["eager", "hooks", "graph"])
def test_a_frozen_base_costs_no_gradients(ranks: RankPool, mode: str) -> None:
    """Reduced bytes and gradient memory are those of the trainable part, up to padding."""
    for expected, got, sent, trainable, grads in ranks.run(_fine_tuned, 2, mode):
        assert got == pytest.approx(expected, rel=1e-6)
        assert set(sent) == {"blocks.0", "blocks.1"}
        assert all(trainable <= size <= trainable + 64 for size in sent.values())
        assert grads <= sum(sent.values()) // 2
