"""Gather plans: how the shards of a unit become a buffer in which every parameter is contiguous.

Each rank holds a few rows of every parameter, one parameter behind the other; the unsharded buffer
has all rows of the first parameter, then all rows of the second one. With two ranks, ``w`` of four
rows, ``b`` and ``c`` of two elements each::

    shard of rank 0    | w0 w1 | b0 | c0 |       shard of rank 1    | w2 w3 | b1 | c1 |
    unsharded buffer   | w0 w1 w2 w3 | b0 b1 | c0 c1 |

A *direct* slice (``w``) is gathered by itself, from its place in the shard into its place in the
buffer. *Packed* pieces (``b``, ``c``) are the end of the shard, which is one message; what arrives
is rank-major and is copied into place::

    message            | b0 c0 | b1 c1 |  ->  | b0 b1 | c0 c1 |

A packed piece that is divided along another dimension than the first (``w``, two rows, by columns)
lies in the buffer in *blocks*, those of one rank between those of the others::

    shard of rank 0    | w00 w10 |   shard of rank 1    | w01 w11 |   buffer    | w00 w01 w10 w11 |

What begins at ``start`` in a shard begins at ``N * start`` in the buffer of N ranks. So a plan does
not know the number of ranks, and what M of them have gathered is gathered by others with the same
plan times M (``scaled``). Reductions go the same way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch

from fsdp_dynamo.comm import streams

INDEXED_NUMEL = 1 << 16
"""Messages of at most so many elements are brought into place by one indexed copy where the host
computes, too: it takes half as long as a copy of each piece. Indices take sixteen bytes for each
element; plans that are equal share them."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""The unsharded and the sharded side of one message: ``(n * N,)`` and ``(n,)``."""


@dataclass(frozen=True)
class GatherPlan:
    """Slices of a shard that are gathered by themselves, and those that share a message.

    Attributes:
        starts: first element of each direct slice in the shard, ascending. Between slices there may
            be gaps, which are not gathered.
        numels: elements of each direct slice.
        widths: elements of each packed piece, which are one behind the other up to the end of the
            shard. Gaps among them are pieces, too.
        packed_start: where the first of these begins.
        blocks: into how many blocks each packed piece is cut in the buffer; empty: all into one.
    """

    starts: tuple[int, ...]
    numels: tuple[int, ...]
    widths: tuple[int, ...]
    packed_start: int
    blocks: tuple[int, ...] = ()

    @cached_property
    def packed_numel(self) -> int:
        """Elements of a shard that share a message."""
        return sum(self.widths)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a shard."""
        return self.packed_start + self.packed_numel

    @cached_property
    def is_one_slice(self) -> bool:
        """Whether the buffer is rank-major: the shards one behind the other."""
        return self.starts == (0,) and self.numels == (self.shard_numel,)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """First element and end of what belongs to no slice and no piece of a shard."""
        ends = [start + numel for start, numel in zip(self.starts, self.numels, strict=True)]
        between = zip((0, *ends), (*self.starts, self.packed_start), strict=True)
        return tuple([(begin, end) for begin, end in between if begin < end])

    def scaled(self, factor: int) -> GatherPlan:
        """The plan of ranks that hold ``factor`` shards each, gathered with this plan."""
        return self if factor == 1 else _scaled(self, factor)

    @cached_property
    def all_packed(self) -> GatherPlan:
        """A plan that fills an equal buffer from one message."""
        bounds = [0]
        for start, numel in zip(self.starts, self.numels, strict=True):
            bounds += [start] if start > bounds[-1] else []
            bounds += [start + numel] if numel else []
        bounds += [self.packed_start] if self.packed_start > bounds[-1] else []
        widths = [end - begin for begin, end in pairwise(bounds)]
        blocks = (*[1] * len(widths), *self.blocks) if self.blocks else ()
        return plan_of((), (), (*widths, *self.widths), 0, blocks)

    def encode(self) -> list[int]:
        """As integers, an argument of operators."""
        blocks = self.blocks or [1] * len(self.widths)
        packed = [number for piece in zip(self.widths, blocks, strict=True) for number in piece]
        return [len(self.starts), self.packed_start, *self.starts, *self.numels, *packed]

    # -- tensors -----------------------------------------------------------------------------------

    def new_shard(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor ``(shard_numel,)`` for a reduction to write; zero where it writes nothing."""
        shard = like.new_empty(self.shard_numel)
        for begin, end in self.gaps:
            shard[begin:end].zero_()
        return shard

    def direct(self, unsharded: torch.Tensor, shard: torch.Tensor, size: int) -> list[Pair]:
        """Both sides of each direct slice among ``size`` ranks (views)."""
        if not self.starts:
            return []
        return [
            (unsharded[size * start : size * (start + numel)], shard[start : start + numel])
            for start, numel in zip(self.starts, self.numels, strict=True)
        ]

    def packed(self, tensor: torch.Tensor, size: int = 1) -> torch.Tensor:
        """The end of a shard, or of a buffer of ``size`` ranks, that is packed (a view)."""
        return tensor[size * self.packed_start :] if self.packed_start else tensor

    def places(self, unsharded: torch.Tensor, size: int) -> list[torch.Tensor]:
        """The packed pieces in the buffer (views), each as ``(size, width)``.

        With blocks, each as ``(size, blocks, width // blocks)``.
        """
        widths = [size * width for width in self.widths]
        pieces = torch.split_with_sizes(self.packed(unsharded, size), widths)
        if not self.blocks:
            return [piece.view(size, -1) for piece in pieces]
        pairs = zip(pieces, self.blocks, strict=True)
        return [piece.view(blocks, size, -1).transpose(0, 1) for piece, blocks in pairs]

    def copy_out(self, unsharded: torch.Tensor, message: torch.Tensor, size: int) -> None:
        """Bring a gathered message ``(size * packed_numel,)`` into its places in the buffer."""
        if _is_indexed(message):
            order, _ = self._orders(size, message.device)
            torch.index_select(message, 0, order, out=self.packed(unsharded, size))
        elif self.blocks:
            places = self.places(unsharded, size)
            pieces = message.view(size, -1).split_with_sizes(self.widths, 1)
            pairs = zip(pieces, places, strict=True)
            torch._foreach_copy_(places, [piece.view(place.shape) for piece, place in pairs])
        else:
            rows = message.view(size, -1)
            torch.split_with_sizes_copy(rows, self.widths, 1, out=self.places(unsharded, size))

    def message_of(self, unsharded: torch.Tensor, size: int) -> torch.Tensor:
        """The packed pieces of a buffer as a message: rank-major, ``(size * packed_numel,)``.

        A buffer of one slice is a message as it is.
        """
        if self.is_one_slice:
            return unsharded
        packed = self.packed(unsharded, size)
        if _is_indexed(packed):
            _, order = self._orders(size, packed.device)
            return torch.index_select(packed, 0, order)
        places = self.places(unsharded, size)
        if self.blocks:
            places = [place.flatten(1) for place in places]
        return torch.cat(places, 1).view(-1)

    def _orders(self, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """For each packed element of the buffer its place in the message, and the other way."""
        known = self._known_orders.get((size, device))
        if known is None:
            numbers = torch.arange(size * self.packed_numel, device=device)
            columns = numbers.view(size, -1).split_with_sizes(self.widths, 1)
            pairs = zip(columns, self.blocks or [1] * len(columns), strict=True)
            pieces = [column.reshape(size, blocks, -1).transpose(0, 1) for column, blocks in pairs]
            order = torch.cat([piece.reshape(-1) for piece in pieces])
            known = self._known_orders[size, device] = order, torch.argsort(order)
        return known

    @cached_property
    def _known_orders(self) -> dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]]:
        return {}

    def shard_of(self, unsharded: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """A copy of the part that a rank has of a buffer."""
        plan = self.all_packed
        if plan.is_one_slice:
            return unsharded.view(size, -1)[rank].clone()
        return torch.cat([place[rank].reshape(-1) for place in plan.places(unsharded, size)])


@lru_cache(maxsize=1024)
def _scaled(plan: GatherPlan, factor: int) -> GatherPlan:
    starts, numels, widths = (
        tuple([number * factor for number in numbers])
        for numbers in (plan.starts, plan.numels, plan.widths)
    )
    return _shared(starts, numels, widths, plan.packed_start * factor, plan.blocks)


def _is_indexed(packed: torch.Tensor) -> bool:
    return packed.numel() <= INDEXED_NUMEL and not streams.host_runs_ahead(packed.device)


def plan_of(
    starts: Sequence[int],
    numels: Sequence[int],
    widths: Sequence[int],
    packed_start: int,
    blocks: Sequence[int] = (),
) -> GatherPlan:
    """A plan, without pieces that have no elements; a shard that is one piece needs no message.

    Args:
        starts: as of ``GatherPlan``.
        numels: as of ``GatherPlan``.
        widths: as of ``GatherPlan``.
        packed_start: as of ``GatherPlan``.
        blocks: as of ``GatherPlan``.
    """
    pieces = [piece for piece in zip(widths, blocks or [1] * len(widths), strict=True) if piece[0]]
    widths, blocks = [width for width, _ in pieces], [number for _, number in pieces]
    has_blocks = any(number > 1 for number in blocks)
    if packed_start == 0 and len(widths) <= 1 and not has_blocks:
        return one_slice(sum(widths))
    kept = [(start, numel) for start, numel in zip(starts, numels, strict=True) if numel]
    return _shared(
        tuple([start for start, _ in kept]),
        tuple([numel for _, numel in kept]),
        tuple(widths),
        packed_start,
        tuple(blocks) if has_blocks else (),
    )


_shared = lru_cache(maxsize=4096)(GatherPlan)


def one_slice(shard_numel: int) -> GatherPlan:
    """The plan whose buffer is rank-major: the shards one behind the other."""
    return _shared((0,), (shard_numel,), (), shard_numel)


@lru_cache(maxsize=4096)
def _decoded(numbers: tuple[int, ...]) -> GatherPlan:
    num_direct, packed_start = numbers[:2]
    packed = 2 + 2 * num_direct
    starts, numels = numbers[2 : 2 + num_direct], numbers[2 + num_direct : packed]
    return plan_of(starts, numels, numbers[packed::2], packed_start, numbers[packed + 1 :: 2])


def decode(numbers: Sequence[int]) -> GatherPlan:
    """Back from ``GatherPlan.encode``."""
    return _decoded(tuple(numbers))
