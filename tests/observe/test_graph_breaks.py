"""Graph breaks with the user's line, and recompiles with the guard that failed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import nn

from fsdp_dynamo import FSDP, Explanation, explain
from fsdp_dynamo.dynamo.artifacts import Artifact, Frame, record_artifacts
from fsdp_dynamo.observe.graph_breaks import GraphBreak, Recompile, graph_breaks_in, recompiles_in
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


def _explained(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Explanation, str]:
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(nn.Linear(4, 4), _Breaks()), auto_wrap_policy=ModuleWrapPolicy({_Breaks})
    )
    found = explain(torch.compile(model, **options), torch.ones(2, 4))
    return found, str(found)


@pytest.mark.parametrize(("backend", "unit"), [("aot_eager", "1"), ("fsdp_dynamo_aot_eager", "")])
def test_a_break_is_shown_with_its_line(ranks: RankPool, backend: str, unit: str) -> None:
    for found, text in ranks.run(_explained, 2, {"backend": backend}):
        mine = [one for one in found.graph_break_sites if one.file == __file__]
        assert [(one.line, one.unit) for one in mine] == [(_this_line(), unit)]
        assert mine[0].code.startswith("torch._dynamo.graph_break()")
        assert f"{__file__}:{_this_line()}" in text
        assert Explanation.from_json(found.to_json()) == found


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
    return Artifact(name, Frame(0, 0), "layers.0", text, 0)


def test_texts_of_any_kind_are_read() -> None:
    texts = [
        "nothing that is known\nmore",
        "Graph Break Reason: one\n\nthe real one\n  Explanation:",
    ]
    found = graph_breaks_in(_artifact("dynamo_graph_break_reason", t) for t in [*texts, texts[0]])
    assert found == (
        GraphBreak("", 0, "", "nothing that is known", "layers.0", 2),
        GraphBreak("", 0, "", "the real one", "layers.0", 1),
    )
    guards = recompiles_in(
        _artifact("recompile_reasons", text)
        for text in ("0/0: a == 1", '["0/1: a == 1", "0/0: b"]')
    )
    assert guards == (Recompile("layers.0", "a == 1", 2),)


def test_one_place_that_is_told_twice_counts_once() -> None:
    at = "Graph break in user code at t.py:3\nGraph Break Reason: "
    texts = [at + "first\n", at + "Failed to handle graph break gracefully by executing it\n"]
    found = graph_breaks_in(_artifact("dynamo_graph_break_reason", text) for text in texts)
    assert [(one.line, one.reason, one.count) for one in found] == [(3, "first", 1)]
    other = "why\nThe graph break occurred in the following user code:\n"
    other += '  File "t.py", line 8, in f\n    print(x)\n'
    (one,) = graph_breaks_in([_artifact("dynamo_graph_break_reason", other)])
    assert (one.file, one.line, one.code) == ("t.py", 8, "print(x)")


def test_the_text_names_both() -> None:
    nothing = Explanation("hooks", "b", "cpu", 2, (), 0, {}, (), ())
    found = replace(
        nothing,
        graph_break_sites=(GraphBreak("train.py", 7, "print(x)", "no print", "layers.0", 3),),
        recompiles=(Recompile("layers.1", "x.size()[0] == 3", 2),),
    )
    lines = str(found).splitlines()
    assert "   3 x train.py:7 in layers.0: print(x)" in lines
    assert "       no print" in lines
    assert "   2 x layers.1: x.size()[0] == 3" in lines
