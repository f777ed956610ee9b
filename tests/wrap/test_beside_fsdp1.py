"""A campaign against FSDP1 itself: random models, arguments and user calls on both sides.

    pytest tests/wrap/test_beside_fsdp1.py             # 15 programs
    pytest -m slow tests/wrap/test_beside_fsdp1.py     # 200, a tenth each in hooks and graph mode
    pytest -m slow tests/wrap/test_beside_fsdp1.py --programs=1000 --first-program=5000

A difference that no entry of ``fsdp1_known.KNOWN`` explains fails, with a smaller program.
Deliberate ones are in docs/migration.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from beside_fsdp1 import campaign, reproducer
from fsdp1_checkpoints import crossings, draw_crossing
from fsdp1_known import FSDP1_DIES, KNOWN
from fsdp1_programs import Program, draw
from pool import RankPool

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
COMPILED = {0: "hooks", 5: "graph"}
"""Modes by the last digit of a program's seed; the others run eagerly."""
FAULTS = ("gradients twice as large", "no no_sync", "no step")


def _check(ranks: RankPool, programs: Sequence[Program], world_size: int = 2) -> None:
    counts, different = campaign(ranks, programs, world_size)
    print(dict(counts))
    if different:
        program, text = reproducer(ranks, different[0][0], world_size)
        pytest.fail(
            f"{len(different)} of {len(programs)} programs differ, such as\n{program}\n{text}"
        )


def test_some_programs(ranks: RankPool) -> None:
    _check(ranks, [draw(seed) for seed in range(15)])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_programs(ranks: RankPool, request: pytest.FixtureRequest) -> None:
    first = request.config.getoption("--first-program")
    seeds = range(first, first + request.config.getoption("--programs"))
    _check(ranks, [draw(seed, COMPILED.get(seed % 10, "eager")) for seed in seeds])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hybrid_strategies(ranks: RankPool) -> None:
    _check(ranks, [draw(seed, strategies=HYBRID) for seed in range(40)], world_size=4)


def _cross(ranks: RankPool, folder: Path, seeds: range) -> None:
    programs = [draw_crossing(seed) for seed in seeds]
    counts, different = zip(*ranks.run(crossings, 2, programs, str(folder)), strict=True)
    print(counts)
    assert counts[0] >= len(programs) // 2
    assert list(different) == [[], []]


def test_checkpoints_cross(ranks: RankPool, tmp_path: Path) -> None:
    """Sharded ones, through torch.distributed.checkpoint; FSDP1's values are DTensors."""
    _cross(ranks, tmp_path, range(5))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_checkpoints_cross(ranks: RankPool, tmp_path: Path) -> None:
    _cross(ranks, tmp_path, range(5, 60))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(ranks: RankPool, fault: str) -> None:
    calls = (("train", 0), ("step",), ("zero_grad", "model", True), ("accumulate", 1), ("train", 2))
    program = Program(draw(0).tree, calls=calls)
    assert campaign(ranks, [program])[0] == {"same": 1}
    assert campaign(ranks, [program], fault=fault)[0] == {"different": 1}


def test_what_is_known_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/migration.md").read_text()
    section = page.partition("### Known differences from FSDP1")[2].partition("\n## ")[0]
    assert [
        name for name in {k.name for k in KNOWN} | {FSDP1_DIES} if f"**{name}**" not in section
    ] == []
