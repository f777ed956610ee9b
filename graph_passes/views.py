"""Passes over parameter views: fewer nodes, and each view at its first use."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx, ops
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graph_passes.graph_pass import graph_pass
from graph_passes.graph_utils import is_alias, is_gather, is_wait, op_name
from graph_passes.markers import cuts_views

# -- cut views -------------------------------------------------------------------------------------
# Cut views: each parameter view is one node on the unsharded buffer.
#
# Before::
#
#     wait -> split_with_sizes -> getitem -> view -> t -> mm
#
# After::
#
#     wait -> as_strided -> mm
#
# In a region the unsharded buffer is an input, not a wait.
#
# For graphs that are run node by node, where every node costs host time. Storages and their
# lifetimes do not change.


@graph_pass(is_bitwise=True)
def cut_views(graph: fx.Graph) -> None:
    """Replace split, getitem, view and transpose of a gathered tensor by one strided view."""
    for split in list(graph.nodes):
        if op_name(split) != "aten::split_with_sizes" or not _is_unsharded(split):
            continue
        sizes: list[int] = split.args[1]
        start = split.args[0].meta["val"].storage_offset()
        for piece in list(split.users):
            if piece.target is not operator.getitem:
                continue
            index = piece.args[1]
            _replace(graph, split.args[0], piece, start + sum(sizes[:index]), [sizes[index]])
    erase_unused(graph)


def _is_unsharded(split: fx.Node) -> bool:
    source: fx.Node = split.args[0]  # type: ignore[assignment]
    return is_wait(source) or (source.op == "placeholder" and cuts_views(split))


def _replace(
    graph: fx.Graph, source: fx.Node, node: fx.Node, offset: int, shape: list[int]
) -> None:
    """Replace ``node``, a contiguous slice of ``source``, and the views of it."""
    rest = []
    for user in list(node.users):
        if user.target is ops.aten.view.default:
            # Shape of the result: the argument may contain -1.
            _replace(graph, source, user, offset, list(user.meta["val"].shape))
        elif op_name(user) == "aten::t" and len(shape) == 2:
            size, stride = [shape[1], shape[0]], [1, shape[1]]
            user.replace_all_uses_with(_strided(graph, source, user, size, stride, offset))
        else:
            rest.append(user)
    if rest:
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * shape[i + 1]
        view = _strided(graph, source, node, shape, strides, offset)
        for user in rest:
            user.replace_input_with(node, view)


def _strided(
    graph: fx.Graph,
    source: fx.Node,
    old: fx.Node,
    size: list[int],
    stride: list[int],
    offset: int,
) -> fx.Node:
    with graph.inserting_before(old):
        view = graph.call_function(ops.aten.as_strided.default, (source, size, stride, offset))
    view.meta.update({k: v for k, v in old.meta.items() if k != "eager_input_vals"})
    return view


# -- drop noop views -------------------------------------------------------------------------------
# Drop view nodes that change nothing.
#
# A graph that is run node by node pays host time for every node. Tracing leaves pairs such as::
#
#     mm -> t -> t -> view        ->      mm -> view
#     sum -> view -> view         ->      sum -> view
#     x -> detach -> y            ->      x -> y
#
# Nodes that are outputs stay: an output must not become an alias of an input.


_VIEW = ops.aten.view.default
_IDENTITIES = frozenset({"aten::detach", "aten::alias"})
_ERASABLE = _IDENTITIES | {"aten::view", "aten::_unsafe_view", "aten::t", "aten::split_with_sizes"}


@graph_pass(is_bitwise=True)
def drop_noop_views(graph: fx.Graph) -> None:
    """Remove identities, double transposes and repeated views."""
    for node in graph.nodes:
        source = _stands_for(node)
        if source is None or any(user.op == "output" for user in node.users):
            continue
        node.replace_all_uses_with(source)
    erase_unused(graph)


def erase_unused(graph: fx.Graph) -> None:
    """Erase view nodes without users."""
    for node in reversed(graph.nodes):
        if not node.users and (op_name(node) in _ERASABLE or node.target is operator.getitem):
            graph.erase_node(node)


def _stands_for(node: fx.Node) -> fx.Node | None:
    """Return the earlier node that ``node`` equals, if any. Also merge a view into its source."""
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


# -- sink views ------------------------------------------------------------------------------------
# Sink views: a view of an unsharded buffer stands where it is first used.
#
# Before::
#
#     wait -> norm_weight = as_strided(wait)   embedding   ...   mul(x, norm_weight)
#
# After::
#
#     wait   embedding   ...   norm_weight = as_strided(wait)   mul(x, norm_weight)
#
# Tracing makes all views of a unit at the start of its forward. A gather must end before the first
# node that reads its wait. If that is a view, this is long before anything is computed with it.


@graph_pass(is_bitwise=True)
def sink_views(graph: fx.Graph) -> None:
    """Move all views of gathered tensors down to their first users; values stay the same."""
    for view in reversed(list(_views_of_gathers(graph))):
        if view.users:
            min(view.users).prepend(view)  # nodes compare by their place in the graph


def _views_of_gathers(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield views of gathered tensors, and views of views, in graph order."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_wait(node) and is_gather(node.all_input_nodes[0]):
            found.add(node)
        elif is_alias(node) and found.issuperset(node.all_input_nodes):
            found.add(node)
            yield node
