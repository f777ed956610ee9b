"""Random models, random calls: a state machine makes the programs, ranks run them.

    pytest tests/wrap/test_fuzz.py              # 20 programs, always the same
    pytest -m slow tests/wrap/test_fuzz.py      # 200 others each time, shrunk when one fails
    python benchmarks/campaigns/random_programs.py --programs 2000      # by their seeds

What was found once is kept in ``FOUND``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import programs
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from module_trees import Branch, Leaf, trees
from pool import RankPool
from programs import Call, Program, Result, draw, run_program

from fsdp_dynamo import FSDP

WORLD_SIZE = 2
NUM_CALLS = 8
_MODES = ("eager", "eager", "hooks", "graph")
_seeds = st.integers(0, 5)
_rows = st.sampled_from([2, 2, 5])


def _run(ranks: RankPool, program: Program) -> None:
    assert _wrong(ranks, run_program, program) == [], program


def _wrong(ranks: RankPool, run: Callable[..., Result], program: Program) -> list[str]:
    """On any rank."""
    with tempfile.TemporaryDirectory() as folder:
        results = ranks.run(run, WORLD_SIZE, program, folder)
    return [text for result in results for text in result.wrong]


def _machine_for(ranks: RankPool) -> type[RuleBasedStateMachine]:
    class Calls(RuleBasedStateMachine):
        """Collects a program; it runs when all of it is known."""

        def __init__(self) -> None:
            super().__init__()
            self.model: tuple[Any, ...] = ()
            self.calls: list[Call] = []

        @initialize(
            tree=trees,
            strategy=st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
            mode=st.sampled_from(_MODES),
            widened=st.booleans(),
            by_hand=st.booleans(),
        )
        def wrap(
            self, tree: Branch, strategy: str, mode: str, widened: bool, by_hand: bool
        ) -> None:
            self.model, self.by_hand = (tree, strategy, mode, widened), by_hand

        @rule(seed=_seeds, rows=_rows, backward=st.booleans())
        def forward(self, seed: int, rows: int, backward: bool) -> None:
            self.calls.append(("forward", seed, rows))
            if backward:
                self.calls.append(("backward",))

        @rule(seed=_seeds, rows=_rows)
        def forward_without_grad(self, seed: int, rows: int) -> None:
            self.calls.append(("forward_without_grad", seed, rows))

        @rule()
        def backward(self) -> None:
            self.calls.append(("backward",))

        @rule(seed=_seeds)
        def accumulate(self, seed: int) -> None:
            self.calls.append(("accumulate", seed))

        @rule(largest=st.sampled_from([0.01, 1e3]))
        def clip(self, largest: float) -> None:
            self.calls.append(("clip", largest))

        @rule()
        def step(self) -> None:
            self.calls.append(("step",))

        @rule(to_none=st.booleans())
        def zero_grad(self, to_none: bool) -> None:
            self.calls.append(("zero_grad", to_none))

        @rule(
            name=st.sampled_from(
                ["summon", "state_dict", "load", "deepcopy", "save_checkpoint", "load_checkpoint"]
            )
        )
        def ask(self, name: str) -> None:
            self.calls.append((name,))

        @rule(number=st.integers(0, 7), frozen=st.booleans())
        def freeze(self, number: int, frozen: bool) -> None:
            self.calls.append(("freeze", number, frozen))

        @rule(seed=_seeds, where=st.sampled_from(["forward", "input", "output"]))
        def fail(self, seed: int, where: str) -> None:
            in_backward = ("fail_in_backward", seed, where)
            self.calls.append(("fail_in_forward",) if where == "forward" else in_backward)

        @rule(mode=st.booleans())
        def train(self, mode: bool) -> None:
            self.calls.append(("train", mode))

        def teardown(self) -> None:
            if self.model:
                _run(ranks, Program(*self.model, tuple(self.calls), self.by_hand))

    return Calls


def _settings(num_programs: int, **kwargs: Any) -> settings:
    return settings(
        max_examples=num_programs,
        stateful_step_count=NUM_CALLS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **kwargs,
    )


def test_random_calls(ranks: RankPool) -> None:
    fixed = _settings(20, derandomize=True, phases=[Phase.generate])
    run_state_machine_as_test(_machine_for(ranks), settings=fixed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_calls(ranks: RankPool) -> None:
    run_state_machine_as_test(_machine_for(ranks), settings=_settings(200, print_blob=True))


FOUND = {
    "a copy of what refers to itself weakly": Program(
        Branch((Leaf("scale", wrapped=True), Leaf("nothing", wrapped=True)), wrapped=True),
        "SHARD_GRAD_OP",
        "eager",
        False,
        (("forward_without_grad", 0), ("deepcopy",), ("forward", 1), ("backward",), ("deepcopy",)),
    ),
    "two forwards that both know of a sum": Program(
        Branch((Leaf("linear", bias=False),)),
        "FULL_SHARD",
        "graph",
        False,
        (("accumulate", 0), ("forward", 0), ("forward", 0)),
    ),
    "a model without parameters": Program(
        Branch((Leaf("nothing"),)), "FULL_SHARD", "eager", False, (("forward", 0), ("step",))
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(ranks: RankPool, name: str) -> None:
    _run(ranks, FOUND[name])


def test_float64_tells_rounding_from_a_fault(ranks: RankPool) -> None:
    cancels = draw(70307)  # a norm undoes what a scalar does, whose gradient its terms leave
    assert _wrong(ranks, run_program, cancels)
    exact = replace(cancels, in_float64=True)
    assert not _wrong(ranks, run_program, exact)
    assert _wrong(ranks, _run_with_a_fault, exact)


def _run_with_a_fault(rank: int, world_size: int, program: Program, folder: str) -> Result:
    """The model's weights are off by a tenth of what float32 programs may be."""
    wrapped = programs._wrapped

    def wrapped_wrong(program: Program) -> FSDP:
        model = wrapped(program)
        with FSDP.summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + 1e-5)
        return model

    with patch.object(programs, "_wrapped", wrapped_wrong):
        return run_program(rank, world_size, program, folder)
