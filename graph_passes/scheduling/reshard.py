"""Reshard after forward: gather again in the backward instead of saving.

In the joint graph, before the partition::

    shard -> all_gather -> wait -> split -> view -> mm            (forward)
                                             |
                                             +-----> t -> mm      (backward)

The partitioner would save ``wait``, since it never recomputes a collective by itself, and the
unsharded buffer would live until the backward. So the chain from the shard to the parameter views,
and everything else computed from unsharded parameters alone (casts, transposes), is tagged
MUST_RECOMPUTE. After the partition::

    forward:   shard -> all_gather -> wait -> split -> view -> mm
    backward:  shard -> all_gather -> wait -> split -> view -> t -> mm

Only the shard, an input, is saved. Units that stay unsharded (the root) are tagged MUST_SAVE at
their wait, and views of it are recomputed from there.

In the joint graph of a region the unsharded buffer is an input, which the region saves. The graph
around the region decides whether that keeps it alive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from graph_passes.graph_utils import is_collective, is_gather, is_wait
from graph_passes.markers import cuts_views, mark_of

# The partitioner saves a value if a checkpointed part of a higher number reads it. Our chains have
# a higher number than any part of the user's, so they are recomputed whatever reads them.
_AC_GRAPH_ID = 1 << 30


def tag_reshard_after_forward(graph: fx.Graph, kept: Collection[str] = ()) -> list[str]:
    """Tag a joint graph as the marks of its all-gathers say.

    Args:
        graph: the joint graph, before the partition.
        kept: FQNs of units that stay unsharded whatever their marks say.

    Returns:
        The FQNs of the units that reshard after their forward, in graph order.
    """
    from_parameters: set[fx.Node] = set()
    resharded: list[str] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_gather(node):
            mark = mark_of(node)
            assert mark is not None
            from_parameters.add(node)
            reshards = mark.reshards and mark.unit not in kept
            _tag(node, reshards)
            if reshards:
                resharded.append(mark.unit)
        elif is_collective(node):
            continue
        elif is_wait(node) and node.args[0] in from_parameters:
            from_parameters.add(node)
            gather = node.all_input_nodes[0]
            _tag(node, gather.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE)
        elif _cuts_an_input(node) or (
            node.all_input_nodes and all(n in from_parameters for n in node.all_input_nodes)
        ):
            from_parameters.add(node)
            _tag(node, True)
    _tag_shard_casts(graph)
    return resharded


def _cuts_an_input(node: fx.Node) -> bool:
    return cuts_views(node) and all(n.op == "placeholder" for n in node.all_input_nodes)


def _tag(node: fx.Node, recompute: bool) -> None:
    policy = CheckpointPolicy.MUST_RECOMPUTE if recompute else CheckpointPolicy.MUST_SAVE
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _AC_GRAPH_ID


def _tag_shard_casts(graph: fx.Graph) -> None:
    """Tag the casts of shards before all-gathers, which are recomputed too."""
    for node in graph.nodes:
        if not is_collective(node) or node.meta.get("recompute") is None:
            continue
        source = node.args[0]
        while isinstance(source, fx.Node) and source.op == "call_function":
            if not isinstance(source.meta.get("recompute"), CheckpointPolicy):
                _tag(source, True)
            source = source.all_input_nodes[0] if source.all_input_nodes else None


# -- old values ------------------------------------------------------------------------------------
# Save the old values of inputs that a step changes, if its backward computes with them again.
#
# In the joint graph, before the partition (batch norm's statistics under activation
# checkpointing)::
#
#     mean (input) -> batch_norm -> output, new mean -> returned, and copied into the input
#
# Checkpointing's tags have ``batch_norm`` recomputed in the backward from the input, which has
# changed by then. After ``save_old_values``, it reads a copy both times::
#
#     mean (input) -> clone (saved) -> batch_norm -> output, new mean
#
# After the partition (a running mean that a layer adds), ``save_copies`` does the same for inputs
# that the forward saves and changes.


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_COPY = torch.ops.aten.copy_.default
_SHARED_META = ("val", "tensor_meta", "partitioner_tag")


def save_old_values(graph: fx.Graph) -> list[str]:
    """Let nodes that are recomputed read copies of the inputs that a joint graph changes.

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
    """Return the names of the inputs that a joint graph changes."""
    return frozenset(node.name for node in _changed(graph, graph.find_nodes(op="placeholder")))


def save_copies(forward: fx.Graph, changed: frozenset[str], num_outputs: int) -> list[str]:
    """Let a forward graph save copies of the inputs that it changes.

    Args:
        forward: the forward graph.
        changed: names of the inputs that it changes.
        num_outputs: number of its outputs; saved values follow them.

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
    """Yield inputs into which the graph copies, and inputs whose new values it returns."""
    described = pytree.tree_leaves(graph.output_node().meta.get("desc"), is_leaf=_is_mutation)
    changed = [one.mutated_input for one in described if _is_mutation(one)]
    for node in inputs:
        if node.meta.get("desc") in changed or any(user.target is _COPY for user in node.users):
            yield node


def _is_mutation(description: Any) -> bool:
    return hasattr(description, "mutated_input")
