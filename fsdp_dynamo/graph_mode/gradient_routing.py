"""Shards as inputs of a compiled graph, and the way of their gradients back to the units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import fx

from fsdp_dynamo import events
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.flat_parameter import FlatParameter, Undecided
from fsdp_dynamo.core.original_parameter import owner_of
from fsdp_dynamo.core.reduction import reduce_frozen
from fsdp_dynamo.dynamo.untraced import BY_AUTOGRAD, untraced
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError, unit_name
from fsdp_dynamo.graph_mode import graph_recording
from fsdp_dynamo.graph_mode.captures import Captures
from fsdp_dynamo.graph_mode.operators import GraphOperators
from fsdp_dynamo.graph_mode.traced_unit import SecondaryInputs
from graph_passes.gradients.producers import Ranges
from graph_passes.markers import NO_VALUE

_OWNER = "_fsdp_dynamo_flat"
_UNREDUCED = "_fsdp_dynamo_unreduced"

_Absent = Mapping[tuple[str, int], Sequence[Ranges]]

GradHandler = Callable[[torch.Tensor, _Absent], Undecided]
"""Handler of an input's gradient; its second argument says which elements no rank computed."""


def mark_shard(flat: FlatParameter) -> None:
    """Let a shard that becomes an input of a compiled graph lead back to its flat parameter.

    The reference is weak: autograd's nodes hold the shard, and the garbage collector cannot see
    cycles through them.
    """
    setattr(flat.sharded, _OWNER, ref(flat))


def unreduced_input_of(flat: FlatParameter) -> torch.Tensor:
    """Return an input for graphs that reduce nothing: its gradient is the unsharded gradient.

    It has the shape of the unsharded buffer and one element of memory.
    """
    one = torch.zeros((), dtype=flat.sum_dtype, device=flat.device)
    unreduced = one.expand(flat.layout.padded_numel)
    unreduced.requires_grad_(flat.sum_dtype.is_floating_point or flat.sum_dtype.is_complex)
    setattr(unreduced, _UNREDUCED, ref(flat))
    return unreduced


def _no_flat() -> None:
    """Stand in for the weak reference, on tensors that belong to no unit."""


def _grad_handler(flat: FlatParameter) -> GradHandler:
    """Return a handler of reduced gradients.

    If gradients from before the forward (``no_sync``) are reduced too, they enter the graph as
    ``total`` and are part of what it returns.
    """
    total = flat.grad_sum.total if flat.grad_sum.settings.reduces else None
    frozen = flat.module_parameters.frozen  # the graph computes their gradients nevertheless

    def handle(grad: torch.Tensor, absent: _Absent) -> Undecided:
        unused = _unused(flat, absent)
        if total is not None:
            # ``total`` was saved by every forward since it was accumulated. Other forwards that
            # still wait for their backward, and this one if its graph is retained, would add it
            # again: they add ``NO_VALUE`` from now on.
            if flat.grad_sum.total is total:
                reduce_frozen([flat])
                unused -= flat.grad_sum.used()
                flat.grad_sum.take()
                flat.grad_sum.accumulation.refresh()
            total.data.fill_(NO_VALUE)
        return flat.accumulate_grad(grad, unused, frozen)

    return handle


def _unused(flat: FlatParameter, absent: _Absent) -> set[int]:
    """Return the indices of parameters that got no gradient in any reduction of this rank."""
    each = [
        flat.layout.slots_within(ranges) for ranges in absent.get((flat.unit_fqn, flat.ordinal), ())
    ]
    return set.intersection(*each) if each else set()


def _unreduced_handler(flat: FlatParameter) -> GradHandler:
    before = flat.module_parameters.frozen

    def handle(grad: torch.Tensor, absent: _Absent) -> Undecided:
        frozen = flat.module_parameters.frozen_now().union(before)
        views = flat.layout.split(grad) if frozen else []
        for index in frozen:
            views[index].fill_(NO_VALUE)
        flat.grad_sum.add(grad, frozen, lacks_some=True)
        return []

    return handle


class _RouteGradients(torch.autograd.Function):
    """Autograd function that passes the gradients of shards and unreduced inputs to the units.

    Forward: the inputs, unchanged. Backward: the reduced gradient of a shard is added to the
    original parameters' ``.grad``; the unsharded gradient of an unreduced input joins the gradients
    that wait for a reduction.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        operators: GraphOperators,
        handlers: Collection[GradHandler],
        secondaries: SecondaryInputs,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.operators = operators
        ctx.handlers = handlers
        ctx.secondaries = secondaries
        return tuple([tensor.view_as(tensor) for tensor in inputs])

    @staticmethod
    @untraced(BY_AUTOGRAD)
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        graph_recording.current().end_of_graph()
        with torch.no_grad():
            absent = ctx.operators.take_absent()
            ctx.operators.finish_copies()
            undecided: Undecided = []
            for handle, grad in zip(ctx.handlers, grads, strict=True):
                if grad is not None:
                    undecided += handle(grad, absent)
            FlatParameter.add_present(undecided)
        ctx.secondaries.end_backward()
        events.enter_backward(None)
        return (None,) * (len(grads) + 3)


def _run(
    compiled: Callable[..., Any],
    arguments: Sequence[Any],
    secondaries: SecondaryInputs,
    captures: Captures | None,
) -> Any:
    try:
        outputs = compiled(*arguments)
        if captures is not None:
            captures.watch(outputs)
    except BaseException:  # the graph has dropped what it had in flight
        secondaries.abandon()
        raise
    graph_recording.current().end_of_graph()
    secondaries.end_forward()
    return outputs


def route_gradients(compiled: Callable[..., Any], operators: GraphOperators) -> Callable[..., Any]:
    """Route the shards among a compiled graph's inputs through ``_RouteGradients``."""

    def run(*inputs: Any) -> Any:
        flat = next(_flats_in(inputs), None)
        if flat is None:
            return run_forward(*inputs)
        around = events.begin_forward(flat.grad_sum.accumulation.model)
        graph_recording.current().begin_graph(flat.device)
        try:
            return run_forward(*inputs)
        finally:
            events.end_forward(around)

    def run_forward(*inputs: Any) -> Any:
        operators.abandon()  # what a backward that never reached the shards has left
        captures = operators.captures
        if captures is not None:
            captures.begin_forward([value for value in inputs if _stays(value)])
        handlers = _grad_handlers(inputs)
        arguments = [_as_trained(value) for value in inputs]
        secondaries = SecondaryInputs(inputs)
        secondaries.gather(arguments)
        if captures is not None and secondaries:
            captures.refused = "secondary shards are gathered anew in each step"
        if not handlers or not torch.is_grad_enabled():
            return _run(compiled, arguments, secondaries, captures)
        routed = [arguments[position] for position in handlers]
        tracked = _RouteGradients.apply(  # type: ignore[no-untyped-call]
            operators, list(handlers.values()), secondaries, *routed
        )
        for position, shard in zip(handlers, tracked, strict=True):
            arguments[position] = shard
        outputs = _run(compiled, arguments, secondaries, captures)
        _watch_backward(inputs, outputs)
        return outputs

    return run


def _as_trained(value: Any) -> Any:
    """Return an input of a graph, detached if nothing of its unit is trained now."""
    flat: FlatParameter | None = getattr(value, _OWNER, getattr(value, _UNREDUCED, _no_flat))()
    return value if flat is None or flat.is_trainable else value.detach()


def _flats_in(inputs: Sequence[Any]) -> Iterator[FlatParameter]:
    found = (getattr(value, _OWNER, _no_flat)() for value in inputs)
    return (flat for flat in found if flat is not None)


def _stays(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) or hasattr(value, _OWNER)


def _watch_backward(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Hook the outputs, so that ``_begin_backward`` runs before a graph's backward."""
    begin = partial(_begin_backward, list(_flats_in(inputs)), events.current_step())
    for output in outputs:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(begin)


@untraced(BY_AUTOGRAD)
def _begin_backward(
    flats: Sequence[FlatParameter], step: events.Step | None, _grad: torch.Tensor | None
) -> None:
    events.enter_backward(step)
    if flats:
        graph_recording.current().begin_graph(flats[0].device)
    for flat in flats:
        waiting = flat.grad_sum
        if flat.is_trainable:
            waiting.accumulation.require_whole_backward(waiting.settings, flat.unit_fqn)
        waiting.remove_dropped()


def _unfrozen_error(flat: FlatParameter) -> FSDPStateError:
    return FSDPStateError(
        f"{unit_name(flat.unit_fqn)}: expected parameters that are frozen, as they were when the "
        "graph was made, got requires_grad=True, noticed in this call. Call the model again: it "
        "will be compiled anew, with gradients of these parameters."
    )


def _refuse_comm_hook(flat: FlatParameter) -> None:
    """Raise if there is a communication hook: the graph's own collectives reduce."""
    if flat.comm_hook is not None:
        raise UnsupportedError(
            f"{unit_name(flat.unit_fqn)}: expected no communication hook in graph mode, got one "
            "that register_comm_hook() has set. Run eagerly or with torch.compile(model), or leave "
            "the hook out: MixedPrecision(reduce_dtype=...) compresses on all paths."
        )


def _grad_handlers(inputs: Sequence[Any]) -> dict[int, GradHandler]:
    """Return the handlers of the inputs that get a gradient, by position."""
    handlers: dict[int, GradHandler] = {}
    for position, value in enumerate(inputs):
        flat: FlatParameter | None = getattr(value, _OWNER, _no_flat)()
        unreduced: FlatParameter | None = getattr(value, _UNREDUCED, _no_flat)()
        if flat is not None:
            had_gradient = value.requires_grad
            reduce_frozen([flat])
            flat.check_originals()
            if flat.requires_grad and not had_gradient:
                raise _unfrozen_error(flat)
            _refuse_comm_hook(flat)
        if flat is not None and value.requires_grad and flat.is_trainable:
            handlers[position] = _grad_handler(flat)
        elif unreduced is not None and value.requires_grad and unreduced.is_trainable:
            handlers[position] = _unreduced_handler(unreduced)
    return handlers


# -- written parameters ----------------------------------------------------------------------------
# Refusal of graphs that write a unit's parameters and gather the unit afterwards.
#
# A graph gathers a unit's shard, and the parameters that it writes are views of that shard.
# AOTAutograd takes them for unrelated inputs, so the gather would read the values from before the
# write.


_IN_PLACE = {"setitem"} | {
    f"i{name}"
    for name in ("add", "and", "floordiv", "mod", "mul", "or", "pow", "sub", "truediv", "xor")
}


def refuse_writes_before_gathers(gm: fx.GraphModule) -> None:
    """Raise ``UnsupportedError`` if a graph writes a parameter and then gathers its unit."""
    aliases: dict[fx.Node, torch.Tensor] = {}  # parameters of units, and views of them
    written: dict[int | None, str] = {}  # FQNs by the storage of their shard
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            example = _real_value(node)
            if isinstance(example, torch.Tensor) and owner_of(example) is not None:
                aliases[node] = example
            continue
        for source in node.all_input_nodes:  # the only use of a shard is its gather
            fqn = None if source in aliases else written.get(_storage(_real_value(source)))
            if fqn is not None:
                raise _write_error(fqn)
        targets = [source for source in _first_argument(node) if source in aliases]
        if _writes_in_place(node):
            written |= {_storage(aliases[t]): owner_of(aliases[t]) or "" for t in targets}
        elif targets and _fake_storage(node) == _fake_storage(targets[0]):
            aliases[node] = aliases[targets[0]]


def _real_value(node: fx.Node) -> Any:
    argument = node.meta.get("grapharg")
    return None if argument is None else argument.example


def _first_argument(node: fx.Node) -> list[fx.Node]:
    first = node.kwargs.get("out", node.args[0] if node.args else None)
    return [one for one in (first if isinstance(first, (list, tuple)) else [first]) if one]  # type: ignore[misc]


def _writes_in_place(node: fx.Node) -> bool:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    is_operator = name.strip("_") in _IN_PLACE
    schema = getattr(target, "_schema", None)
    is_mutable = schema is not None and schema.is_mutable
    return is_method or is_operator or is_mutable or "out" in node.kwargs


def _fake_storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    if isinstance(value, (tuple, list)) and value:  # views of one tensor
        value = value[0]
    return _storage(value)


def _storage(tensor: Any) -> int | None:
    return local_of(tensor).untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else None


def _write_error(fqn: str) -> UnsupportedError:
    return UnsupportedError(
        f"parameter '{fqn}', graph mode: expected parameters that stay as they are until their "
        "unit has run, got a write inside the forward, before the unit is gathered. Write it "
        "before or after the call of the compiled model, or compile with torch.compile(model), "
        "where it counts from the unit's next gather on."
    )
