"""Cut views: each parameter view is taken straight from the unsharded flat parameter.

Before::

    wait -> split_with_sizes -> getitem -> view -> t -> mm

After::

    wait -> as_strided -> mm

In a region the unsharded flat parameter is an input instead of a wait.

For graphs that are run node by node, where every node costs host time. The storage, and so what
is kept alive and when it is freed, is the same.
"""

from __future__ import annotations

import operator

from torch import fx, ops

from graph_passes.graph_pass import graph_pass
from graph_passes.graph_utils import is_wait, op_name
from graph_passes.markers import cuts_views
from graph_passes.views.drop_noop_views import erase_unused


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
    """Whether what is split is an unsharded flat parameter."""
    source: fx.Node = split.args[0]  # type: ignore[assignment]
    return is_wait(source) or (source.op == "placeholder" and cuts_views(split))


def _replace(
    graph: fx.Graph, source: fx.Node, node: fx.Node, offset: int, shape: list[int]
) -> None:
    """Replace ``node``, a contiguous piece, and the views that hang on it."""
    rest = []
    for user in list(node.users):
        if user.target is ops.aten.view.default:
            # Not its argument, in which -1 stands for what is left.
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
