"""Programs of compiled stretches: their numbers, and what is compiled, ordered and freed."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from compile_caches import WIDTH, Layer, using_cache
from pool import on_ranks
from torch import fx, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from fsdp_dynamo import FSDP
from fsdp_dynamo.graph_mode.captures import phase_of
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


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


# -- numbers ---------------------------------------------------------------------------------------


class _Rows(nn.Sequential):
    """Computes on all rows of a batch of matrices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        return super().forward(x.reshape(batch * length, width)).view(batch, length, width)


@on_ranks(2)
def test_a_product_of_dynamic_sizes(rank: int) -> None:
    """A stretch is given a tensor of ``(batch * length, width)``, and not the batch itself."""
    models = [_wrapped(_Rows(*_layers(2))) for _ in range(2)]
    runs = models[0], _compiled(models[1], dynamic=True)
    for step in range(2):
        x = torch.rand(2 + step, 5 - step, WIDTH, generator=torch.Generator().manual_seed(step))
        losses = [run(x + rank).square().mean() for run in runs]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(_gradients(models[1]), _gradients(models[0]))


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


@on_ranks(2)
def test_no_stretch_writes_into_what_another_reads(rank: int) -> None:
    """AOTAutograd lets Inductor reuse the memory of tensors that were saved for the backward."""
    models = [_wrapped(_Sea()) for _ in range(2)]
    for run in (models[0], _compiled(models[1])):
        outputs = run(torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(rank)))
        sum(one.square().mean() for one in outputs).backward()
    torch.testing.assert_close(_gradients(models[1]), _gradients(models[0]))


# -- what is compiled ------------------------------------------------------------------------------


def _facts(program: Program) -> tuple[int, int]:
    """Distinct stretches, and calls of them."""
    return len(program.stretches), len(re.findall(r"= stretch_\d", program.source))


@on_ranks(2)
def test_a_deeper_model_has_no_more_stretches(rank: int, tmp_path: Path) -> None:
    """Nor does it compile any."""
    call, found = StretchCompiler.__call__, []
    for depth in (4, 6):
        made: list[Any] = []

        def watch(*args: Any, made: list[Any] = made, **kwargs: Any) -> Program:
            program = call(*args, **kwargs)
            made.append(_facts(program))
            return program

        with (
            mock.patch.object(StretchCompiler, "__call__", watch),
            using_cache(tmp_path / str(rank)),
        ):
            model = _compiled(_wrapped(nn.Sequential(*_layers(depth))))
            model(torch.ones(4, WIDTH)).sum().backward()
            counts = counters["inductor"]
            found.append((made, counts["fxgraph_cache_miss"], counts["fxgraph_cache_hit"]))
    (few, compiled, _), (many, compiled_again, hits) = found
    for (distinct, calls), (same, more_calls) in zip(few, many, strict=True):
        assert distinct == same
        assert calls < more_calls
    assert compiled == sum(distinct for distinct, *_ in few)
    assert (compiled_again, hits) == (0, compiled)


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
        stretches = {"stretch_0": stretch, "stretch_1": stretch}
        program = Program(source, stretches, {}, phase_of(graph))
    program([torch.ones(2)])
    assert freed == [False, True]


# -- random numbers --------------------------------------------------------------------------------


class _Dropped(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.weight, 0.5)


class _Masks(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self]


@on_ranks(2)
def test_equal_units_drop_other_elements(rank: int) -> None:
    """And the backward of each drops the same as its forward."""
    layers = _Masks([_Dropped(WIDTH, WIDTH, bias=False) for _ in range(2)])
    for layer in layers:
        nn.init.ones_(layer.weight)
    model = _wrapped(layers)
    torch.manual_seed(rank)
    outputs = _compiled(model)(torch.zeros(WIDTH, WIDTH))
    assert not torch.equal(outputs[0], outputs[1])
    sum(one.sum() for one in outputs).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        grads = [param.grad.clone() for param in model.parameters()]
    for grad, output in zip(grads, outputs, strict=True):
        mean = output.detach().clone()  # ones that were dropped or doubled
        dist.all_reduce(mean)
        torch.testing.assert_close(grad, mean / 2)
