"""CUDA graphs: the code of a phase, captured once and replayed by the device.

A replay reads and writes the addresses of the capture. So inputs are of three kinds::

    shards, nn.Parameters, saved tensors    read in place; if one has moved, captured anew
    all others                              copied into tensors of the capture before the replay
    what nothing reads                      ignored

and outputs, too::

    saved for the backward                  stay in the memory of the capture
    inputs of the graph                     returned as they were given
    all others                              copied out of it after the replay

While a forward waits for its backward, its saved tensors must stay as they are: other forwards run
uncaptured until then. NCCL wants all ranks to capture, replay or run a collective alike. Therefore
decisions follow from what the program does on all ranks, not from the time at which a tensor dies,
or from an address at which an allocator happened to put it: a capture holds what it reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from fsdp_dynamo import events
from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.collectives import transport_of
from fsdp_dynamo.comm.group_state import group_named
from fsdp_dynamo.comm.streams import side_streams
from fsdp_dynamo.comm.watchdog import raise_if_failed, wait_on_device
from fsdp_dynamo.dynamo.untraced import BY_AUTOGRAD, untraced
from fsdp_dynamo.errors import FSDPStateError
from fsdp_dynamo.graph_mode.offloading import TO_DEVICE, TO_HOST
from graph_passes.graph_utils import (
    group_of,
    is_backward,
    is_collective,
    num_bytes,
    op_name,
    storage_of,
    values_of,
)
from graph_passes.markers import wire_of

NUM_OUTPUTS = "fsdp_dynamo_num_outputs"
"""Key in the meta of a forward's output node: how many outputs are not saved tensors."""
WARM_UP = 2
"""Forwards that run uncaptured: kernels are tuned and communicators are made there."""
_MAX_CAPTURES = 8
"""Captures of a phase; each but the first follows a parameter that has moved."""

Run = Callable[[list[Any]], Any]
_Result = TypeVar("_Result")


class Phase(NamedTuple):
    """Facts about the code of one phase, from its lowered graph.

    Attributes:
        is_backward: whether it is the backward.
        num_outputs: number of outputs, from the first, that leave the compiled code; the others are
            saved for the backward.
        given: by position of a forward's output, position of the input that it is.
        unread: positions of inputs that nothing reads.
        written: positions of inputs that are written.
        groups: registered names of the groups of its collectives.
        num_bytes: bytes that its collectives return.
        refused: why it cannot be captured; empty if it can.
    """

    is_backward: bool
    num_outputs: int
    given: Mapping[int, int]
    unread: frozenset[int]
    written: tuple[int, ...]
    groups: tuple[str, ...]
    num_bytes: int
    refused: str


def phase_of(graph: fx.Graph) -> Phase:
    """Return the facts about a planned graph, before its collectives are lowered."""
    inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    (output,) = graph.find_nodes(op="output")
    outputs = output.args[0]
    collectives = [node for node in graph.nodes if is_collective(node)]
    # A gradient that is a saved tensor would be overwritten by the next replay.
    given = {i: inputs[node] for i, node in enumerate(outputs) if node in inputs}
    given, readers = ({}, ()) if is_backward(graph) else (given, (output,))
    return Phase(
        is_backward(graph),
        output.meta.get(NUM_OUTPUTS, len(outputs)),
        given,
        frozenset(i for node, i in inputs.items() if all(user in readers for user in node.users)),
        tuple(inputs[node] for node in _written(graph) if node in inputs),
        tuple(dict.fromkeys(map(group_of, collectives))),
        sum(map(num_bytes, collectives)),
        next(_obstacles(graph), ""),
    )


def _written(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            first = node.args[0]
            yield from first if isinstance(first, (list, tuple)) else [first]


_BODIES = torch.ops.higher_order
_CHOOSING = {_BODIES.cond, _BODIES.while_loop, _BODIES.scan, _BODIES.associative_scan}
_READING = {torch.ops.aten.multinomial.default, torch.ops.aten.nonzero.default}


def _obstacles(graph: fx.Graph) -> Iterator[str]:
    """Yield reasons why a graph cannot be captured."""
    modules = graph.owning_module.modules() if graph.owning_module is not None else ()
    graphs = [module.graph for module in modules if isinstance(module, fx.GraphModule)]
    devices = set()
    for node in (node for one in (graph, *graphs) for node in one.nodes):
        if node.target in (TO_DEVICE, TO_HOST):
            yield "shards are offloaded to the host"
        if _reads_on_host(node):
            yield f"{node.target} reads values on the host"
        if "rng_state" in str(node.target):
            yield "a state of random numbers is kept for recomputation"
        if is_collective(node) and (wire := wire_of(node)) is not None and wire.is_stochastic:
            yield "stochastic rounding draws its noise on the host"
        values = values_of(node) if node.op != "output" else []
        devices |= {value.device for value in values if isinstance(value, torch.Tensor)}
        if node.op == "placeholder" and any(not isinstance(v, torch.Tensor) for v in values):
            yield "sizes or numbers change between calls"
    if not graph.find_nodes(op="placeholder"):
        yield "it has no inputs"
    if len(devices) > 1:
        yield f"its tensors are on {' and '.join(sorted(map(str, devices)))}"


def _reads_on_host(node: fx.Node) -> bool:
    if node.target in _CHOOSING or node.target in _READING:
        return True
    if torch.Tag.data_dependent_output in getattr(node.target, "tags", ()):
        return True
    tensors = [value for value in values_of(node) if isinstance(value, torch.Tensor)]
    if any(isinstance(size, torch.SymInt) for value in tensors for size in value.shape):
        return True  # of a static graph: the size depends on values
    if not op_name(node).startswith(("aten::index", "aten::_unsafe_index")):
        return False
    values = [value for one in node.all_input_nodes[1:] for value in values_of(one)]
    return any(isinstance(v, torch.Tensor) and v.dtype == torch.bool for v in values)


class _Capture(NamedTuple):
    """A captured phase.

    Attributes:
        replay: runs it on the current stream.
        copied: by position, tensors into which inputs are copied.
        in_place: by position, inputs as they are read; held, so that no other tensor gets their
            addresses.
        outputs: tensors that it writes, and outputs that are no tensors.
        leaving: outputs that are copied.
        saved: by position, outputs that are saved for the backward.
        absent: what ``GraphOperators.take_absent`` returns after it.
    """

    replay: Callable[[], None]
    copied: dict[int, torch.Tensor]
    in_place: dict[int, torch.Tensor]
    outputs: list[Any]
    leaving: _Leaving
    saved: dict[int, torch.Tensor]
    absent: dict[Any, Any]


class Captures:
    """Captured phases of one graph of Dynamo's, and the forward whose saved tensors they hold."""

    def __init__(self) -> None:
        self.refused = ""
        self._in_place: set[int] = set()
        self._forward = self._backward = 0  # numbers of those that run
        self._backward_of_replay = False  # the forward of that backward was replayed
        self._held = -1  # number of the forward that was replayed last
        self._is_awaited = False  # its backward has not run
        self._saved: Collection[torch.Tensor] = ()
        self._place: tuple[Any, Any] | None = None  # memory pool and stream of captures

    def begin_forward(self, in_place: Sequence[torch.Tensor]) -> None:
        """Begin a forward; ``in_place`` are inputs that stay at their addresses."""
        self._forward += 1
        self._in_place = {value.data_ptr() for value in in_place}

    def watch(self, outputs: Sequence[Any]) -> None:
        """Keep the saved tensors of the forward until its backward, if it can have one."""
        was_replayed = self._held == self._forward
        enter = partial(_enter_backward, self, self._forward, was_replayed)
        for output in outputs:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                self._is_awaited |= was_replayed
                output.register_hook(enter)

    def enter_backward(self, number: int, was_replayed: bool) -> None:
        """Begin the backward of a forward."""
        self._backward, self._backward_of_replay = number, was_replayed

    def may_run(self, is_backward: bool) -> bool:
        """Whether the phase that is called may be replayed now.

        Raises:
            FSDPStateError: the saved tensors of this backward were overwritten.
        """
        if not is_backward:
            return not self._is_awaited
        number, is_held = self._backward, self._backward == self._held
        if self._backward_of_replay and not is_held:
            raise FSDPStateError(
                f"options={{'cuda_graphs': True}}: expected the backward of forward {number} "
                f"before forward {self._held}, got it afterwards: the tensors that it saved were "
                "overwritten. Run the backwards in time, or leave the option out."
            )
        # Private API of torch: nothing public tells whether the graph is retained.
        if number >= self._held and not torch._C._autograd._get_current_graph_task_keep_graph():
            self._is_awaited = False
        return is_held

    def in_place(self) -> set[int]:
        """Return the addresses of inputs that stay there."""
        return self._in_place.union(one.data_ptr() for one in self._saved)

    def hold(self, saved: Collection[torch.Tensor]) -> None:
        """Note what the forward that runs leaves to its backward."""
        self._held, self._saved = self._forward, saved

    def begin_anew(self) -> None:
        """Take other memory for captures: torch frees a pool with its last capture."""
        self._place, self._saved = None, ()

    def capture(self, run: Callable[[], _Result], device: torch.device) -> tuple[Any, _Result]:
        """Capture what ``run`` enqueues; return a function that replays it, and its result."""
        # The current stream is current again if the capture fails.
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
            if self._place is None:
                self._place = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
            pool, stream = self._place
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                result = run()
        return graph.replay, result

    def refusal(self, device: torch.device, groups: Sequence[dist.ProcessGroup]) -> str:
        """Say why nothing can be captured on a device; empty if it can."""
        if self.refused or device.type != "cuda":
            return self.refused or f"it runs on {device}, and only CUDA has graphs"
        hosts = [group for group in groups if transport_of(group, device) != "library"]
        return "gloo's collectives run on the host" if hosts else ""


class CapturedPhase:
    """Code of one phase: run, captured or replayed.

    Args:
        run: the code. It takes a list of inputs, which it empties.
        phase: facts about it.
        captures: captures of the graph that it belongs to.
        absent: ranges without a gradient in what was reduced (``GraphOperators``).
    """

    def __init__(self, run: Run, phase: Phase, captures: Captures, absent: dict[Any, Any]) -> None:
        self._run = run
        self._phase = phase
        self._captures = captures
        self._absent = absent
        self._refused: str | None = None  # unknown before the first inputs
        self._capture: _Capture | None = None
        self._num_calls = self._num_captures = 0

    def __call__(self, inputs: list[Any]) -> Any:
        self._num_calls += 1
        may_run = self._captures.may_run(self._phase.is_backward)
        if not may_run or self._num_calls <= WARM_UP or self._is_refused(inputs):
            return self._run(inputs)
        capture = self._capture
        if capture is None or self._has_moved(capture, inputs):
            if capture is not None and not self._phase.is_backward:
                self._captures.begin_anew()
            self._capture = capture = None  # frees its memory
            if self._num_captures == _MAX_CAPTURES:
                self._refuse("its parameters move between steps")
                return self._run(inputs)
            self._num_captures += 1
            self._capture = capture = self._new_capture(inputs)
        else:
            _copy(capture.copied, inputs)
        outputs = self._replayed(capture, inputs)
        inputs.clear()
        return outputs

    def _is_refused(self, inputs: Sequence[Any]) -> bool:
        if self._refused is None:
            refused = self._phase.refused
            self._refuse(refused or self._captures.refusal(_device_of(inputs), self._groups()))
        return bool(self._refused)

    def _refuse(self, reason: str) -> None:
        self._refused = reason
        if reason:
            phase = "backward" if self._phase.is_backward else "forward"
            where = "options={'cuda_graphs': True}"
            warnings.warn(f"{where}: a {phase} runs without a graph: {reason}.", stacklevel=2)

    def _groups(self) -> list[dist.ProcessGroup]:
        return [*map(group_named, self._phase.groups)]

    def _has_moved(self, capture: _Capture, inputs: Sequence[Any]) -> bool:
        held = capture.in_place.items()
        return any(inputs[i].data_ptr() != one.data_ptr() for i, one in held)

    def _new_capture(self, inputs: Sequence[Any]) -> _Capture:
        phase, staying = self._phase, self._captures.in_place()
        copied, in_place = {}, {}
        for i, value in enumerate(inputs):
            if i in phase.unread:
                continue
            if value.data_ptr() in staying:
                in_place[i] = value.detach()  # `data` of a parameter may be replaced
            else:
                copied[i] = _span(value).clone().as_strided(value.shape, value.stride())
        before, absent = {**self._absent}, self._absent
        absent.clear()
        static = copied | in_place
        outputs, replay = self._record([static.get(i, one) for i, one in enumerate(inputs)])
        made = {**absent}
        absent.clear()
        absent.update(before)
        own = {
            i: one
            for i, one in enumerate(outputs)
            if isinstance(one, torch.Tensor) and i not in phase.given
        }
        leaving = _Leaving({i: one for i, one in own.items() if i < phase.num_outputs})
        saved = {i: one for i, one in own.items() if i >= phase.num_outputs}
        return _Capture(replay, copied, in_place, outputs, leaving, saved, made)

    def _record(self, inputs: Sequence[Any]) -> tuple[list[Any], Callable[[], None]]:
        """Capture the code with these inputs; return its outputs, and what replays it."""
        run, device = partial(self._run_again, inputs), _device_of(inputs)
        try:
            with events.unrecorded():  # a capture takes no time
                replay, outputs = self._captures.capture(run, device)
        except Exception as error:
            raise FSDPStateError(
                "options={'cuda_graphs': True}: expected code that a CUDA graph can hold, got "
                f"{type(error).__name__} while it was captured: {error}. Leave the option out."
            ) from error
        return [*outputs], replay

    def _run_again(self, inputs: Sequence[Any]) -> Any:
        return self._run([*inputs])

    def _replayed(self, capture: _Capture, inputs: Sequence[Any]) -> list[Any]:
        """Replay a capture, and return the outputs for the inputs that were copied into it."""
        groups = self._groups()
        raise_if_failed()
        for group in groups:
            collective_log.record(group, "graph_replay", "", self._phase.num_bytes)
        capture.replay()
        streams = side_streams(_device_of(inputs))
        if streams is not None:
            for group in groups:
                wait_on_device(streams.after_current(), group)
        for key, ranges in capture.absent.items():
            self._absent.setdefault(key, []).extend(ranges)
        for i in self._phase.written:
            if i in capture.copied:
                inputs[i].copy_(capture.copied[i])
        outputs = [*capture.outputs]
        for i, copy in capture.leaving.copies():
            outputs[i] = copy
        for i, position in self._phase.given.items():
            outputs[i] = inputs[position]
        for i, one in capture.saved.items():
            outputs[i] = one.detach()
        if self._phase.num_outputs < len(outputs):
            self._captures.hold(capture.saved.values())
        return outputs


@untraced(BY_AUTOGRAD)
def _enter_backward(captures: Captures, number: int, was_replayed: bool, _grad: Any) -> None:
    captures.enter_backward(number, was_replayed)


class _Leaving:
    """Outputs that are copied out of the memory of a capture; copies share memory as they do.

    Args:
        outputs: by position.
    """

    def __init__(self, outputs: Mapping[int, torch.Tensor]) -> None:
        groups: dict[Any, list[int]] = {}
        for i, one in outputs.items():
            groups.setdefault((storage_of(one), one.dtype), []).append(i)
        self._alone: dict[int, torch.Tensor] = {}
        self._views: list[tuple[torch.Tensor, dict[int, torch.Tensor]]] = []
        for members in groups.values():
            some = {i: outputs[i] for i in members}
            if len(some) == 1 and 0 not in outputs[members[0]].stride():
                self._alone |= some
                continue
            begin = min(one.storage_offset() for one in some.values())
            end = max(one.storage_offset() + _span(one).numel() for one in some.values())
            whole = outputs[members[0]].as_strided((end - begin,), (1,), begin)
            self._views.append((whole, some))

    def copies(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the positions of outputs, and copies of them."""
        alone = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
            for one in self._alone.values()
        ]
        if alone:
            torch._foreach_copy_(alone, [*self._alone.values()])
        yield from zip(self._alone, alone, strict=True)
        for whole, some in self._views:
            copy, begin = whole.clone(), whole.storage_offset()
            for i, one in some.items():
                yield i, copy.as_strided(one.shape, one.stride(), one.storage_offset() - begin)


def _device_of(values: Sequence[Any]) -> torch.device:
    return next(value.device for value in values if isinstance(value, torch.Tensor))


def _span(value: torch.Tensor) -> torch.Tensor:
    """View the memory between the first and the last element of a tensor."""
    if value.is_contiguous():
        return value.view(-1)
    if not value.numel():
        return value.as_strided((0,), (1,))
    last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((last + 1,), (1,))


def _copy(targets: Mapping[int, torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy values to the targets of their positions, in one launch where possible."""
    dense: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, target in targets.items():
        if 0 not in target.stride():
            dense.append((target, values[i]))
            continue
        if values[i].stride() != target.stride():
            raise FSDPStateError(
                f"options={{'cuda_graphs': True}}: expected strides {target.stride()}, as at the "
                f"capture, got {values[i].stride()}. Leave the option out."
            )
        _span(target).copy_(_span(values[i]))
    if dense:
        torch._foreach_copy_([target for target, _ in dense], [value for _, value in dense])


__all__ = ["CapturedPhase", "Captures", "Phase", "phase_of"]
