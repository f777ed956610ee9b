"""The comparison of final losses: other formats train as well, on the same windows."""

from __future__ import annotations

import sys

import pytest
from pool import RankPool

from benchmarks import final_loss


def _losses(rank: int, world_size: int) -> list[float]:
    formats = (None, None, final_loss.FORMATS["int8"])
    return [final_loss.final_loss(one, seed=0, steps=30) for one in formats]


def test_formats_train_as_fp32_does(ranks: RankPool) -> None:
    found = ranks.run(_losses, 2)
    assert found[0] == found[1]
    exact, again, int8 = found[0]
    assert exact == again < 4.0  # 5.5 before the first step
    assert int8 == pytest.approx(exact, rel=0.05)
    assert int8 != exact


def test_unknown_formats(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["final_loss.py", "--formats", "none,int3"])
    with pytest.raises(SystemExit):
        final_loss.main()
    assert "got 'int3'" in capsys.readouterr().err
