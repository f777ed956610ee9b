"""Encode and decode messages of collectives whose elements travel in fewer bits.

[Note: a message]

One rank's part of a tensor, ``n`` elements in blocks of ``b``, is encoded to these bytes::

    int8, int4, float8   | flag | scale of block 0 | scale of block 1 | ... | codes |
    bfloat16             | n elements |

Padding aligns the first scale, the codes and the end to 16 bytes.

An element is its code times the scale of its block. The scale is the largest absolute value of the
block divided by the largest code. Special values:

- A block that contains a NaN or an infinity has that value as its scale, and arrives as NaN.
- ``NO_VALUE`` (-0.0) has the smallest code of an integer format, if the flag is set.

Two codes of int4 share a byte: the first half of a block is in the lower bits, the second half in
the upper bits.

All ranks decode the same bytes, including those they sent, so they gather bitwise equal values.
All-gathers round to nearest. Reductions round stochastically (unbiased) on request, sum in fp32
after decoding, and never encode a rank's own part.

Source: blockwise quantization of collectives as in ZeRO++ (arXiv:2306.10209) and QSDP
(arXiv:2302.02390).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol

import torch

from fsdp_dynamo.comm import streams, wire_kernels
from graph_passes.wire_format import HEADER_SCALES, WireFormat

_CODES = {
    "int8": torch.int8,
    "int4": torch.uint8,
    "float8": torch.float8_e4m3fn,
    "bfloat16": torch.bfloat16,
}


class Kernels(Protocol):
    """Three kernels that turn elements into messages and back.

    ``parts`` are ``(m, n)``, ``messages`` ``(m, bytes)``. On a device each call is one launch.
    """

    def encode(
        self,
        parts: torch.Tensor,
        messages: torch.Tensor,
        wire: WireFormat,
        may_lack: bool,
        own: int | None = None,
    ) -> None:
        """Write one message per row of ``parts`` except ``own``."""

    def decode(self, parts: torch.Tensor, messages: torch.Tensor, wire: WireFormat) -> None:
        """Write the elements of each message to a row of ``parts``."""

    def add(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        messages: torch.Tensor | Sequence[torch.Tensor],
        wire: WireFormat,
        divisor: float,
        skipped: int,
    ) -> None:
        """Add all rows of ``messages`` but ``skipped`` to ``own`` in fp32; divide the sum."""


@lru_cache
def kernels_of(device: torch.device, wire: WireFormat) -> Kernels:
    """Return the kernels of a device: Triton's on CUDA, otherwise torch's on tiles."""
    is_cuda = device.type == "cuda" and torch.version.cuda is not None
    if not is_cuda or find_spec("triton") is None:
        return _OnTiles()
    least = (8, 9) if wire.name == "float8" else (8, 0)
    if torch.cuda.get_device_capability(device) < least:
        return _OnTiles()
    from fsdp_dynamo.comm import wire_triton  # Triton may not be installed

    return wire_triton


def encode(
    values: torch.Tensor,
    num_parts: int,
    wire: WireFormat,
    may_lack: bool = False,
    own: int | None = None,
) -> torch.Tensor:
    """Encode the parts of a tensor; the messages follow each other in the result.

    Args:
        values: ``(num_parts * n,)``, floating-point; the result is ``(num_parts *
            wire.num_bytes(n),)``.
        num_parts: number of parts of equal size.
        may_lack: whether elements may be ``NO_VALUE``, which must arrive as such.
        own: part whose message stays uninitialized, if any.
    """
    parts = values.detach().view(num_parts, -1)
    size = (num_parts, wire.num_bytes(parts.shape[1]))
    sent = torch.empty(size, dtype=torch.uint8, device=parts.device)
    kernels_of(parts.device, wire).encode(parts, sent, wire, may_lack, own)
    return sent.view(-1)


def decode(output: torch.Tensor, received: torch.Tensor, num_parts: int, wire: WireFormat) -> None:
    """Write the elements of ``num_parts`` messages to ``output`` ``(num_parts * n,)``."""
    kernels = kernels_of(output.device, wire)
    kernels.decode(output.data.view(num_parts, -1), received.view(num_parts, -1), wire)


def add_decoded(
    output: torch.Tensor,
    own: torch.Tensor,
    messages: torch.Tensor | Sequence[torch.Tensor],
    wire: WireFormat,
    divisor: float,
    skipped: int,
) -> None:
    """Write the sum of a rank's own part and of decoded messages, divided, to ``output`` ``(n,)``.

    Args:
        output: may be ``own``.
        own: this rank's part ``(n,)``; the sum is taken in fp32, whatever its dtype.
        messages: ``(m, bytes)``; on CPUs also a sequence of messages, added one by one.
        divisor: divides the sum.
        skipped: index of a message that is left out.
    """
    flat = output.data.view(-1)
    kernels_of(flat.device, wire).add(flat, own.view(-1), messages, wire, divisor, skipped)


class _OnTiles:
    """Kernels of ``wire_kernels``."""

    def encode(
        self,
        parts: torch.Tensor,
        messages: torch.Tensor,
        wire: WireFormat,
        may_lack: bool,
        own: int | None = None,
    ) -> None:
        for some in _without(own, len(parts)):
            _encode_rows(parts[some], messages[some], wire, may_lack)

    def decode(self, parts: torch.Tensor, messages: torch.Tensor, wire: WireFormat) -> None:
        codes, scales = _views(messages, parts.shape[1], wire)
        if not wire.has_scales:
            parts.copy_(codes)
            return
        lacks = _may_lack(scales, wire)
        for values, some, their_scales in _tiles(wire, [parts], [codes], [scales]):
            wire_kernels.decode(values, some, their_scales, lacks)

    def add(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        messages: torch.Tensor | Sequence[torch.Tensor],
        wire: WireFormat,
        divisor: float,
        skipped: int,
    ) -> None:
        if output.data_ptr() != own.data_ptr():
            output.copy_(own)
        flat = output.view(1, -1)
        total = flat if flat.dtype == torch.float32 else flat.to(torch.float32)
        if isinstance(messages, torch.Tensor):
            rows = [messages[some] for some in _without(skipped, len(messages))]
        else:
            rows = [one.view(1, -1) for i, one in enumerate(messages) if i != skipped]
        sent = [_views(some, flat.shape[1], wire) for some in rows]
        codes, scales = [one for one, _ in sent], [one for _, one in sent]
        lacks = [_may_lack(one, wire) for one in scales]
        last = len(sent) - 1
        for target, *tiles in _tiles(wire, [total], codes, scales if wire.has_scales else []):
            for i, may_lack in enumerate(lacks):
                their_scales = tiles[len(codes) + i] if wire.has_scales else None
                over = divisor if i == last else 1.0
                wire_kernels.add(target, tiles[i], their_scales, may_lack, over)
        if total is not flat:
            flat.copy_(total)


def _without(index: int | None, length: int) -> list[slice]:
    """Slices of a sequence that leave out one index."""
    if index is None:
        return [slice(0, length)]
    return [some for some in (slice(0, index), slice(index + 1, length)) if some.start < some.stop]


def _views(
    messages: torch.Tensor, numel: int, wire: WireFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``(m, c)`` and header with scales ``(m, s)`` of messages ``(m, bytes)``."""
    begin = wire.codes_begin(numel)
    code = _CODES[wire.name]
    end = begin + wire.num_codes(numel) * code.itemsize
    return messages[:, begin:end].view(code), messages[:, :begin].view(torch.float32)


def _tiles(
    wire: WireFormat,
    elements: Sequence[torch.Tensor],
    codes: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of the same blocks of elements ``(m, n)``, codes ``(m, c)`` and scales ``(m, s)``.

    Each tile's views are ``(..., blocks, block)``, those of scales ``(..., blocks, 1)``. A smaller
    last block has tiles of its own. If elements have one row and codes several, a tile spans all
    rows.
    """
    numel, block = elements[0].shape[1], wire.block_numel
    most = wire_kernels.tile_numel(elements[0].device)
    whole, rest = divmod(numel, block)
    for first, count, width in ((0, whole, block), (whole, 1, rest)):
        if count and width:
            begin, coded = wire.num_codes(first * block), wire.num_codes(width)
            views = [one[:, first * block :][:, : count * width] for one in elements]
            views = [one.unflatten(1, (count, width)) for one in views]
            sent = [one[:, begin : begin + count * coded] for one in codes]
            views += [one.unflatten(1, (count, coded)) for one in sent]
            begin = HEADER_SCALES + first
            views += [one[:, begin : begin + count].unsqueeze(-1) for one in scales]
            rows, num_blocks = max(map(len, views)), max(1, most // width)
            if rows > len(elements[0]):
                pieces = [_cut_all_rows(view, max(1, num_blocks // rows)) for view in views]
            else:
                pieces = [_cut(view, num_blocks) for view in views]
            yield from zip(*pieces, strict=True)


def _cut(view: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Split a view ``(m, blocks, width)`` into tiles of at most ``most`` blocks.

    A tile is part of one row, ``(blocks, width)``, or consists of whole rows.
    """
    for rows in view.split(max(1, most // view.shape[1])):
        if len(rows) > 1:
            yield rows
        else:
            yield from rows[0].split(most)


def _cut_all_rows(view: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Split a view into tiles of at most ``most`` blocks of every row."""
    for piece in view.split(most, 1):
        yield piece if len(piece) > 1 else piece[0]


def _encode_rows(
    parts: torch.Tensor, messages: torch.Tensor, wire: WireFormat, may_lack: bool
) -> None:
    """Write one message per row of ``parts``."""
    codes, scales = _views(messages, parts.shape[1], wire)
    if not wire.has_scales:
        codes.copy_(parts)
        return
    scales[:, :HEADER_SCALES] = float(may_lack and wire.is_integer)
    for values, some, their_scales in _tiles(wire, [parts], [codes], [scales]):
        wire_kernels.encode(values, some, their_scales, wire, may_lack)


def _may_lack(scales: torch.Tensor, wire: WireFormat) -> bool:
    """Whether codes may stand for ``NO_VALUE``; always on a device, whose host must not wait."""
    if not wire.is_integer:
        return False
    return streams.host_runs_ahead(scales.device) or bool((scales[:, 0] != 0).any())
