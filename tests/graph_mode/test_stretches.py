"""Programs of compiled stretches: their numbers, and what is compiled, ordered and freed."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_caches import WIDTH, Layer, using_cache
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch import fx, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from fsdp_dynamo import FSDP
from fsdp_dynamo.graph_mode.operators import GraphOperators
from fsdp_dynamo.graph_mode.program import Program, loading, source_of
from fsdp_dynamo.graph_mode.stretch_compiler import StretchCompiler
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.scheduling.stretches import Cutting, Stretch


def _layers(count: int) -> list[Layer]:
    torch.manual_seed(7)
    return [Layer(WIDTH, WIDTH, bias=False) for _ in range(count)]


def _wrapped(model: nn.Module) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}))


def _compiled(model: FSDP, **kwargs: Any) -> Any:
    return torch.compile(model, backend="fsdp_dynamo", fullgraph=True, **kwargs)


# -- numbers ---------------------------------------------------------------------------------------


class _Rows(nn.Sequential):
    """Computes on all rows of a batch of matrices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        return super().forward(x.reshape(batch * length, width)).view(batch, length, width)


def _losses_of_rows(rank: int, world_size: int, compiled: bool) -> list[float]:
    """Of steps with batches of several sizes."""
    model = _wrapped(_Rows(*_layers(3)))
    run = _compiled(model, dynamic=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.rand(2 + step, 5 - step, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = run(x + rank).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_product_of_dynamic_sizes(ranks: RankPool) -> None:
    """A stretch is given a tensor of ``(batch * length, width)``, and not the batch itself."""
    compiled, eager = [ranks.run(_losses_of_rows, 2, mode)[0] for mode in (True, False)]
    assert compiled == pytest.approx(eager, rel=1e-5)


class _Waves(Layer):
    """Computes several tensors from several, so that a backward reads what was saved often."""

    def forward(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        w = self.weight[0]
        return [x + (x * w).sin() * xs[0].exp().cos() for x in xs]


class _Sea(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.waves = _Waves(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self.waves(x * self.scale, x.cos() * self.scale, x.sin(), x.tan() * self.scale)


def _gradients(rank: int, world_size: int, compiled: bool) -> list[torch.Tensor]:
    model = _wrapped(_Sea())
    run = _compiled(model) if compiled else model
    outputs = run(torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(rank)))
    sum(one.square().mean() for one in outputs).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def test_no_stretch_writes_into_what_another_reads(ranks: RankPool) -> None:
    """AOTAutograd lets Inductor reuse the memory of tensors that were saved for the backward."""
    for compiled, eager in zip(
        ranks.run(_gradients, 2, True), ranks.run(_gradients, 2, False), strict=True
    ):
        torch.testing.assert_close(compiled, eager)


# -- what is compiled ------------------------------------------------------------------------------


def _programs(rank: int, world_size: int, folder: str) -> list[Any]:
    """Of models of 4 and of 6 blocks: forward and backward, stretches compiled and found."""
    call, found = StretchCompiler.__call__, []
    with pytest.MonkeyPatch.context() as patch:
        for depth in (4, 6):
            made: list[Program] = []

            def watch(*args: Any, made: list[Program] = made, **kwargs: Any) -> Program:
                made.append(call(*args, **kwargs))
                return made[-1]

            patch.setattr(StretchCompiler, "__call__", watch)
            with using_cache(Path(folder) / str(rank)):
                model = _compiled(wrap(make_transformer(num_blocks=depth, dim=32)))
                loss_of(model, batch(rank, 0)).backward()
                counts = counters["inductor"]
                found.append((made, counts["fxgraph_cache_miss"], counts["fxgraph_cache_hit"]))
    return [([_facts(program) for program in made], *counts) for made, *counts in found]


def _facts(program: Program) -> tuple[int, list[int], int]:
    """Distinct stretches, numbers of collectives and waits in order, calls of stretches."""
    numbers = [int(number) for number in re.findall(r"\|(\d+)/\d+\|", program.source)]
    return len(program.stretches), numbers, len(re.findall(r"= stretch_\d", program.source))


@pytest.mark.slow
def test_a_deeper_model_has_no_more_stretches(ranks: RankPool, tmp_path: Path) -> None:
    for (few, compiled, _), (many, compiled_again, found) in ranks.run(_programs, 2, str(tmp_path)):
        for (distinct, order, calls), (same, longer_order, more_calls) in zip(
            few, many, strict=True
        ):
            assert distinct == same
            assert calls < more_calls
            assert order == list(range(len(order)))
            assert longer_order == list(range(len(longer_order)))
            assert len(longer_order) > len(order)
        assert compiled == sum(distinct for distinct, *_ in few)
        assert (compiled_again, found) == (0, compiled)


# -- what is freed ---------------------------------------------------------------------------------


def test_what_no_later_stretch_takes_is_freed_by_the_last_one() -> None:
    """A stretch is given the only reference to what nothing else reads."""
    graph = fx.Graph()
    saved = graph.placeholder("saved")
    values = [graph.call_function(torch.ops.aten.neg.default, (saved,)) for _ in range(2)]
    graph.output(tuple(values))
    first, second = (Stretch([node], [saved], [node]) for node in values)
    cutting = Cutting([first, second], dict(zip(values, (first, second), strict=True)))
    source, _ = source_of(graph, cutting, {first: "stretch_0", second: "stretch_1"})
    freed = []

    def stretch(given: list[torch.Tensor]) -> tuple[torch.Tensor]:
        result, held = given[0].neg(), weakref.ref(given[0])
        given.clear()
        freed.append(held() is None)
        return (result,)

    with loading(GraphOperators()):
        program = Program(source, {"stretch_0": stretch, "stretch_1": stretch}, {})
    program([torch.ones(2)])
    assert freed == [False, True]


# -- random numbers --------------------------------------------------------------------------------


class _Dropped(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.weight, 0.5)


class _Masks(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self]


def _masks(rank: int, world_size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of two equal units: ones that were dropped or doubled, and the gradients of those ones."""
    layers = _Masks([_Dropped(WIDTH, WIDTH, bias=False) for _ in range(2)])
    for layer in layers:
        nn.init.ones_(layer.weight)
    model = _wrapped(layers)
    torch.manual_seed(rank)
    outputs = _compiled(model)(torch.zeros(WIDTH, WIDTH))
    sum(one.sum() for one in outputs).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        grads = [param.grad.clone() for param in model.parameters()]
    return [one.detach() for one in outputs], grads


def test_equal_units_drop_other_elements(ranks: RankPool) -> None:
    """And the backward of each drops the same as its forward."""
    (outputs, grads), (others, _) = ranks.run(_masks, 2)
    assert not torch.equal(outputs[0], outputs[1])
    for grad, one, other in zip(grads, outputs, others, strict=True):
        torch.testing.assert_close(grad, (one + other) / 2)
