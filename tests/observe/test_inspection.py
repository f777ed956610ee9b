"""inspect_graphs(): listings, and files by unit and phase."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import two_units
from models import batch, make_transformer, wrap
from modes import in_mode
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDPStateError, FSDPValueError, inspect_graphs
from fsdp_dynamo.dynamo.artifacts import Artifact, Frame
from fsdp_dynamo.observe.inspection.listings import Listing, listings_of
from graph_passes.graph_pass import as_pass
from graph_passes.text.listing import Line, listing, of_unit, units_in

# -- listings -------------------------------------------------------------------------------------


def test_listings_are_python_and_read_back() -> None:
    """A unit's part folds the compute of others."""
    text = listing(two_units())
    compile(text, "listing", "exec")
    lines = [Line.parse(line) for line in text.splitlines()]
    assert "\n".join(map(str, lines)) + "\n" == text
    assert units_in(lines) == ["layers.0", "", "layers.1"]
    kinds = [(line.kind, line.is_wait) for line in lines if line.unit == "layers.0"]
    assert kinds == [("all_gather", False), ("all_gather", True), ("", False)]
    moved = [*lines[:5], lines[9], *lines[5:9], *lines[10:]]  # layers.1 gathered at the begin
    part = of_unit(moved, "layers.1")
    assert [line.kind for line in part] == ["all_gather"] * 3 + ["", "all_gather", ""]
    assert str(part[3]) == "    # ... 2 lines of layers.0, (root)"
    assert of_unit(lines, "nowhere") == []


class _Kwargs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, 1:], self.scale * x], dim=1).view(size=(-1,)).to(torch.device("cpu"))

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def test_every_kind_of_node_is_python() -> None:
    text = listing(torch.fx.symbolic_trace(_Kwargs()).graph)
    compile(text, "listing", "exec")
    for part in ("self.scale", "cat([", "], dim=1)", "slice(1, None", ".view(size=(-1,))"):
        assert part in text


def test_segments_are_numbered_as_they_run_forward() -> None:
    def artifact(name: str, text: str, frame: int = 0) -> Artifact:
        return Artifact(name, Frame(frame, 0), "", text)

    found = listings_of(
        [
            artifact("aot_forward_graph", "first"),
            artifact("inductor_output_code", "# AOT ID: ['4_forward']"),
            artifact("aot_forward_graph", "second"),
            artifact("inductor_output_code", "# AOT ID: ['5_forward']"),
            artifact("chromium_event", "{}"),
            artifact("inductor_output_code", "# AOT ID: ['5_backward']"),
            artifact("inductor_output_code", "# AOT ID: ['4_backward']"),
            artifact("dynamo_output_graph", "no more", 1),
            artifact("aot_inference_graph", "no grad", 2),
        ]
    )
    assert [(x.graph, x.phase, x.stage, x.text[-12:]) for x in found] == [
        (0, "forward", "partition", "first"),
        (0, "forward", "inductor", "['4_forward']"[-12:]),
        (1, "forward", "partition", "second"),
        (1, "forward", "inductor", "['5_forward']"[-12:]),
        (1, "backward", "inductor", "5_backward']"),
        (0, "backward", "inductor", "4_backward']"),
        (2, "forward", "partition", "no grad"),
    ]
    assert found[0].file_name == "_root.forward.partition.py"
    assert found[-1].file_name == "_root.graph2.forward.partition.py"
    odd = Listing("towers.a/b c.0", 0, "forward", "lowered", "")
    assert odd.file_name == "towers.a_b_c.0.forward.lowered.py"


def test_no_two_files_have_one_name() -> None:
    lines = [
        "    x = f()  # d.a%20b",
        "    g = h()  # all_gather wait d.a_b",
        "    y = g()  # D.a_b",
    ]
    made = [Artifact("fsdp_dynamo.forward.partition", Frame(0, 0), "", "\n".join(lines))]
    parts = [x for x in listings_of(made) if x.unit is not None]
    assert [x.unit for x in parts] == ["d.a b", "d.a_b", "D.a_b"]
    name = ".forward.partition"
    assert [x.file_name for x in parts] == [
        f"d.a_b{name}.py",
        f"d.a_b{name}~2.py",
        f"D.a_b{name}~3.py",
    ]


# -- what passes are ------------------------------------------------------------------------------


def _documented(graph: torch.fx.Graph, more: int = 0) -> None:
    """Looks at the graph.

    And at nothing else.
    """


def _bare(graph: torch.fx.Graph) -> None:
    pass


class _Made:
    """Says what it is in its class."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Not this."""


@dataclass
class _Plain:
    more: int = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Not this."""


def test_passes_are_explained_by_docstrings() -> None:
    assert as_pass(partial(_documented, more=1)).summary == "Looks at the graph."
    assert as_pass(_Made()).summary == "Says what it is in its class."
    for without in (_bare, _Plain(), lambda graph: None):
        assert as_pass(without).summary == ""


# -- real steps ---------------------------------------------------------------------------------


def _inspected(folder: Path, mode: str, rank: int | None = 0) -> dict[str, str]:
    """Texts by file name; gradients are the same as without being looked at."""
    model = wrap(make_transformer(num_blocks=2))
    step = in_mode(model, mode)
    tokens = batch(dist.get_rank(), 0)
    step(tokens).sum().backward()  # compiled before: it is compiled again in the context
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with inspect_graphs(folder, rank) as found:
        step(tokens).sum().backward()
    got = [p.grad for p in model.parameters() if p.grad is not None]
    assert got
    assert all(torch.equal(*pair) for pair in zip(expected, got, strict=True))
    texts = {x.file_name: x.text for x in found.listings}
    assert len(texts) == len(found.listings)
    return texts


@on_ranks(2)
def test_the_graph_mode_stage_by_stage(rank: int, tmp_path: Path) -> None:
    """Of all ranks."""
    texts = _inspected(tmp_path, "graph", rank=None)
    folder = tmp_path / f"rank{rank}"
    assert {path.name for path in folder.iterdir()} == {*texts}
    for name, text in texts.items():
        assert (folder / name).read_text() == text
        ast.parse(text, name)
    for stage in ("partition", "after_grad_buffer", "after_planner", "lowered"):
        for owner in ("_whole", "_root", "blocks.0", "blocks.1"):
            assert f"{owner}.backward.{stage}.py" in texts
    joint = [Line.parse(line) for line in texts["_whole.joint.traced.py"].splitlines()]
    assert set(units_in(joint)) == {"", "blocks.0", "blocks.1"}
    assert not any("graph1" in name for name in texts), "a body of a region is no graph"
    assert "__compiled_fn" in texts["_whole.dynamo.decompiled.py"]
    kinds = [Line.parse(x) for x in texts["_whole.backward.after_planner.py"].splitlines()]
    reductions = [x.unit for x in kinds if x.kind == "reduce_scatter" and not x.is_wait]
    assert reductions == ["blocks.1", "blocks.0", ""]
    before = texts["_whole.backward.after_group_writes.py"].splitlines()
    after = texts["_whole.backward.after_planner.py"].splitlines()
    assert before != after, "the planner moved nothing"
    assert sorted(before) == sorted(after), "the planner does no more than move"
    lowered: list[Any] = [None, None]
    dist.all_gather_object(lowered, texts["_whole.backward.lowered.py"])
    assert lowered[0] == lowered[1]


@on_ranks(2)
def test_the_hooks_mode_unit_by_unit(rank: int, tmp_path: Path) -> None:
    """Of the first rank, without depyf."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "depyf", None)
        if rank == 0:
            with pytest.warns(UserWarning, match=r"pip install -e '\.\[inspection\]'"):
                texts = _inspected(tmp_path, "hooks")
        else:
            texts = _inspected(tmp_path, "hooks")
    phases = {name.removeprefix("blocks.0.") for name in texts if name.startswith("blocks.0.")}
    parts = {"joint.traced.py", "forward.partition.py", "backward.partition.py"}
    assert phases == parts | {"dynamo.captured.py"}
    assert not any(name.startswith("blocks.1.") for name in texts), "equal units share their code"
    # the root's segments, before the blocks and after them, each with its own backward
    assert "aten.mm" in texts["_root.graph1.backward.partition.py"]
    assert "aten.mm" not in texts["_root.backward.partition.py"]
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {*texts}


def _broken_pass(graph: torch.fx.Graph) -> None:
    raise ZeroDivisionError("a pass that fails")


@on_ranks(2)
def test_what_came_before_a_failure_is_written(rank: int, tmp_path: Path) -> None:
    step = in_mode(wrap(make_transformer(num_blocks=1)), "graph", passes=[_broken_pass])
    with pytest.raises(Exception, match="a pass that fails"), inspect_graphs(tmp_path):
        step(batch(rank, 0)).sum().backward()
    dist.barrier()
    names = {path.name for path in tmp_path.iterdir()}
    assert {"_whole.joint.traced.py", "_whole.forward.partition.py"} <= names
    assert "_whole.forward.after__broken_pass.py" not in names


# -- what can go wrong ---------------------------------------------------------------------------


def test_no_such_rank(tmp_path: Path) -> None:
    with pytest.raises(FSDPValueError, match="from 0 to 0"), inspect_graphs(tmp_path / "out", 7):
        pytest.fail("entered")


def test_without_depyf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning names the caller's line."""
    monkeypatch.setitem(sys.modules, "depyf", None)
    compiled = torch.compile(nn.Linear(2, 2), backend="aot_eager")
    with pytest.warns(UserWarning, match="depyf") as said, inspect_graphs(tmp_path):
        compiled(torch.ones(1, 2)).sum().backward()
    assert [x.filename for x in said if "depyf" in str(x.message)] == [__file__]
    assert [*tmp_path.glob("_root.backward.partition.py")]


def test_nothing_compiled_is_said(tmp_path: Path) -> None:
    with pytest.raises(FSDPStateError, match="nothing was compiled"), inspect_graphs(tmp_path):
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert list(tmp_path.iterdir()) == []
