"""inspect_graphs(): listings, files by unit and phase, and its command."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from graphs import two_units
from pool import RankPool
from torch import nn

import fsdp_dynamo
from fsdp_dynamo import (
    FSDP,
    FSDPStateError,
    FSDPValueError,
    inspect_graphs,
    record_events,
)
from fsdp_dynamo.dynamo.artifacts import STAGES, Artifact, Frame
from fsdp_dynamo.observe.command_line import load_function
from fsdp_dynamo.observe.inspection.__main__ import main
from fsdp_dynamo.observe.inspection.listings import Listing, describe_stages, listings_of
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.graph_pass import as_pass
from graph_passes.pipeline import Pipeline, default_passes
from graph_passes.scheduling.planner import Planner
from graph_passes.text.listing import Line, listing, of_unit, units_in

# -- listings -------------------------------------------------------------------------------------


def test_listings_are_python_and_read_back() -> None:
    text = listing(two_units())
    compile(text, "listing", "exec")
    lines = [Line.parse(line) for line in text.splitlines()]
    assert "\n".join(map(str, lines)) + "\n" == text
    assert units_in(lines) == ["layers.0", "", "layers.1"]
    kinds = [(line.kind, line.is_wait) for line in lines if line.unit == "layers.0"]
    assert kinds == [("all_gather", False), ("all_gather", True), ("", False)]


def test_a_units_part_folds_the_compute_of_others() -> None:
    lines = [Line.parse(line) for line in listing(two_units()).splitlines()]
    moved = [*lines[:5], lines[9], *lines[5:9], *lines[10:]]  # layers.1 gathered at the begin
    part = of_unit(moved, "layers.1")
    texts = [str(line) for line in part]
    assert [line.kind for line in part] == [
        "all_gather",
        "all_gather",
        "all_gather",
        "",
        "all_gather",
        "",
    ]
    assert texts[3] == "    # ... 2 lines of layers.0, (root)"
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


# -- what stages are ------------------------------------------------------------------------------


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


def test_a_pass_is_explained_by_its_docstring() -> None:
    assert as_pass(_documented).summary == "Looks at the graph."
    assert as_pass(partial(_documented, more=1)).summary == "Looks at the graph."
    assert as_pass(_Made()).summary == "Says what it is in its class."
    for without in (_bare, _Plain(), lambda graph: None):
        assert as_pass(without).summary == ""


def test_stages_are_explained() -> None:
    stages = Pipeline([_documented, _bare, _documented]).stages()
    found = describe_stages(
        [Artifact(STAGES, Frame(0, 0), "", json.dumps(stages))],
        ["partition", *stages, "after_unheard_of", "no_stage_of_ours"],
    )
    assert "no pass has run" in found["partition"]
    assert found["after__documented"] == "Pass _documented: Looks at the graph."
    assert found["after__documented_2"] == "Pass _documented_2: Looks at the graph."
    assert found["after__bare"] == "Pass _bare: no docstring."
    assert found["after_unheard_of"] == "Pass unheard_of: no docstring."
    assert found["no_stage_of_ours"] == ""


@pytest.mark.parametrize("node_by_node", [False, True])
def test_our_passes_have_docstrings(node_by_node: bool) -> None:
    stages = Pipeline(default_passes(Planner(), node_by_node)).stages()
    assert all(text.endswith((".", ",")) and len(text) > 30 for text in stages.values()), stages


# -- real steps ---------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _inspect(
    rank: int, world_size: int, folder: str, mode: dict[str, Any], writes: int | None = 0
) -> tuple[list[tuple[str, str]], bool]:
    """File names and texts, and whether gradients are the same as without being looked at."""
    torch.manual_seed(0)
    model = FSDP(_Net(), auto_wrap_policy=ModuleWrapPolicy({_Block}))
    step = torch.compile(model, **mode)
    tokens = torch.arange(8).view(2, 4) + rank
    step(tokens).sum().backward()  # compiled before: it is compiled again in the context
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with inspect_graphs(folder, writes) as found:
        step(tokens).sum().backward()
    got = [p.grad for p in model.parameters() if p.grad is not None]
    same = all(torch.equal(*pair) for pair in zip(expected, got, strict=True))
    return [(x.file_name, x.text) for x in found.listings], same and bool(got)


GRAPH = {"backend": "fsdp_dynamo_aot_eager", "fullgraph": True}


def test_the_graph_mode_stage_by_stage(ranks: RankPool, tmp_path: Path) -> None:
    (found, same), _ = ranks.run(_inspect, 2, str(tmp_path), GRAPH)
    assert same
    names = [name for name, _ in found]
    assert len(names) == len(set(names))
    assert {path.name for path in tmp_path.iterdir()} == {*names, "index.html"}
    for name, text in found:
        assert (tmp_path / name).read_text() == text
    for stage in ("partition", "after_grad_buffer", "after_planner", "lowered"):
        for owner in ("_whole", "_root", "blocks.0", "blocks.1"):
            assert f"{owner}.backward.{stage}.py" in names
    texts = dict(found)
    for name, text in found:
        ast.parse(text, name)
    joint = [Line.parse(line) for line in texts["_whole.joint.traced.py"].splitlines()]
    assert set(units_in(joint)) == {"", "blocks.0", "blocks.1"}
    assert not any("graph1" in name for name in names), "a body of a region is no graph"
    assert "__compiled_fn" in texts["_whole.dynamo.decompiled.py"]
    page = (tmp_path / "index.html").read_text()
    assert "Pass planner: Place all collectives" in page
    assert '"start":{"owner":2,"phase":"backward"}' in page, "at blocks.0"
    kinds = [Line.parse(x) for x in texts["_whole.backward.after_planner.py"].splitlines()]
    reductions = [x.unit for x in kinds if x.kind == "reduce_scatter" and not x.is_wait]
    assert reductions == ["blocks.1", "blocks.0", ""]
    before = texts["_whole.backward.after_group_writes.py"].splitlines()
    after = texts["_whole.backward.after_planner.py"].splitlines()
    assert before != after, "the planner moved nothing"
    assert sorted(before) == sorted(after), "the planner does no more than move"


def test_the_hooks_mode_unit_by_unit(ranks: RankPool, tmp_path: Path) -> None:
    (found, same), _ = ranks.run(_inspect, 2, str(tmp_path), {"backend": "inductor"})
    assert same
    texts = dict(found)
    phases = {name.removeprefix("blocks.0.") for name in texts if name.startswith("blocks.0.")}
    assert phases == {
        "dynamo.captured.py",
        "dynamo.decompiled.py",
        "joint.traced.py",
        "forward.partition.py",
        "backward.partition.py",
        "forward.inductor.py",
        "backward.inductor.py",
    }
    assert not any(name.startswith("blocks.1.") for name in texts), "equal units share their code"
    # the root's segments, before the blocks and after them, each with its own backward
    assert "aten.mm" in texts["_root.graph1.backward.partition.py"]
    assert "aten.mm" not in texts["_root.backward.partition.py"]
    assert "extern_kernels.mm(" in texts["_root.graph1.backward.inductor.py"]
    assert "extern_kernels.mm(" not in texts["_root.backward.inductor.py"]


def test_all_ranks_may_write(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_inspect, 2, str(tmp_path), GRAPH, None)
    assert {path.name for path in tmp_path.iterdir()} == {"rank0", "rank1"}
    ours, theirs = (
        (tmp_path / f"rank{rank}" / "_whole.backward.lowered.py").read_text() for rank in (0, 1)
    )
    assert ours == theirs


def _broken_pass(graph: torch.fx.Graph) -> None:
    raise ZeroDivisionError("a pass that fails")


def _fails(rank: int, world_size: int, folder: str) -> str:
    model = FSDP(_Net(), auto_wrap_policy=ModuleWrapPolicy({_Block}))
    step = torch.compile(model, **GRAPH, options={"passes": [_broken_pass]})
    try:
        with inspect_graphs(folder):
            step(torch.arange(8).view(2, 4)).sum().backward()
    except Exception as error:
        return str(error)
    return "no error"


def test_what_came_before_a_failure_is_written(ranks: RankPool, tmp_path: Path) -> None:
    assert "a pass that fails" in ranks.run(_fails, 2, str(tmp_path))[0]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"index.html", "_whole.joint.traced.py", "_whole.forward.partition.py"} <= names
    assert "_whole.forward.after__broken_pass.py" not in names


# -- what can go wrong ---------------------------------------------------------------------------


def test_no_such_rank(tmp_path: Path) -> None:
    with pytest.raises(FSDPValueError, match="from 0 to 0"), inspect_graphs(tmp_path / "out", 7):
        pytest.fail("entered")


def test_inside_a_recording_that_is_empty(tmp_path: Path) -> None:
    with record_events() as log, inspect_graphs(tmp_path):
        torch.compile(nn.Linear(2, 2), backend="aot_eager")(torch.ones(1, 2)).sum().backward()
    assert log == []
    assert (tmp_path / "index.html").exists()


def test_nothing_compiled_is_said(tmp_path: Path) -> None:
    with pytest.raises(FSDPStateError, match="nothing was compiled"), inspect_graphs(tmp_path):
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert list(tmp_path.iterdir()) == []


def _inspect_without_depyf(rank: int, world_size: int, folder: str) -> tuple[list[str], list[str]]:
    """File names, and what was warned of."""
    with (
        mock.patch.dict(sys.modules, {"depyf": None}),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        found, same = _inspect(rank, world_size, folder, GRAPH)
    assert same
    return [name for name, _ in found], [str(x.message) for x in said if "depyf" in str(x.message)]


def test_without_depyf(ranks: RankPool, tmp_path: Path) -> None:
    with_it, _ = ranks.run(_inspect, 2, str(tmp_path / "with"), GRAPH)[0]
    (names, said), (_, said_by_others) = ranks.run(
        _inspect_without_depyf, 2, str(tmp_path / "without")
    )
    decompiled = "_whole.dynamo.decompiled.py"
    assert [name for name, _ in with_it if name != decompiled] == names
    assert {path.name for path in (tmp_path / "without").iterdir()} == {*names, "index.html"}
    (message,) = said
    assert "pip install -e '.[inspection]'" in message
    assert said_by_others == [], "they write nothing"


def test_the_warning_names_the_callers_line(tmp_path: Path) -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="aot_eager")
    without = mock.patch.dict(sys.modules, {"depyf": None})
    with without, pytest.warns(UserWarning, match="depyf") as said, inspect_graphs(tmp_path):
        compiled(torch.ones(1, 2)).sum().backward()
    assert [x.filename for x in said if "depyf" in str(x.message)] == [__file__]


@pytest.mark.parametrize("name", ["json", "json:nothing", "no_such_module:main", ":main"])
def test_a_function_that_is_not_there(name: str) -> None:
    with pytest.raises(FSDPValueError, match="--module PKG:FN"):
        load_function(name, "a function", "inspection")


SCRIPT = """
import sys
import torch, torch.distributed as dist
from fsdp_dynamo import FSDP

def main():
    dist.init_process_group("gloo")
    step = torch.compile(FSDP(torch.nn.Linear(4, int(sys.argv[1]))), backend="aot_eager")
    step(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()
"""


def _command(folder: Path, *rest: str) -> subprocess.CompletedProcess[str]:
    """What the command says; ``train.py`` is in the folder."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += [
        "-m",
        "fsdp_dynamo",
        "inspect",
        "--module",
        "train:main",
        "--out",
        "seen",
        *rest,
    ]
    root = str(Path(fsdp_dynamo.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_command(tmp_path: Path) -> None:
    done = _command(tmp_path, "--", "3")
    assert done.returncode == 0, done.stderr
    assert "index.html" in done.stdout
    assert "f32[3, 4]" in (tmp_path / "seen" / "_root.backward.partition.py").read_text()
    assert (tmp_path / "seen" / "_root.dynamo.decompiled.py").exists()


@pytest.mark.slow
def test_the_command_without_depyf(tmp_path: Path) -> None:
    (tmp_path / "depyf.py").write_text("raise ImportError('not here')")
    done = _command(tmp_path, "--", "3")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pip install -e '.[inspection]'") == 1
    assert (tmp_path / "seen" / "index.html").exists()
    assert (tmp_path / "seen" / "_root.backward.partition.py").exists()
    assert not (tmp_path / "seen" / "_root.dynamo.decompiled.py").exists()


HOW_IT_IS_CALLED = "main() was called without arguments; arguments after -- are in sys.argv[1:]"


def test_the_command_says_how_the_function_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compiles_nothing.py").write_text(
        "import sys\n\ndef main(*given):\n    print(given, sys.argv[1:])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ["--module", "compiles_nothing:main", "--", "graph", "fp32"]
    with pytest.raises(FSDPStateError, match="nothing was compiled") as raised:
        main(arguments)
    assert HOW_IT_IS_CALLED in str(raised.value)
    assert "() ['graph', 'fp32']" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    with pytest.raises(SystemExit):
        main([*arguments[:2], "--rank", "foo"])
    said, refused = capsys.readouterr()
    assert "expected a rank, or 'all', got 'foo'" in refused
    assert HOW_IT_IS_CALLED.replace("was called", "is called") in said
    assert "pip install -e '.[inspection]'" in said
