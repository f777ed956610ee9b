"""A short version of the long run: what a process holds, and restarts that change no number.

python benchmarks/campaigns/soak.py --minutes 30      # the long one
"""

from __future__ import annotations

from pathlib import Path

import pytest
from long_run import SAVE_EVERY, run
from pool import RankPool

ROUNDS = SAVE_EVERY + 10


@pytest.mark.slow
def test_restarts_change_nothing(ranks: RankPool, tmp_path: Path) -> None:
    straight = ranks.run(run, 2, str(tmp_path / "straight"), 0.0, ROUNDS)
    for until in (SAVE_EVERY + 5, ROUNDS):
        parts = ranks.run(run, 2, str(tmp_path / "restarted"), 0.0, until)
        for one, part in zip(straight, parts, strict=True):
            assert {n: one.numbers[n] for n in part.numbers} == part.numbers
        ranks.stop()
    assert min(parts[0].numbers) == SAVE_EVERY + 1
    held = straight[0].samples[-1]
    assert held.resident_kib > 0
    assert held.threads >= 1
