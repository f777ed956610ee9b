"""Collectives of a compiled graph at run time.

``lowering`` replaces a graph's functional collectives by these functions after all passes have run.
Each starts its collective and returns the output at once. The output must not be read before
``wait`` returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist

from fsdp_dynamo.comm import collectives
from fsdp_dynamo.comm.gather_plan import decode
from fsdp_dynamo.comm.in_flight import InFlight
from fsdp_dynamo.comm.streams import side_streams
from fsdp_dynamo.graph_mode import offloading, trace
from fsdp_dynamo.health.graph_agreement import require_agreement
from graph_passes.gradients.producers import Ranges
from graph_passes.text.listing import Label
from graph_passes.wire_format import WireFormat

_in_flight: dict[int, InFlight] = {}
_absent: dict[tuple[str, int], list[Ranges]] = {}


def _group(name: str, fingerprint: str) -> dist.ProcessGroup:
    """Return the group of this name. A fingerprint: require that all ranks run this graph."""
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    if fingerprint:
        require_agreement(group, fingerprint)
    return group


_Issue = Callable[
    [
        Sequence[torch.Tensor],
        Sequence[torch.Tensor],
        dist.ProcessGroup,
        collectives.Events,
        Sequence[str],
        collectives.Wires,
        collectives.Plans,
    ],
    list[InFlight],
]
_label_of = lru_cache(maxsize=4096)(Label.decode)


def _launch(
    issue: _Issue,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    texts: Sequence[str],
    plans: collectives.Plans,
) -> None:
    """Issue several collectives as one launch, and record each of them.

    On a device, collectives that also copy (packed parameters) run on a side stream, so that
    neither the copies nor the collective hold up the computing stream.
    """
    record = trace.current()
    labels = [_label_of(text) for text in texts]
    for label in labels:
        if label.kind != "all_gather":
            _absent.setdefault((label.unit, label.ordinal), []).append(label.absent)
    noted = record.launch(labels, outputs, inputs)
    wires = [WireFormat.decode(label.wire) for label in labels]
    units = [label.unit for label in labels]
    streams = side_streams(outputs[0].device)
    if streams is None or not any(plan is not None and plan.widths for plan in plans):
        issued = issue(outputs, inputs, group, noted, units, wires, plans)
    elif labels[0].kind == "all_gather":
        streams.settle()  # the computing stream may still use the outputs' memory
        with streams.gathering():
            issued = issue(outputs, inputs, group, noted, units, wires, plans)
            pairs = zip(issued, inputs, strict=True)
            issued = [one.handed_over(streams, shard) for one, shard in pairs]  # copied out
    else:
        streams.replicas_follow()
        with streams.over_replicas():  # copies in
            issued = issue(outputs, inputs, group, noted, units, wires, plans)
        follow = streams.replicas_follow  # before the memory of the messages is reused
        issued = [
            InFlight([one], (*one.buffers, given), finish=follow)
            for one, given in zip(issued, inputs, strict=True)
        ]
    for output, in_flight in zip(outputs, issued, strict=True):
        _in_flight[output.data_ptr()] = in_flight
    record.launched(labels)


def all_gather_together(
    shards: Sequence[torch.Tensor],
    world_size: int,
    group: str,
    plans: Sequence[Sequence[int]],
    texts: Sequence[str],
    fingerprint: str = "",
) -> list[torch.Tensor]:
    """Start all-gathers as one launch and return the unsharded tensors.

    Args:
        shards: ``(n_i,)`` each, all of one dtype.
        world_size: size of the group.
        group: registered name of the group.
        plans: encoded gather plan of each shard.
        texts: encoded ``Label`` of each collective.
        fingerprint: of the graph; given with the first launch of a graph only.
    """
    ranks = _group(group, fingerprint)
    shards = [shard.contiguous() for shard in shards]
    outputs = [shard.new_empty(shard.numel() * world_size) for shard in shards]
    _launch(collectives.issue_all_gathers, outputs, shards, ranks, texts, [*map(decode, plans)])
    return outputs


def all_gather(
    shard: torch.Tensor,
    world_size: int,
    group: str,
    plan: Sequence[int],
    text: str,
    fingerprint: str = "",
) -> torch.Tensor:
    """Start an all-gather and return the unsharded tensor."""
    return all_gather_together([shard], world_size, group, [plan], [text], fingerprint)[0]


def all_gather_from_host_together(
    shards: Sequence[torch.Tensor],
    device: str,
    dtype: torch.dtype,
    world_size: int,
    group: str,
    plans: Sequence[Sequence[int]],
    texts: Sequence[str],
    fingerprint: str = "",
) -> list[torch.Tensor]:
    """Start all-gathers of shards in host memory, which are copied to ``device`` first."""
    ranks = _group(group, fingerprint)

    def issue(outputs: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        decoded = [*map(decode, plans)]
        _launch(collectives.issue_all_gathers, outputs, sent, ranks, texts, decoded)

    return offloading.send_from_host(shards, device, dtype, world_size, issue)


def all_gather_from_host(
    shard: torch.Tensor,
    device: str,
    dtype: torch.dtype,
    world_size: int,
    group: str,
    plan: Sequence[int],
    text: str,
    fingerprint: str = "",
) -> torch.Tensor:
    """Start an all-gather of a shard in host memory."""
    return all_gather_from_host_together(
        [shard], device, dtype, world_size, group, [plan], [text], fingerprint
    )[0]


def reduce_scatter_together(
    unsharded: Sequence[torch.Tensor],
    world_size: int,
    group: str,
    plans: Sequence[Sequence[int]],
    texts: Sequence[str],
    fingerprint: str = "",
) -> list[torch.Tensor]:
    """Start means over ranks as one launch and return this rank's parts.

    Args:
        unsharded: ``(n_i * world_size,)`` each, all of one dtype.
    """
    ranks = _group(group, fingerprint)
    unsharded = [whole.contiguous() for whole in unsharded]
    decoded = [*map(decode, plans)]
    outputs = [plan.new_shard(whole) for whole, plan in zip(unsharded, decoded, strict=True)]
    if unsharded[0].dtype == torch.float16:  # divided in place before the sum
        unsharded = [whole.clone() for whole in unsharded]
    lacks = [bool(_label_of(text).absent) for text in texts]
    issue = partial(collectives.issue_reduce_means, may_lack=lacks)
    _launch(issue, outputs, unsharded, ranks, texts, decoded)
    return outputs


def reduce_scatter(
    unsharded: torch.Tensor,
    world_size: int,
    group: str,
    plan: Sequence[int],
    text: str,
    fingerprint: str = "",
) -> torch.Tensor:
    """Start a mean over ranks and return this rank's part."""
    return reduce_scatter_together([unsharded], world_size, group, [plan], [text], fingerprint)[0]


def all_reduce_together(
    tensors: Sequence[torch.Tensor], group: str, texts: Sequence[str], fingerprint: str = ""
) -> list[torch.Tensor]:
    """Start means over ranks of copies as one launch and return the copies."""
    ranks = _group(group, fingerprint)
    outputs = [tensor.contiguous().clone() for tensor in tensors]
    plans = [None] * len(outputs)
    _launch(collectives.issue_reduce_means, outputs, outputs, ranks, texts, plans)
    return outputs


def all_reduce(tensor: torch.Tensor, group: str, text: str, fingerprint: str = "") -> torch.Tensor:
    """Start a mean over ranks of a copy and return the copy."""
    return all_reduce_together([tensor], group, [text], fingerprint)[0]


def wait(output: torch.Tensor, source: torch.Tensor | None, text: str) -> torch.Tensor:
    """Wait for a collective and return its output.

    Args:
        output: what the function that started the collective returned.
        source: input of the collective, an argument only to keep it alive until here; ``None`` if
            the collective itself keeps what it sends.
        text: encoded ``Label`` of the wait.
    """
    in_flight = _in_flight.pop(output.data_ptr())
    record, label = trace.current(), _label_of(text)
    record.wait(label)
    try:
        in_flight.wait()
    except BaseException:
        abandon()
        raise
    offloading.free_sent(output)
    record.waited(label, output)
    return output


def take_absent() -> dict[tuple[str, int], list[Ranges]]:
    """Return and forget the ranges without a gradient in what was reduced since the last call.

    Returns:
        By unit FQN and ordinal of the flat parameter: for each reduction, ranges of elements.
    """
    taken = dict(_absent)
    _absent.clear()
    return taken


def abandon() -> None:
    """Drop the collectives that a failed graph has left in flight."""
    _absent.clear()
    while _in_flight:
        _in_flight.popitem()[1].abandon()
    offloading.abandon()
