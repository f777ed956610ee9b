"""Triton kernels of encoded messages for CUDA devices: encode, decode, and sum over peers.

Each function is one launch, whatever the number of messages, and reads and writes memory once.
``wire_codec`` has the same three functions for CPUs, and defines the bytes of a message.

A program handles ``ROWS`` blocks of one message. The last, smaller block of a message has a program
of its own, so that loads and stores of whole blocks are 16 bytes wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from fsdp_dynamo.comm import wire_kernels
from graph_passes.wire_format import HEADER_SCALES, WireFormat

INT8 = tl.constexpr(0)
INT4 = tl.constexpr(1)
FLOAT8 = tl.constexpr(2)
BFLOAT16 = tl.constexpr(3)
FORMATS = {"int8": 0, "int4": 1, "float8": 2, "bfloat16": 3}
HEADER = tl.constexpr(HEADER_SCALES)
ALIGNED = tl.constexpr(16)
SMALLEST_SCALE = tl.constexpr(1e-35)
ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds a small fp32 number to the nearest integer."""
_NUMBERS = [
    "skipped",
    "seed",
    "num_peers",
    "num_units",
    "message_units",
    "num_blocks",
    "rest",
]
"""Arguments whose values do not select another compiled kernel."""
_TILE_NUMEL = 2048
OPTIONS = {
    "num_warps": 4,
    "maxnreg": 64,  # without it, ptxas spills registers for more occupancy
    "enable_fp_fusion": False,  # products and sums round apart, as on a CPU
}
"""Options of the compiler for all kernels."""


# -- launches ------------------------------------------------------------------------------------


def encode(
    parts: torch.Tensor,
    messages: torch.Tensor,
    wire: WireFormat,
    may_lack: bool,
    own: int | None = None,
) -> None:
    """Write one message per row of ``parts`` except ``own``."""
    is_stochastic = wire.is_stochastic and wire.is_integer
    seed = wire_kernels.next_seed() if is_stochastic else 0
    num_parts = len(parts) - (own is not None)
    skipped = len(parts) if own is None else own
    launch = _Launch(wire, parts.shape[1], parts)
    launch(
        _encode,
        num_parts,
        (parts, *launch.views(messages), skipped, seed),
        STOCHASTIC=is_stochastic,
        LACK=may_lack and wire.is_integer,
        LARGEST={"int8": 127.0, "int4": 7.0, "float8": 448.0, "bfloat16": 1.0}[wire.name],
    )


def decode(parts: torch.Tensor, messages: torch.Tensor, wire: WireFormat) -> None:
    """Write the elements of each message to a row of ``parts``."""
    launch = _Launch(wire, parts.shape[1], parts)
    launch(_decode, len(parts), (parts, *launch.views(messages)))


def add(
    output: torch.Tensor,
    own: torch.Tensor,
    messages: torch.Tensor | Sequence[torch.Tensor],
    wire: WireFormat,
    divisor: float,
    skipped: int,
) -> None:
    """Add all rows of ``messages`` but ``skipped`` to ``own`` in fp32, in order; divide the sum."""
    assert isinstance(messages, torch.Tensor)  # point-to-point messages are of CPUs
    launch = _Launch(wire, output.numel(), output, own)
    given = (output, own, *launch.views(messages), skipped, len(messages) - 1, float(divisor))
    launch(_add, 1, given)


class _Launch:
    """Grid and constants of a launch for messages of ``numel`` elements."""

    def __init__(self, wire: WireFormat, numel: int, *tensors: torch.Tensor) -> None:
        self._format = FORMATS[wire.name]
        self._numel = numel
        self._message_bytes = wire.num_bytes(numel)
        self._codes_begin = wire.codes_begin(numel)
        self._device = tensors[0].device
        block = wire.block_numel if wire.has_scales else _TILE_NUMEL
        self._num_blocks, self._rest = divmod(numel, block)
        self._block = block
        width = triton.next_power_of_2(block)
        self._rows = max(1, _TILE_NUMEL // width)
        # Rows of `parts` begin at multiples of this.
        self._unit = gcd(numel, *(16 // one.itemsize for one in tensors))

    def views(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the messages as scales, and their codes."""
        codes = messages.view(-1)[self._codes_begin :]
        dtype = {0: torch.int8, 1: torch.int8, 2: torch.float8_e4m3fn, 3: torch.bfloat16}
        return messages.view(torch.float32), codes.view(dtype[self._format])

    def __call__(
        self, kernel: Any, num_rows: int, given: tuple[Any, ...], **constants: Any
    ) -> None:
        """Launch a kernel on ``num_rows`` messages."""
        num_programs = triton.cdiv(self._num_blocks, self._rows) + (self._rest > 0)
        if not num_rows or not num_programs:
            return
        cuda = self._device.type == "cuda"
        where: AbstractContextManager[Any] = (
            torch.cuda.device(self._device) if cuda else nullcontext()
        )
        with where:
            kernel[(num_programs, num_rows)](
                *given,
                self._numel // self._unit,
                self._message_bytes // 16,
                self._num_blocks,
                self._rest,
                UNIT=self._unit,
                BLOCK=self._block,
                WIDTH=triton.next_power_of_2(self._block),
                ROWS=self._rows,
                FORMAT=self._format,
                **OPTIONS,
                **constants,
            )


# -- kernels -------------------------------------------------------------------------------------
# `half` is the number of codes in the first half of a block of int4; `width` its elements.


@triton.jit
def _noise(index, seed):
    """Return numbers in (0, 1) that depend on ``index`` and ``seed`` alone.

    Source: hash function lowbias32 of C. Wellons, "Prospecting for Hash Functions" (2018).
    """
    x = (index.to(tl.uint32) * 0x9E3779B1) ^ seed.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return (x >> 8).to(tl.float32) * 5.9604644775390625e-08 + 2.98023223876953125e-08


@triton.jit
def _code(x, factor, index, seed, STOCHASTIC: tl.constexpr, LACK: tl.constexpr):
    """Return the integer codes of elements; ``LACK`` is the code of ``NO_VALUE``, 0 for none."""
    scaled = x * factor
    scaled = tl.where(scaled == scaled, scaled, 0.0)  # the scale says NaN
    if STOCHASTIC:
        code = tl.floor(scaled + _noise(index, seed))
    else:
        code = (scaled + ROUNDING) - ROUNDING
    code = code.to(tl.int8)
    if LACK != 0:
        code = tl.where(x.to(tl.int32, bitcast=True) == -2147483648, LACK, code).to(tl.int8)
    return code


@triton.jit
def _bound(x):
    """Return the largest absolute value of each row; that of a row with a NaN is NaN."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _tile(
    first,
    num_blocks,
    width,
    half,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Return blocks, their mask, and offsets and masks of codes, elements, and second elements."""
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    exists = rows < num_blocks
    begins = rows * BLOCK
    if FORMAT == INT4:
        codes = (rows * (BLOCK // 2))[:, None] + columns[None, :]
    else:
        codes = begins[:, None] + columns[None, :]
    low = begins[:, None] + columns[None, :]
    high = low + half
    mask = exists[:, None] & (columns[None, :] < half)
    high_mask = exists[:, None] & (columns[None, :] + half < width)
    if IS_WHOLE:  # masks by row do not stop 16-byte accesses
        mask = tl.broadcast_to(exists[:, None], (ROWS, COLUMNS))
        high_mask = mask
    return rows, exists, codes, low, mask, high, high_mask


@triton.jit
def _encode_tile(
    values,
    scales,
    codes,
    index,
    seed,
    first,
    num_blocks,
    width,
    half,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LACK: tl.constexpr,
):
    rows, exists, places, low, mask, high, high_mask = _tile(
        first, num_blocks, width, half, BLOCK, COLUMNS, ROWS, FORMAT, IS_WHOLE
    )
    given = tl.load(values + low, mask, other=0.0)
    if FORMAT == BFLOAT16:
        tl.store(codes + places, given.to(tl.bfloat16), mask)
    else:
        x = given.to(tl.float32)
        bits = _bound(x)
        if FORMAT == INT4:
            y = tl.load(values + high, high_mask, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, _bound(y))
        bound = bits.to(tl.float32, bitcast=True)
        bound = tl.where(bound < SMALLEST_SCALE * LARGEST, SMALLEST_SCALE * LARGEST, bound)
        # With noise below 1 added and rounded down, codes are at most LARGEST.
        steps = tl.full(bound.shape, LARGEST - 0.001 if STOCHASTIC else LARGEST, tl.float32)
        factor = (tl.div_rn(tl.full(bound.shape, 1.0, tl.float32), bound) * steps)[:, None]
        tl.store(scales + HEADER + rows, tl.div_rn(bound, steps), exists)
        if FORMAT == FLOAT8:
            code = (x * factor).to(tl.float8e4nv)
        elif FORMAT == INT4:
            lower = _code(x, factor, index + low, seed, STOCHASTIC, -8 if LACK else 0)
            upper = _code(y, factor, index + high, seed, STOCHASTIC, -8 if LACK else 0)
            code = ((lower & 15) | (tl.where(high_mask, upper, 0).to(tl.int8) << 4)).to(tl.int8)
        else:
            code = _code(x, factor, index + low, seed, STOCHASTIC, -128 if LACK else 0)
        tl.store(codes + places, code, mask)


@triton.jit(do_not_specialize=_NUMBERS)
def _encode(
    values,
    scales,
    codes,
    skipped,
    seed,
    num_units,
    message_units,
    num_blocks,
    rest,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LACK: tl.constexpr,
):
    part = tl.program_id(1)
    part = (part + (part >= skipped)).to(tl.int64)
    begin = part * num_units * UNIT
    values += begin
    scales += part * message_units * (ALIGNED // 4)
    codes += part * message_units * (ALIGNED // (2 if FORMAT == BFLOAT16 else 1))
    COLUMNS: tl.constexpr = WIDTH // 2 if FORMAT == INT4 else WIDTH
    HALF: tl.constexpr = BLOCK // 2 if FORMAT == INT4 else BLOCK
    first = tl.program_id(0) * ROWS
    if FORMAT != BFLOAT16 and tl.program_id(0) == 0:
        header = tl.full((HEADER,), 1.0 if LACK else 0.0, tl.float32)
        tl.store(scales + tl.arange(0, HEADER), header)
    if first < num_blocks:
        _encode_tile(
            values, scales, codes, begin, seed, first, num_blocks, BLOCK, HALF, BLOCK, COLUMNS,
            ROWS, FORMAT, BLOCK == WIDTH, LARGEST, STOCHASTIC, LACK,
        )  # fmt: skip
    else:
        half = (rest + 1) // 2 if FORMAT == INT4 else rest
        _encode_tile(
            values, scales, codes, begin, seed, num_blocks, num_blocks + 1, rest, half, BLOCK,
            COLUMNS, 1, FORMAT, False, LARGEST, STOCHASTIC, LACK,
        )  # fmt: skip


@triton.jit
def _value(code, scale, LACK: tl.constexpr):
    """Return elements in fp32; ``LACK`` is the code of ``NO_VALUE``, 0 for none."""
    value = code.to(tl.float32) * scale
    if LACK != 0:
        value = tl.where(code == LACK, -0.0, value)
    return value


@triton.jit
def _decoded(codes, scales, places, mask, rows, exists, FORMAT: tl.constexpr):
    """Return elements, and the second halves of blocks of int4, otherwise the elements again."""
    code = tl.load(codes + places, mask, other=0.0)
    if FORMAT == BFLOAT16:
        low = code.to(tl.float32)
        high = low
    else:
        scale = tl.load(scales + HEADER + rows, exists, other=0.0)[:, None]
        if FORMAT == INT8:
            low = _value(code, scale, -128)
            high = low
        elif FORMAT == INT4:
            low = _value((code << 4).to(tl.int8) >> 4, scale, -8)
            high = _value(code >> 4, scale, -8)
        else:
            low = _value(code, scale, 0)
            high = low
    return low, high


@triton.jit
def _decode_tile(
    values,
    scales,
    codes,
    first,
    num_blocks,
    width,
    half,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    rows, exists, places, low, mask, high, high_mask = _tile(
        first, num_blocks, width, half, BLOCK, COLUMNS, ROWS, FORMAT, IS_WHOLE
    )
    x, y = _decoded(codes, scales, places, mask, rows, exists, FORMAT)
    tl.store(values + low, x.to(values.dtype.element_ty), mask)
    if FORMAT == INT4:
        tl.store(values + high, y.to(values.dtype.element_ty), high_mask)


@triton.jit(do_not_specialize=_NUMBERS)
def _decode(
    values,
    scales,
    codes,
    num_units,
    message_units,
    num_blocks,
    rest,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    part = tl.program_id(1).to(tl.int64)
    values += part * num_units * UNIT
    scales += part * message_units * (ALIGNED // 4)
    codes += part * message_units * (ALIGNED // (2 if FORMAT == BFLOAT16 else 1))
    COLUMNS: tl.constexpr = WIDTH // 2 if FORMAT == INT4 else WIDTH
    HALF: tl.constexpr = BLOCK // 2 if FORMAT == INT4 else BLOCK
    first = tl.program_id(0) * ROWS
    if first < num_blocks:
        _decode_tile(
            values, scales, codes, first, num_blocks, BLOCK, HALF, BLOCK, COLUMNS, ROWS, FORMAT,
            BLOCK == WIDTH,
        )  # fmt: skip
    else:
        half = (rest + 1) // 2 if FORMAT == INT4 else rest
        _decode_tile(
            values, scales, codes, num_blocks, num_blocks + 1, rest, half, BLOCK, COLUMNS, 1,
            FORMAT, False,
        )  # fmt: skip


@triton.jit
def _add_tile(
    output,
    own,
    scales,
    codes,
    skipped,
    num_peers,
    divisor,
    message_units,
    first,
    num_blocks,
    width,
    half,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    rows, exists, places, low, mask, high, high_mask = _tile(
        first, num_blocks, width, half, BLOCK, COLUMNS, ROWS, FORMAT, IS_WHOLE
    )
    x = tl.load(own + low, mask, other=0.0).to(tl.float32)
    y = x
    if FORMAT == INT4:
        y = tl.load(own + high, high_mask, other=0.0).to(tl.float32)
    for peer in range(num_peers):
        part = (peer + (peer >= skipped)).to(tl.int64) * message_units
        of_codes = codes + part * (ALIGNED // (2 if FORMAT == BFLOAT16 else 1))
        of_scales = scales + part * (ALIGNED // 4)
        one, other = _decoded(of_codes, of_scales, places, mask, rows, exists, FORMAT)
        x += one
        if FORMAT == INT4:
            y += other
    by = tl.full((ROWS, COLUMNS), 1.0, tl.float32) * divisor
    # Equal ends of both branches would be merged, and their stores would be 4 bytes wide.
    cache: tl.constexpr = "" if IS_WHOLE else ".wb"
    tl.store(output + low, tl.div_rn(x, by).to(output.dtype.element_ty), mask, cache_modifier=cache)
    if FORMAT == INT4:
        y = tl.div_rn(y, by).to(output.dtype.element_ty)
        tl.store(output + high, y, high_mask, cache_modifier=cache)


@triton.jit(do_not_specialize=_NUMBERS)
def _add(
    output,
    own,
    scales,
    codes,
    skipped,
    num_peers,
    divisor,
    num_units,
    message_units,
    num_blocks,
    rest,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    COLUMNS: tl.constexpr = WIDTH // 2 if FORMAT == INT4 else WIDTH
    HALF: tl.constexpr = BLOCK // 2 if FORMAT == INT4 else BLOCK
    first = tl.program_id(0) * ROWS
    if first < num_blocks:
        _add_tile(
            output, own, scales, codes, skipped, num_peers, divisor, message_units, first,
            num_blocks, BLOCK, HALF, BLOCK, COLUMNS, ROWS, FORMAT, BLOCK == WIDTH,
        )  # fmt: skip
    else:
        half = (rest + 1) // 2 if FORMAT == INT4 else rest
        _add_tile(
            output, own, scales, codes, skipped, num_peers, divisor, message_units, num_blocks,
            num_blocks + 1, rest, half, BLOCK, COLUMNS, 1, FORMAT, False,
        )  # fmt: skip
