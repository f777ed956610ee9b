"""FSDP1 code of lightning and accelerate, unchanged, with the import swapped: it trains as DDP.

They are imported in ranks only: it takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool

if find_spec("lightning") is None or find_spec("accelerate") is None:
    pytest.skip("needs lightning and accelerate", allow_module_level=True)

# Fabric loads whole files into DTensors only from tensors, and its FSDPStrategy gives others.
FABRIC: dict[str, tuple[str, dict[str, Any]]] = {
    "sharded": ("sharded", {}),
    "gradients only": ("sharded", {"sharding_strategy": "SHARD_GRAD_OP"}),
    "offload": ("sharded", {"cpu_offload": True}),
}
ACCELERATE: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("FULL_STATE_DICT", {}),
    "sharded": ("SHARDED_STATE_DICT", {"use_orig_params": True}),
    "gradients only": ("FULL_STATE_DICT", {"reshard_after_forward": "SHARD_GRAD_OP"}),
}


def _trained(
    rank: int, world_size: int, library: str, folder: str, cases: dict[str, Any]
) -> tuple[list[float], dict[str, list[float]]]:
    runs = import_module("swapped_import")
    losses = {}
    for number, (name, (form, options)) in enumerate(cases.items()):
        case = Path(folder, str(number))
        case.mkdir(exist_ok=True)
        losses[name] = getattr(runs, library)(rank, str(case), form, options)
    return runs.with_ddp(rank), losses


@pytest.mark.parametrize(
    ("library", "cases"), [("with_fabric", FABRIC), ("with_accelerate", ACCELERATE)]
)
def test_trains_saves_and_loads_as_ddp(
    ranks: RankPool, tmp_path: Path, library: str, cases: dict[str, Any]
) -> None:
    for expected, found in ranks.run(_trained, 2, library, str(tmp_path), cases):
        assert found == {name: pytest.approx(expected, rel=1e-5) for name in cases}
