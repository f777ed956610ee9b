"""Other lengths, graph breaks, recompilations, and warming up before them."""

from __future__ import annotations

import copy
import inspect
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from loops import Batch, classification_loss, error_of, examples, fit, fit_squares, shard
from models import average_gradients, batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch._dynamo.utils import counters

from fsdp_dynamo import (
    FSDP,
    DivergenceError,
    FSDPValueError,
    RankFailedError,
    record_events,
    warmup,
)
from fsdp_dynamo.dynamo import artifacts, progress
from fsdp_dynamo.graph_mode import trace
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def _num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def _classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(6, 12), nn.Tanh()), nn.Linear(12, 3))


@on_ranks(2)
def test_many_lengths_need_few_graphs(rank: int) -> None:
    """The first length is compiled as it is, the second one for all that follow."""
    eager, wrapped = (wrap(make_transformer(num_blocks=1)) for _ in range(2))
    model = in_mode(wrapped, "graph")
    num_graphs = []
    for n in range(8):
        losses = [loss_of(one, batch(rank, n, length=5 + 3 * n)) for one in (eager, model)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0.0)
        num_graphs.append(_num_graphs())
    assert num_graphs[1] == num_graphs[-1]


# -- graph breaks ----------------------------------------------------------------------------------


class _Layer(nn.Linear):
    """A unit."""


class _Breaking(_Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()  # the user's line
        return x * 2


def _layers() -> FSDP:
    torch.manual_seed(7)
    layers = nn.Sequential(_Layer(8, 8), _Breaking(8, 8), _Breaking(8, 8), nn.Linear(8, 1))
    return FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({_Layer}))


@on_ranks(2)
def test_units_that_break_go_on(rank: int) -> None:
    """They stay unsharded, and a warning names each once. A whole graph is refused."""
    lines, first = inspect.getsourcelines(_Breaking.forward)
    line = first + next(n for n, text in enumerate(lines) if "the user's line" in text)
    error = error_of(lambda: in_mode(_layers(), "graph")(torch.ones(2, 8)))
    assert f'test_compile_trouble.py", line {line}, in forward' in error
    assert "torch._dynamo.graph_break()  # the user's line" in error

    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return fit_squares(model, optimizer, (2, 8), (rank, 2 + rank))

    model = _layers()
    compiled = torch.compile(model, backend="fsdp_dynamo_aot_eager")
    trace._warned.clear()  # by an earlier job of this process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert losses(compiled) == pytest.approx(losses(_layers()), rel=1e-5)
    said = " ".join(str(w.message) for w in caught if "expected one graph" in str(w.message))
    stay = re.findall(r"'([\w.]+)' \((\d+) bytes\)", said)
    sizes = [(u.fqn, str(sum(f.unsharded_bytes for f in u.flats))) for u in model._fsdp_root.units]
    assert sorted(stay) == sizes[2:]  # of the root, and of three layers
    with record_events() as log:
        losses(compiled)
    reduced = Counter(event.unit for event in log if event.kind == "reduce_scatter")
    assert reduced == {"": 2, "0": 2, "1": 2, "2": 2}


# -- accumulation and evaluation -------------------------------------------------------------------

_GROUPS = ((4, 3), (3, 4), (3,))
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


@on_ranks(2)
def test_accumulation_needs_no_higher_limit(rank: int) -> None:
    """Each of its states may have as many graphs as the model needs without accumulation."""
    plain = _classifier()
    before = _num_graphs()
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    expected, _ = _train_and_evaluate(compiled, plain, rank, partial(average_gradients, plain))
    num_plain = _num_graphs() - before

    whole = shard(_classifier())
    with torch._dynamo.config.patch(recompile_limit=num_plain):
        losses, more = _train_and_evaluate(in_mode(whole, "graph"), whole, rank)
    assert losses == pytest.approx(expected, rel=1e-5)  # also of the steps before
    assert more == 0


# -- recompilations --------------------------------------------------------------------------------


class _Changing(nn.Sequential):
    """A number that Dynamo takes as a constant changes from step to step."""

    kind = "a0"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + int(self.kind[1:]) / 8)


@pytest.mark.parametrize(("mode", "sync"), [("hooks", True), ("graph", True), ("graph", False)])
@on_ranks(2)
def test_beyond_the_recompile_limit(rank: int, mode: str, sync: bool) -> None:
    """What is not compiled runs eagerly, between the same hooks; a whole graph is refused."""
    plain = _Changing(*_classifier())
    eager, wrapped = shard(copy.deepcopy(plain)), shard(plain)
    run = in_mode(wrapped, mode)
    eager.require_backward_grad_sync = wrapped.require_backward_grad_sync = sync
    with torch._dynamo.config.patch(recompile_limit=2):
        for step in range(2 if mode == "graph" else 4):
            eager.module.kind = wrapped.module.kind = f"a{step}"
            losses = [classification_loss(one, examples(rank, step)) for one in (eager, run)]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(losses[1], losses[0])
        if mode == "graph":
            wrapped.module.kind = "a2"
            error = error_of(lambda: run(examples(rank)[0]))
            assert error.startswith("FailOnRecompileLimitHit: ")


# -- warming up ------------------------------------------------------------------------------------


def _state_of(model: nn.Module) -> list[torch.Tensor]:
    found = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    return [tensor.detach().clone() for tensor in found]


def _loss_and_noise(model: nn.Module, batch: Batch) -> torch.Tensor:
    return classification_loss(model, batch) + torch.rand(())


@on_ranks(2)
def test_warming_up_changes_nothing(rank: int) -> None:
    def train(model: nn.Module) -> list[float]:
        return fit(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(3))

    batches = [examples(rank, n, size=4 + n) for n in range(4)]
    plain = _classifier()
    plain[0].register_buffer("seen", torch.zeros(1))

    def count(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        module.seen.add_(1)

    plain[0].register_forward_hook(count)
    wrapped = shard(plain)
    model = in_mode(wrapped, "graph")
    before = _state_of(model)
    warmup(model, batches, _loss_and_noise)
    assert all(map(torch.equal, before, _state_of(model)))
    assert all(p.grad is None for p in model.parameters())
    with wrapped.no_sync():
        warmup(wrapped, batches[:1], classification_loss)  # its sums do not stay
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = train(model)
    assert losses == pytest.approx(train(shard(_classifier())), rel=1e-5)


@on_ranks(2)
def test_warming_up_for_accumulation_and_evaluation(rank: int) -> None:
    """Nothing is compiled afterwards, neither anew nor for the first time."""
    wrapped = shard(_classifier())
    model, given = in_mode(wrapped, "graph"), examples(rank)
    warmup(model, [given], classification_loss, accumulation=True, evaluation=True)
    with artifacts.record_artifacts() as written:
        with wrapped.no_sync():
            classification_loss(model, given).backward()
        classification_loss(model, given).backward()
        model.eval()
        with torch.no_grad():
            classification_loss(model, given)
    assert model.training is False
    assert written == []


@on_ranks(2)
def test_progress_says_what_a_graph_is_for(rank: int) -> None:
    lines: list[str] = []
    wrapped = shard(_classifier())
    model, given = in_mode(wrapped, "graph"), examples(rank)
    with (
        mock.patch.object(progress, "_AFTER_S", 0.0),
        mock.patch.object(progress, "_write", lines.append),
    ):
        classification_loss(model, given).backward()
        with wrapped.no_sync():
            classification_loss(model, given).backward()
        classification_loss(model, given).backward()
        with torch.no_grad():
            classification_loss(model, given)
        classification_loss(model, examples(rank, size=7)).backward()
    start = "compiling the graph of a "
    told = [line.removeprefix(start) for line in lines if line.startswith(start)]
    told = [line for line in told if line.endswith(" s")]  # not those that only begin
    expected = (
        "step: ",
        "step that accumulates gradients, as under no_sync(): ",
        "step that reduces accumulated gradients: ",
        "forward without gradients anew (TORCH_LOGS=recompiles says why): ",
        "step anew (TORCH_LOGS=recompiles says why): ",
    )
    assert len(told) == (len(expected) if rank == 0 else 0), told
    assert all(line.startswith(what) for line, what in zip(told, expected, strict=rank == 0))


def test_short_compilations_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(progress, "_write", lines.append)
    monkeypatch.setattr(progress, "_SHORT_ONES_S", 0.02)
    compilations = progress.CompilationProgress()
    for _ in range(3):
        compilations.begin(None)
        time.sleep(0.01)
        compilations.end(None)
    assert len(lines) == 1
    assert "short compilations, the last of code: 0 s" in lines[0]


@on_ranks(2)
def test_wrong_calls(rank: int) -> None:
    wrapped = FSDP(nn.Linear(2, 2))
    for call, expected in (
        (lambda: warmup(nn.Linear(2, 2), [torch.ones(2)]), "expected a model with units, got Lin"),
        (
            lambda: warmup(wrapped, [torch.ones(2)], lambda model, x: model(x).sum().backward()),
            "expected a loss, one number.* got None",
        ),
    ):
        with pytest.raises(FSDPValueError, match=expected):
            call()
    assert all(parameter.grad is None for parameter in wrapped.parameters())


@on_ranks(2)
def test_fewer_batches_on_a_rank(rank: int) -> None:
    model = in_mode(shard(_classifier()), "graph")
    with pytest.raises(DivergenceError, match="1 of 1"):
        warmup(model, [examples(rank)[0]] * (2 - rank))


@on_ranks(2)
def test_a_batch_that_a_rank_cannot_compute(rank: int) -> None:
    model = in_mode(shard(_classifier()), "graph")
    batches: list[Any] = [examples(rank)[0], "no tensor" if rank else examples(rank)[0]]
    with pytest.raises(Exception, match="." if rank else "^rank 1 after the ") as raised:
        warmup(model, batches)
    if rank:
        sys.excepthook(raised.type, raised.value, raised.tb)  # nobody catches it
    else:
        assert raised.type is RankFailedError
