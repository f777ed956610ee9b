"""Put the bodies of regions back where they are called.

A region is traced, differentiated and partitioned once for all units that share it; what comes
after sees one flat graph, in which every unit has nodes of its own.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from graph_passes.graph_pass import graph_pass
from graph_passes.graph_utils import body_of
from graph_passes.markers import UNIT, unit_of


@graph_pass(is_bitwise=True)
def inline_regions(graph: fx.Graph) -> None:
    """Regions are put back as nodes of every unit that shares them.

    Args:
        graph: partitioned; changed in place. Nodes of a body get the unit of its call.
    """
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
    """What is known of a body's node, as one of the unit that calls it."""
    custom = node.meta.get("custom") or {}
    unit = unit_of(call)
    if unit is None or UNIT not in custom:
        return dict(node.meta)
    return node.meta | {"custom": custom | {UNIT: unit}}


def _adopt(gm: fx.GraphModule, body: fx.GraphModule, target: str) -> str:
    """Give an attribute of a body to the module around; returns its name there."""
    value = operator.attrgetter(target)(body)
    known = {id(v): name for name, v in (*gm.named_children(), *gm.named_buffers())}
    if id(value) in known:
        return known[id(value)]
    name, number = f"inlined_{target.replace('.', '_')}", 0
    while hasattr(gm, f"{name}_{number}"):
        number += 1
    setattr(gm, f"{name}_{number}", value)
    return f"{name}_{number}"


__all__ = ["inline_regions"]
