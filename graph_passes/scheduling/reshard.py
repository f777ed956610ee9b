"""Reshard after forward: gather again in the backward instead of saving.

In the joint graph, before the partition::

    shard -> all_gather -> wait -> split -> view -> mm            (forward)
                                             |
                                             +-----> t -> mm      (backward)

The partitioner would keep ``wait`` (it must not run a collective twice on its own), and so the
unsharded flat parameter would live until the backward. This pass tags the chain from the shard
to the parameter views, and everything else that is computed from unsharded parameters alone
(casts, transposes), as MUST_RECOMPUTE. After the partition::

    forward:   shard -> all_gather -> wait -> split -> view -> mm
    backward:  shard -> all_gather -> wait -> split -> view -> t -> mm

Only the shard, an input, is saved. Units that stay unsharded (the root) are tagged MUST_SAVE at
their wait, and views of it are recomputed from there.

In the joint graph of a region the unsharded flat parameter is an input. It is what the region
saves; whether that keeps it alive is decided in the graph around the region.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graph_passes.graph_utils import is_collective, is_wait
from graph_passes.markers import cuts_views, mark_of

# The partitioner saves what a checkpointed region of a higher number reads from one of a lower;
# above all of the user's regions, our chains are recomputed whatever reads them.
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
        mark = mark_of(node)
        if is_collective(node):
            if mark is None or mark.kind != "all_gather":
                continue
            from_parameters.add(node)
            reshards = mark.reshards and mark.unit not in kept
            _tag(node, reshards)
            if reshards:
                resharded.append(mark.unit)
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
    """Tag what is done to a shard before the all-gather (a cast): done again too, not saved."""
    for node in graph.nodes:
        if not is_collective(node) or node.meta.get("recompute") is None:
            continue
        source = node.args[0]
        while isinstance(source, fx.Node) and source.op == "call_function":
            if not isinstance(source.meta.get("recompute"), CheckpointPolicy):
                _tag(source, True)
            source = source.all_input_nodes[0] if source.all_input_nodes else None
