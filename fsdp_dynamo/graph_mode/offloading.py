"""Copies between host and device in a compiled graph, for units whose shards are offloaded.

A traced graph holds two operators, which copy on the computing stream::

    shard (host) -> to_device -> all_gather -> wait -> ...      ... -> wait -> to_host -> gradient

The lowering moves the copies to other streams:

- A copy and its all-gather become one call. The copy runs on the stream of the gathers, when the
  graph reaches it; the all-gather waits for it, the computing stream does not.
- The copy of a shard that is not gathered becomes a start on the same stream, and an end at which
  the computing stream waits. Each starts where the one before ends.
- Gradients are copied on a stream of their own. The host waits for all of them once, when the
  backward is over (``finish_copies``). Gradients that the graph sums (a unit that is called twice)
  are summed on the device first.

Where the host does not run ahead (CPUs), every copy is complete when its call returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fsdp_dynamo.comm.streams import HostCopy, SideStreams, StreamEvent, side_streams

_copies: deque[HostCopy] = deque()
_staged: dict[int, tuple[SideStreams, torch.Tensor]] = {}
"""By address of an all-gather's output: the copy that it sends."""
_arriving: dict[int, StreamEvent] = {}
"""By address of a copy that no all-gather sends: the event of its end."""


# -- to the device ---------------------------------------------------------------------------------


def to_device(shard: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a shard ``(n,)`` in host memory, on the device and in another dtype."""
    copied = torch.empty_like(shard, device=device).copy_(shard, non_blocking=True)
    return copied.to(dtype)


def send_from_host(
    shards: Sequence[torch.Tensor],
    device: str,
    dtype: torch.dtype,
    world_size: int,
    issue: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
) -> list[torch.Tensor]:
    """Copy shards to the device and issue their all-gathers on the stream of the gathers.

    Args:
        shards: ``(n_i,)`` each, in host memory.
        device: where they are gathered.
        dtype: dtype in which they are gathered.
        world_size: ranks of the group.
        issue: issues the all-gathers on the current stream, given their outputs and inputs.
    """
    outputs = [
        torch.empty(shard.numel() * world_size, dtype=dtype, device=device) for shard in shards
    ]
    streams = side_streams(torch.device(device))
    if streams is None:
        issue(outputs, [to_device(shard, device, dtype) for shard in shards])
        return outputs
    streams.settle()  # the computing stream may still use the outputs' memory
    with streams.gathering():
        sent = [to_device(shard, device, dtype) for shard in shards]
        issue(outputs, sent)
    for output, copied in zip(outputs, sent, strict=True):
        _staged[output.data_ptr()] = streams, copied
    return outputs


def free_sent(output: torch.Tensor) -> None:
    """Free the copy that an all-gather has sent, once the current stream has waited for it."""
    staged = _staged.pop(output.data_ptr(), None)
    if staged is not None:
        staged[0].settle()  # the next copy may get its memory


def start_to_device(shard: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Start ``to_device`` on the stream of the gathers; unread until ``end_to_device``."""
    streams = side_streams(torch.device(device))
    if streams is None:
        return to_device(shard, device, dtype)
    output = torch.empty(shard.shape, dtype=dtype, device=device)
    streams.settle()  # the computing stream may still use its memory
    with streams.gathering():
        output.copy_(
            to_device(shard, device, shard.dtype) if dtype != shard.dtype else shard,
            non_blocking=True,
        )
    _arriving[output.data_ptr()] = streams.after_gathers()
    return output


def end_to_device(output: torch.Tensor) -> torch.Tensor:
    """Let the current stream wait for a copy, and return it."""
    arriving = _arriving.pop(output.data_ptr(), None)
    if arriving is not None:
        arriving.wait()
    return output


# -- to the host -----------------------------------------------------------------------------------


def to_host(grad: torch.Tensor) -> torch.Tensor:
    """Return a copy of a reduced gradient ``(n,)`` in host memory."""
    return torch.empty_like(grad, device="cpu").copy_(grad)


def start_to_host(grad: torch.Tensor) -> torch.Tensor:
    """Start to copy a gradient to the host; the copy must not be read before ``finish_copies``."""
    streams = side_streams(grad.device)
    if streams is None:
        return to_host(grad)
    while _copies and _copies[0].is_done:
        _copies.popleft().wait()  # returns at once, and frees the gradient on the device
    _copies.append(streams.copy_to_host(grad))
    return _copies[-1].host


def finish_copies() -> None:
    """Block until all gradients are on the host. Copies end in order: wait for the last."""
    if _copies:
        _copies[-1].wait()
    _copies.clear()


def abandon() -> None:
    """Drop what a failed graph has left."""
    finish_copies()
    _staged.clear()
    while _arriving:
        _arriving.popitem()[1].wait()  # the copy may still write memory that is about to be reused


# -- in graphs -------------------------------------------------------------------------------------

_library = torch.library.Library("fsdp_dynamo", "FRAGMENT")
_library.define("to_device(Tensor shard, str device, ScalarType dtype) -> Tensor")
_library.define("to_host(Tensor grad) -> Tensor")


def _fake_to_device(shard: Any, device: str, dtype: torch.dtype) -> Any:
    return shard.new_empty(shard.shape, device=device, dtype=dtype)


def _fake_to_host(grad: Any) -> Any:
    return grad.new_empty(grad.shape, device="cpu")


for _function, _fake in (
    (to_device, _fake_to_device),
    (to_host, _fake_to_host),
):
    _library.impl(_function.__name__, _function, "CPU")
    _library.impl(_function.__name__, _function, "CUDA")
    torch.library.register_fake(f"fsdp_dynamo::{_function.__name__}", _fake, lib=_library)

TO_DEVICE = torch.ops.fsdp_dynamo.to_device.default
TO_HOST = torch.ops.fsdp_dynamo.to_host.default


def copy_before(gather: fx.Node) -> fx.Node | None:
    """Return the copy whose only use is this all-gather, if there is one."""
    source = gather.args[0]
    if not isinstance(source, fx.Node) or source.target is not TO_DEVICE or len(source.users) > 1:
        return None
    return source


def copies_to_device(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Split copies that no all-gather sends; each starts where the one before ends.

    Returns:
        Pairs of the node that starts a copy and the node that ends it.
    """
    split: list[tuple[fx.Node, fx.Node]] = []
    for end in [node for node in graph.nodes if node.target is TO_DEVICE]:
        is_input = end.all_input_nodes[0].op == "placeholder"
        before = split[-1][1].next if split and is_input else end
        with graph.inserting_before(before):
            start = graph.node_copy(end)
        split.append((start, end))
    return split


def lower_gradients(graph: fx.Graph) -> None:
    """Copy gradients that leave the graph on a stream of their own."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.add.Tensor:
            _add_on_the_device(graph, node)
    for node in graph.nodes:
        if node.target is TO_HOST and all(user.op == "output" for user in node.users):
            node.target = start_to_host


def _add_on_the_device(graph: fx.Graph, total: fx.Node) -> None:
    """Sum gradients on the device and copy the sum to the host.

    ::

        a -> to_host -+                      a -+
                      +- add -> gradient        +- add -> to_host -> gradient
        b -> to_host -+                      b -+
    """
    parts = total.all_input_nodes
    if len(parts) != 2 or list(total.args) != parts or total.kwargs:
        return
    if not all(part.target is TO_HOST and len(part.users) == 1 for part in parts):
        return
    on_device = [part.all_input_nodes[0] for part in parts]
    with graph.inserting_before(total):
        added = graph.call_function(torch.ops.aten.add.Tensor, tuple(on_device))
        copied = graph.call_function(TO_HOST, (added,))
    added.meta["val"] = on_device[0].meta.get("val")
    copied.meta.update(total.meta)
    total.replace_all_uses_with(copied)
    for node in (total, *parts):
        graph.erase_node(node)
