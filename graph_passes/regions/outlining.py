"""Regions: equal unit bodies become calls of one graph, which is compiled once.

Before (a graph as Dynamo hands it over, two equal units ``a`` and ``b``)::

    unshard(a) -> split -> view ... -> linear -> gelu -> ...        nodes of unit a
    unshard(b) -> split -> view ... -> linear -> gelu -> ...        nodes of unit b

After::

    unshard(a) -> invoke_subgraph(region_0, "region_0", unsharded_a, x)
    unshard(b) -> invoke_subgraph(region_0, "region_0", unsharded_b, y)

Marks tell which nodes belong to a unit's body. Bodies are compared node by node, so units that
differ in anything never share a region.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graph_passes.graph_pass import graph_pass
from graph_passes.graph_utils import (
    Numbered,
    attribute_key,
    body_of,
    is_checkpointed,
    order_index,
    value_key,
)
from graph_passes.markers import UNIT, is_body, unit_of
from graph_passes.regions.eligibility import (
    carrying_gradients,
    changed_after,
    last_changes,
    passes_gradients,
    why_not,
)

_IDENTIFIER = "fsdp_region_{}"


@dataclass
class Run:
    """A unit's nodes that follow one another in a graph.

    Attributes:
        unit: FQN of the unit.
        nodes: the nodes, in graph order.
        inputs: nodes outside that they use, in order of first use.
        outputs: nodes of the run that are used outside.
    """

    unit: str
    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]


@dataclass
class RegionReport:
    """Units that became regions, and why the rest did not.

    Attributes:
        regions: units that share each region, in graph order.
        left: unit and reason for every body that is not in a region.
    """

    regions: list[list[str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def text(self) -> str:
        """Return one line for each region and for each body that is in none."""
        lines = [f"region of {len(units)}: {', '.join(units)}" for units in self.regions]
        return "\n".join([*lines, *(f"no region: '{unit}': {why}" for unit, why in self.left)])


def outline_regions(gm: fx.GraphModule) -> RegionReport:
    """Replace bodies that occur at least twice in a Dynamo graph by calls of one graph each."""
    groups: dict[Any, list[Run]] = {}
    report = RegionReport()
    position, changes = order_index(gm.graph), last_changes(gm.graph)
    carrying = carrying_gradients(gm.graph)
    for run in _runs(gm.graph):
        if changed_after(run.inputs, position[run.nodes[-1]], changes):
            report.left.append((run.unit, "one of its inputs is changed after it"))
        elif not passes_gradients(run.nodes, run.inputs, run.outputs, carrying):
            report.left.append((run.unit, "no gradient comes to one of its inputs or outputs"))
        else:
            groups.setdefault(_key(run, gm), []).append(run)
    for runs in groups.values():
        reason = _why_alone(runs[0]) if len(runs) == 1 else None
        body = None
        if reason is None:
            body = _extract(gm, runs[0])
            reason = why_not(body, runs[0].inputs, runs[0].outputs)
        if body is None or reason is not None:
            report.left += [(run.unit, str(reason)) for run in runs]
            continue
        name = _IDENTIFIER.format(len(report.regions))
        gm.add_submodule(name, body)
        for run in runs:
            _call(gm.graph, run, name)
        report.regions.append([run.unit for run in runs])
    gm.graph.lint()
    gm.recompile()
    return report


def _runs(graph: fx.Graph) -> Iterator[Run]:
    """Yield the bodies of all units; a body ends where another unit's node comes in between."""
    nodes: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        unit = unit_of(node) if is_body(node) else None
        if nodes and unit != unit_of(nodes[0]):
            yield _run(nodes)
            nodes = []
        if unit is not None:
            nodes.append(node)
    if nodes:
        yield _run(nodes)


def _run(nodes: list[fx.Node]) -> Run:
    inside = set(nodes)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    return Run(str(unit_of(nodes[0])), nodes, _inputs(nodes), outputs)


def _inputs(nodes: list[fx.Node]) -> list[fx.Node]:
    return [node for node in _outside(nodes) if not _is_checkpointed(node)]


def _bodies(nodes: list[fx.Node]) -> list[fx.Node]:
    """Return the bodies that activation checkpointing calls, which become part of the region."""
    return [node for node in _outside(nodes) if _is_checkpointed(node)]


def _outside(nodes: list[fx.Node]) -> dict[fx.Node, None]:
    inside = set(nodes)
    return {n: None for node in nodes for n in node.all_input_nodes if n not in inside}


def _is_checkpointed(node: fx.Node) -> bool:
    if node.op != "get_attr":
        return False
    return is_checkpointed(node, operator.attrgetter(str(node.target))(node.graph.owning_module))


def _key(run: Run, owner: fx.GraphModule) -> tuple[Any, ...]:
    """Return a key that is equal for two runs iff one graph can replace both."""
    bodies = _bodies(run.nodes)
    numbered = Numbered([*run.inputs, *bodies, *run.nodes])
    inputs = tuple(_input_key(node) for node in run.inputs)
    inputs += tuple(attribute_key(owner, body) for body in bodies)
    nodes = tuple(numbered.key_of(node) for node in run.nodes)
    return inputs, nodes, numbered.plain(run.outputs)


def _input_key(node: fx.Node) -> Any:
    """Return a key of interchangeable inputs; a module in the graph equals only itself."""
    value = node.meta.get("example_value")
    return ("attribute", node.target) if value is None else value_key(value, is_placed=False)


def _why_alone(run: Run) -> str:
    if any(node.op == "get_attr" for node in run.inputs):
        return "it calls an operator with a body of its own"
    return "no other unit is equal to it"


def _extract(gm: fx.GraphModule, run: Run) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(_inputs(run.nodes)):  # not run.inputs: those may be replaced
        copies[node] = graph.placeholder(f"region_input_{position}")
        copies[node].meta = {k: v for k, v in node.meta.items() if k == "example_value"}
    for node in [*_bodies(run.nodes), *run.nodes]:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in run.outputs))
    return fx.GraphModule(gm, graph)


def _call(graph: fx.Graph, run: Run, name: str) -> None:
    inputs = _inputs(run.nodes)
    with graph.inserting_before(run.nodes[0]):
        body = graph.get_attr(name)
        call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, name, *inputs))
        call.meta = {k: v for k, v in run.nodes[-1].meta.items() if k != "example_value"}
        call.meta["example_value"] = tuple(n.meta["example_value"] for n in run.outputs)
        for index, node in enumerate(run.outputs):
            item = graph.call_function(operator.getitem, (call, index))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item)
    for node in reversed(run.nodes):
        graph.erase_node(node)


# -- inlining --------------------------------------------------------------------------------------
# Put the bodies of regions back where they are called.
#
# A region is traced, differentiated and partitioned once for all units that share it. Later passes
# see one flat graph, in which every unit has nodes of its own.


@graph_pass(is_bitwise=True)
def inline_regions(graph: fx.Graph) -> None:
    """Replace calls of regions by nodes of the units that call them."""
    for call in list(graph.nodes):
        body = body_of(call)
        if body is not None:
            assert graph.owning_module is not None  # else it has no bodies
            _inline(graph.owning_module, call, body)


def _inline(gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule) -> None:
    attribute, _, *operands = call.args
    placeholders = body.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(placeholders, operands, strict=True))
    results: Any = ()
    with call.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "output":
                results = fx.map_arg(node.args[0], lambda n: copies[n])
            elif node.op != "placeholder":
                copies[node] = call.graph.node_copy(node, lambda n: copies[n])
                copies[node].meta = _meta_of(node, call)
            if node.op == "get_attr":
                copies[node].target = _adopt(gm, body, str(node.target))
    for item in list(call.users):
        assert item.target is operator.getitem, f"{call}: expected getitem, got {item}"
        item.replace_all_uses_with(results[item.args[1]])
        call.graph.erase_node(item)
    call.graph.erase_node(call)
    if isinstance(attribute, fx.Node) and not attribute.users:
        call.graph.erase_node(attribute)


def _meta_of(node: fx.Node, call: fx.Node) -> dict[str, Any]:
    """Return the metadata of a body's node as a node of the calling unit."""
    custom = node.meta.get("custom") or {}
    unit = unit_of(call)
    if unit is None or UNIT not in custom:
        return dict(node.meta)
    return node.meta | {"custom": custom | {UNIT: unit}}


def _adopt(gm: fx.GraphModule, body: fx.GraphModule, target: str) -> str:
    """Give an attribute of a body to the module around; return its name there."""
    value = operator.attrgetter(target)(body)
    known = {id(v): name for name, v in (*gm.named_children(), *gm.named_buffers())}
    if id(value) in known:
        return known[id(value)]
    name, number = f"inlined_{target.replace('.', '_')}", 0
    while hasattr(gm, f"{name}_{number}"):
        number += 1
    setattr(gm, f"{name}_{number}", value)
    return f"{name}_{number}"
