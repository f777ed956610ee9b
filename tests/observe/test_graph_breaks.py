"""Graph breaks with the user's line, and recompiles with the guard that failed."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, Explanation, explain
from fsdp_dynamo.dynamo.artifacts import Artifact, Frame, record_artifacts
from fsdp_dynamo.observe import training_step
from fsdp_dynamo.observe.training_step import GraphBreak, Recompile, graph_breaks_in, recompiles_in
from fsdp_dynamo.wrap import unit_module
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


class _Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()  # this line
        return x.relu()


def _this_line() -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if line.endswith("# this line"))


@pytest.mark.parametrize(("mode", "unit"), [("hooks", "1"), ("graph", "")])
@on_ranks(2)
def test_a_break_is_shown_with_its_line(rank: int, mode: str, unit: str) -> None:
    model = FSDP(
        nn.Sequential(nn.Linear(4, 4), _Breaks()), auto_wrap_policy=ModuleWrapPolicy({_Breaks})
    )
    compiled = torch.compile(model, **{**MODES[mode], "fullgraph": False})
    found = explain(compiled, torch.ones(2, 4))
    assert [(one.line, one.unit) for one in found.graph_breaks] == [(_this_line(), unit)]
    assert found.graph_breaks[0].code.startswith("torch._dynamo.graph_break()")
    assert f"{__file__}:{_this_line()}" in str(found)


def test_a_recompile_is_shown_with_its_guard() -> None:
    @torch.compile(backend="eager", dynamic=False)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with record_artifacts() as made:
        for length in (3, 4, 5):
            double(torch.ones(length))
    assert [one.guard.replace("got", "actual") for one in recompiles_in(made)] == [
        "tensor 'x' size mismatch at index 0. expected 3, actual 4",
        "tensor 'x' size mismatch at index 0. expected 4, actual 5",
    ]


def _artifact(name: str, text: str) -> Artifact:
    return Artifact(name, Frame(0, 0), "layers.0", text)


def test_texts_of_any_kind_are_read() -> None:
    texts = [
        "nothing that is known\nmore",
        "Graph Break Reason: one\n\nthe real one\n  Explanation:",
    ]
    found = graph_breaks_in(_artifact("dynamo_graph_break_reason", t) for t in [*texts, texts[0]])
    assert [one.reason for one in found] == ["nothing that is known", "the real one"]
    assert found[0] == GraphBreak("", 0, "", "nothing that is known", "layers.0")


def _broken(*frames: tuple[str, str], reason: str = "no print") -> Artifact:
    """A break in the last of these frames, each a file and its code."""
    stack = "".join(f'  File "{file}", line 3, in f\n    {code}\n' for file, code in frames)
    text = (
        f"Graph break in user code at {frames[-1][0]}:3\nGraph Break Reason: found\n\n{reason}\n\n"
    )
    text += f"User code traceback:\n{stack}\nTraceback (most recent call last):\n"
    return _artifact(
        "dynamo_graph_break_reason", text + '  File "t.py", line 9, in g\n    other()\n'
    )


CALL = (training_step.__file__, "target.run(*inputs)")
HOOKED = (unit_module.__file__, "return self._fsdp_run_hooked(args, kwargs, key)")
OURS = (unit_module.__file__, "return traced_forward(")
VISION = torch.nn.__file__.replace("torch/nn", "torchvision/models"), "x"
LOOP, PRINT = ("train.py", "for b in blocks: x = b(x)"), ("model.py", "print(x)")


@pytest.mark.parametrize(
    ("frames", "found"),
    [
        ([LOOP, CALL, OURS, LOOP, OURS, PRINT], PRINT),
        ([LOOP, CALL, PRINT, (torch.nn.__file__, "torch's own")], PRINT),
        ([LOOP, CALL, OURS, LOOP, HOOKED], LOOP),
        ([LOOP, CALL, HOOKED], None),
        ([LOOP, CALL, OURS, LOOP, OURS, (json.encoder.__file__, "of ours")], None),
        ([PRINT], PRINT),
        ([LOOP, CALL, VISION], VISION),
    ],
)
def test_a_break_is_where_the_user_can_change_it(
    frames: list[tuple[str, str]], found: tuple[str, str] | None
) -> None:
    places = [(one.file, one.code) for one in graph_breaks_in([_broken(*frames)])]
    assert places == ([] if found is None else [found])


def test_one_place_that_is_told_twice_counts_once() -> None:
    again = "Failed to handle graph break gracefully. Skipping the function"
    both = graph_breaks_in([_broken(CALL, PRINT), _broken(CALL, LOOP, PRINT, reason=again)])
    assert [(one.file, one.reason) for one in both] == [("model.py", "no print")]
    other = "why\nThe graph break occurred in the following user code:\n"
    other += '  File "t.py", line 8, in f\n    print(x)\n'
    (one,) = graph_breaks_in([_artifact("dynamo_graph_break_reason", other)])
    assert (one.file, one.line, one.code) == ("t.py", 8, "print(x)")


def test_what_another_backend_compiled_is_no_recompile() -> None:
    """Reasons name the graphs that were tried; only those seen here are of this backend."""
    stack = '\nUser stack trace:\n  File "{}", line 1, in f\n    s.c += 1'
    failed = "0/2: s.c == 1   # s.c += 1  # truncated/m.py:1 in f" + stack.format("m.py")
    of_ours = '0/2: name == "a"   # code  # truncated/m.py:1 in f' + stack.format(OURS[0])
    reasons = [["0/0: BACKEND_MATCH failure"], [failed, "0/0: b == 1"], ["0/0: c == 1"], [of_ours]]
    made = [Artifact("dynamo_output_graph", Frame(0, 2), "u", "graph")]
    made += [
        Artifact("recompile_reasons", Frame(0, 3 + i), "u", json.dumps(texts))
        for i, texts in enumerate(reasons)
    ]
    assert recompiles_in(made) == (Recompile("u", "s.c == 1  # s.c += 1"),)
    assert recompiles_in(made[1:]) == ()


class _Counts(nn.Module):
    """Recompiled in the first steps: its number becomes a symbol when it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


@pytest.mark.parametrize("mode", ["hooks", "graph"])
@on_ranks(2)
def test_a_step_that_compiles_is_not_measured(rank: int, mode: str) -> None:
    """Before and after training, with another backend's code of the model beside its own."""
    model = FSDP(_Counts())
    compiled = in_mode(model, mode)
    explanations = [explain(compiled, torch.ones(2, 4))]
    for _ in range(2):
        compiled(torch.ones(2, 4)).sum().backward()
        torch.compile(model, backend="eager")(torch.ones(2, 4)).sum().backward()
    explanations.append(explain(compiled, torch.ones(2, 4)))
    for found in explanations:
        assert (found.num_graphs, found.graph_breaks) == (1, ())
        assert sum(event.is_collective for event in found.measured) >= 2
        assert len(found.graphs) == (0 if mode == "hooks" else 2)
    guards = [one.guard.partition(" == ")[0][-6:] for one in explanations[0].recompiles]
    assert guards in ([], [".calls"])


def _trained(explains: bool, limit: int) -> tuple[list[Explanation], int]:
    """Train with three sizes, perhaps explain in between; the limit of recompiles that suffices."""
    torch.compiler.reset()
    layers = nn.Sequential(nn.Linear(4, 4), _Breaks())  # it breaks in code of its class
    model = FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear, _Breaks}))
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    compiled(torch.ones(2, 4)).sum().backward()
    found = [explain(compiled, torch.ones(n, 4)) for n in (2, 3, 2)] if explains else []
    strict = {"fail_on_recompile_limit_hit": True, "recompile_limit": limit}
    with record_artifacts() as made, torch._dynamo.config.patch(strict):
        for rows in (3, 4):
            compiled(torch.ones(rows, 4)).sum().backward()
    return found, 1 + max(one.frame.recompile for one in made)


@on_ranks(2)
def test_an_explanation_leaves_nothing(rank: int) -> None:
    """Neither recompiles for its sizes, nor its backend."""
    _, enough = _trained(explains=False, limit=8)
    made = []

    def note(*arguments: Any) -> Any:
        own = real(*arguments)
        made.append(weakref.ref(own))
        return own

    real = training_step.OwnBackend
    with mock.patch.object(training_step, "OwnBackend", note):
        found, _ = _trained(explains=True, limit=enough)  # explanations use up none of it
    gc.collect()
    assert len({sum("size" in one.guard for one in each.recompiles) for each in found}) == 1
    assert len({one.num_graphs for one in found}) == 1
    assert [backend() for backend in made] == [None] * len(made)
