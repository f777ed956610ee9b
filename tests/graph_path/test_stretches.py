"""Programs of compiled stretches: their numbers, and what is compiled, ordered and freed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_caches import WIDTH, Layer, using_cache
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch import nn
from torch._dynamo.utils import counters

from fsdp_dynamo import FSDP
from fsdp_dynamo.graph_path.program import Program
from fsdp_dynamo.graph_path.stretch_compiler import StretchCompiler
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


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
