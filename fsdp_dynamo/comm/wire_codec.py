"""Messages of collectives whose elements travel in fewer bits.

[Note: a message]

One rank's part of a tensor, ``n`` elements in blocks of ``b``, as bytes::

    int8, float8   | flag | scale of block 0 | scale of block 1 | ... | n codes | padding |
    bfloat16       | n elements | padding |

An element is its code times the scale of its block; the scale is the largest absolute value of the
block over the largest code. What a code cannot say:

- A block with a NaN or an infinity has a scale that is none: all of it arrives as NaN.
- ``NO_VALUE`` (-0.0) has the code -128 in int8, if the flag says that there are such.

All ranks decode the same bytes, their own among them, so what they gather is bitwise equal. Codes
of gathers are rounded to the nearest, those of reductions at random if asked for (unbiased), and
sums are taken in fp32 after decoding.

On a CPU the work goes tile by tile through a small buffer: memory that is allocated anew costs ten
times what the arithmetic does. Where the host runs ahead of the device, a tile is all of it.

Source: blockwise quantisation of collectives as in ZeRO++ (arXiv:2306.10209) and QSDP
(arXiv:2302.02390).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fsdp_dynamo.comm import streams
from graph_passes.markers import NO_VALUE
from graph_passes.wire_format import SCALE_BYTES, WireFormat

_LARGEST = {"int8": 127.0, "float8": 448.0}
_CODES = {"int8": torch.int8, "float8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}
_LACKS = -128
_TILE_NUMEL = 1 << 18
_SMALLEST_SCALE = 1e-35
"""Below it, a block arrives as zeros: the inverse of a scale must be a number."""

_generators: dict[torch.device, torch.Generator] = {}


def encode(
    values: torch.Tensor, num_parts: int, wire: WireFormat, may_lack: bool = False
) -> torch.Tensor:
    """Messages of the parts of a tensor, one behind the other.

    Args:
        values: ``(num_parts * n,)``, floating-point.
        num_parts: equally large parts.
        wire: their format.
        may_lack: whether elements may be ``NO_VALUE``, which is to arrive.

    Returns:
        Bytes ``(num_parts * wire.num_bytes(n),)``.
    """
    parts = values.detach().view(num_parts, -1)
    numel = parts.shape[1]
    sent = torch.empty((num_parts, wire.num_bytes(numel)), dtype=torch.uint8, device=values.device)
    codes, scales = _views(sent, numel, wire)
    if not wire.has_scales:
        codes.copy_(parts)
        return sent.view(-1)
    scales[:, 0] = float(may_lack and wire.name == "int8")
    noise = _noise(wire, values.device) if wire.is_stochastic else None
    for tile in _tiles(num_parts, numel, wire, values.device):
        _encode_tile(tile.of(parts), tile.of(codes), tile.scales(scales), wire, noise, may_lack)
    return sent.view(-1)


def decode(output: torch.Tensor, received: torch.Tensor, num_parts: int, wire: WireFormat) -> None:
    """Write the elements of ``num_parts`` messages into ``output`` ``(num_parts * n,)``."""
    parts = output.data.view(num_parts, -1)
    messages = received.view(num_parts, -1)
    numel = parts.shape[1]
    codes, scales = _views(messages, numel, wire)
    if not wire.has_scales:
        parts.copy_(codes)
        return
    lacks = _may_lack(scales, wire)
    for tile in _tiles(num_parts, numel, wire, output.device):
        _decode_tile(tile.of(parts), tile.of(codes), tile.scales(scales), lacks)


def decode_sum(
    output: torch.Tensor, messages: Sequence[torch.Tensor], wire: WireFormat, divisor: float
) -> None:
    """Write the sum of what messages hold, in their order, over ``divisor`` into ``output``.

    Args:
        output: ``(n,)``; the sum is taken in fp32, whatever its dtype.
        messages: one from each rank, of ``n`` elements.
        wire: their format.
        divisor: of the sum.
    """
    flat = output.data.view(-1)
    total = flat if flat.dtype == torch.float32 else flat.to(torch.float32)
    decode(total, messages[0], 1, wire)
    own = torch.empty(min(total.numel(), _tile_numel(flat.device)), device=flat.device)
    for message in messages[1:]:
        codes, scales = _views(message.view(1, -1), total.numel(), wire)
        lacks = wire.has_scales and _may_lack(scales, wire)
        for tile in _tiles(1, total.numel(), wire, flat.device):
            target = tile.of(total.view(1, -1))
            term = own[: target.numel()].view(target.shape)
            if wire.has_scales:
                _decode_tile(term, tile.of(codes), tile.scales(scales), lacks)
            else:
                term.copy_(tile.of(codes))
            target.add_(term)
    if divisor != 1:
        total.div_(divisor)
    if total is not flat:
        flat.copy_(total)


# -- messages ------------------------------------------------------------------------------------


def _views(
    messages: torch.Tensor, numel: int, wire: WireFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``(m, numel)`` and scales ``(m, s)`` of messages ``(m, bytes)``."""
    begin = wire.num_scales(numel) * SCALE_BYTES
    code = _CODES[wire.name]
    end = begin + numel * code.itemsize
    return messages[:, begin:end].view(code), messages[:, :begin].view(torch.float32)


class _Tile:
    """Some blocks of some messages."""

    def __init__(self, rows: slice, begin: int, end: int, block: int) -> None:
        self._rows, self._begin, self._end, self._block = rows, begin, end, block

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """Its elements ``(rows, blocks, block)``, a view of ``(m, numel)``."""
        own = elements[self._rows, self._begin : self._end]
        return own.view(own.shape[0], -1, self._width)

    def scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Its scales ``(rows, blocks, 1)``, a view of ``(m, s)``."""
        first = 1 + self._begin // self._block
        count = (self._end - self._begin) // self._width
        return scales[self._rows, first : first + count].unsqueeze(-1)

    @property
    def _width(self) -> int:
        return min(self._block, self._end - self._begin)


def _tile_numel(device: torch.device) -> int:
    return 1 << 62 if streams.host_runs_ahead(device) else _TILE_NUMEL


def _tiles(num_parts: int, numel: int, wire: WireFormat, device: torch.device) -> Iterator[_Tile]:
    """Tiles that cover all elements; a last, smaller block has tiles of its own."""
    block, most = wire.block_numel, _tile_numel(device)
    whole = numel // block * block
    width = max(block, min(whole, most // block * block))
    rows = max(1, most // max(1, min(width, whole)))
    for first in range(0, num_parts, rows):
        some = slice(first, first + rows)
        for begin in range(0, whole, width):
            yield _Tile(some, begin, min(begin + width, whole), block)
        if whole < numel:
            yield _Tile(some, whole, numel, block)


# -- tiles ---------------------------------------------------------------------------------------


def _noise(wire: WireFormat, device: torch.device) -> torch.Tensor:
    """Numbers in [0, 1), one for each place in a block, other ones on each rank.

    They are drawn beside the user's random numbers.
    """
    if device not in _generators:
        rank = dist.get_rank() if dist.is_initialized() else 0
        _generators[device] = torch.Generator(device).manual_seed(rank)
    return torch.rand(wire.block_numel, generator=_generators[device], device=device)


def _encode_tile(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    wire: WireFormat,
    noise: torch.Tensor | None,
    may_lack: bool,
) -> None:
    largest = _LARGEST[wire.name]
    exact = values.to(torch.float32)
    bounds = exact.abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST_SCALE * largest)
    scales.copy_(bounds / largest)
    scales.masked_fill_(~bounds.isfinite(), torch.nan)
    scaled = exact * (largest / bounds)
    if wire.name == "float8":
        codes.copy_(scaled)
        return
    scaled = scaled.round_() if noise is None else scaled.add_(noise[: scaled.shape[-1]]).floor_()
    codes.copy_(scaled.clamp_(-largest, largest))
    if may_lack:
        codes.masked_fill_((exact == 0) & exact.signbit(), _LACKS)


def _may_lack(scales: torch.Tensor, wire: WireFormat) -> bool:
    """Whether codes may say ``NO_VALUE``; a device's host does not wait to know."""
    if wire.name != "int8":
        return False
    return streams.host_runs_ahead(scales.device) or bool((scales[:, 0] != 0).any())


def _decode_tile(
    output: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, lacks: bool
) -> None:
    output.copy_(codes)
    output.mul_(scales)
    if lacks:
        output.masked_fill_(codes == _LACKS, NO_VALUE)
