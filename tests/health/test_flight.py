"""Flight records: written when a rank fails, and what they say together."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fsdp_dynamo import FSDPStateError, record_flight
from fsdp_dynamo.comm.collective_log import Entry
from fsdp_dynamo.health import flight_recorder
from fsdp_dynamo.health.flight_recorder import explain_records

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from fsdp_dynamo import FSDP, record_flight
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

dist.init_process_group("gloo")
if len(sys.argv) > 2:
    record_flight(sys.argv[2])
plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
for step in range(3):
    if step == 2 and dist.get_rank() == 1:
        if sys.argv[1] == "raises":
            raise ValueError("no more data")
        os.kill(os.getpid(), 9)
    model(torch.ones(1, 4)).sum().backward()
dist.destroy_process_group()
"""


def _run(tmp_path: Path, what: str, by_default: bool = False) -> str:
    """Two ranks of which the second one fails in the third step; what the records say."""
    (tmp_path / "run.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = dict(os.environ, PYTHONPATH=str(REPOSITORY), CUDA_VISIBLE_DEVICES="")
    folder = str(tmp_path / "flight")
    where = [] if by_default else [folder]
    environment["FSDP_DYNAMO_FLIGHT"] = folder if by_default else ""
    run = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(tmp_path / "run.py"), what, *where],
        env=environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert run.returncode != 0
    assert f"flight record in {folder}" in run.stderr.decode()
    explain = [sys.executable, "-m", "fsdp_dynamo", "flight", folder]
    said = subprocess.run(explain, env=environment, capture_output=True, text=True, check=True)
    assert said.stderr == ""
    return said.stdout


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only rank of a run without a recorder; returns the folder of temporary files."""
    monkeypatch.setattr(flight_recorder.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(flight_recorder.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(flight_recorder, "_recorder", None)
    monkeypatch.setattr(flight_recorder, "_is_off", False)
    monkeypatch.setattr(flight_recorder, "register_exit_callback", lambda _: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(flight_recorder, "_user", lambda: "someone")
    monkeypatch.delenv(flight_recorder.VARIABLE, raising=False)
    return tmp_path


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_records_are_private(one_rank: Path) -> None:
    """No other user reads them, whatever the umask, also in a folder of an older version."""
    before = os.umask(0)
    try:
        flight_recorder.record_flight_by_default()
        recorder = flight_recorder._recorder
        assert recorder is not None
        private = recorder.folder.parent
        assert private.parent == one_rank
        assert not private.exists()  # until there is a record
        private.mkdir(mode=0o755)
        recorder.write("a reason", [])
    finally:
        os.umask(before)
    assert json.loads(recorder.path.read_text())["reason"] == "a reason"
    assert [_mode(path) for path in (private, recorder.folder, recorder.path)] == [
        0o700,
        0o700,
        0o600,
    ]


@pytest.mark.parametrize("what", ["a link", "another user's", "a file"])
def test_a_folder_that_is_not_ours(
    one_rank: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Names of temporary files can be guessed: what others put there gets no record."""
    private, elsewhere = flight_recorder._default_folder().parent, one_rank / "elsewhere"
    elsewhere.mkdir()
    if what == "a link":
        private.symlink_to(elsewhere)
    elif what == "a file":
        private.touch()
    else:
        private.mkdir()
        monkeypatch.setattr(os, "getuid", lambda: private.stat().st_uid + 1)
    with pytest.warns(UserWarning, match="no flight records: .*is a link, or belongs to another"):
        flight_recorder.record_flight_by_default()
    assert flight_recorder._recorder is None
    assert [*elsewhere.iterdir()] == []


def test_a_link_in_the_place_of_a_record(one_rank: Path) -> None:
    victim = one_rank / "victim"
    victim.write_text("as it was")
    recorder = flight_recorder._Recorder(one_rank / "records")
    recorder.folder.mkdir()
    recorder.path.with_suffix(".part").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        recorder.write("a reason", [])
    assert victim.read_text() == "as it was"


def test_records_are_small(one_rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many groups with long names, the last collectives; of an endless error, the begin."""
    label = "layers." * 40
    entries = [Entry(number, 1, "all_gather", label, 8) for number in range(1000)]
    groups = [([0, rank], 1000, entries) for rank in range(8)]
    monkeypatch.setattr(flight_recorder.collective_log, "recent_by_group", lambda: groups)
    flight_recorder.record_flight_by_default()
    recorder = flight_recorder._recorder
    assert recorder is not None
    recorder.write("\u00fc" * (1 << 21), ["x" * (1 << 21)] * 20)
    assert recorder.path.stat().st_size <= flight_recorder.MAX_BYTES == 1 << 20
    written = json.loads(recorder.path.read_text())
    assert written["reason"].startswith("\u00fc")
    for group in written["groups"]:
        assert group["count"] == 1000
        assert group["entries"][-1][0] == 999
        assert len(group["entries"]) > 100


def test_no_records(one_rank: Path) -> None:
    """Neither by default nor from a recorder that was there."""
    flight_recorder.record_flight_by_default()
    assert flight_recorder._recorder is not None
    record_flight(None)
    flight_recorder._record_error(ValueError("as asked"))
    flight_recorder.record_flight_by_default()
    assert flight_recorder._recorder is None
    assert [*one_rank.iterdir()] == []


@pytest.mark.slow
def test_a_rank_that_raises(tmp_path: Path) -> None:
    """torchrun may be quicker to end the others than they are with their records."""
    said = _run(tmp_path, "raises", by_default=True)
    assert "rank 1: ValueError: no more data" in said


@pytest.mark.slow
def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    said = _run(tmp_path, "is killed")
    assert "1 of 2 ranks have left a record." in said
    assert "rank 1 left none: killed" in said


def _record(rank: int, reason: str, *what: tuple[str, str]) -> dict[str, Any]:
    entries = [Entry(i, 1, kind, label, 8) for i, (kind, label) in enumerate(what)]
    group = {"ranks": [0, 1], "count": len(entries), "entries": entries}
    record = {"rank": rank, "world_size": 2, "reason": reason, "stack": [], "groups": [group]}
    return json.loads(json.dumps(record))


def test_ranks_that_part() -> None:
    begin = [("all_gather", "a"), ("all_gather", "b")]
    said = explain_records(
        [
            _record(0, "SIGTERM", *begin, ("all_gather", "c")),
            _record(1, "SIGTERM", *begin, ("reduce_scatter", "b")),
        ]
    )
    assert (
        "Among ranks 0, 1, collective 2: rank 0 issued the all-gather of unit 'c' (8 elements, "
        "step 1), rank 1 the reduce-scatter of unit 'b' (8 elements, step 1)." in said
    )
    same = explain_records([_record(r, "SIGTERM", *begin) for r in range(2)])
    assert "all have issued the same 2 collectives" in same
    raised = _record(1, "ValueError: no more data", *begin)
    missed = explain_records([_record(0, "SIGTERM", *begin, ("all_gather", "c")), raised])
    assert "rank 1 did not come to the all-gather of unit 'c' (8 elements, step 1)" in missed
    assert "Look first at rank 1:" in missed


def test_nothing_to_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flight_recorder.main([str(tmp_path)]) == 2
    assert "call fsdp_dynamo.record_flight(folder) in every rank" in capsys.readouterr().err
    with pytest.raises(FSDPStateError, match="expected a process group"):
        record_flight(tmp_path)
    whole = json.dumps(_record(1, "SIGTERM", ("all_gather", "a")))
    for rank, text in enumerate((whole[:20], whole, '{"loss": 1}')):
        (tmp_path / f"rank-{rank}.json").write_text(text)
    assert flight_recorder.main([str(tmp_path)]) == 0
    said, left_out = capsys.readouterr()
    assert "rank 1: SIGTERM" in said
    assert "rank-0.json', got JSONDecodeError" in left_out
    assert "rank-2.json', got other content" in left_out


def test_said_while_standard_error_is_being_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Busy:
        def write(self, text: str) -> None:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    monkeypatch.setattr(sys, "stderr", Busy())
    flight_recorder._print_error("rank 0: flight record in here")
    monkeypatch.undo()
    assert capfd.readouterr().err == "rank 0: flight record in here\n"
