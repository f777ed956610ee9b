"""The link of a chosen rate between two namespaces: bytes, rate, failures, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import needs_link

from benchmarks import bench, link
from benchmarks.command_line import BadInputError

ROOT = Path(__file__).parents[2]


def test_the_link_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BadInputError, match=r"expected root.*got user id 1000"):
        link.run_on_link(["true"], link.Shape())
    assert bench.link_arguments() == ()


def _netns(*command: str) -> str:
    done = subprocess.run(["ip", "netns", *command], capture_output=True, text=True, check=True)
    return done.stdout


def _left_by(process_id: int) -> list[str]:
    """Namespaces that a process has made and not removed."""
    there = {line.split()[0] for line in _netns("list").splitlines()}
    return [h.namespace for h in link.hosts_of(process_id) if h.namespace in there]


def _remove_hosts(process_id: int) -> None:
    """What a process that failed its test has left: programs and namespaces."""
    for namespace in _left_by(process_id):
        for program in _netns("pids", namespace).split():
            os.kill(int(program), signal.SIGKILL)
        _netns("del", namespace)


SEND = """
import os, pathlib, socket, sys, time
num_bytes, burst, file = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
address = (os.environ["MASTER_ADDR"], 29999)
if os.environ["RANK"] == "0":
    server = socket.create_server(address)
    connection, _ = server.accept()
    received = skipped = 0
    began = time.monotonic()
    while data := connection.recv(1 << 16):
        received += len(data)
        if received <= burst:
            skipped, began = received, time.monotonic()
    file.write_text(str((received - skipped) / (time.monotonic() - began)))
else:
    for _ in range(100):
        try:
            socket.create_connection(address).sendall(bytes(num_bytes))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
"""


def _send(shape: link.Shape, num_bytes: int, file: Path) -> tuple[list[int], float]:
    """Bytes that each host has sent, and those a second that came behind the burst."""
    numbers = (str(num_bytes), "2000000", str(file))
    code, sent = link.run_on_link([sys.executable, "-c", SEND, *numbers], shape)
    assert code == 0
    return sent, float(file.read_text())


@needs_link
def test_link_counts_bytes_and_cleans_up(tmp_path: Path) -> None:
    sent, _ = _send(link.Shape("1gbit"), 3_000_000, tmp_path / "rate")
    assert 3_000_000 <= sent[1] < 3_500_000
    assert sent[0] < 300_000
    assert not _left_by(os.getpid())


@needs_link
@pytest.mark.slow
@pytest.mark.timing
def test_link_keeps_its_rate(tmp_path: Path) -> None:
    """A time, so with a wide margin: what the network's headers take is a twentieth."""
    shape = link.Shape("200mbit")
    num_bytes = 2_000_000 + int(2 * shape.bytes_per_s)
    _, measured = _send(shape, num_bytes, tmp_path / "rate")
    assert 0.5 < measured / shape.bytes_per_s < 1.2


@needs_link
def test_link_gives_a_failure_on_and_ends_the_other_rank() -> None:
    failing = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    code, _ = link.run_on_link([sys.executable, "-c", failing], link.Shape())
    assert code == 7
    assert not _left_by(os.getpid())


@needs_link
def test_link_cleans_up_after_a_signal(tmp_path: Path) -> None:
    """Also where the shell has started it with signals ignored, as in the background."""
    started = tmp_path / "pid"
    sleeper = f"import os, pathlib, time; pathlib.Path({str(started)!r} + os.environ['RANK'])"
    sleeper += ".write_text(str(os.getpid())); time.sleep(600)"
    ignoring = ["sh", "-c", 'trap "" INT TERM; exec "$@"', "sh"]
    command = [sys.executable, str(ROOT / "benchmarks" / "link.py"), "--"]
    process = subprocess.Popen([*ignoring, *command, sys.executable, "-c", sleeper])
    files = [Path(f"{started}{rank}") for rank in (0, 1)]
    try:
        deadline = time.monotonic() + 60
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 128 + signal.SIGINT
        assert not _left_by(process.pid)
        for file in files:
            assert not Path("/proc", file.read_text()).exists()
    finally:
        process.kill()
        process.wait()
        _remove_hosts(process.pid)
