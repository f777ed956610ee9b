"""Gather plans: how the shards of a unit become a buffer in which every parameter is contiguous.

Each rank holds some rows of every parameter, one parameter behind the other. The unsharded buffer
holds all rows of the first parameter, then all rows of the second. With two ranks, ``w`` of four
rows, and ``b`` and ``c`` of two elements each::

    shard of rank 0    | w0 w1 | b0 | c0 |       shard of rank 1    | w2 w3 | b1 | c1 |
    unsharded buffer   | w0 w1 w2 w3 | b0 b1 | c0 c1 |

A *direct* slice (``w``) has an all-gather of its own, from its place in the shard to its place in
the buffer. *Packed* slices (``b``, ``c``) are the end of the shard and travel as one message, which
arrives in rank-major order and is copied into place::

    message            | b0 c0 | b1 c1 |  ->  | b0 b1 | c0 c1 |

A packed slice that is sharded along a dimension other than 0 (``w`` of two rows, by columns) is cut
into *blocks* in the buffer, in which the ranks alternate::

    shard of rank 0    | w00 w10 |   shard of rank 1    | w01 w11 |   buffer    | w00 w01 w10 w11 |

A slice that starts at ``start`` in a shard starts at ``N * start`` in the buffer of N ranks. So a
plan does not depend on the number of ranks: to gather shards that M ranks have gathered before, use
the same plan times M (``scaled``). Reductions run in the opposite direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch

from fsdp_dynamo.comm import streams

INDEXED_NUMEL = 1 << 16
"""Messages of at most this many elements are reordered by one indexed copy on the CPU.

It takes half as long as one copy per slice. Indices cost 16 bytes per element, and equal plans
share them.
"""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Unsharded and sharded side of one message: ``(n * N,)`` and ``(n,)``."""


@dataclass(frozen=True)
class GatherPlan:
    """Direct and packed slices of a shard.

    Attributes:
        starts: first element of each direct slice in the shard, ascending. Gaps between slices are
            not gathered.
        numels: elements of each direct slice.
        widths: elements of each packed slice. These follow each other up to the end of the shard;
            gaps among them count as slices.
        packed_start: first element of the first packed slice.
        blocks: number of blocks that each packed slice has in the buffer; empty: one each.
    """

    starts: tuple[int, ...]
    numels: tuple[int, ...]
    widths: tuple[int, ...]
    packed_start: int
    blocks: tuple[int, ...] = ()

    @cached_property
    def packed_numel(self) -> int:
        """Elements of a shard that share one message."""
        return sum(self.widths)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a shard."""
        return self.packed_start + self.packed_numel

    @cached_property
    def is_one_slice(self) -> bool:
        """Whether the buffer is rank-major: the shards in rank order."""
        return self.starts == (0,) and self.numels == (self.shard_numel,)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """First element and end of each part of a shard that belongs to no slice."""
        ends = [start + numel for start, numel in zip(self.starts, self.numels, strict=True)]
        between = zip((0, *ends), (*self.starts, self.packed_start), strict=True)
        return tuple([(begin, end) for begin, end in between if begin < end])

    def scaled(self, factor: int) -> GatherPlan:
        """Plan for ranks that hold ``factor`` shards each, gathered with this plan."""
        return self if factor == 1 else _scaled(self, factor)

    @cached_property
    def all_packed(self) -> GatherPlan:
        """Plan with the same buffer whose slices are all packed."""
        bounds = [0]
        for start, numel in zip(self.starts, self.numels, strict=True):
            bounds += [start] if start > bounds[-1] else []
            bounds += [start + numel] if numel else []
        bounds += [self.packed_start] if self.packed_start > bounds[-1] else []
        widths = [end - begin for begin, end in pairwise(bounds)]
        blocks = (*[1] * len(widths), *self.blocks) if self.blocks else ()
        return plan_of((), (), (*widths, *self.widths), 0, blocks)

    def encode(self) -> list[int]:
        """Return the plan as integers, an argument of operators; ``decode`` is the inverse."""
        blocks = self.blocks or [1] * len(self.widths)
        packed = [number for piece in zip(self.widths, blocks, strict=True) for number in piece]
        return [len(self.starts), self.packed_start, *self.starts, *self.numels, *packed]

    # -- tensors -----------------------------------------------------------------------------------

    def new_shard(self, like: torch.Tensor) -> torch.Tensor:
        """Tensor ``(shard_numel,)`` for a reduction to write to; gaps are zero."""
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
        """Packed part of a shard, or of a buffer of ``size`` ranks (a view)."""
        return tensor[size * self.packed_start :] if self.packed_start else tensor

    def places(self, unsharded: torch.Tensor, size: int) -> list[torch.Tensor]:
        """Packed slices in the buffer (views), each as ``(size, width)``.

        With blocks, each as ``(size, blocks, width // blocks)``.
        """
        widths = [size * width for width in self.widths]
        pieces = torch.split_with_sizes(self.packed(unsharded, size), widths)
        if not self.blocks:
            return [piece.view(size, -1) for piece in pieces]
        pairs = zip(pieces, self.blocks, strict=True)
        return [piece.view(blocks, size, -1).transpose(0, 1) for piece, blocks in pairs]

    def copy_out(self, unsharded: torch.Tensor, message: torch.Tensor, size: int) -> None:
        """Copy a gathered message ``(size * packed_numel,)`` into its places in the buffer."""
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
        """Packed slices of a buffer as a rank-major message ``(size * packed_numel,)``.

        A buffer of one slice is returned as it is.
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
        """Index of each packed element of the buffer in the message, and the inverse."""
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
        """Copy of the shard of ``rank`` that a buffer of ``size`` ranks holds."""
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
    """Return the shared plan with these fields, without empty slices.

    A shard that is a single packed slice becomes a direct slice, which needs no message.
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
    """Plan whose buffer is rank-major: the shards in rank order."""
    return _shared((0,), (shard_numel,), (), shard_numel)


@lru_cache(maxsize=4096)
def _decoded(numbers: tuple[int, ...]) -> GatherPlan:
    num_direct, packed_start = numbers[:2]
    packed = 2 + 2 * num_direct
    starts, numels = numbers[2 : 2 + num_direct], numbers[2 + num_direct : packed]
    return plan_of(starts, numels, numbers[packed::2], packed_start, numbers[packed + 1 :: 2])


def decode(numbers: Sequence[int]) -> GatherPlan:
    """Return the plan from which ``GatherPlan.encode`` made these integers."""
    return _decoded(tuple(numbers))
