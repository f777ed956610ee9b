"""Measured once: how fast a group's link is, and how fast its first rank computes.

The numbers decide where collectives go. They are rounded, and kept beside Inductor's compile cache,
so that the next start of the same job finds the same numbers and with them its compiled code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_dynamo import collectives
from fsdp_dynamo.agreement import share_from_first

_SMALL_NUMEL = 256
_LARGE_NUMEL = 1 << 19
_REPEATS = 5
_PLACES = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "FSDP_DYNAMO_PLACE")
_MEASURE = "measure"


def measured(group: dist.ProcessGroup, device: torch.device) -> dict[str, dict[str, float]]:
    """``{"link": {...}, "device": {...}}``, the same numbers on all ranks of a group.

    Every rank of the group must call it.

    Raises:
        DivergenceError: a rank has not come.
    """
    path = _path_of(group, device)

    def known() -> str:
        with suppress(OSError):
            return path.read_text()
        return _MEASURE

    text = share_from_first(group, "measured link and device", known)
    if text == _MEASURE:
        link = _measure_link(group, device)

        def write() -> str:
            found = json.dumps({"link": link, "device": _measure_device(device)})
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(found)
            return found

        text = share_from_first(group, "measured link and device", write)
    numbers: dict[str, dict[str, float]] = json.loads(text)
    return numbers


def _path_of(group: dist.ProcessGroup, device: torch.device) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    what = [
        platform.node(),
        torch.__version__,
        str(group.size()),
        group._get_backend(device).name(),
        str(torch.get_num_threads()),
        *(os.environ.get(name, "") for name in _PLACES),
    ]
    if device.type != "cpu":
        what.append(torch.get_device_module(device).get_device_name())
    digest = hashlib.sha256("\n".join(what).encode()).hexdigest()[:24]
    return Path(cache_dir()) / "fsdp_dynamo" / f"{digest}.json"


def _milliseconds(action: Callable[[], Any], device: torch.device) -> float:
    """Median of some repeats."""
    times = []
    for _ in range(_REPEATS + 1):
        _synchronize(device)
        began = time.perf_counter()
        action()
        _synchronize(device)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _measure_link(group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """Latency from a small all-gather, rate from a large one."""
    size = group.size()

    def gather_ms(numel: int) -> float:
        shard = torch.zeros(numel, device=device)
        output = torch.empty(numel * size, device=device)
        return _milliseconds(lambda: collectives.all_gather(output, shard, group), device)

    latency_ms = gather_ms(_SMALL_NUMEL)
    moving_ms = max(gather_ms(_LARGE_NUMEL) - latency_ms, 1e-3)
    num_bytes = _LARGE_NUMEL * 4 * (size - 1)
    return {"latency_ms": _rounded(latency_ms), "bytes_per_ms": _rounded(num_bytes / moving_ms)}


def _measure_device(device: torch.device) -> dict[str, float]:
    """Rate of a matrix product and of an addition."""
    width = 512 if device.type == "cpu" else 4096
    one = torch.ones(width, width, device=device)  # random numbers belong to the user
    product_ms = _milliseconds(lambda: one @ one, device)
    large = torch.zeros(width * width * 16, device=device)
    added_ms = _milliseconds(lambda: large.add_(1.0), device)
    return {
        "flops_per_ms": _rounded(2 * width**3 / product_ms),
        "bytes_per_ms": _rounded(2 * large.numel() * 4 / added_ms),
    }


def _rounded(number: float) -> float:
    """To two digits: more would only say how busy the machine was."""
    digits = 1 - math.floor(math.log10(abs(number)))
    return round(number, digits)
