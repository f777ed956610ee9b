"""Parameters as inputs of operators with bodies, such as ``torch.cond``.

Dynamo and AOTAutograd refuse such an operator if two of its inputs share a storage, as the
parameters of a unit do. Where a unit's code may call one, each of its parameters therefore has a
storage of its own in Dynamo's graph. Before AOTAutograd sees the graph, parameters become views
again, and operators that refuse views get copies::

    unshard -> parameters -> cond      =>      unshard -> parameter_views -> clone -> cond
                         \\-> mm                                         \\-> mm
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fsdp_dynamo.graph_path.unshard_operators import PARAMETER_VIEWS, PARAMETERS

_OPS = torch.ops.higher_order
_REFUSE = {_OPS.cond, _OPS.while_loop, _OPS.scan, _OPS.associative_scan, _OPS.map_impl}


def copy_shared_inputs(gm: fx.GraphModule) -> None:
    """Replace ``parameters`` in a graph of Dynamo's, as above.

    Args:
        gm: a graph with example values, in which units are unsharded once.
    """
    buffers: dict[int, fx.Node] = {}  # unsharded flat parameters by the storages of parameters
    graphs = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    for graph in graphs:
        for node in graph.graph.find_nodes(op="call_function", target=PARAMETERS):
            node.target = PARAMETER_VIEWS
            values = node.meta["example_value"]
            buffers |= dict.fromkeys(map(_storage, values), node.all_input_nodes[0])
    _copy_inputs(gm, buffers)
    for graph in graphs:
        graph.recompile()


def _copy_inputs(gm: fx.GraphModule, buffers: dict[int, fx.Node]) -> None:
    for node in [*gm.graph.nodes]:
        if node.target in _REFUSE:  # what its body calls gets inputs of the body's own
            _copy_inputs_of(node, buffers)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            for body in node.all_input_nodes:
                if body.op == "get_attr":
                    _copy_inputs(gm.get_submodule(str(body.target)), buffers)  # type: ignore[arg-type]


def _copy_inputs_of(node: fx.Node, buffers: dict[int, fx.Node]) -> None:
    """Copy all inputs of an operator that lie in one buffer but the first."""
    seen: set[fx.Node] = set()
    for source in node.all_input_nodes:
        buffer = buffers.get(_storage(source.meta.get("example_value")))
        if buffer in seen:
            with node.graph.inserting_before(node):
                copy = node.graph.call_method("clone", (source,))
            copy.meta = dict(source.meta)
            node.replace_input_with(source, copy)
        elif buffer is not None:
            seen.add(buffer)


def _storage(value: Any) -> int:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0


__all__ = ["copy_shared_inputs"]
