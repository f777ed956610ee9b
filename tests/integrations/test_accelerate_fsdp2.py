"""accelerate's FSDP2 code with torch's ``fully_shard`` replaced by ours: it trains as one process.

It is imported in ranks only: it takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from pool import RankPool

if find_spec("transformers") is None or find_spec("accelerate") is None:
    pytest.skip("needs transformers and accelerate", allow_module_level=True)


def _trained(
    rank: int, world_size: int, folder: Path, tied: bool, from_rank_0: bool
) -> list[float]:
    found: list[float] = import_module("swapped_fsdp2").with_accelerate(
        rank, folder, tied, from_rank_0
    )
    return found


@pytest.mark.parametrize("from_rank_0", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_trains_saves_and_loads(
    ranks: RankPool, tmp_path: Path, tied: bool, from_rank_0: bool
) -> None:
    for differences in ranks.run(_trained, 2, tmp_path, tied, from_rank_0):
        assert max(differences) < 1e-6
