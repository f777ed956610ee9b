"""``torch.compiler.set_stance`` around graph mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compile_caches import WIDTH, losses_of, make_compiled_products, make_products, using_cache
from pool import RankPool
from torch.nn.parallel import DistributedDataParallel

STANCES = (
    "default",
    "force_eager",
    "eager_on_recompile",
    "eager_then_compile",
    "aot_eager_then_compile",
)


def _losses_in_stances(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    found = {"reference": losses_of(DistributedDataParallel(make_products()), rank)}
    with using_cache(Path(folder)):
        for stance in STANCES:
            torch._dynamo.reset()
            model = make_compiled_products()
            with torch.compiler.set_stance(stance):
                found[stance] = losses_of(model, rank)
        model = make_compiled_products()
        model(torch.rand(4, WIDTH)).square().mean().backward()
        with torch.compiler.set_stance("fail_on_recompile"):
            found["fail_on_recompile"] = losses_of(model, rank)
    return found


def test_losses_are_those_of_ddp(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(_losses_in_stances, 2, str(tmp_path)):
        for stance in (*STANCES, "fail_on_recompile"):
            assert found[stance] == pytest.approx(found["reference"], rel=1e-5), stance
