"""Random module trees, policies, dtypes, frozen and tied parameters, against one process."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from module_trees import Branch, run_tree, trees
from pool import RankPool

NUM_TREES = 300


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_random_trees(ranks: RankPool, world_size: int) -> None:
    @settings(
        max_examples=NUM_TREES * 2 // 3 if world_size == 2 else NUM_TREES // 3,
        deadline=None,
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
