"""Drop view nodes that change nothing.

A graph that is run node by node pays host time for every node. Tracing leaves pairs such as::

    mm -> t -> t -> view        ->      mm -> view
    sum -> view -> view         ->      sum -> view
    x -> detach -> y            ->      x -> y

Nodes that are outputs stay as they are: an output must not become an alias of an input.
"""

from __future__ import annotations

import operator

from torch import fx, ops
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graph_passes.graph_pass import graph_pass
from graph_passes.graph_utils import op_name

_VIEW = ops.aten.view.default
_IDENTITIES = frozenset({"aten::detach", "aten::alias"})
_ERASABLE = _IDENTITIES | {"aten::view", "aten::_unsafe_view", "aten::t", "aten::split_with_sizes"}


@graph_pass(is_bitwise=True)
def drop_noop_views(graph: fx.Graph) -> None:
    """Replace identities, double transposes and repeated views by what they stand for."""
    for node in graph.nodes:
        source = _stands_for(node)
        if source is None or any(user.op == "output" for user in node.users):
            continue
        node.replace_all_uses_with(source)
    erase_unused(graph)


def erase_unused(graph: fx.Graph) -> None:
    """Erase view nodes that nothing uses any more."""
    for node in reversed(graph.nodes):
        if not node.users and (op_name(node) in _ERASABLE or node.target is operator.getitem):
            graph.erase_node(node)


def _stands_for(node: fx.Node) -> fx.Node | None:
    """The earlier node that ``node`` equals, if there is one; merges a view into its source."""
    name = op_name(node)
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if name in _IDENTITIES:
        return source
    if name == "aten::t" and op_name(source) == "aten::t":
        inner = source.args[0]
        return inner if isinstance(inner, fx.Node) else None
    if node.target is _VIEW:  # not that of a dtype, which keeps the shape
        if source.target is _VIEW:
            node.args = (source.args[0], *node.args[1:])
            source = node.all_input_nodes[0]
        if _same_shape(node, source):
            return source
    return None


def _same_shape(node: fx.Node, source: fx.Node) -> bool:
    one, other = node.meta.get("val"), source.meta.get("val")
    if one is None or other is None or not hasattr(other, "shape"):
        return False
    if one.dim() != other.dim():
        return False
    pairs = zip(one.shape, other.shape, strict=True)
    return all(statically_known_true(a == b) for a, b in pairs)  # sizes may depend on data
