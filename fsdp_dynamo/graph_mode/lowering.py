"""Lowering, the last step on a scheduled graph: collectives become calls of our functions.

Collectives, waits and copies become calls of ``operators`` and ``offloading``. Writes into flat
gradients become functions (``lower_to_functions``) or in-place operators (``lower_writes``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import fx

from fsdp_dynamo.graph_mode import offloading, operators
from graph_passes.gradients.flat_gradient import FUNCTIONS, OPERATORS, reductions, write_name
from graph_passes.gradients.producers import absent_in
from graph_passes.graph_utils import is_collective, op_name, plan_of, wait_of
from graph_passes.markers import launch_of
from graph_passes.text.listing import Label, fingerprint, label_boundaries

_Function = Callable[..., Any]

_ISSUES: dict[str, tuple[_Function, _Function]] = {
    "fsdp_dynamo_collectives::all_gather_into_tensor": (
        operators.all_gather,
        operators.all_gather_together,
    ),
    "fsdp_dynamo_collectives::reduce_scatter_tensor": (
        operators.reduce_scatter,
        operators.reduce_scatter_together,
    ),
    "_c10d_functional::all_reduce": (operators.all_reduce, operators.all_reduce_together),
}
"""By operator: the function for one collective, and that for several in one launch."""

_FROM_HOST = operators.all_gather_from_host, operators.all_gather_from_host_together

BOUNDARIES: frozenset[_Function] = frozenset(
    (
        *(function for pair in _ISSUES.values() for function in pair),
        *_FROM_HOST,
        operators.wait,
        offloading.start_to_device,
        offloading.end_to_device,
        offloading.start_to_host,
    )
)
"""Functions that ``lower_boundaries`` puts into a graph."""


def _launches(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    def key(node: fx.Node) -> object:
        launch = launch_of(node)
        return node if launch is None else launch

    return [list(group) for _, group in groupby(nodes, key)]


def _lower_issues(graph: fx.Graph, labels: dict[fx.Node, str]) -> dict[fx.Node, fx.Node]:
    """Replace collectives and give the first launch the fingerprint of the whole graph.

    Returns:
        By wait, the node of the output that it waits for.
    """
    carried = fingerprint(graph)
    issued: dict[fx.Node, fx.Node] = {}
    for members in _launches(node for node in labels if is_collective(node)):
        waits = [wait_of(node) for node in members]
        alone, together = _ISSUES[op_name(members[0])]
        if _take_copies(graph, members):
            alone, together = _FROM_HOST
        texts = [labels[node] for node in members]
        outputs = members
        if len(members) == 1:
            members[0].args = (*_issue_args(members[0]), texts[0], carried)
            members[0].target = alone
        else:
            outputs = _merge(graph, members, together, texts, carried)
        issued.update(zip(waits, outputs, strict=True))
        carried = ""
    return issued


def _take_copies(graph: fx.Graph, gathers: list[fx.Node]) -> bool:
    """Let the all-gathers of a launch send from the host, if all can with equal arguments."""
    copies = [copy for node in gathers if (copy := offloading.copy_before(node)) is not None]
    if len(copies) < len(gathers) or len({copy.args[1:] for copy in copies}) > 1:
        return False
    for node, copy in zip(gathers, copies, strict=True):
        node.args = (*copy.args, *node.args[1:])
        graph.erase_node(copy)
    return True


def _issue_args(node: fx.Node) -> list[Any]:
    """Return the arguments of the lowered call: all but the reduce op, which is always the mean."""
    return [arg for arg in node.args if arg != "avg"]


def _merge(
    graph: fx.Graph, members: list[fx.Node], target: Any, texts: list[str], carried: str
) -> list[fx.Node]:
    """Replace several collectives by one call and its items.

    The call stands where the last collective stood: all that is sent exists there, and no wait
        comes
    before.
    """
    sources = [node.all_input_nodes[0] for node in members]
    items = []
    with graph.inserting_before(members[-1]):
        arguments = [sources, *_issue_args(members[0])[1:]]
        if plan_of(members[0]):
            arguments[-1] = [list(plan_of(node)) for node in members]
        arguments += texts, carried
        call = graph.call_function(target, tuple(arguments))
        for position, node in enumerate(members):
            item = graph.call_function(operator.getitem, (call, position))
            item.meta.update(node.meta)
            items.append(item)
    call.meta.update(members[0].meta)
    call.meta["val"] = [node.meta.get("val") for node in members]
    for node, item in zip(members, items, strict=True):
        node.replace_all_uses_with(item)
        graph.erase_node(node)
    return items


def _source_of(output: fx.Node, label: str) -> Any:
    """Return the tensor that a lowered collective sends, to be kept alive until its wait.

    ``None`` if the collective sends encoded messages or a copy from the host, which it keeps
    itself.
    """
    if Label.decode(label).wire:
        return None
    call, position = output.args if output.target is operator.getitem else (output, None)
    if getattr(call.target, "__name__", "").startswith(_FROM_HOST[0].__name__):  # type: ignore[union-attr]
        return None
    sent: Any = call.args[0]  # type: ignore[union-attr]
    return sent if position is None else sent[position]


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
    for wait, output in _lower_issues(graph, labels).items():
        wait.target = operators.wait
        wait.args = (output, _source_of(output, labels[wait]), labels[wait])
    for start, end in offloading.copies_to_device(graph):
        start.target = offloading.start_to_device
        end.target, end.args = offloading.end_to_device, (start,)


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
