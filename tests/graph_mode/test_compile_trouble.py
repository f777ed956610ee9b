"""Other lengths, graph breaks, recompilations, and warming up before them."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from loops import classification_loss, examples, make_classifier, shard
from models import (
    DOORS,
    Block,
    Transformer,
    average_gradients,
    batch,
    loss_of,
    make_transformer,
    train,
    wrap,
)
from modes import in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch._dynamo.utils import counters

from fsdp_dynamo import (
    FSDP,
    FSDPValueError,
    RankFailedError,
    fully_shard,
    limit_recompiles,
    record_events,
    warmup,
)
from fsdp_dynamo.graph_mode import trace
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

COMPILED = ("hooks", "graph")


def _num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def _losses(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    losses = []
    for tokens in batches:
        loss = loss_of(model, tokens)
        loss.backward()
        losses.append(loss.item())
    return losses


# -- lengths ---------------------------------------------------------------------------------------


def _sixteen_lengths(rank: int, world_size: int, mode: str) -> tuple[list[float], list[float], int]:
    batches = [batch(rank, n, length=5 + 3 * n) for n in range(16)]
    expected = _losses(wrap(make_transformer(num_blocks=2)), batches)
    model = in_mode(wrap(make_transformer(num_blocks=2)), mode)
    losses = _losses(model, batches[:2])
    after_two = _num_graphs()
    losses += _losses(model, batches[2:])
    return expected, losses, _num_graphs() - after_two


@pytest.mark.parametrize("mode", [pytest.param("hooks", marks=pytest.mark.slow), "graph"])
def test_many_lengths_need_few_graphs(ranks: RankPool, mode: str) -> None:
    """The first length is compiled as it is, the second one for all that follow."""
    for expected, losses, more in ranks.run(_sixteen_lengths, 2, mode):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert more == 0


# -- graph breaks ----------------------------------------------------------------------------------


class _BreakingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()  # the user's line
        return x * 2


class _Breaking(Transformer):
    """Its last blocks break the graph."""

    def __init__(self, num_breaks: int = 1) -> None:
        super().__init__(num_blocks=1)
        self.blocks.extend(_BreakingBlock(16) for _ in range(num_breaks))


def _breaking(num_breaks: int = 1) -> FSDP:
    torch.manual_seed(7)
    return FSDP(_Breaking(num_breaks), auto_wrap_policy=ModuleWrapPolicy({Block}))


def _break_in_a_whole_graph(rank: int, world_size: int) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # Dynamo's, whose class is private
        loss_of(in_mode(_breaking(), "graph"), batch(rank, 0))
    return str(caught.value)


def test_an_error_shows_the_users_line(ranks: RankPool) -> None:
    lines, first = inspect.getsourcelines(_BreakingBlock.forward)
    line = first + next(n for n, text in enumerate(lines) if "the user's line" in text)
    for message in ranks.run(_break_in_a_whole_graph, 2):
        assert f'test_compile_trouble.py", line {line}, in forward' in message
        assert "torch._dynamo.graph_break()  # the user's line" in message


def _break_and_go_on(rank: int, world_size: int) -> tuple[Any, Any, dict[str, int], Any, Any]:
    expected, _ = train(_breaking(2), rank, steps=2)
    model = _breaking(2)
    compiled = torch.compile(model, backend="fsdp_dynamo_aot_eager")
    trace._warned.clear()  # by an earlier job of this process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got, _ = train(compiled, rank, steps=2)
    said = " ".join(str(w.message) for w in caught if "expected one graph" in str(w.message))
    with record_events() as log:
        loss_of(compiled, batch(rank, 0)).backward()
    reduced = [event.unit for event in log if event.kind == "reduce_scatter"]
    stay = re.findall(r"'([\w.]+)' \((\d+) bytes\)", said)
    sizes = [(u.fqn, str(sum(f.unsharded_bytes for f in u.flats))) for u in model._fsdp_root.units]
    return expected, got, {unit: reduced.count(unit) for unit in reduced}, sorted(stay), sizes


class _BreakingInTheLoop(Transformer):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(self.norm(x)) * self.scale


def _break_in_the_loop(rank: int, world_size: int) -> tuple[Any, Any, list[str]]:
    def make() -> FSDP:
        torch.manual_seed(7)
        return FSDP(_BreakingInTheLoop(), auto_wrap_policy=ModuleWrapPolicy({Block}))

    trace._warned.clear()  # by an earlier job of this process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got, _ = train(torch.compile(make(), backend="fsdp_dynamo_aot_eager"), rank, steps=3)
    said = [str(w.message) for w in caught if "expected one graph" in str(w.message)]
    return train(make(), rank, steps=3)[0], got, said


@pytest.mark.slow
def test_a_root_that_breaks_in_its_loop(ranks: RankPool) -> None:
    for expected, got, said in ranks.run(_break_in_the_loop, 2):
        assert got == pytest.approx(expected, rel=1e-5)
        assert len(said) == 1
        assert said[0].startswith("torch.compile: expected one graph")


def test_units_that_break_go_on(ranks: RankPool) -> None:
    """They stay unsharded, and a warning names each once."""
    for expected, got, reductions, stay, sizes in ranks.run(_break_and_go_on, 2):
        assert stay == sizes[2:]  # of the root, blocks.0, blocks.1 and blocks.2
        assert got == pytest.approx(expected, rel=1e-5)
        assert reductions == {"": 1, "blocks.0": 1, "blocks.1": 1, "blocks.2": 1}


# -- accumulation and evaluation -------------------------------------------------------------------

_GROUPS = ((4, 4), (4, 3), (1, 1), (3,))
"""Sizes of the batches whose gradients are summed; the last group is odd."""


def _train_and_evaluate(
    model: nn.Module, whole: nn.Module, rank: int, finish: Callable[[], None] = lambda: None
) -> tuple[list[float], int]:
    """Two epochs of SGD steps that accumulate, with evaluations in every state of it.

    Args:
        model: compiled.
        whole: what was compiled.
        rank: of the batches.
        finish: called before a step.

    Returns:
        Losses, and the number of graphs that the second epoch added.
    """
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    losses, graphs = [], []
    for _ in range(2):
        for sizes in _GROUPS:
            for number, size in enumerate(sizes, 1):
                whole.require_backward_grad_sync = number == len(sizes)
                loss = classification_loss(model, examples(rank, number, size))
                (loss / len(sizes)).backward()
                with torch.no_grad():
                    losses.append(classification_loss(model, examples(rank, 9, size)).item())
            finish()
            optimizer.step()
            optimizer.zero_grad()
        graphs.append(_num_graphs())
    return losses, graphs[1] - graphs[0]


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_accumulation_needs_no_higher_limit(rank: int, door: str) -> None:
    """Each of its states may have as many graphs as the model needs without accumulation."""
    plain = make_classifier()
    before = _num_graphs()
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    expected, _ = _train_and_evaluate(compiled, plain, rank, partial(average_gradients, plain))
    num_plain = _num_graphs() - before

    whole = make_classifier()
    if door == "wrapper":
        whole = shard(whole)
    else:
        fully_shard(whole, policy=ModuleWrapPolicy({nn.Sequential}))
    with torch._dynamo.config.patch(recompile_limit=num_plain):
        losses, more = _train_and_evaluate(in_mode(whole, "graph"), whole, rank)
    assert losses == pytest.approx(expected, rel=1e-5)  # also of the steps before
    assert more == 0


# -- recompilations --------------------------------------------------------------------------------


class _Changing(Transformer):
    """A number that Dynamo takes as a constant changes from step to step."""

    kind = "a0"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (1 + int(self.kind[1:]) / 8)


def _beyond_the_limit(
    rank: int, world_size: int, mode: str, sync: bool = True
) -> tuple[list[float], list[float], str]:
    def run(mode: str) -> tuple[list[float], str]:
        torch.manual_seed(7)
        wrapped = FSDP(_Changing(num_blocks=2), auto_wrap_policy=ModuleWrapPolicy({Block}))
        model = in_mode(wrapped, mode)
        wrapped.require_backward_grad_sync = sync
        losses = []
        for step in range(4):
            wrapped.module.kind = f"a{step}"
            try:
                losses += _losses(model, [batch(rank, step)])
            except Exception as error:
                return losses, f"{type(error).__name__}: {error}"
        return losses, ""

    with torch._dynamo.config.patch(recompile_limit=2):
        return run("eager")[0], *run(mode)


def test_beyond_the_recompile_limit(ranks: RankPool) -> None:
    """Where graph breaks are allowed, what is not compiled runs eagerly, between the same hooks."""
    for expected, losses, error in ranks.run(_beyond_the_limit, 2, "hooks"):
        assert error == ""
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("sync", [True, False])
def test_beyond_the_recompile_limit_of_a_whole_graph(ranks: RankPool, sync: bool) -> None:
    for expected, losses, error in ranks.run(_beyond_the_limit, 2, "graph", sync):
        assert error.startswith("FailOnRecompileLimitHit: ")
        assert losses == pytest.approx(expected[:2], rel=1e-5)


# -- warming up ------------------------------------------------------------------------------------


def _state_of(model: nn.Module) -> list[torch.Tensor]:
    found = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    return [tensor.detach().clone() for tensor in found]


def _loss_and_noise(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return loss_of(model, tokens) + torch.rand(())


def _warmed_up(
    rank: int, world_size: int, mode: str
) -> tuple[bool, bool, list[float], list[float]]:
    batches = [batch(rank, n, length=4 + n) for n in range(4)]
    expected, _ = train(wrap(make_transformer(num_blocks=2)), rank, steps=3)
    plain = make_transformer(num_blocks=2)
    plain.blocks[0].register_buffer("seen", torch.zeros(1))

    def count(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        module.seen.add_(1)

    plain.blocks[0].register_forward_hook(count)
    wrapped = wrap(plain)
    model = in_mode(wrapped, mode)
    before = _state_of(model)
    warmup(model, batches, _loss_and_noise, max_recompiles=0)
    same = all(torch.equal(a, b) for a, b in zip(before, _state_of(model), strict=True))
    clean = all(p.grad is None for p in model.parameters())
    with wrapped.no_sync():
        warmup(wrapped, batches[:1], loss_of)  # its sums do not stay
    try:
        losses, _ = train(model, rank, steps=3)
    finally:
        limit_recompiles(None)
    return same, clean, expected, losses


@pytest.mark.parametrize("mode", COMPILED)
def test_warming_up_changes_nothing(ranks: RankPool, mode: str) -> None:
    for same, clean, expected, losses in ranks.run(_warmed_up, 2, mode):
        assert same
        assert clean
        assert losses == pytest.approx(expected, rel=1e-5)


def _over_budget(rank: int, world_size: int, count: int) -> tuple[int, str]:
    """How many other dtypes the compiled function took before it was an error."""
    function = torch.compile(lambda x: (x * 2).sum(), backend="aot_eager")
    function(torch.ones(2, requires_grad=True)).backward()
    done = 0
    limit_recompiles(count)
    try:
        for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64):
            function(torch.ones(2, dtype=dtype, requires_grad=True)).backward()
            done += 1
    except Exception as error:
        return done, f"{type(error).__name__}: {error}"
    finally:
        limit_recompiles(None)
    return done, ""


@pytest.mark.parametrize("count", [0, 2])
def test_one_recompilation_too_many(ranks: RankPool, count: int) -> None:
    ((done, message),) = ranks.run(_over_budget, 1, count)
    assert done == count
    assert "RecompileError: Recompiling function" in message
    assert "dtype mismatch" in message


def _wrong_calls(rank: int, world_size: int) -> list[str]:
    messages = []

    def note(call: Any) -> None:
        try:
            call()
        except FSDPValueError as error:
            messages.append(str(error))

    note(lambda: warmup(nn.Linear(2, 2), [torch.ones(2)]))
    note(lambda: limit_recompiles(-1))
    wrapped = FSDP(nn.Linear(2, 2))
    note(lambda: warmup(wrapped, [torch.ones(2)], lambda model, x: model(x).sum().backward()))
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    return messages


def test_wrong_calls(ranks: RankPool) -> None:
    for unwrapped, negative, no_loss in ranks.run(_wrong_calls, 2):
        assert unwrapped.startswith("warmup(): expected a model with units, got Linear.")
        assert "0 or more" in negative
        assert no_loss.startswith("warmup(): expected a loss, one number")
        assert "got None" in no_loss


def _other_batches(rank: int, world_size: int, how: str) -> tuple[str, str]:
    try:
        _warm_up_otherwise(rank, how)
    except Exception as error:
        if how == "raises" and rank:
            sys.excepthook(type(error), error, error.__traceback__)  # nobody catches it
        return type(error).__name__, str(error)
    return "", ""


def _warm_up_otherwise(rank: int, how: str) -> None:
    model = in_mode(wrap(make_transformer(num_blocks=1)), "graph")
    batches: list[Any] = [batch(rank, 0), batch(rank, 1)][: 1 if how == "fewer" and rank else 2]
    if how == "raises" and rank:
        batches[1] = "no tensor"
    warmup(model, batches)


def test_ranks_with_other_batches(ranks: RankPool) -> None:
    for kind, message in ranks.run(_other_batches, 2, "fewer"):
        assert kind == "DivergenceError"
        assert "1 of 1" in message
    (kind, message), _ = ranks.run(_other_batches, 2, "raises")
    assert kind == RankFailedError.__name__
    assert message.startswith("rank 1 after the ")
