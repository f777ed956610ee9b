"""Names of modules that hold the characters which labels, fingerprints and listings use."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Builder
from modes import INDUCTOR_MODES, MODES, in_mode
from pool import RankPool
from torch import nn

from fsdp_dynamo import FSDP, DivergenceError, events, record_plans
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


def _expected(world_size: int) -> list[torch.Tensor]:
    """Parameters of one process after the steps of all ranks."""
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(world_size):
            (model(_batch(rank, step)).square().mean() / world_size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _train(
    rank: int, world_size: int, mode: str, options: dict[str, Any]
) -> tuple[list[torch.Tensor], list[str], list[str]]:
    """Parameters; units that were gathered in the last step; problems with the plan, if made."""
    model = FSDP(_Model(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    problems = []
    with record_plans() as log:
        run = in_mode(model, mode, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            with events.record_events() as recorded:
                run(_batch(rank, step)).square().mean().backward()
            optimizer.step()
    if mode.startswith("graph"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            log.plan().save(path)
            problems = log.plan().diff(Plan.load(path))
            planned = {transfer.unit for graph in log.plan().graphs for transfer in graph.transfers}
            torch._dynamo.reset()
            in_mode(model, mode, **options, plan=str(path))(_batch(rank, 0)).sum().backward()
        problems += sorted(planned ^ {"", *(f"layers.{key}" for key in KEYS)})
    units = list(dict.fromkeys(event.unit for event in recorded if event.kind == "all_gather"))
    with FSDP.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()], units, problems


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *((mode, {}) for mode in MODES),
        ("graph", {"regions": True}),
        *((pytest.param(mode, {}, marks=pytest.mark.slow)) for mode in INDUCTOR_MODES),
    ],
)
def test_any_name(ranks: RankPool, mode: str, options: dict[str, Any]) -> None:
    for parameters, units, problems in ranks.run(_train, 2, mode, options):
        assert problems == []
        assert sorted(units) == sorted(["", *(f"layers.{key}" for key in KEYS)])
        torch.testing.assert_close(parameters, _expected(2))


def _skip_one(rank: int, world_size: int) -> str:
    model: Any = FSDP(_Model(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    run = model.module if hasattr(model, "module") else model
    model(_batch(rank, 0)).sum().backward()
    if rank == 1:
        run.layers["d,e"].forward = nn.Identity().forward
    try:
        model(_batch(rank, 1)).sum().backward()
    except DivergenceError as error:
        return str(error)
    return ""


def test_a_unit_that_one_rank_leaves_out_is_named(ranks: RankPool) -> None:
    for message in ranks.run(_skip_one, 2):
        assert "unit 'layers.d,e'" in message


@pytest.mark.parametrize("name", NAMES)
def test_marks_and_labels(name: str) -> None:
    mark = Mark(name, "all_gather", "forward", 1, True)
    assert Mark.decode(mark.encode()) == mark
    label = Label(name, "all_gather", "forward", (name, ""), ("", name, name), 3)
    assert Label.decode(label.encode()) == label


@pytest.mark.parametrize("name", NAMES)
def test_fingerprints(name: str) -> None:
    builder = Builder()
    shard = builder.input("shard")
    shard.meta["val"] = torch.empty(10)
    gathers = [builder.gather(name, shard) for _ in range(2)]
    builder.graph.output(tuple(gathers))
    entries = fingerprint(builder.graph).split(SEPARATOR)
    assert len(entries) == 2
    assert f"of unit '{name or '(root)'}', flat parameter 0, 10 float32" in describe_entry(
        entries[0]
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("kind", "is_wait"), [("", False), ("all_gather", False), ("all_gather", True)]
)
def test_listings(name: str, kind: str, is_wait: bool) -> None:
    line = Line("    x = aten.mm.default(a, b)", name, kind, is_wait)
    assert "\n" not in str(line)
    assert Line.parse(str(line)) == line
