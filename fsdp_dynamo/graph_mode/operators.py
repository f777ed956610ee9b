"""Collectives of compiled graphs at run time, and what they have in flight.

``lowering`` replaces a graph's functional collectives by methods of ``GraphOperators`` after all
passes have run. A method that issues collectives returns at once; ``wait`` returns their outputs,
which exist nowhere else in the graph, so that nothing can read them too early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_dynamo.comm import collectives
from fsdp_dynamo.comm.gather_plan import decode
from fsdp_dynamo.comm.group_state import group_named
from fsdp_dynamo.comm.in_flight import InFlight
from fsdp_dynamo.comm.streams import side_streams
from fsdp_dynamo.graph_mode import graph_recording
from fsdp_dynamo.graph_mode.captures import CapturedPhase, Captures, Phase, Run
from fsdp_dynamo.graph_mode.offloading import HostCopies, to_device
from fsdp_dynamo.health.graph_agreement import require_agreement
from graph_passes.gradients.producers import Ranges
from graph_passes.text.listing import Label
from graph_passes.wire_format import WireFormat

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


class Issued:
    """A collective between its issue and its wait.

    Attributes:
        output: its output, unread until the wait.
        in_flight: its handle, which keeps the tensors alive that it sends and receives.
    """

    __slots__ = ("in_flight", "output")

    def __init__(self, output: torch.Tensor, in_flight: InFlight) -> None:
        self.output = output
        self.in_flight = in_flight


Launch = list[Issued | None]
"""Collectives that were issued as one launch; ``None`` after the wait, which frees the output."""


class GraphOperators(HostCopies):
    """Collectives and copies of one graph of Dynamo's: of its forward and its backward.

    Attributes:
        captures: its CUDA graphs; ``None`` without the option.
    """

    def __init__(self, cuda_graphs: bool = False) -> None:
        super().__init__()
        self.captures = Captures() if cuda_graphs else None
        self._in_flight: set[Issued] = set()
        self._absent: dict[tuple[str, int], list[Ranges]] = {}

    def all_gather(
        self,
        shards: Sequence[torch.Tensor],
        world_size: int,
        group: str,
        plans: Sequence[Sequence[int]],
        texts: Sequence[str],
        fingerprint: str = "",
    ) -> Launch:
        """Start all-gathers.

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
        return self._launch(
            collectives.issue_all_gathers, outputs, shards, ranks, texts, [*map(decode, plans)]
        )

    def all_gather_from_host(
        self,
        shards: Sequence[torch.Tensor],
        device: str,
        dtype: torch.dtype,
        world_size: int,
        group: str,
        plans: Sequence[Sequence[int]],
        texts: Sequence[str],
        fingerprint: str = "",
    ) -> Launch:
        """Copy shards from host memory to ``device``, in ``dtype``, and start their all-gathers.

        Copies and all-gathers run on the stream of the gathers, beside what is computed.
        """
        ranks = _group(group, fingerprint)
        outputs = [
            torch.empty(shard.numel() * world_size, dtype=dtype, device=device) for shard in shards
        ]

        def launch(sent: Sequence[torch.Tensor]) -> Launch:
            decoded = [*map(decode, plans)]
            issue = collectives.issue_all_gathers
            return self._launch(issue, outputs, sent, ranks, texts, decoded)

        streams = side_streams(torch.device(device))
        if streams is None:
            return launch([to_device(shard, device, dtype) for shard in shards])
        streams.free_pending()  # the computing stream may still use the outputs' memory
        with streams.gathering():
            return launch([to_device(shard, device, dtype) for shard in shards])

    def reduce_scatter(
        self,
        unsharded: Sequence[torch.Tensor],
        world_size: int,
        group: str,
        plans: Sequence[Sequence[int]],
        texts: Sequence[str],
        fingerprint: str = "",
    ) -> Launch:
        """Start means over ranks, of which each rank gets its part.

        ``unsharded`` are ``(n_i * world_size,)`` each, all of one dtype.
        """
        ranks = _group(group, fingerprint)
        unsharded = [whole.contiguous() for whole in unsharded]
        decoded = [*map(decode, plans)]
        outputs = [plan.new_shard(whole) for whole, plan in zip(unsharded, decoded, strict=True)]
        if unsharded[0].dtype == torch.float16:  # divided in place before the sum
            unsharded = [whole.clone() for whole in unsharded]
        lacks = [bool(_label_of(text).absent) for text in texts]
        issue = partial(collectives.issue_reduce_means, may_lack=lacks)
        return self._launch(issue, outputs, unsharded, ranks, texts, decoded)

    def all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        group: str,
        texts: Sequence[str],
        fingerprint: str = "",
    ) -> Launch:
        """Start means over ranks of copies."""
        ranks = _group(group, fingerprint)
        outputs = [tensor.contiguous().clone() for tensor in tensors]
        plans = [None] * len(outputs)
        return self._launch(collectives.issue_reduce_means, outputs, outputs, ranks, texts, plans)

    def _launch(
        self,
        issue: _Issue,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        texts: Sequence[str],
        plans: collectives.Plans,
    ) -> Launch:
        """Issue collectives as one launch, and record each of them."""
        record = graph_recording.current()
        labels = [_label_of(text) for text in texts]
        for label in labels:
            if label.kind != "all_gather":
                self._absent.setdefault((label.unit, label.ordinal), []).append(label.absent)
        recorded = record.launch(labels, outputs, inputs)
        wires = [WireFormat.decode(label.wire) for label in labels]
        units = [label.unit for label in labels]
        handles = issue(outputs, inputs, group, recorded, units, wires, plans)
        launched = [*map(Issued, outputs, handles)]
        self._in_flight.update(launched)
        record.launched(labels)
        return [*launched]

    def wait(self, launched: Launch, position: int, text: str) -> torch.Tensor:
        """Wait for a collective of a launch, and return its output.

        Args:
            launched: the launch, which no longer holds this collective afterwards.
            position: position of the collective in the launch.
            text: encoded ``Label`` of the wait.
        """
        issued, launched[position] = launched[position], None
        assert issued is not None  # a collective has one wait
        record, label = graph_recording.current(), _label_of(text)
        record.wait(label)
        self._in_flight.remove(issued)
        issued.in_flight.wait()
        record.waited(label, issued.output)
        return issued.output

    def take_absent(self) -> dict[tuple[str, int], list[Ranges]]:
        """Return and forget the ranges without a gradient in what was reduced since the last call.

        Returns:
            By unit FQN and ordinal of the flat parameter: for each reduction, ranges of elements.
        """
        taken = {**self._absent}
        self._absent.clear()
        return taken

    def runner(self, run: Run, phase: Phase) -> Run:
        """Return a function that runs the code of a phase, and abandons what it leaves in flight.

        Args:
            run: takes a list of inputs, which it empties.
            phase: facts about it.
        """
        if self.captures is not None:
            run = CapturedPhase(run, phase, self.captures, self._absent)

        def guarded(inputs: list[Any]) -> Any:
            try:
                return run(inputs)
            except BaseException:
                self.abandon()
                raise

        return guarded

    def abandon(self) -> None:
        """Drop what a graph that failed has left in flight."""
        self._absent.clear()
        while self._in_flight:
            self._in_flight.pop().in_flight.abandon()
        super().abandon()


def _group(name: str, fingerprint: str) -> dist.ProcessGroup:
    """Return the group of this name. A fingerprint: require that all ranks run this graph."""
    group = group_named(name)
    if fingerprint:
        require_agreement(group, fingerprint)
    return group
