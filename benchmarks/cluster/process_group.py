"""Rank 0's process group of a simulated cluster; what the other ranks hold: ``cluster``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from benchmarks.cluster.link import (
    CollectiveRecord,
    CommunicationLog,
    CudaLink,
    HostLink,
    Request,
    SimulatedWork,
)
from benchmarks.cluster.model import ClusterModel, Op

BACKEND = "simulated"

Tensors = list[torch.Tensor]


class SimulatedCluster:
    """State that all groups of a simulated cluster share: the model, the links, the log.

    Args:
        model: the whole cluster.
        device: ``"cpu"`` or a CUDA device: where object collectives put their bytes.
    """

    def __init__(self, model: ClusterModel, device: str | torch.device = "cpu") -> None:
        self.model = model
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device: expected cpu or cuda, got {device!r}")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device: expected one that is available, got {device!r}")
        self.log = CommunicationLog()
        self._host = HostLink(self.log, model.burst_s)
        self._cuda: dict[torch.device, CudaLink] = {}

    def link(self, device: torch.device) -> HostLink | CudaLink:
        """The queue of a device's collectives; made when first used, on CUDA."""
        if device.type == "cpu":
            return self._host
        if device.type != "cuda":
            raise NotImplementedError(f"simulated collectives of {device.type} tensors")
        if device not in self._cuda:
            self._cuda[device] = CudaLink(self.log, device)
        return self._cuda[device]


class _BackendFacts:
    """Capabilities of a group's backend: it splits, coalesces, allocates nothing.

    Its name is ``gloo`` for a cluster of gloo collectives, so that code which picks an algorithm by
    backend picks as it would on the cluster that is modelled.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    options = None

    def __init__(self, model: ClusterModel) -> None:
        self._name = "gloo" if model.collectives == "gloo" else BACKEND

    def name(self) -> str:
        return self._name

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False


class SimulatedGroup(dist.ProcessGroup):
    """Rank 0's view of a group of a simulated cluster.

    Methods have torch's names and arguments; most callers reach them through
    ``torch.distributed``. Those inherited from C++ call the overrides for functional collectives
    and DDP.

    Args:
        cluster: the cluster, shared with its other groups.
        model: the cluster as far as this group uses it.
        rank: this process' rank in the group.
    """

    def __init__(self, cluster: SimulatedCluster, model: ClusterModel, rank: int) -> None:
        super().__init__(rank, model.world_size)
        self.model = model
        self.cluster = cluster
        self._facts = _BackendFacts(model)
        self._name = ""
        self._description = ""
        self._coalesced: list[SimulatedWork] | None = None
        # Bytes and seconds of what has been issued before: working them out takes as long as
        # everything else that happens when a small collective is issued.
        self._costs: dict[tuple[Op, int], tuple[int, float]] = {}

    # -- the log ----------------------------------------------------------------------------------

    @property
    def log(self) -> list[CollectiveRecord]:
        """All collectives since the last reset, of all groups of the cluster, as issued."""
        return self.cluster.log.records()

    def reset_log(self) -> None:
        """Clear the log."""
        self.cluster.log.reset()

    def exposed_s(self) -> float:
        """Seconds that waiting for collectives has blocked since the last reset."""
        return sum(record.waited_s for record in self.log)

    # -- what torch asks of a group ---------------------------------------------------------------

    # torch keeps a group's name in its C++ backends, of which this one has none.

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802  # torch's name
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name  # noqa: N815  # torch's name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        """The name under which torch knows this group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Description of the group."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self.cluster.device.type)]

    def _get_backend(self, device: torch.device) -> _BackendFacts:
        return self._facts

    def __repr__(self) -> str:
        return f"SimulatedGroup(rank {self.rank()} of {self.size()}, {self.model})"

    # -- issuing ----------------------------------------------------------------------------------

    def _issue(
        self,
        op: Op,
        payload: Sequence[torch.Tensor],
        move: Callable[[], object],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> SimulatedWork:
        """Issue a collective whose large side is ``payload``."""
        payload_bytes = sum(tensor.nbytes for tensor in payload)
        device = payload[0].device if payload else torch.device("cpu")
        cost = self._costs.get((op, payload_bytes))
        if cost is None:
            wire_bytes = self.model.wire_bytes(op, payload_bytes)
            cost = wire_bytes, self.model.seconds(op, payload_bytes)
            self._costs[op, payload_bytes] = cost
        request = Request(op, payload_bytes, *cost, list(inputs), list(outputs), move)
        with torch.no_grad():
            work = self.cluster.link(device).issue(request)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> SimulatedWork | None:
        # The link is a queue: when the last is done, all are.
        works, self._coalesced = self._coalesced, None
        return works[-1] if works else None

    # -- all-gather -------------------------------------------------------------------------------

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> SimulatedWork:
        """``inputs[i]`` ``(n, ...)`` into ``outputs[i]`` of N times as many elements."""

        def move() -> None:
            for output, shard in zip(outputs, inputs, strict=True):
                slots = output.data.view(self.size(), shard.numel())
                # Callers often gather in place, from a slot of the output.
                slots.copy_(shard.data.reshape(1, -1).expand(self.size(), -1))

        return self._issue("all_gather", outputs, move, inputs, outputs)

    def all_gather_single(
        self, output: torch.Tensor, shard: torch.Tensor, opts: Any = None
    ) -> SimulatedWork:
        """``shard`` ``(n, ...)`` into ``output`` of N times as many elements."""
        return self.all_gather_single_coalesced([output], [shard])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """``inputs[i]`` into each of the N tensors of ``outputs[i]``."""
        slots = [slot for row in outputs for slot in row]

        def move() -> None:
            for row, shard in zip(outputs, inputs, strict=True):
                _fill(row, shard)

        return self._issue("all_gather", slots, move, inputs, slots)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> SimulatedWork:
        """``inputs[i]`` into ``outputs[j][i]``, for each rank j."""
        slots = [slot for row in outputs for slot in row]

        def move() -> None:
            for row in outputs:
                for slot, shard in zip(row, inputs, strict=True):
                    slot.data.copy_(shard)

        return self._issue("all_gather", slots, move, inputs, slots)

    # -- reduce-scatter ---------------------------------------------------------------------------

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> SimulatedWork:
        """The N chunks of ``inputs[i]`` reduced into ``outputs[i]``, a chunk's size."""
        reduce = _reduction("reduce_scatter", opts, _CHUNK_REDUCTIONS)

        def move() -> None:
            for output, unsharded in zip(outputs, inputs, strict=True):
                chunks = unsharded.data.view(self.size(), output.numel())
                _reduce_chunks(output, chunks, reduce)

        return self._issue("reduce_scatter", inputs, move, inputs, outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, unsharded: torch.Tensor, opts: Any = None
    ) -> SimulatedWork:
        """The N chunks of ``unsharded`` reduced into ``output``, a chunk's size."""
        return self.reduce_scatter_single_coalesced([output], [unsharded], opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> SimulatedWork:
        """The N tensors of ``inputs[i]`` reduced into ``outputs[i]``."""
        reduce = _reduction("reduce_scatter", opts, _CHUNK_REDUCTIONS)
        chunks = [chunk for row in inputs for chunk in row]

        def move() -> None:
            for output, row in zip(outputs, inputs, strict=True):
                _reduce_chunks(output, torch.stack([chunk.view(-1) for chunk in row]), reduce)

        return self._issue("reduce_scatter", chunks, move, chunks, outputs)

    # -- all-reduce, reduce -----------------------------------------------------------------------

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> SimulatedWork:
        """Each tensor, in place."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        reduce = _reduction("all_reduce", opts, _TENSOR_REDUCTIONS)

        def move() -> None:
            for tensor in tensors:
                reduce(tensor.data, self.size())

        return self._issue("all_reduce", tensors, move, tensors, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        """Same as ``allreduce`` if this rank is the root; otherwise tensors are unchanged."""
        reduce = _reduction("reduce", opts, _TENSOR_REDUCTIONS)

        def move() -> None:
            if opts.rootRank == self.rank():
                for tensor in tensors:
                    reduce(tensor.data, self.size())

        return self._issue("reduce", tensors, move, tensors, tensors)

    # -- all-to-all -------------------------------------------------------------------------------

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> SimulatedWork:
        """A copy of ``source``; splits may be uneven as long as the totals are equal."""
        return self._all_to_all([output], [source])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """``inputs[i]`` into ``outputs[i]``, for each rank i."""
        return self._all_to_all(outputs, inputs)

    def _all_to_all(self, outputs: Tensors, inputs: Tensors) -> SimulatedWork:
        sizes = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
        if sizes[0] != sizes[1]:
            raise NotImplementedError(
                f"simulated all_to_all: expected as many elements received as sent, got {sizes[0]} "
                f"and {sizes[1]}"
            )

        def move() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                output.data.view(-1).copy_(source.data.reshape(-1))

        return self._issue("all_to_all", inputs, move, inputs, outputs)

    # -- from and to one rank ---------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        """Tensors are unchanged, whatever the source."""
        return self._issue("broadcast", tensors, _nothing, tensors, tensors)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """``inputs[i]`` into each tensor of ``outputs[i]``; no outputs on other ranks."""
        slots = [slot for row in outputs for slot in row]

        def move() -> None:
            for row, shard in zip(outputs, inputs, strict=False):
                _fill(row, shard)

        # What passes through the root, also where another rank is the root.
        return self._issue("gather", slots or list(inputs) * self.size(), move, inputs, slots)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> SimulatedWork:
        """This rank's slot of ``inputs[i]`` into ``outputs[i]``; no inputs on other ranks."""
        slots = [slot for row in inputs for slot in row]

        def move() -> None:
            for output, row in zip(outputs, inputs, strict=False):
                output.data.copy_(row[self.rank()])

        return self._issue("scatter", slots or list(outputs) * self.size(), move, slots, outputs)

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> SimulatedWork:
        """Has no receiver."""
        return self._issue("send", tensors, _nothing, tensors, [])

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> SimulatedWork:
        """The tensors stay as they are."""
        return self._issue("recv", tensors, _nothing, [], tensors)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """Waiting for it blocks the host, also where tensors are on CUDA."""
        return self._issue("barrier", [], _nothing, [], [])

    # -- names before torch 2.12 -------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- refused ----------------------------------------------------------------------------------

    def recv_anysource(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("simulated recv_anysource: name the source")

    def monitored_barrier(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("simulated monitored_barrier: use barrier")

    def split_group(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("simulated split_group: use new_group")

    def merge_remote_group(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("simulated merge_remote_group")


# -- local memory traffic -------------------------------------------------------------------------
# Everything is written through ``.data``: collectives of real backends do not raise the version
# counter of their outputs either, on which autograd's check of saved tensors depends.


def _nothing() -> None:
    """Data movement that does nothing."""


def _fill(slots: Tensors, shard: torch.Tensor) -> None:
    if slots:
        torch._foreach_copy_([slot.data for slot in slots], [shard.data] * len(slots))


_CHUNK_REDUCTIONS: dict[Any, Callable[..., Any]] = {
    dist.ReduceOp.SUM: torch.sum,
    dist.ReduceOp.AVG: torch.mean,
    dist.ReduceOp.MAX: torch.amax,
    dist.ReduceOp.MIN: torch.amin,
}

_TENSOR_REDUCTIONS: dict[Any, Callable[[torch.Tensor, int], object]] = {
    dist.ReduceOp.SUM: lambda tensor, num_ranks: tensor.mul_(num_ranks),
    dist.ReduceOp.AVG: lambda tensor, num_ranks: tensor,
    dist.ReduceOp.MAX: lambda tensor, num_ranks: tensor,
    dist.ReduceOp.MIN: lambda tensor, num_ranks: tensor,
}


def _reduction(op: str, opts: Any, known: dict[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """The local form of the reduce operation in a collective's options (none: a sum)."""
    reduce_op = dist.ReduceOp.SUM if opts is None else opts.reduceOp.op
    if reduce_op not in known:
        raise NotImplementedError(f"simulated {op} with {reduce_op}: expected SUM, AVG, MAX or MIN")
    return known[reduce_op]


def _reduce_chunks(output: torch.Tensor, chunks: torch.Tensor, reduce: Callable[..., Any]) -> None:
    """Reduce ``chunks`` ``(N, n)`` over N into ``output`` of n elements."""
    flat = output.data.view(-1)
    if flat.untyped_storage().data_ptr() == chunks.untyped_storage().data_ptr():
        flat.copy_(reduce(chunks, dim=0))  # in place, into one of the chunks
    else:
        reduce(chunks, dim=0, out=flat)
