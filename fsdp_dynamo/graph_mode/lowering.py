"""Lowering, the last step on a scheduled graph: collectives become calls of our functions.

Collectives, waits and copies become calls of methods of ``GraphOperators``. Writes into flat
gradients become functions (``lower_to_functions``) or in-place operators (``lower_writes``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import fx

from fsdp_dynamo.graph_mode import offloading
from fsdp_dynamo.graph_mode.operators import GraphOperators
from graph_passes.gradients.flat_gradient import FUNCTIONS, OPERATORS, reductions, write_name
from graph_passes.gradients.producers import absent_in
from graph_passes.graph_utils import is_collective, op_name, plan_of, wait_of
from graph_passes.markers import launch_of
from graph_passes.text.listing import fingerprint, label_boundaries

_ISSUES: dict[str, Callable[..., Any]] = {
    "fsdp_dynamo_collectives::all_gather_into_tensor": GraphOperators.all_gather,
    "fsdp_dynamo_collectives::reduce_scatter_tensor": GraphOperators.reduce_scatter,
    "_c10d_functional::all_reduce": GraphOperators.all_reduce,
}

BOUNDARIES: frozenset[Callable[..., Any]] = frozenset(
    (
        *_ISSUES.values(),
        GraphOperators.all_gather_from_host,
        GraphOperators.wait,
        GraphOperators.start_to_device,
        GraphOperators.end_to_device,
        GraphOperators.start_to_host,
    )
)
"""Methods that ``lower_boundaries`` puts into a graph, unbound: see ``bind``."""


def _launches(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    def key(node: fx.Node) -> object:
        launch = launch_of(node)
        return node if launch is None else launch

    return [list(group) for _, group in groupby(nodes, key)]


def _lower_issues(graph: fx.Graph, labels: dict[fx.Node, str]) -> None:
    """Replace each launch by one call, and give the first the fingerprint of the whole graph.

    The call stands where the last collective of the launch stood: all that is sent exists there,
    and no wait comes before.
    """
    graph_fingerprint = fingerprint(graph)
    for members in _launches(node for node in labels if is_collective(node)):
        waits = [wait_of(node) for node in members]
        target = _ISSUES[op_name(members[0])]
        if _take_copies(graph, members):
            target = GraphOperators.all_gather_from_host
        arguments = [arg for arg in members[0].args if arg != "avg"]  # always the mean
        arguments[0] = [node.args[0] for node in members]
        if plan_of(members[0]):
            arguments[-1] = [list(plan_of(node)) for node in members]
        arguments += [labels[node] for node in members], graph_fingerprint
        with graph.inserting_before(members[-1]):
            call = graph.call_function(target, tuple(arguments))
        call.meta.update(members[0].meta)
        call.meta["val"] = [node.meta.get("val") for node in members]
        for position, (node, wait) in enumerate(zip(members, waits, strict=True)):
            wait.target, wait.args = GraphOperators.wait, (call, position, labels[wait])
            graph.erase_node(node)
        graph_fingerprint = ""


def _take_copies(graph: fx.Graph, gathers: list[fx.Node]) -> bool:
    """Let the all-gathers of a launch send from the host, if all can with equal arguments."""
    copies = [copy for node in gathers if (copy := offloading.copy_before(node)) is not None]
    if len(copies) < len(gathers) or len({copy.args[1:] for copy in copies}) > 1:
        return False
    for node, copy in zip(gathers, copies, strict=True):
        node.args = (*copy.args, *node.args[1:])
        graph.erase_node(copy)
    return True


def _labels(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the labels of collectives and waits as text; reductions have ``absent`` ranges."""
    labels = label_boundaries(graph)
    for node in reductions(graph):
        labels[node] = replace(labels[node], absent=tuple(absent_in(node.args[0])))
    return {node: label.encode() for node, label in labels.items()}


def lower_boundaries(graph: fx.Graph) -> None:
    """Replace collectives, waits and copies by calls of our functions."""
    labels = _labels(graph)
    offloading.lower_gradients(graph)
    _lower_issues(graph, labels)
    for start, end in offloading.copies_to_device(graph):
        start.target = GraphOperators.start_to_device
        end.target, end.args = GraphOperators.end_to_device, (start,)


def bind(graph: fx.Graph, operators: GraphOperators) -> None:
    """Let a lowered graph that is run as Python call the methods of its operators."""
    methods = {function: getattr(operators, function.__name__) for function in BOUNDARIES}
    for node in graph.nodes:
        if node.target in BOUNDARIES:
            node.target = methods[node.target]


def lower_to_functions(graph: fx.Graph) -> None:
    """Lower a graph that is run as Python: writes into flat gradients become function calls too."""
    lower_boundaries(graph)
    for node in graph.nodes:
        name = write_name(node)
        if name:
            node.target = FUNCTIONS[name]


def lower_writes(graph: fx.Graph) -> None:
    """Lower writes for Inductor: in-place operators, and copies that it can fuse with sums."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        name = write_name(node)
        if not name or name == "new_flat":
            continue
        flat: fx.Node = node.args[0]
        node.replace_all_uses_with(flat)
        if name != "write":
            node.target = getattr(OPERATORS, f"{name}_").default
            node.meta["val"] = None
            continue
        _, offset, stride, source = node.args
        with graph.inserting_before(node):
            size = list(source.meta["val"].shape)
            view = graph.call_function(aten.as_strided.default, (flat, size, stride, offset))
            copy = graph.call_function(aten.copy_.default, (view, source))
        for new in (view, copy):
            new.meta.update(node.meta)
        view.meta["val"] = copy.meta["val"] = node.meta["val"].as_strided(size, stride, offset)
        graph.erase_node(node)
