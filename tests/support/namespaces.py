"""Tests that need two hosts on one machine."""

from __future__ import annotations

import ctypes
import os
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import link
from benchmarks.command_line import BadInputError

needs_link = pytest.mark.usefixtures("two_namespaces")


def why_there_is_no_link() -> str | None:
    """Why no link can be made here, or ``None``; making one is the only sure test."""
    try:
        link.check_can_link()
        with link.two_hosts(link.Shape()):
            return None
    except BadInputError as error:
        return str(error)


_CLONE_NEWNET = 0x40000000


def join_host(rank: int, world_size: int, host: link.Host, store: Path, timeout_s: float) -> None:
    """Move this rank to one end of the link, into a default group of its own."""
    dist.destroy_process_group()
    namespace = os.open(f"/var/run/netns/{host.namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.setns(namespace, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    os.close(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = host.interface
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def set_link(host: link.Host, state: str) -> None:
    """Cut the link ("down"), or join it again ("up")."""
    command = ["ip", "-n", host.namespace, "link", "set", host.interface, state]
    subprocess.run(command, check=True)
