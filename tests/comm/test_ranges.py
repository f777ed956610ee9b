"""Ranges of torch's profiler, named by unit, in eager and on both compiled modes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch.profiler import profile

MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "hooks": {"backend": "aot_eager"},
    "graph": {"backend": "fsdp_dynamo_aot_eager", "fullgraph": True},
}


def _ranges(rank: int, world_size: int, mode: str) -> dict[str, int]:
    model = wrap(make_transformer(num_blocks=2))
    options = MODES[mode]
    step = model if options is None else torch.compile(model, **options)
    loss_of(step, batch(rank, 0)).backward()
    with profile() as profiler:
        loss_of(step, batch(rank, 1)).backward()
    names = Counter(e.name for e in profiler.events() if e.name.startswith("FSDP::"))
    return dict(names)


@pytest.mark.parametrize("mode", list(MODES))
def test_every_collective_has_a_range(ranks: RankPool, mode: str) -> None:
    found = ranks.run(_ranges, 2, mode)[0]
    units = {"(root)": 1, "blocks.0": 2, "blocks.1": 2}
    for unit, gathers in units.items():
        for name, times in (("all_gather", gathers), ("reduce_scatter", 1)):
            assert found[f"FSDP::{name} {unit}"] == times
            assert found[f"FSDP::{name} wait {unit}"] == times
    forwards = {name for name in found if name.startswith("FSDP::forward")}
    assert forwards == (set() if mode == "graph" else {f"FSDP::forward {unit}" for unit in units})
