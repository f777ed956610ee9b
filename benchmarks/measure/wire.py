"""Bytes on the wire, as the interface counts them."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
RATE_VARIABLE = "LINK_BYTES_PER_S"


@lru_cache(maxsize=1)
def _counter() -> Path | None:
    name = os.environ.get(INTERFACE_VARIABLE)
    if name is None or name == "lo":  # loopback counts the other ranks' bytes as well
        return None
    path = Path("/sys/class/net") / name / "statistics" / "tx_bytes"
    return path if path.exists() else None


def sent_bytes() -> int | None:
    """Bytes that have left this rank's interface; ``None`` where no interface is its own."""
    counter = _counter()
    return None if counter is None else int(counter.read_text())


def link_bytes_per_s() -> float | None:
    """Rate of the link that this rank was started on; ``None`` where it is not known."""
    rate = os.environ.get(RATE_VARIABLE)
    return None if rate is None else float(rate)
