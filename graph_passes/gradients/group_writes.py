"""Group writes: small gradients that are copied into the flat gradient go there together.

Before::

    new_flat -> write -> mm_into -> write -> reduce_scatter

After::

    new_flat -> mm_into -> write_many -> reduce_scatter

For graphs that are run node by node, where every node costs host time. Large gradients are
written where they are made, so that each is freed at once.
"""

from __future__ import annotations

import torch
from torch import fx

from graph_passes.gradients.flat_gradient import chain_of, reductions, write_name
from graph_passes.gradients.operators import OPERATORS
from graph_passes.graph_pass import graph_pass
from graph_passes.graph_utils import num_bytes, order_index

SMALL_BYTES = 1 << 16


@graph_pass(is_bitwise=True)
def group_writes(graph: fx.Graph) -> None:
    """Merge each flat gradient's small copies into one, behind the last of what they copy."""
    for reduction in list(reductions(graph)):
        small = [node for node in reversed(chain_of(reduction)) if _is_small(node)]
        if len(small) > 1:
            _merge(graph, reduction, small)


def _is_small(node: fx.Node) -> bool:
    if write_name(node) != "write":
        return False
    source: fx.Node = node.args[3]  # type: ignore[assignment]
    strides = torch.empty(source.meta["val"].shape, device="meta").stride()
    return num_bytes(source) <= SMALL_BYTES and list(node.args[2]) == list(strides)  # type: ignore[arg-type]


def _merge(graph: fx.Graph, reduction: fx.Node, writes: list[fx.Node]) -> None:
    offsets = [node.args[1] for node in writes]
    sources: list[fx.Node] = [node.args[3] for node in writes]  # type: ignore[misc]
    meta = dict(writes[-1].meta)
    for node in writes:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
    flat: fx.Node = reduction.args[0]  # type: ignore[assignment]
    index = order_index(graph)
    last = max([flat, *sources], key=index.__getitem__)
    with graph.inserting_after(last):
        merged = graph.call_function(OPERATORS.write_many.default, (flat, offsets, sources))
    merged.meta.update(meta)
    reduction.replace_input_with(flat, merged)
    _make_late(chain_of(reduction)[-1])


def _make_late(new_flat: fx.Node) -> None:
    """Move the buffer's making to its first write, which may be later now."""
    first = next(iter(new_flat.users))
    first.prepend(new_flat)
    like = next(node for node in first.all_input_nodes if node is not new_flat)
    new_flat.args = (like, *new_flat.args[1:])
