"""A process that no launcher has started: one rank, and a group of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import warnings
import torch
from torch import nn
from fsdp_dynamo import FSDP, fully_shard

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for shard in (FSDP, fully_shard):
        plain = nn.Linear(4, 2)
        expected = plain(torch.ones(1, 4)).sum()
        model = shard(plain)
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        assert loss == expected, (loss, expected)
        assert next(model.parameters()).grad.norm() > 0
said = [str(one.message) for one in caught if "No process group" in str(one.message)]
assert len(said) == 1, said
print("done", said[0])
"""


def _run(**variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_works_and_says_so_once() -> None:
    done = _run()
    assert done.stdout.startswith("done No process group: this process is the only rank"), done
    assert done.returncode == 0


@pytest.mark.parametrize("ranks", ["2", "16"])
def test_a_rank_of_several_is_refused(ranks: str) -> None:
    done = _run(WORLD_SIZE=ranks, RANK="0")
    assert f"got none in one of {ranks} ranks (WORLD_SIZE)" in done.stderr
