"""Save the old values of inputs that a step changes, where its backward computes with them again.

In the joint graph, before the partition (batch norm's statistics below activation checkpointing)::

    mean (input) -> batch_norm -> output, new mean -> returned, and copied into the input

The tags of checkpointing have ``batch_norm`` computed again in the backward, from the input: that
has changed by then. After this pass it is computed from a copy, twice::

    mean (input) -> clone (saved) -> batch_norm -> output, new mean

After the partition (a running mean that a layer adds): what the forward saves of an input that it
changes is a copy, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_COPY = torch.ops.aten.copy_.default
_SHARED_META = ("val", "tensor_meta", "partitioner_tag")


def save_old_values(graph: fx.Graph) -> list[str]:
    """Let tagged nodes of a joint graph read copies of the inputs that it changes.

    Args:
        graph: the joint graph, with the tags of activation checkpointing.

    Returns:
        Names of the inputs that are copied.
    """
    inputs = graph.find_nodes(op="placeholder")
    saved = []
    for node in _changed(graph, inputs):
        readers = [user for user in node.users if user.meta.get("recompute") in _RECOMPUTED]
        if not readers:
            continue
        with graph.inserting_after(inputs[-1]):
            clone = graph.call_function(torch.ops.aten.clone.default, (node,))
        clone.meta = {key: node.meta[key] for key in _SHARED_META if key in node.meta}
        clone.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for reader in readers:
            reader.replace_input_with(node, clone)
        saved.append(node.name)
    return saved


def changed_inputs(graph: fx.Graph) -> frozenset[str]:
    """Names of the inputs that a joint graph changes."""
    return frozenset(node.name for node in _changed(graph, graph.find_nodes(op="placeholder")))


def save_copies(forward: fx.Graph, changed: frozenset[str], num_outputs: int) -> list[str]:
    """Let a forward graph save copies of the inputs that it changes.

    Args:
        forward: the forward graph.
        changed: names of the inputs that it changes.
        num_outputs: of its outputs, which come before what it saves.

    Returns:
        Names of the inputs that are copied.
    """
    inputs, output = forward.find_nodes(op="placeholder"), forward.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    copied = {}
    for node in dict.fromkeys(values[num_outputs:]):
        if node in inputs and node.name in changed:
            with forward.inserting_after(inputs[-1]):
                copied[node] = forward.call_function(torch.ops.aten.clone.default, (node,))
            copied[node].meta = {key: node.meta[key] for key in _SHARED_META if key in node.meta}
    saved = [copied.get(value, value) for value in values[num_outputs:]]
    output.args = ((*values[:num_outputs], *saved),)
    return [node.name for node in copied]


def _changed(graph: fx.Graph, inputs: list[fx.Node]) -> Iterator[fx.Node]:
    """Inputs into which the graph copies, and those whose new values it returns."""
    described = pytree.tree_leaves(graph.output_node().meta.get("desc"), is_leaf=_is_mutation)
    changed = [one.mutated_input for one in described if _is_mutation(one)]
    for node in inputs:
        if node.meta.get("desc") in changed or any(user.target is _COPY for user in node.users):
            yield node


def _is_mutation(description: Any) -> bool:
    return hasattr(description, "mutated_input")
