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
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from fsdp_dynamo.comm.streams import HostCopy, StreamEvent, side_streams


def to_device(shard: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a shard ``(n,)`` in host memory, on the device and in another dtype."""
    copied = torch.empty_like(shard, device=device).copy_(shard, non_blocking=True)
    return copied.to(dtype)


def to_host(grad: torch.Tensor) -> torch.Tensor:
    """Return a copy of a reduced gradient ``(n,)`` in host memory."""
    return torch.empty_like(grad, device="cpu").copy_(grad)


Arriving = tuple[torch.Tensor, StreamEvent | None]
"""A copy of a shard, and the event of its end if it runs on another stream."""


class HostCopies:
    """Copies between host and device that the graphs of one graph of Dynamo's have in flight."""

    def __init__(self) -> None:
        self._arriving: set[StreamEvent] = set()
        self._to_host: deque[HostCopy] = deque()

    def start_to_device(self, shard: torch.Tensor, device: str, dtype: torch.dtype) -> Arriving:
        """Start ``to_device`` on the stream of the gathers."""
        streams = side_streams(torch.device(device))
        if streams is None:
            return to_device(shard, device, dtype), None
        output = torch.empty(shard.shape, dtype=dtype, device=device)
        streams.free_pending()  # the computing stream may still use its memory
        with streams.gathering():
            output.copy_(
                to_device(shard, device, shard.dtype) if dtype != shard.dtype else shard,
                non_blocking=True,
            )
        end = streams.after_gathers()
        self._arriving.add(end)
        return output, end

    def end_to_device(self, arriving: Arriving) -> torch.Tensor:
        """Let the current stream wait for a copy, and return it."""
        output, end = arriving
        if end is not None:
            self._arriving.remove(end)
            end.wait()
        return output

    def start_to_host(self, grad: torch.Tensor) -> torch.Tensor:
        """Start to copy a gradient; the copy must not be read before ``finish_copies``."""
        streams = side_streams(grad.device)
        if streams is None:
            return to_host(grad)
        while self._to_host and self._to_host[0].is_done:
            self._to_host.popleft().wait()  # returns at once, and frees the gradient on the device
        copied = streams.copy_to_host(grad)
        self._to_host.append(copied)
        return copied.host

    def finish_copies(self) -> None:
        """Block until all gradients are on the host. Copies end in order: wait for the last."""
        copies = list(self._to_host)
        if copies:
            copies[-1].wait()
        for one in copies:  # not those that a backward on another thread has started meanwhile
            with suppress(ValueError):
                self._to_host.remove(one)

    def abandon(self) -> None:
        """Drop what a graph that failed has left in flight."""
        self.finish_copies()
        while self._arriving:
            self._arriving.pop().wait()  # the copy may still write, and its memory is reused


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
            node.target = HostCopies.start_to_host


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
