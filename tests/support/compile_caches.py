"""A model that compiles in no time, and caches of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import clear_caches

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

WIDTH = 8


class Layer(nn.Linear):
    """A unit."""


def make_products() -> nn.Module:
    """Its graphs hold products alone, for which nothing takes a C++ compiler."""
    torch.manual_seed(7)
    return nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(2)))


def losses_of(model: nn.Module, rank: int) -> list[float]:
    """Of SGD steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        inputs = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@contextmanager
def using_cache(folder: Path) -> Iterator[None]:
    """Nothing is known but what lies in the folder."""
    torch._dynamo.reset()
    clear_caches()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        try:
            yield
        finally:
            clear_caches()


def make_compiled_products(model: nn.Module | None = None, **options: Any) -> Any:
    """``make_products()``, or a model of layers, in graph mode with Inductor."""
    wrapped = FSDP(model or make_products(), auto_wrap_policy=ModuleWrapPolicy({Layer}))
    return torch.compile(wrapped, backend="fsdp_dynamo", fullgraph=True, options=options or None)
