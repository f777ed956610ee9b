"""The graph mode: a unit's forward as Dynamo traces it.

Every instruction here is run by Dynamo once for every unit, so they are few: what can be made
ready before is a constant, and what needs no Dynamo is in ``unshard_operators``. Nothing here
runs outside a trace.
"""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import traceback
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_dynamo import events
from fsdp_dynamo.comm.streams import time_events_on
from fsdp_dynamo.core.dtensors import TensorParallel
from fsdp_dynamo.core.unit_modules import registered
from fsdp_dynamo.dynamo.private_api import (
    CompileRefusedError,
    ends_with_a_break,
    made_to_require_grad,
    number_of_body,
    with_side_effects,
)
from fsdp_dynamo.eager.hooks import cast_output, prepare_inputs
from fsdp_dynamo.errors import FSDPStateError, unit_name
from fsdp_dynamo.events import Step, current_step
from fsdp_dynamo.graph_mode.traced_unit import constants_of
from fsdp_dynamo.graph_mode.unshard_operators import (
    PARAMETER_VIEWS,
    PARAMETERS,
    UNSHARD,
    unsharded_behind,
)
from graph_passes.graph_utils import hint
from graph_passes.markers import BODY, UNIT, unit_of
from graph_passes.text.listing import Label


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_originals(name: str) -> None:
    """Check the parameters of the unit module of this name, before its shards become inputs.

    Raises:
        CompileRefusedError: something is wrong with them (``Unit.check_originals``), or an input of
            the unit was made to require gradients.
    """
    unit = registered(name)._fsdp_unit
    try:
        unit.check_originals()
    except FSDPStateError as error:
        raise CompileRefusedError(*error.args) from None
    if torch.is_grad_enabled() and made_to_require_grad():
        raise CompileRefusedError(
            f"{unit_name(unit.fqn)}: expected activations that require gradients because of "
            "parameters, got requires_grad_() on one before this unit, which Dynamo cannot return "
            "from a graph. Leave the call out: non-reentrant checkpointing does not need it "
            "(transformers: model.disable_input_require_grads(), "
            'gradient_checkpointing_kwargs={"use_reentrant": False}); or compile without fullgraph '
            "(hooks mode)."
        )


Inputs = Sequence[tuple[torch.Tensor | None, ...]]
"""Inputs of the graph for a unit's flat parameters, each with those of ``unshard`` in order."""


def _gather(inputs: Inputs, fqn: str, flats: tuple[str, ...]) -> list[torch.Tensor]:
    unsharded = []
    with traceback.annotate({UNIT: fqn, BODY: "0"}):
        for tensors, flat in zip(inputs, flats):  # noqa: B905  # traced by Dynamo
            unsharded.append(UNSHARD(*tensors, flat))
    return unsharded


_OPEN = ""
"""The key that is there while the outermost unit runs, which forgets them all afterwards."""


def _gather_once(
    name: str,
    gathered: dict[str, list[torch.Tensor]],
    inputs: Inputs,
    fqn: str,
    flats: tuple[str, ...],
) -> list[torch.Tensor]:
    """Parameters that another module of the unit has gathered in the outermost forward."""
    if is_outermost(name):
        with_side_effects(gathered.__setitem__, _OPEN, [])
    key = place_of(name, torch.is_grad_enabled())
    if key in gathered:
        return gathered[key]
    unsharded = _gather(inputs, fqn, flats)
    if _OPEN in gathered:
        with_side_effects(gathered.__setitem__, key, unsharded)
    return unsharded


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_outermost(name: str) -> bool:
    """Whether the unit module of this name is that of the outermost unit."""
    return registered(name)._fsdp_is_outermost()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def place_of(name: str, has_grad: bool) -> str:
    """The unit of this name, the body in which it is traced, and whether with gradients.

    What is made in the body of an operator like ``checkpoint`` is not seen outside.
    """
    return f"{id(registered(name)._fsdp_unit)} in {number_of_body()}, {has_grad}"


def traced_forward(
    name: str,
    unit_module: Any,
    inputs: Inputs,
    settings: str,
    splits: tuple[tuple[int, TensorParallel], ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gathered: dict[str, list[torch.Tensor]] | None,
) -> Any:
    """A unit's forward with its all-gathers in the graph.

    Views of the unsharded flat parameters stand in ``module._parameters`` while the module is
    called, and the original parameters after it. Holders are reached by their path, as the
    user's own code reaches them, so that Dynamo guards each module once.

    Args:
        name: the unit module's registered name.
        unit_module: the unit module.
        inputs: of the graph.
        settings: ``UnitSettings.in_graphs``.
        splits: positions of the parameters that tensor parallelism has split, and how.
        args: positional inputs.
        kwargs: keyword inputs.
        gathered: unsharded flat parameters of units of several modules, by unit, in a forward of
            the outermost one; ``None`` where there is no such unit.
    """
    constants = constants_of(name, settings)
    fqn, input_dtype, output_dtype, device, flats, layouts, places, are_apart = constants
    if input_dtype or device:
        dtype = getattr(torch, input_dtype) if input_dtype else None
        target = torch.device(device) if device else None
        args, kwargs = prepare_inputs(target, dtype, args, kwargs)
    if gathered is None:
        unsharded = _gather(inputs, fqn, flats)
    else:
        unsharded = _gather_once(name, gathered, inputs, fqn, flats)
    with traceback.annotate({UNIT: fqn, BODY: "1"}):
        views = []
        parameters_of = PARAMETERS if are_apart else PARAMETER_VIEWS
        for flat, layout in zip(unsharded, layouts):  # noqa: B905  # traced by Dynamo
            views.extend(parameters_of(flat, layout))
        for i, split in splits:
            views[i] = split.as_dtensor(views[i])
        paths, holders, parameters, positions = places
        tables = []
        inner = unit_module._fsdp_inner()
        for path in paths:
            holder = inner
            for part in path:
                holder = holder._modules[part]
            tables.append(holder._parameters)
        shown = list(map(tables.__getitem__, holders))
        originals = list(map(operator.getitem, shown, parameters))
        with_side_effects(_put, shown, parameters, map(views.__getitem__, positions))
        try:
            output = unit_module._fsdp_body()(*args, **kwargs)
        finally:
            with_side_effects(_put, shown, parameters, originals)
        if output_dtype:
            output = cast_output(getattr(torch, output_dtype), output)
    if gathered is not None and is_outermost(name):
        with_side_effects(gathered.clear)
    return output


def _put(tables: Any, keys: Any, values: Any) -> None:
    for table, key, value in zip(tables, keys, values):  # noqa: B905  # traced by Dynamo
        table[key] = value


# -- broken units ----------------------------------------------------------------------------------
# Units in which a graph ends: their unsharded parameters go from one graph to the next.
#
# Dynamo ends a graph where it cannot go on. Where that is inside of a unit, the next graph takes
# the unsharded flat parameter or its views for inputs and saves them for its backward, and no
# pass can reshard the unit in between (decision 14).


_warned: set[tuple[str, int]] = set()
"""Units that were named, and their bytes; ``("", 0)`` for a graph break outside of them."""


def warn_if_the_graph_breaks(gm: fx.GraphModule) -> None:
    """Warn, once for each unit, that a graph break ends a graph that is to be compiled.

    An unsharded flat parameter, which users do not see, leaves a graph only where one ends before
    the unit's module is called.
    """
    outputs = gm.graph.output_node().all_input_nodes
    if not ends_with_a_break(gm) and not any(node.target is UNSHARD for node in outputs):
        return
    units = set(units_that_stay(gm).items()) or {("", 0)}
    if units <= _warned:
        return
    _warned.update(units)
    named = ", ".join(f"'{fqn}' ({num_bytes} bytes)" for fqn, num_bytes in sorted(units) if fqn)
    stays = f", but units in which a graph ends stay unsharded until their backward: {named}"
    warnings.warn(
        "torch.compile: expected one graph of the whole model, got a graph break. Results are "
        f"the same{stays if named else ''}. TORCH_LOGS=graph_breaks and explain(model) say "
        "where and why; with fullgraph=True it is an error.",
        stacklevel=2,
    )


def units_that_stay(gm: fx.GraphModule) -> dict[str, int]:
    """Bytes of what leaves a graph unsharded, by the unit's FQN.

    The root is left out: it stays unsharded until its backward in any case.
    """
    found: dict[str, int] = {}
    for source in dict.fromkeys(map(unsharded_behind, gm.graph.output_node().all_input_nodes)):
        if source is None:
            continue
        tensor = source.meta.get("example_value")
        fqn = unit_of(source)
        if fqn and isinstance(tensor, torch.Tensor):
            found[fqn] = found.get(fqn, 0) + hint(tensor.numel()) * tensor.element_size()
    return found


# -- recording -------------------------------------------------------------------------------------
# Events of compiled graphs, seen from their collectives.
#
# Compute is what runs between two collectives; the label of each says whose it is. The end of an
# unsharded flat parameter is noticed at the next collective.


class NoRecording:
    """Recorder that drops everything, in use while nothing records."""

    def launch(
        self, labels: Sequence[Label], outputs: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]
    ) -> list[events.Event | None]:
        """Collectives are about to be issued as one launch; returns an event for each."""
        return [None] * len(labels)

    def launched(self, labels: Sequence[Label]) -> None:
        """Collectives have been issued; their unit's compute comes next."""

    def wait(self, label: Label) -> None:
        """A wait begins."""

    def waited(self, label: Label, output: torch.Tensor) -> None:
        """A wait has ended."""

    def begin_graph(self, device: torch.device) -> None:
        """A compiled graph is about to run."""

    def end_of_graph(self) -> None:
        """A compiled graph has returned: what it computed last has stopped."""


class GraphRecording(NoRecording):
    """Writes the events of graphs into ``log``."""

    def __init__(self, log: events.EventLog) -> None:
        self.log = log
        self._compute: list[events.Event] = []
        self._began = log.now()
        self._alive: list[tuple[StorageWeakRef, Label, int, Step | None]] = []
        self._uses: dict[int, int] = {}  # references to outputs before they were issued

    def launch(
        self, labels: Sequence[Label], outputs: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]
    ) -> list[events.Event | None]:
        time_events_on(outputs[0].device)
        return [self._begin(*each) for each in zip(labels, outputs, sent, strict=True)]

    def _begin(self, label: Label, output: torch.Tensor, sent: torch.Tensor) -> events.Event:
        self.wait(label)
        num_bytes = max(output.nbytes, sent.nbytes)
        if label.kind == "all_gather":
            self._instant("unshard", label, num_bytes)
            reference = StorageWeakRef(output.untyped_storage())
            self._alive.append((reference, label, num_bytes, current_step()))
        self._uses[output.data_ptr()] = output._use_count()  # type: ignore[attr-defined]
        return self.log.issue(label.unit, label.kind, label.phase, num_bytes, "graph", label.graph)

    def _instant(self, kind: events.Kind, label: Label, num_bytes: int) -> None:
        self.log.instant(label.unit, kind, label.phase, num_bytes, "graph", label.graph)

    def launched(self, labels: Sequence[Label]) -> None:
        for label in labels:
            self._follow(label)

    def wait(self, label: Label) -> None:
        """A collective is reached: what computed until now has stopped."""
        for unit in label.before:
            event = self._compute_of(unit, label)
            self.log.end(event)
            event.begin_with(self._began)
            self._began = self.log.now()
        self.end_of_graph()
        self.expire()

    def waited(self, label: Label, output: torch.Tensor) -> None:
        self._settle(output)
        self._follow(label)

    def begin_graph(self, device: torch.device) -> None:
        time_events_on(device)
        self._began = self.log.now()

    def end_of_graph(self) -> None:
        for event in self._compute:
            self.log.end(event)
        self._compute = []

    def _settle(self, output: torch.Tensor) -> None:
        """Give a backend's thread the time to let go of a tensor, so that its end is seen.

        A gloo thread holds its tensors for some microseconds after the wait; on a busy machine
        a freed one would be counted as alive. Bounded, and done in recordings only.
        """
        uses = self._uses.pop(output.data_ptr(), 0)
        until = time.perf_counter() + 0.02
        while output._use_count() > uses + 1 and time.perf_counter() < until:  # type: ignore[attr-defined]
            time.sleep(0.0001)

    def _follow(self, label: Label) -> None:
        """Begin the compute that comes after a collective, or its wait."""
        for unit in label.after:
            event = self._same_compute(unit, label)
            if event is None:
                event = self._compute_of(unit, label)
            self._compute.append(event)

    def _compute_of(self, unit: str, label: Label) -> events.Event:
        return self.log.issue(unit, label.phase, label.phase, 0, "graph", label.graph)

    def _same_compute(self, unit: str, label: Label) -> events.Event | None:
        """A unit's compute goes on where a collective of another unit fell into it."""
        for event in reversed(self.log):
            if event.kind == label.phase and event.source == "graph":
                is_same = (event.unit, event.step) == (unit, current_step())
                return event if is_same else None
        return None

    def expire(self) -> None:
        """Note unsharded flat parameters whose storage has been freed."""
        still = []
        for one in self._alive:
            reference, label, num_bytes, step = one
            if reference.expired():
                self._instant("reshard", label, num_bytes)
                self.log[-1].step = step  # which may have ended
            else:
                still.append(one)
        self._alive = still


_OFF = NoRecording()
_current = _OFF


def current() -> NoRecording:
    """The recording of the log that is open now."""
    global _current
    log = events.recorder
    if log is None:
        _current = _OFF
    elif not isinstance(_current, GraphRecording) or _current.log is not log:
        _current = GraphRecording(log)
        log.at_end = _current.expire
    return _current
