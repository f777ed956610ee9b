"""Random models, random calls, beside one process.

    pytest tests/wrap/test_fuzz.py              # 23 programs, always the same
    python benchmarks/campaigns/random_programs.py --programs 2000      # by their seeds

What was found once is kept in ``FOUND``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import programs
import pytest
import torch
import unit_kinds
from module_trees import Boundary, Branch, Leaf
from pool import RankPool
from programs import Call, Program, Result, draw, run_program, run_with_weights_off
from programs import wrong_on_any_rank as wrong
from torch import nn

from fsdp_dynamo import FSDP

SEEDS = [seed for seed in range(40) if draw(seed).mode == "eager" or seed in (4, 6, 9, 11, 15, 31)]
"""Three programs each in hooks and graph mode, where compiling takes nearly all of the time."""


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls(ranks: RankPool, seed: int) -> None:
    program = draw(seed)
    assert wrong(ranks, program) == [], program


def _two_steps(tree: Branch, *calls: Call, **fields: Any) -> Program:
    step = (*calls, ("backward",), ("step",), ("zero_grad", True))
    return Program(tree, "FULL_SHARD", "eager", "none", (*step, *step), **fields)


def _chain(boundary: Boundary) -> Branch:
    """Four units, of which the two in the middle have a boundary."""
    first, unit = Leaf("linear", wrapped=True), Leaf("linear", wrapped=True, boundary=boundary)
    return Branch((first, unit, unit, first), wrapped=True)


ROOT = Branch((Leaf("linear", bias=False),))
NAMED = Boundary("named tuple")
FOUND = {
    "a teacher that follows while Dynamo traces": Program(
        Branch((Leaf("linear", frozen="all", tied_to=1, boundary=Boundary(stored="mean")),)),
        "FULL_SHARD",
        "hooks",
        "none",
        (("forward", 3, 2, "both"),),
        in_float64=True,
        teacher="moves",
        freezes_teacher=True,
    ),
    "a copy of what refers to itself weakly": Program(
        Branch((Leaf("scale", wrapped=True), Leaf("nothing", wrapped=True)), wrapped=True),
        "SHARD_GRAD_OP",
        "eager",
        "none",
        (("forward_without_grad", 0), ("deepcopy",), ("forward", 1), ("backward",), ("deepcopy",)),
    ),
    "two forwards that both know of a sum": Program(
        Branch((Leaf("linear", bias=False),)),
        "FULL_SHARD",
        "graph",
        "none",
        (("accumulate", 0), ("forward", 0), ("forward", 0)),
    ),
    "a model without parameters": Program(
        Branch((Leaf("nothing"),)), "FULL_SHARD", "eager", "none", (("forward", 0), ("step",))
    ),
    "a view changed in place": _two_steps(
        _chain(Boundary(view="squeeze", change="add_")), ("forward", 0)
    ),
    "a loss on a stored tensor alone": _two_steps(
        _chain(Boundary(stored="mean")), ("forward", 0, 2, "aux")
    ),
    "a registered container": _two_steps(_chain(Boundary("pytree")), ("forward", 0)),
    "a named tuple in mixed precision": replace(
        _two_steps(Branch((Leaf("norm", boundary=NAMED),), boundary=NAMED), ("forward", 0)),
        precision="wide",
    ),
    "values written through .data after a forward alone": _two_steps(
        ROOT, ("forward", 0), ("forget",), ("change", -1, ".data.mul_"), ("forward", 0)
    ),
    "a teacher moved in the root's forward": _two_steps(ROOT, ("forward", 0), teacher="moves"),
    "a teacher that follows its student in a graph": replace(  # not found, but seldom drawn
        _two_steps(_chain(Boundary()), ("ema", "lerp_"), ("forward", 0), teacher="model"),
        mode="graph",
    ),
    "frozen between forward and backward": _two_steps(
        ROOT, ("forward", 0), ("freeze_between", 0, True)
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(ranks: RankPool, name: str) -> None:
    assert wrong(ranks, FOUND[name]) == []


def test_float64_tells_rounding_from_a_fault(ranks: RankPool) -> None:
    magnifies = programs._draw_themes(42)  # its rounding, some thousand times
    assert wrong(ranks, magnifies)
    exact = replace(magnifies, in_float64=True)
    assert not wrong(ranks, exact)
    assert wrong(ranks, exact, run_with_weights_off)


def _run_with_first_numbers(rank: int, world_size: int, program: Program, folder: str) -> Result:
    """Sharded models compute with what was set before their first step."""
    set_step = programs.trees.set_step

    def set_first(module: nn.Module, step: int) -> None:
        set_step(module, 0 if isinstance(module, FSDP) else step)

    with patch.object(programs.trees, "set_step", set_first):
        return run_program(rank, world_size, program, folder)


def _run_with_effects_twice(rank: int, world_size: int, program: Program, folder: str) -> Result:
    """Sharded models count twice, and their batch norms' statistics move on their own."""
    call = programs._Pair._call

    def call_and_change(pair: Any, run: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output = call(pair, run, x)
        for node in programs.trees.nodes_of(pair.model):
            node.stats["n"] += node.stats["n"] > 0
            for buffer in node.buffers():
                buffer.data += 0.01  # seen by no version counter, as compiled code's writes
        return output

    with patch.object(programs._Pair, "_call", call_and_change):
        return run_program(rank, world_size, program, folder)


FIRST, TWICE = _run_with_first_numbers, _run_with_effects_twice
STEPS = (
    *(("set_step", 0), ("forward", 0, 5), ("backward",), ("step",)),
    *(("set_step", 1), ("forward", 3, 5), ("backward",), ("state_dict",)),
)
PLANTED = [
    *((Boundary(number=name), "linear", FIRST) for name in unit_kinds.NUMBERS),
    *((Boundary(result=name), "linear", FIRST) for name in unit_kinds.RESULTS if name != "dtype"),
    (Boundary(fills="a counter in its dict"), "linear", TWICE),
    *((Boundary(), name, TWICE) for name in programs.trees.NORMS),
]


@pytest.mark.parametrize(("boundary", "kind", "run"), PLANTED)
def test_a_fault_of_units_is_found(
    ranks: RankPool, boundary: Boundary, kind: str, run: Callable[..., Result]
) -> None:
    unit = Leaf(kind, wrapped=True, boundary=boundary)
    program = Program(Branch((unit, unit)), "FULL_SHARD", "eager", "none", STEPS)
    assert wrong(ranks, program, run)
    assert not wrong(ranks, program)
