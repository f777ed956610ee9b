"""A few trials of the campaign of random faults: one of each kind.

python benchmarks/campaigns/random_faults.py --trials 200      # many
"""

from __future__ import annotations

import pytest
from pool import RankPool
from random_faults import Fault, Judge, Trial

TRIALS = {
    "raises in the loader": Trial(0, "eager", 2, 1, Fault("raise", "data"), 2, False),
    "raises while saving": Trial(0, "eager", 3, 2, Fault("raise", "save"), 2, True),
    "is killed while saving": Trial(0, "eager", 2, 1, Fault("kill", "save"), 2, False),
    "has a clock that jumps": Trial(0, "eager", 2, 0, Fault("clock", "data", -60.0), 1, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_a_rank_that(ranks: RankPool, name: str) -> None:
    verdict = Judge(ranks).run(TRIALS[name])
    assert verdict.wrong == [], verdict
