"""The last step on a scheduled graph: functional collectives become calls of ``graph_ops``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fsdp_dynamo import graph_ops
from graph_passes.fingerprint import fingerprint
from graph_passes.flat_gradient import write_name
from graph_passes.grad_ops import FUNCTIONS, OPERATORS
from graph_passes.graph_utils import is_collective, is_region, is_wait, op_name
from graph_passes.labels import label_boundaries

_ISSUES: dict[str, Callable[..., Any]] = {
    "_c10d_functional::all_gather_into_tensor": graph_ops.all_gather,
    "_c10d_functional::reduce_scatter_tensor": graph_ops.reduce_scatter,
    "_c10d_functional::all_reduce": graph_ops.all_reduce,
}


def _issue_args(node: fx.Node) -> list[Any]:
    """Arguments of the lowered call: without the reduce op, which is always the mean."""
    return [arg for arg in node.args if arg != "avg"]


def _lower_issues(graph: fx.Graph, labels: dict[fx.Node, str], to: Callable[..., Any]) -> None:
    """Replace collectives; the first one carries the fingerprint of the whole graph."""
    carried = fingerprint(graph)
    for node, text in labels.items():
        if is_collective(node):
            node.args = (*_issue_args(node), text, carried)
            node.target = to(_ISSUES[op_name(node)])
            carried = ""


def lower_to_functions(graph: fx.Graph) -> None:
    """For backends that run the graph as Python: nodes call the functions themselves."""
    labels = {node: label.encode() for node, label in label_boundaries(graph).items()}
    waits = [node for node in labels if is_wait(node)]
    _lower_issues(graph, labels, lambda function: function)
    for node in waits:
        issued = node.all_input_nodes[0]
        node.target = graph_ops.wait
        node.args = (issued, issued.args[0], labels[node])
    for node in graph.nodes:
        name = write_name(node)
        if name:
            node.target = FUNCTIONS[name]


def _lower_writes(graph: fx.Graph) -> None:
    """Writes mutate one buffer, which the reduction reads; copies are left to Inductor to fuse."""
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


def lower_to_operators(graph: fx.Graph) -> None:
    """For Inductor: nodes call operators; a wait mutates the tensor that its collective made."""
    operators = torch.ops.fsdp_dynamo
    labels = {node: label.encode() for node, label in label_boundaries(graph).items()}
    waits = [node for node in labels if is_wait(node)]
    issues = [node for node in labels if is_collective(node)]
    _lower_issues(graph, labels, lambda function: getattr(operators, function.__name__).default)
    for node in issues:
        node.meta.pop("eager_input_vals", None)
    _lower_writes(graph)
    for node in waits:
        issued = node.all_input_nodes[0]
        arguments = (issued, issued.args[0], labels[node])
        with graph.inserting_before(node):
            mutate = graph.call_function(operators.wait_.default, arguments)
        mutate.meta.update(node.meta)
        mutate.meta["val"] = None
        mutate.meta.pop("eager_input_vals", None)  # of the operator that was replaced
        node.replace_all_uses_with(issued)
        graph.erase_node(node)


def region_bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """The graphs of all regions that a graph calls, each once."""
    names = {node.args[0].target: None for node in gm.graph.nodes if is_region(node)}
    bodies = [gm.get_submodule(name) for name in names]
    return [body for body in bodies if isinstance(body, fx.GraphModule)]


def lower_regions_to_modules(graph: fx.Graph) -> None:
    """For backends that run the graph as Python: a region is called as the module it is."""
    for node in list(graph.nodes):
        if not is_region(node):
            continue
        body, _, *operands = node.args
        with graph.inserting_before(node):
            call = graph.call_module(body.target, tuple(operands))
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        if not body.users:
            graph.erase_node(body)
