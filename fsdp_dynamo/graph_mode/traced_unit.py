"""Constants of a unit in a graph: settings, groups and layout at the time of the trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import fx, nn

from fsdp_dynamo.core.flat_parameter import FlatParameter, Wires
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.core.unit_modules import UnitModuleProtocol, registered
from fsdp_dynamo.dynamo.private_api import CompileRefusedError
from fsdp_dynamo.eager.views_while_traced import may_call_operators
from fsdp_dynamo.errors import unit_name
from fsdp_dynamo.graph_mode.unshard_operators import (
    PARAMETER_VIEWS,
    PARAMETERS,
    FlatConstants,
    ViewConstants,
    encode,
)
from graph_passes.graph_utils import storage_of
from graph_passes.markers import CollectiveKind, Mark
from graph_passes.wire_format import text_of


class Places(NamedTuple):
    """Places at which a unit's parameters are attributes; a tied parameter has several.

    Attributes:
        paths: attribute names from the unit's module to each holder of parameters.
        holders: index into ``paths``, for each place.
        names: name of the parameter in its holder, for each place.
        positions: position of the parameter in the unit, for each place.
    """

    paths: tuple[tuple[str, ...], ...]
    holders: tuple[int, ...]
    names: tuple[str, ...]
    positions: tuple[int, ...]


class TracedUnit(NamedTuple):
    """Constants of one unit in the graph.

    Attributes:
        fqn: FQN of the unit.
        input_dtype: dtype to which floating-point inputs are cast, by name; ``""``: not cast.
        output_dtype: dtype to which floating-point outputs are cast, by name; ``""``: not cast.
        device: device to which inputs are copied; ``""``: not copied.
        flats: encoded ``FlatConstants`` of each flat parameter.
        layouts: encoded ``ViewConstants`` of each flat parameter.
        places: where the parameters are attributes.
        are_apart: whether Dynamo sees each parameter in a storage of its own (see
            ``copy_shared_inputs``).
    """

    fqn: str
    input_dtype: str
    output_dtype: str
    device: str
    flats: tuple[str, ...]
    layouts: tuple[str, ...]
    places: Places
    are_apart: bool


def _describe(module: UnitModuleProtocol) -> TracedUnit:
    unit = module._fsdp_unit
    reshards = unit.settings.reshards_after_forward
    if reshards is None:
        reshards = (
            unit.config.sharding_strategy.reshards_after_forward and not module._fsdp_is_outermost()
        )
    device = "" if unit.device is None else str(unit.device)
    input_dtype, output_dtype = _name(module._fsdp_input_dtype), _name(unit.output_dtype)
    return TracedUnit(
        unit.fqn,
        input_dtype,
        output_dtype,
        device,
        flats=tuple(
            [encode(_describe_flat(f, unit, i, reshards)) for i, f in enumerate(unit.flats)]
        ),
        layouts=tuple([encode(_describe_views(flat)) for flat in unit.flats]),
        places=_places(module),
        are_apart=may_call_operators(unit),
    )


def _places(module: UnitModuleProtocol) -> Places:
    known = _paths(module._fsdp_inner())  # anew: a checkpoint wrapper may have been added
    paths: dict[tuple[str, ...], int] = {}
    places: dict[tuple[int, str], int] = {}
    for position, original in enumerate(module._fsdp_unit.originals()):
        for holder, name, _ in original.sites:
            if holder in known:
                number = paths.setdefault(known[holder], len(paths))
                places[number, name] = position
    holders, names = zip(*places, strict=True) if places else ((), ())
    return Places(tuple(paths), holders, names, tuple(places.values()))


def _describe_views(flat: FlatParameter) -> ViewConstants:
    layout = flat.layout
    shapes = [slot.shape for slot in layout.slots]
    return ViewConstants(layout.split_sizes, layout.split_slots, shapes)


def _describe_flat(flat: FlatParameter, unit: Unit, ordinal: int, reshards: bool) -> FlatConstants:
    gathers, reductions = groups_in_graph(flat)
    num_scatters = (1 if flat.is_sharded else 0) if flat.hierarchy is None else len(reductions)
    wires = flat.wires
    # The gather across nodes, which has the wire format, runs before the graph
    # (``SecondaryInputs``).
    gather_wire = wires.gather if flat.hierarchy is None else None
    num_shards = 1 if flat.hierarchy is None else flat.hierarchy.across.size()
    num_sent = num_shards * flat.layout.shard_numel
    return FlatConstants(
        unit=unit.fqn,
        group_name=gathers.group_name,
        world_size=gathers.size(),
        reductions=tuple([group.group_name for group in reductions]),
        scatters=tuple(
            [group.size() if i < num_scatters else 0 for i, group in enumerate(reductions)]
        ),
        gather_plan=flat.gather_plan(num_sent, is_packed=gather_wire is not None).encode(),
        reduce_plans=tuple([plan.encode() for plan in flat.reduce_plans[:num_scatters]]),
        is_sharded=flat.is_sharded,
        requires_grad=flat.requires_grad,
        param_dtype=_name(flat.param_dtype),
        reduce_dtype=_name(flat.reduce_dtype),
        sum_dtype=_name(flat.sum_dtype),
        grad_dtype=_name(flat.dtype),
        grad_scale=unit.settings.grad_scale,
        gather_mark=Mark(
            unit.fqn,
            "all_gather",
            "forward",
            ordinal,
            reshards,
            text_of(gather_wire),
        ).encode(),
        reduce_marks=_reduce_marks(unit, ordinal, len(reductions), num_scatters, wires),
        offloaded_from=str(flat.device) if flat.is_offloaded else "",
    )


def groups_in_graph(
    flat: FlatParameter,
) -> tuple[dist.ProcessGroup, tuple[dist.ProcessGroup, ...]]:
    """Return the group in which a graph gathers a flat parameter, and those in which it reduces."""
    if flat.hierarchy is None:
        return flat.group, flat.groups.reductions
    return flat.hierarchy.node, (flat.hierarchy.node, flat.hierarchy.across)


def _reduce_marks(
    unit: Unit, ordinal: int, num_reductions: int, num_scatters: int, wires: Wires
) -> tuple[str, ...]:
    """Return a mark for each reduction of a flat parameter, in order.

    Of several reduce-scatters, only the last has a wire format. Marks must be unique: where two
    reductions have one kind, the second has an ordinal beyond those of the unit's flat parameters.
    """
    marks = []
    kinds: list[CollectiveKind] = []
    for i in range(num_reductions):
        kind: CollectiveKind = "reduce_scatter" if i < num_scatters else "all_reduce"
        wire = wires.reduce if i == num_scatters - 1 else None
        text = text_of(wires.replicas if kind == "all_reduce" else wire)
        number = ordinal + len(unit.flats) if kind in kinds else ordinal
        marks.append(Mark(unit.fqn, kind, "backward", number, wire=text).encode())
        kinds.append(kind)
    return tuple(marks)


def _paths(module: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Return the attribute names that lead to every module below, wrappers included."""
    paths: dict[nn.Module, tuple[str, ...]] = {module: ()}
    pending = [module]
    while pending:
        parent = pending.pop()
        for name, child in parent._modules.items():
            if child is not None and child not in paths:
                paths[child] = (*paths[parent], name)
                pending.append(child)
    return paths


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constants_of(name: str, settings: str) -> tuple[Any, ...]:
    """Return the ``TracedUnit`` of a unit module as a plain tuple.

    Args:
        name: registered name of the unit module.
        settings: ``UnitSettings.in_graphs``. Unused; Dynamo guards the arguments of a constant
            result.

    Raises:
        CompileRefusedError: a setting or a parameter with gather hooks needs eager or hooks mode.
    """
    module = registered(name)
    refused = module._fsdp_unit.settings.eager_only()
    if refused is not None:
        setter, reason = refused
        raise CompileRefusedError(
            f"{unit_name(module._fsdp_unit.fqn)}: expected settings that a whole graph can follow, "
            f"got {setter}: {reason}. Leave it out, or compile without fullgraph (hooks mode)."
        )
    for original in module._fsdp_unit.originals():
        if original.tensor_class is not None:
            raise CompileRefusedError(
                f"parameter '{module._fsdp_unit.paths.fqn_of(original.fqn)}': expected plain "
                "parameters in graph mode, got one whose class has fsdp_pre_all_gather. Run "
                "eagerly or with torch.compile(model), or make the model without such classes and "
                'gather in float8: collective_precision=CollectivePrecision(all_gather="float8").'
            )
    *constants, places, are_apart = _describe(module)
    return (*constants, tuple(places), are_apart)


# -- operator inputs -------------------------------------------------------------------------------
# Parameters as inputs of operators with bodies, such as ``torch.cond``.
#
# Dynamo and AOTAutograd refuse such an operator if two of its inputs share a storage, as the
# parameters of a unit do. Where a unit's code may call one, Dynamo therefore sees each parameter in
# a storage of its own (``parameters``). Before AOTAutograd sees the graph, ``copy_shared_inputs``
# makes the parameters views again, and copies those that such an operator takes::
#
#     unshard -> parameters -> cond      =>      unshard -> parameter_views -> clone -> cond
#                          \-> mm                                         \-> mm


_OPS = torch.ops.higher_order
_REFUSE = {_OPS.cond, _OPS.while_loop, _OPS.scan, _OPS.associative_scan, _OPS.map_impl}


def copy_shared_inputs(gm: fx.GraphModule) -> None:
    """Replace ``parameters`` by views and copies, as shown above (after ``share_unshards``)."""
    buffers: dict[int, fx.Node] = {}  # unsharded buffer, by storage of the parameter
    graphs = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    for graph in graphs:
        for node in graph.graph.find_nodes(op="call_function", target=PARAMETERS):
            node.target = PARAMETER_VIEWS
            values = node.meta["example_value"]
            buffers |= dict.fromkeys(map(storage_of, values), node.all_input_nodes[0])
    _copy_inputs(gm, buffers)
    for graph in graphs:
        graph.recompile()


def _copy_inputs(gm: fx.GraphModule, buffers: dict[int, fx.Node]) -> None:
    for node in [*gm.graph.nodes]:
        if node.target in _REFUSE:  # operators in its body read the body's own inputs
            _copy_inputs_of(node, buffers)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            for body in node.all_input_nodes:
                if body.op == "get_attr":
                    _copy_inputs(gm.get_submodule(str(body.target)), buffers)  # type: ignore[arg-type]


def _copy_inputs_of(node: fx.Node, buffers: dict[int, fx.Node]) -> None:
    """Copy the inputs of an operator that lie in one unsharded buffer, except the first."""
    seen: set[fx.Node] = set()
    for source in node.all_input_nodes:
        buffer = buffers.get(storage_of(source.meta.get("example_value")))
        if buffer in seen:
            with node.graph.inserting_before(node):
                copy = node.graph.call_method("clone", (source,))
            copy.meta = dict(source.meta)
            node.replace_input_with(source, copy)
        elif buffer is not None:
            seen.add(buffer)


# -- secondary inputs ------------------------------------------------------------------------------
# Secondary shards (``HIERARCHICAL_SHARD``) as inputs of a compiled graph.
#
# A secondary shard outlives the graph: several backwards that accumulate gradients share it. So it
# is gathered across nodes before a graph is called, at the time when eager mode would, and the
# graph itself only gathers inside the node. Dynamo is given a stand-in, which every call replaces::
#
#     stand-in -> all_gather -> wait -> ...      shard -> (no use but its gradient)


_OWNER = "_fsdp_dynamo_secondary"


class _Owner(NamedTuple):
    """Owner of a stand-in's secondary shard, by weak references (see ``mark_shard``)."""

    module: ReferenceType[UnitModuleProtocol]
    flat: ReferenceType[FlatParameter]


def stand_in_for(module: UnitModuleProtocol, flat: FlatParameter) -> torch.Tensor | None:
    """Return an input of graphs for a secondary shard; ``None`` if the flat parameter has none.

    Args:
        module: module of the unit; its root may still change.
        flat: the flat parameter.

    Returns:
        A tensor ``(padded_numel / ranks in a node,)`` without storage.
    """
    if flat.hierarchy is None:
        return None
    stand_in = torch.empty(
        flat.layout.padded_numel // flat.hierarchy.node.size(),
        dtype=flat.param_dtype,
        device=flat.device,
    )
    stand_in.untyped_storage().resize_(0)
    setattr(stand_in, _OWNER, _Owner(ref(module), ref(flat)))
    return stand_in


class SecondaryInputs:
    """Secondary shards among the inputs of one call of a compiled graph, and of its backward."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._flats: dict[int, FlatParameter] = {}
        roots: dict[Any, None] = {}
        for position, value in enumerate(inputs):
            owner: _Owner | None = getattr(value, _OWNER, None)
            module = None if owner is None else owner.module()
            flat = None if owner is None else owner.flat()
            if module is not None and flat is not None:
                roots[module._fsdp_root] = None
                self._flats[position] = flat
        self._roots = tuple(roots)

    def __bool__(self) -> bool:
        return bool(self._flats)

    def gather(self, arguments: list[Any]) -> None:
        """Replace stand-ins among the arguments. Gather what is missing or may be outdated."""
        try:
            for root in self._roots:
                if root.is_outside:  # otherwise the root's own forward runs around this graph
                    root.secondary.begin_forward()
                root.secondary.gather()
            for position, flat in self._flats.items():
                piece = flat.kept_shard_to_gather()
                assert piece is not None
                arguments[position] = piece[0]
        except BaseException:
            self.abandon()
            raise

    def end_forward(self) -> None:
        """Free the shards after a forward without backward."""
        for root in self._roots:
            if root.is_outside:
                root.secondary.end_forward()

    def end_backward(self) -> None:
        """Free the shards of units whose gradients were reduced."""
        for root in self._roots:
            if root.is_outside:
                root.secondary.end_backward()

    def abandon(self) -> None:
        """Free all shards after an error."""
        for root in self._roots:
            root.secondary.abandon()
