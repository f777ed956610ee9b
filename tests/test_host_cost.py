"""Host cost a unit, as ratios to FSDP2 in the same run (see benchmarks/host_overhead.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "host_overhead.py"


def test_host_cost(tmp_path: Path) -> None:
    """Eager at most half of FSDP2's, the graph path at most a fifth.

    A process of its own, so that nothing else of the test run is in it.
    """
    result = tmp_path / "rows.json"
    subprocess.run([sys.executable, str(BENCHMARK), "--json", str(result)], check=True)
    rows = json.loads(result.read_text())
    assert rows["fsdp_dynamo eager"]["of_fsdp2_eager"] <= 0.5
    assert rows["fsdp_dynamo graph path (aot_eager)"]["of_fsdp2_eager"] <= 0.2
