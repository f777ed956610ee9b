"""Host cost a unit, as ratios to FSDP2 in the same run (see benchmarks/host_overhead.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "host_overhead.py"


@pytest.mark.slow
@pytest.mark.timing
def test_host_cost(tmp_path: Path) -> None:
    """Eager at most half of FSDP2's, graph mode at most a fifth.

    A process of its own, so that nothing else of the test run is in it.
    """
    result = tmp_path / "rows.json"
    peers = "plain,fsdp2,ours,ours_graph_aot_eager"
    command = [sys.executable, str(BENCHMARK), "--peers", peers, "--json", str(result)]
    subprocess.run(command, check=True)
    rows = json.loads(result.read_text())["rows"]
    assert rows["ours"]["of_fsdp2_eager"] <= 0.5
    assert rows["ours_graph_aot_eager"]["of_fsdp2_eager"] <= 0.2
