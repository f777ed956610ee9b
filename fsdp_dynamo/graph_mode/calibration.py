"""Measured rates of a group's link and of the device that computes.

They decide where collectives are placed. They are rounded and kept beside Inductor's compile cache,
so that the next start of a job finds the same rates and, with them, its compiled code.

On CPUs, where the processor also moves the bytes, its rate is measured while a gather is in flight.
That is the situation in a step with hidden collectives, and the rate can be a third lower.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_dynamo.comm import collectives, wire_codec, wire_kernels
from fsdp_dynamo.graph_mode.compile_cache import own_file
from fsdp_dynamo.health.comparison import share_from_first
from graph_passes.wire_format import WireFormat

_SMALL_NUMEL = 256
_LARGE_BYTES = 1 << 24
"""Bytes that a rank receives, enough to outweigh bursts and latency."""
_DEVICE_NUMEL = 1 << 27
"""Elements to encode on an accelerator. Units are that large, and fewer measure launches."""
_REPEATS = 5
_IN_A_ROW = 4
_MANY = 50
_PLACES = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "FSDP_DYNAMO_PLACE")
_MEASURE = "measure"
_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes besides float32 in which products are measured; accelerators can be ten times as fast."""


def measured(group: dist.ProcessGroup, device: torch.device) -> dict[str, dict[str, Any]]:
    """Return rates ``{"link": {...}, "device": {...}}``, the same on all ranks of a group.

    Every rank of the group must call this. Raises ``DivergenceError`` if one does not.
    """

    def measure() -> _Rates:
        return {"link": _measure_link(group, device), "device": _measure_device(group, device)}

    names = {"link", "device"}
    return _known_or(measure, names, group, _path_of(group, device), "measured link and device")


def measured_formats(
    group: dist.ProcessGroup, device: torch.device, formats: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return ``{"encode_bytes_per_ms": {...}, "decode_bytes_per_ms": {...}}`` by wire format.

    They are measured with the kernels that the step will run, compiled or not. Every rank of the
    group must call this.
    """

    def measure() -> _Rates:
        pairs = {text: _measure_coding(text, group, device) for text in formats}
        rates = zip(*pairs.values(), strict=True)
        return {
            name: dict(zip(pairs, each, strict=True))
            for name, each in zip(names, rates, strict=True)
        }

    names = ("encode_bytes_per_ms", "decode_bytes_per_ms")
    path = _path_of(group, device, *formats, str(wire_kernels.are_compiled()))
    return _known_or(measure, set(names), group, path, "measured rates of formats")


_Rates = dict[str, dict[str, Any]]


def _known_or(
    measure: Callable[[], _Rates], names: set[str], group: dist.ProcessGroup, path: Path, what: str
) -> _Rates:
    """Return the rates in the first rank's file; if it is missing, measure and write it."""

    def known() -> str:
        with suppress(OSError, ValueError, TypeError):
            text = path.read_text()
            if set(json.loads(text)) == names:
                return text
        return _MEASURE

    text = share_from_first(group, what, known)
    if text == _MEASURE:
        found = json.dumps(measure())

        def write() -> str:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                draft = path.with_suffix(f".{os.getpid()}")
                draft.write_text(found)
                draft.replace(path)  # another job reads all of it, or what was there before
            return found

        text = share_from_first(group, what, write)
    numbers: _Rates = json.loads(text)
    return numbers


@cache
def _measured_code() -> str:
    """Digest of the code that measures and of the code that is measured."""
    kernels = Path(wire_kernels.__file__).parent.glob("wire_*.py")
    files = [Path(__file__), *sorted(kernels)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _path_of(group: dist.ProcessGroup, device: torch.device, *more: str) -> Path:
    what = [
        platform.node(),
        torch.__version__,
        ",".join(map(str, dist.get_process_group_ranks(group))),
        group._get_backend(device).name(),
        str(torch.get_num_threads()),
        str(_DTYPES),
        _measured_code(),
        *(os.environ.get(name, "") for name in _PLACES),
        *more,
    ]
    if device.type != "cpu":
        what.append(torch.get_device_module(device).get_device_name())
    return own_file(".json", *what)


def _milliseconds(action: Callable[[], Any], device: torch.device) -> float:
    return statistics.median(_times(action, device, _REPEATS))


def _times(action: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Return the milliseconds of every repeat after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        _synchronize(device)
        began = time.perf_counter()
        action()
        _synchronize(device)
        times.append((time.perf_counter() - began) * 1e3)
    return times[1:]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _large_gather(group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, Tensor]:
    numel = max(_SMALL_NUMEL, _LARGE_BYTES // 4 // max(1, group.size() - 1))
    return torch.empty(numel * group.size(), device=device), torch.zeros(numel, device=device)


def _measure_link(group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """Measure the latency with small all-gathers, the rate with large ones."""
    small = torch.zeros(_SMALL_NUMEL, device=device)
    all_small = torch.empty(_SMALL_NUMEL * group.size(), device=device)
    # The minimum: on a busy machine (compilers starting up) most repeats take much longer.
    latency_ms = min(_times(lambda: collectives.all_gather(all_small, small, group), device, _MANY))
    output, shard = _large_gather(group, device)
    large_ms = _milliseconds(lambda: collectives.all_gather(output, shard, group), device)
    moving_ms = max(large_ms - latency_ms, 1e-3)
    num_bytes = shard.nbytes * max(1, group.size() - 1)
    return {"latency_ms": _rounded(latency_ms), "bytes_per_ms": _rounded(num_bytes / moving_ms)}


def _measure_device(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Measure the rates of matrix products and of an addition."""
    width = 512 if device.type == "cpu" else 4096
    large = torch.zeros(width * width * 16, device=device)
    added_ms = _loaded_ms(lambda: large.add_(1.0), group, device)

    def flops_per_ms(dtype: torch.dtype, width: int) -> float:
        # Not random: the state of the generators belongs to the user.
        one = torch.ones(width, width, dtype=dtype, device=device)
        return _rounded(2 * width**3 / _loaded_ms(lambda: one @ one, group, device))

    return {
        "flops_per_ms": flops_per_ms(torch.float32, width),
        "bytes_per_ms": _rounded(2 * large.nbytes / added_ms),
        "flops_by_dtype": {  # smaller: CPUs without instructions for a dtype are 100 times slower
            str(one).removeprefix("torch."): flops_per_ms(one, width // 2) for one in _DTYPES
        },
    }


def _measure_coding(
    text: str, group: dist.ProcessGroup, device: torch.device
) -> tuple[float, float]:
    """Return the bytes read and written per millisecond of encoding, and of decoding."""
    wire = WireFormat.decode(text)
    assert wire is not None  # formats are never ""
    numel = _LARGE_BYTES // 4 if device.type == "cpu" else _DEVICE_NUMEL
    values = torch.ones(numel, device=device)
    output = torch.empty_like(values)
    with wire_kernels.noise_unchanged():
        # The first call compiles the kernels; the repeats below are measured.
        sent = wire_codec.encode(values, 1, wire)
        wire_codec.decode(output, sent, 1, wire)
        encode_ms = _loaded_ms(lambda: wire_codec.encode(values, 1, wire), group, device)
    decode_ms = _loaded_ms(lambda: wire_codec.decode(output, sent, 1, wire), group, device)
    num_bytes = values.nbytes + sent.nbytes
    return _rounded(num_bytes / encode_ms), _rounded(num_bytes / decode_ms)


def _loaded_ms(action: Callable[[], Any], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the median time of an action; on a CPU, while a gather is in flight.

    An accelerator runs several in a row, so that the host's launch time does not count.
    """
    if device.type != "cpu":
        return _milliseconds(lambda: [action() for _ in range(_IN_A_ROW)], device) / _IN_A_ROW
    gather = collectives.issue_all_gather(*_large_gather(group, device), group)
    found = _milliseconds(action, device)
    gather.wait()
    return found


def _rounded(number: float) -> float:
    """Round to two digits: more would only reflect how busy the machine was."""
    digits = 1 - math.floor(math.log10(abs(number)))
    return round(number, digits)
