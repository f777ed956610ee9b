"""Two hosts joined by a link of a chosen rate, on one machine.

    python benchmarks/link.py [--rate 1gbit] [--burst 2mb] -- COMMAND ...

Two network namespaces joined by a veth pair; each end has a token-bucket filter. ``COMMAND`` runs
once in each, as rank 0 and rank 1 of 2, with the variables that torchrun would set, gloo on the
namespace's own interface, and (where there are cores enough) a core of its own. A command that
begins with a ``.py`` file is run by this Python. What is printed at the end: bytes that each host
sent, from the interface counters.

The burst must be about 2 MB: with a small one the kernel splits segments in software and the
processor, not the link, is the limit. Needs root, ``ip`` and ``tc`` (Debian's iproute2). The
namespaces are removed at the end, also after Ctrl-C or a failed command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import BadInputError, one_line_on_bad_input
from benchmarks.measure import ranks, wire

PORT = 29533
GRACE_S = 5.0
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Host:
    """One end of the link."""

    namespace: str
    interface: str
    address: str


@dataclass(frozen=True)
class Shape:
    """Limits of the link, in the notation of ``tc``.

    Attributes:
        rate: such as ``1gbit``.
        burst: size of the token bucket, such as ``2mb``.
        latency: longest a packet waits in the queue, such as ``200ms``.
    """

    rate: str = "1gbit"
    burst: str = "2mb"
    latency: str = "200ms"

    @property
    def bytes_per_s(self) -> float:
        """The rate as a number.

        Raises:
            BadInputError: it is not a number followed by kbit, mbit or gbit.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", self.rate)
        if match is None or float(match[1]) == 0:
            raise BadInputError(
                f"--rate: expected a number above 0 with kbit, mbit or gbit, got {self.rate!r}"
            )
        return float(match[1]) * _RATES[match[2]] / 8


def check_can_link() -> None:
    """Raise an error, before any change, if no link can be created here."""
    if not sys.platform.startswith("linux"):
        raise BadInputError(f"link: expected Linux (network namespaces), got {sys.platform}")
    if os.geteuid() != 0:
        raise BadInputError(
            "link: expected root (network namespaces need it), got user id "
            f"{os.geteuid()}; run it with sudo"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise BadInputError(f"link: the command '{tool}' is missing: install iproute2")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BadInputError(f"link: '{' '.join(command)}' failed: {done.stderr.strip()}")
    return done.stdout


def hosts_of(process_id: int) -> tuple[Host, Host]:
    """Both ends of the link of a process."""
    tag = process_id % 100000
    first, second = (
        Host(f"link{tag}h{n}", f"veth{tag}h{n}", f"10.77.{tag % 250}.{n + 1}") for n in (0, 1)
    )
    return first, second


@contextmanager
def two_hosts(shape: Shape) -> Iterator[tuple[Host, Host]]:
    """Make the namespaces and the link; remove them on the way out, whatever happened."""
    hosts = first, second = hosts_of(os.getpid())
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        pair = ("type", "veth", "peer", "name", second.interface, "netns", second.namespace)
        _run("ip", "link", "add", first.interface, "netns", first.namespace, *pair)
        for host in hosts:
            inside = ("ip", "-n", host.namespace)
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _run(*inside, "link", "set", host.interface, "up")
            _run(*inside, "link", "set", "lo", "up")
            bucket = ("rate", shape.rate, "burst", shape.burst, "latency", shape.latency)
            qdisc = ("qdisc", "add", "dev", host.interface, "root", "tbf", *bucket)
            _run("tc", "-n", host.namespace, *qdisc)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def sent_bytes(host: Host) -> int:
    """Bytes that have left a host over the link."""
    shown = _run("ip", "-n", host.namespace, "-s", "-j", "link", "show", host.interface)
    return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


def rank_environment(
    rank: int, hosts: tuple[Host, Host], shape: Shape, per_host: int = 1
) -> dict[str, str]:
    """Environment of a rank: torchrun's variables, and gloo's interface."""
    return dict(
        ranks.QUIET | os.environ,
        RANK=str(rank),
        WORLD_SIZE=str(2 * per_host),
        LOCAL_RANK=str(rank % per_host),
        LOCAL_WORLD_SIZE=str(per_host),
        MASTER_ADDR=hosts[0].address,
        MASTER_PORT=str(PORT),
        **{wire.INTERFACE_VARIABLE: hosts[rank // per_host].interface},
        FSDP_DYNAMO_PLACE=f"link of {shape}",  # rates of other links do not apply
        **{wire.RATE_VARIABLE: repr(shape.bytes_per_s)},
    )


def _command_of(number: int, host: Host, command: list[str]) -> list[str]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2 and shutil.which("taskset"):
        command = ["taskset", "-c", str(cores[number]), *command]
    return ["ip", "netns", "exec", host.namespace, *command]


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End process groups by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(p.poll() is None for p in processes):
            time.sleep(0.05)


def run_on_link(command: list[str], shape: Shape, per_host: int = 1) -> tuple[int, list[int]]:
    """Run a command as so many ranks on each host, which share its core.

    Returns:
        The first exit code that is not 0 (else 0), and the bytes that each host sent.
    """
    check_can_link()
    _ = shape.bytes_per_s
    if command and command[0].endswith(".py"):
        command = [sys.executable, *command]
    if not command or shutil.which(command[0]) is None:
        got = command[0] if command else "nothing"
        raise BadInputError(f"link: expected a command after '--', got {got}")
    with two_hosts(shape) as hosts:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(2 * per_host):
                number = rank // per_host
                processes.append(
                    subprocess.Popen(
                        _command_of(number, hosts[number], command),
                        env=rank_environment(rank, hosts, shape, per_host),
                        start_new_session=True,
                    )
                )
            code = _wait(processes)
            return code, [sent_bytes(host) for host in hosts]
        finally:
            _stop(processes)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all have succeeded or one has failed; returns the exit code."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return failed
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], usage="link.py [--rate R] [--burst B] -- COMMAND ..."
    )
    parser.add_argument("--rate", default=Shape.rate, help="link rate in tc's words")
    parser.add_argument("--burst", default=Shape.burst, help="token bucket in tc's words")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    # Both, since a job in the background of a script inherits an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with one_line_on_bad_input():
        try:
            code, sent = run_on_link(command, Shape(options.rate, options.burst))
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    print(f"link: host 0 sent {sent[0]:,} bytes, host 1 sent {sent[1]:,} bytes", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
