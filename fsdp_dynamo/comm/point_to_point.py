"""All-gathers and exchanges for gloo, made of one send and one receive per rank and message.

gloo's own all-gather receives into an internal buffer and copies from there, on a thread that
competes with the computation. Its all-to-all copies too, and also transfers the rank's own part. A
send reads the caller's tensor and a receive writes it: only the rank's own shard is copied, and
each rank sends no more bytes than in a ring.

Messages between two ranks match by tag, in the order of issue. All ranks issue a group's
collectives in the same order, and tags differ between kinds and units (``collective_log``), so
messages of different collectives never match. Each group has its own connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from fsdp_dynamo.comm.gather_plan import Pair


@runtime_checkable
class Work(Protocol):
    """Operation in flight."""

    def wait(self) -> object:
        """Wait until the operation is complete."""


class UnreachableError(RuntimeError):
    """Message that gloo refuses at once, because the connection is closed already.

    Attributes:
        peer: global rank at the other end.
    """

    def __init__(self, error: RuntimeError, group: dist.ProcessGroup, rank: int) -> None:
        super().__init__(str(error))
        self.peer = dist.get_global_rank(group, rank)


def _others(group: dist.ProcessGroup) -> Iterator[int]:
    """Other ranks of a group, starting with the next, so that ranks start with different peers."""
    rank, size = group.rank(), group.size()
    return ((rank + step) % size for step in range(1, size))


def peer_of(group: dist.ProcessGroup, works: Sequence[Work], position: int) -> int | None:
    """Global rank at the other end of the work at ``position``.

    Returns ``None`` if the works are not the sends and receives of ``_messages``.
    """
    others = list(_others(group))
    if not others or not works or len(works) % (2 * len(others)):
        return None
    each = len(works) // (2 * len(others))  # messages from, and to, each rank
    return dist.get_global_rank(group, others[position // each % len(others)])


def issue_all_gathers(pairs: Sequence[Pair], group: dist.ProcessGroup, tag: int) -> list[Work]:
    """Start gathering every rank's shards.

    Raises ``UnreachableError`` if a rank is gone.

    Args:
        pairs: outputs ``(n * world_size,)`` and shards ``(n,)``, all contiguous. A shard may be the
            rank's own slot of its output; otherwise it is copied there. All must stay alive and
            unchanged until all works have been waited for.
        tag: tag of the messages, which match in the order of ``pairs``.
    """
    rank, size = group.rank(), group.size()
    slots, shards, own = [], [], []
    for output, shard in pairs:
        assert output.is_contiguous()
        assert shard.is_contiguous()
        if output.numel() == 0:
            continue
        # ``data``: a collective neither bumps its output's version nor is differentiated.
        slots.append(output.data.chunk(size))
        shards.append(shard.data)
        # Before the first send, since an error in between would leave the other ranks waiting.
        if slots[-1][rank].data_ptr() != shard.data_ptr():
            own.append((slots[-1][rank], shards[-1].view_as(slots[-1][rank])))
    works = _messages(group, tag, slots, [[shard] * size for shard in shards])
    for slot, part in own:
        slot.copy_(part)
    return works


def issue_exchanges(
    pairs: Sequence[Pair], group: dist.ProcessGroup, tag: int
) -> tuple[list[Work], list[list[torch.Tensor]]]:
    """Start sending each rank its chunks of unsharded tensors.

    Takes pairs of an unsharded tensor ``(n * world_size,)`` and this rank's output ``(n,)``.
    Otherwise like ``issue_all_gathers``.

    Returns:
        The works and, for each pair, the parts ``(n,)`` of this rank's chunk in rank order. This
            rank's part is a view of the unsharded tensor. One of the first two parts is the output,
            the rest are views of one buffer of ``(world_size - 2) * n`` elements.
    """
    rank, size = group.rank(), group.size()
    received, sent = [], []
    for unsharded, output in pairs:
        assert unsharded.is_contiguous()
        assert output.is_contiguous()
        whole = unsharded.data.view(-1)
        chunks = whole.chunk(size) if whole.numel() else [whole] * size
        own = chunks[rank]
        parts = list(own.new_empty((max(size - 2, 0), own.numel())))
        if size > 1:
            parts.insert(0, output.data.view(-1))
        parts.insert(rank, own)
        received.append(parts)
        sent.append(chunks)
    return _messages(group, tag, received, sent), received


def _messages(
    group: dist.ProcessGroup,
    tag: int,
    received: Sequence[Sequence[torch.Tensor]],
    sent: Sequence[Sequence[torch.Tensor]],
) -> list[Work]:
    """Receive one tensor of each list from every other rank, and send one of each; skip empty ones.

    Works are ordered by direction (receives first), then rank, then list: ``peer_of`` relies on it.
    """
    works: list[Work] = []
    try:
        for r in _others(group):
            for tensors in received:
                if tensors[r].numel():
                    works.append(group.recv([tensors[r]], r, tag))
        for r in _others(group):
            for tensors in sent:
                if tensors[r].numel():
                    works.append(group.send([tensors[r]], r, tag))
    except RuntimeError as error:
        raise UnreachableError(error, group, r) from error
    return works


def sum_parts(output: torch.Tensor, parts: Sequence[torch.Tensor], divisor: float) -> None:
    """Write the sum of ``parts``, added in order and divided by ``divisor``, to ``output``.

    ``output`` may be one of the first two parts. More than two low-precision parts are summed in
    float32 and rounded once, as in ``torch.mean``; two parts need no float32, since halving is
    exact.
    """
    flat = output.data.view(-1)
    widened = len(parts) > 2 and flat.dtype in (torch.bfloat16, torch.float16)
    if widened or len(parts) == 1:
        total, rest = parts[0].to(torch.float32 if widened else flat.dtype), parts[1:]
    else:
        total, rest = torch.add(parts[0], parts[1], out=flat), parts[2:]
    for part in rest:
        total.add_(part)
    if divisor != 1:
        total.div_(divisor)
    if total is not flat:
        flat.copy_(total)


def all_reduce_max(values: torch.Tensor, group: dist.ProcessGroup, tag: int) -> None:
    """Replace values by their maxima over the ranks of a group; blocks.

    gloo's own all-reduce matches any other one by order alone: it would mix up values with the
    gradients of a rank that does something else. In round k, each rank sends to the one ``2**k``
    behind it and receives from the one as far before it.

    Args:
        values: changed in place.
        tag: equal on all ranks, and not that of any other message.
    """
    rank, size = group.rank(), group.size()
    distance = 1
    while distance < size:
        received = torch.empty_like(values)
        works = [
            group.recv([received], (rank - distance) % size, tag),
            group.send([values.clone()], (rank + distance) % size, tag),
        ]
        for work in works:
            work.wait()
        torch.maximum(values, received, out=values)
        distance *= 2
