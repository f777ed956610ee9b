"""Arithmetic of encoded messages with torch, on tiles of several blocks.

A tile stays in a CPU's cache, so that its many passes cost one pass over memory.
``compile_kernels`` fuses the passes. CUDA devices with Triton run ``wire_triton`` instead.

Elements and codes of a tile are ``(..., blocks, block)``, scales ``(..., blocks, 1)``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from fsdp_dynamo.comm import streams
from graph_passes.markers import NO_VALUE, is_no_value
from graph_passes.wire_format import WireFormat

_LACKS = {torch.int8: -128, torch.uint8: -8}
"""Code of ``NO_VALUE`` by the dtype of codes; uint8 holds two codes of int4."""
_SMALLEST_SCALE = 1e-35
"""Blocks below it arrive as zeros, since the inverse of a scale must be finite."""
_LARGEST = {"int8": 127.0, "int4": 7.0, "float8": 448.0}
_LARGEST_BEFORE_NOISE = {"int8": 126.999, "int4": 6.999}
"""With noise below 1 added and rounded down, codes are at most 127 and 7."""
_SMALLEST_COMPILED = 1 << 14
"""Tiles with fewer elements run uncompiled: evaluating the guards would take as long."""

_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def tile_numel(device: torch.device) -> int:
    """Largest number of elements of a tile."""
    if streams.host_runs_ahead(device):
        return 1 << 22  # launches cost more than passes over memory
    return 1 << 20 if _compiled else 1 << 18


def compile_kernels(backend: str | Callable[..., Any]) -> None:
    """Compile the kernels with a backend of ``torch.compile``, at their first large tile.

    The first call in a process decides the backend.
    """
    for kernel in () if _compiled else _KERNELS:
        # Without ``fullgraph``, which raises at the recompile limit (many dtypes and formats).
        _compiled[kernel] = torch.compile(kernel, backend=backend)


def are_compiled() -> bool:
    """Whether large tiles run compiled kernels."""
    return bool(_compiled)


def _run(kernel: Callable[..., Any], *arguments: Any) -> Any:
    """Run a kernel; compiled, if the tile is large enough."""
    if arguments[0].numel() < _SMALLEST_COMPILED or kernel not in _compiled:
        return kernel(*arguments)
    # ``data`` drops the views' bases, which Dynamo would guard.
    given = [one.data if isinstance(one, torch.Tensor) else one for one in arguments]
    for one in given:
        if isinstance(one, torch.Tensor):
            # Specialize on the block's width, which is faster, but not on the number of blocks.
            torch._dynamo.mark_dynamic(one, list(range(one.ndim - 1)))
    return _compiled[kernel](*given)


@torch.no_grad()
def encode(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    wire: WireFormat,
    may_lack: bool,
) -> None:
    """Write codes and scales of a tile."""
    single = codes.new_empty(values.shape, dtype=torch.int8) if wire.is_packed else codes
    lack = _LACKS[codes.dtype] if may_lack and wire.is_integer else None
    if wire.is_integer and wire.is_stochastic:
        noise, largest = _noise_like(values), _LARGEST_BEFORE_NOISE[wire.name]
        scales.copy_(_run(_encode_with_noise, values, single, noise, largest, lack))
    else:
        scales.copy_(_run(_encode, values, single, _LARGEST[wire.name], wire.is_integer, lack))
    if wire.is_packed:
        _run(_pack, single, codes)


@torch.no_grad()
def decode(output: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, may_lack: bool) -> None:
    """Write the elements of a tile to ``output``."""
    lack = _LACKS[codes.dtype] if may_lack else None
    _run(_decode, output, _single(codes, output.shape), scales, lack)


@torch.no_grad()
def add(
    total: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    may_lack: bool,
    divisor: float,
) -> None:
    """Add the elements of one or several tiles to ``total``, and divide the sum.

    Args:
        total: ``(blocks, block)``.
        codes: shaped as ``total``, or ``(messages, ...)``.
        scales: ``None`` if codes are elements.
        may_lack: whether codes may stand for ``NO_VALUE``.
        divisor: divides the sum.
    """
    shape = total.shape if codes.ndim == total.ndim else (len(codes), *total.shape)
    lack = _LACKS[codes.dtype] if may_lack else None
    _run(_add, total, _single(codes, shape), scales, lack, divisor)


def _single(codes: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Codes one by one (int4 unpacked), in the shape of their elements."""
    if codes.dtype != torch.uint8:
        return codes
    single = codes.new_empty(shape, dtype=torch.int8)
    _run(_unpack, single, codes)
    return single


# -- kernels -------------------------------------------------------------------------------------


def _bounds(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Largest absolute value of each block."""
    return values.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST_SCALE * largest)


def _encode(
    values: torch.Tensor, codes: torch.Tensor, largest: float, is_integer: bool, lack: int | None
) -> torch.Tensor:
    exact = values.to(torch.float32)
    bounds = _bounds(exact, largest)
    scaled = exact * (largest / bounds)
    codes.copy_(scaled.round_() if is_integer else scaled)
    if lack is not None:
        codes.masked_fill_(is_no_value(values), lack)
    return bounds / largest


def _encode_with_noise(
    values: torch.Tensor,
    codes: torch.Tensor,
    noise: torch.Tensor,
    largest: float,
    lack: int | None,
) -> torch.Tensor:
    exact = values.to(torch.float32)
    bounds = _bounds(exact, largest)
    factors = largest / bounds
    codes.copy_(torch.addcmul(noise, exact, factors).floor_())
    if lack is not None:
        codes.masked_fill_(is_no_value(values), lack)
    return bounds / largest


def _decode(
    output: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, lack: int | None
) -> None:
    output.copy_(codes).mul_(scales)
    if lack is not None:
        output.masked_fill_(codes == lack, NO_VALUE)


def _add(
    total: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    lack: int | None,
    divisor: float,
) -> None:
    terms = codes if scales is None else codes.to(total.dtype).mul_(scales)
    if lack is not None:
        terms = terms.masked_fill_(codes == lack, NO_VALUE)
    if terms.ndim > total.ndim:  # a sum of nothing but NO_VALUE (-0.0) would be 0.0
        is_missing = is_no_value(terms).all(0)
        terms = terms.sum(0, dtype=total.dtype).masked_fill_(is_missing, NO_VALUE)
    total.add_(terms)
    if divisor != 1:
        total.div_(divisor)


def _pack(codes: torch.Tensor, packed: torch.Tensor) -> None:
    half = packed.shape[-1]
    low, high = codes[..., :half], codes[..., half:]
    packed.copy_(low & 15)
    packed[..., : high.shape[-1]].bitwise_or_(high << 4)


def _unpack(codes: torch.Tensor, packed: torch.Tensor) -> None:
    half, signed = packed.shape[-1], packed.view(torch.int8)
    codes[..., :half] = (signed << 4) >> 4
    codes[..., half:] = signed[..., : codes.shape[-1] - half] >> 4


_KERNELS = (_encode, _encode_with_noise, _decode, _add, _pack, _unpack)


# -- noise ---------------------------------------------------------------------------------------

_offsets = random.Random(0)
"""Seeds, and offsets of tiles' noise in ``_numbers``; the sequence differs between ranks."""


def begin_noise() -> None:
    """Restart the noise of stochastic rounding, when a model is wrapped.

    It is seeded from torch's CPU generator, which stays unchanged, and the rank. So a seed set
    before the model is wrapped makes runs reproducible, whatever ran before in the process.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    _offsets.seed(bytes(torch.get_rng_state().tolist()) + str(rank).encode())


@contextmanager
def noise_unchanged() -> Iterator[None]:
    """Restore the noise generator afterwards, for measurements."""
    state = _offsets.getstate()
    try:
        yield
    finally:
        _offsets.setstate(state)


def next_seed() -> int:
    """Return a seed for a kernel that makes its own noise, 0 to 2**31 - 1."""
    return _offsets.randrange(1 << 31)


def _noise_like(values: torch.Tensor) -> torch.Tensor:
    """Uniform noise in (0, 1) for a tile, in its shape.

    It is a slice of a fixed table, since generating it would cost more than all the rest.
    """
    most = max(tile_numel(values.device), values.numel())
    first = _offsets.randrange(most)
    return _numbers(values.device, most)[first : first + values.numel()].view(values.shape)


@cache
def _numbers(device: torch.device, most: int) -> torch.Tensor:
    """Table ``(2 * most,)`` of noise."""
    generator = torch.Generator(device).manual_seed(0)
    order = torch.randperm(2 * most, generator=generator, device=device)
    return order.to(torch.float32).add_(0.5).div_(2 * most)
