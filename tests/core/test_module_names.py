"""Names of modules that hold the characters which labels, fingerprints and listings use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Builder
from loops import different, gradients, whole_gradients
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, DivergenceError, record_events, record_plans
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.markers import Mark
from graph_passes.scheduling.plan import Plan
from graph_passes.text.listing import SEPARATOR, Label, Line, describe_entry, fingerprint

KEYS = ("a|b|c", "d,e", "f;g", "h i", "100%7C", "(root)", "all_gather wait", "x  # y", "ü\n'\"")
NAMES = ("", *KEYS, *(f"layers.{key}" for key in KEYS))
DIM = 16


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleDict(
            {key: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for key in KEYS}
        )
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = x + layer(x)
        return self.head(x)


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_any_name(rank: int, mode: str, tmp_path: Path) -> None:
    """Gradients are those of one process, each unit is gathered, and plans can be saved."""
    model = FSDP(_Model(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    with record_plans() as log, record_events() as recorded:
        in_mode(model, mode)(_batch(rank, 0)).square().mean().backward()
    plain = _Model()
    for other in range(2):
        (plain(_batch(other, 0)).square().mean() / 2).backward()
    assert different(whole_gradients(model), gradients(plain)) == []
    units = {"", *(f"layers.{key}" for key in KEYS)}
    assert {event.unit for event in recorded if event.kind == "all_gather"} == units
    if mode == "graph":
        path = tmp_path / f"plan of rank {rank}.json"
        log.plan().save(path)
        assert log.plan() == Plan.load(path)
        assert {t.unit for graph in log.plan().graphs for t in graph.transfers} == units
        torch._dynamo.reset()
        in_mode(model, mode, plan=str(path))(_batch(rank, 0)).square().mean().backward()


@on_ranks(2)
def test_a_unit_that_one_rank_leaves_out_is_named(rank: int) -> None:
    model: Any = FSDP(_Model(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    model(_batch(rank, 0)).sum().backward()
    if rank == 1:
        model.module.layers["d,e"].forward = nn.Identity().forward
    with pytest.raises(DivergenceError, match=r"unit 'layers\.d,e'"):
        model(_batch(rank, 1)).sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_texts(name: str) -> None:
    """Of marks, labels, fingerprints and listings."""
    mark = Mark(name, "all_gather", "forward", 1, True)
    assert Mark.decode(mark.encode()) == mark
    label = Label(name, "all_gather", "forward", (name, ""), ("", name, name), 3)
    assert Label.decode(label.encode()) == label
    builder = Builder()
    shard = builder.input("shard")
    shard.meta["val"] = torch.empty(10)
    builder.graph.output(tuple(builder.gather(name, shard) for _ in range(2)))
    entries = fingerprint(builder.graph).split(SEPARATOR)
    assert len(entries) == 2
    wanted = f"of unit '{name or '(root)'}', flat parameter 0, 10 float32"
    assert wanted in describe_entry(entries[0])
    for kind, is_wait in (("", False), ("all_gather", False), ("all_gather", True)):
        line = Line("    x = aten.mm.default(a, b)", name, kind, is_wait)
        assert "\n" not in str(line)
        assert Line.parse(str(line)) == line
