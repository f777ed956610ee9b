"""The tutorial's code, as it stands on the page, on two ranks."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool

from fsdp_dynamo import checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def _run(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What the script leaves behind; whole tensors as NumPy's, which need no shared memory."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        left = runpy.run_path(f"{folder}/tutorial.py", run_name="__main__")
    finally:
        os.chdir(before)
    names = ("num_whole", "num_here", "losses", "going_on", "resumed")
    explained = str(left["explanation"])
    state = {name: tensor.numpy() for name, tensor in left["state"].items()}
    return {**{name: left[name] for name in names}, "explained": explained, "state": state}


def _plain_model(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = runpy.run_path(str(folder / "model.py"))["Model"]()
    return model


def test_tutorial(ranks: RankPool, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 10
    (tmp_path / "tutorial.py").write_text("\n\n".join(blocks))
    (tmp_path / "model.py").write_text(blocks[0])
    found = ranks.run(_run, 2, str(tmp_path))
    assert sum(run["num_here"] for run in found) == found[0]["num_whole"]
    for run in found:
        assert run["losses"][0] > 3.0  # of 23 tokens, nothing known: log(23) is 3.1
        assert run["losses"][-1] < 0.6 * run["losses"][0]
        assert run["resumed"] == pytest.approx(run["going_on"], rel=1e-4)
        assert "graph mode, fsdp_dynamo_aot_eager, cpu, 2 ranks: 3 units" in run["explained"]
    assert "_whole.joint.traced.py" in {path.name for path in (tmp_path / "graphs").rglob("*.py")}

    # What the page writes, whole and in parts, is read by the plain model in this one process.
    whole = torch.load(tmp_path / "model.pt")
    assert list(whole) == list(_plain_model(tmp_path).state_dict())
    for name, tensor in whole.items():
        assert torch.equal(tensor, torch.from_numpy(found[1]["state"][name]))
    plain = _plain_model(tmp_path)
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    loaded = checkpoint.load(tmp_path / "run", plain)
    assert loaded is not None
    assert loaded.step == 60
    for old, parameter in zip(before, plain.parameters(), strict=True):
        assert not torch.equal(old, parameter)
