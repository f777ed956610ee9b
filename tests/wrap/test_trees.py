"""Random module trees, policies, dtypes, frozen and tied parameters, against one process."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from module_trees import Branch, run_tree, trees
from pool import RankPool

_slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("world_size", "num_trees"),
    [(2, 100), pytest.param(2, 200, marks=_slow), pytest.param(4, 100, marks=_slow)],
)
def test_random_trees(ranks: RankPool, world_size: int, num_trees: int) -> None:
    @settings(
        max_examples=num_trees,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # after an error the ranks start anew: too slow to shrink
    )
    @given(tree=trees, strategy=st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]))
    def check(tree: Branch, strategy: str) -> None:
        for wrong in ranks.run(run_tree, world_size, tree, strategy):
            assert wrong == []

    check()
