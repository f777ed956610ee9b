"""Units in which a graph ends: their unsharded parameters go from one graph to the next.

Dynamo ends a graph where it cannot go on. Where that is inside of a unit, the next graph takes the
unsharded flat parameter or its views for inputs and saves them for its backward, and no pass can
reshard the unit in between (decision 14).
"""

from __future__ import annotations

import warnings

import torch
from torch import fx

from fsdp_dynamo.dynamo.private_api import ends_with_a_break
from fsdp_dynamo.errors import error_message
from fsdp_dynamo.graph_path.unshard_operators import UNSHARD, unsharded_behind
from graph_passes.graph_utils import hint
from graph_passes.markers import unit_of

_warned: set[tuple[str, int]] = set()
"""Units that were named, and their bytes; ``("", 0)`` for a graph break outside of them."""


def warn_if_the_graph_breaks(gm: fx.GraphModule) -> None:
    """Warn, once for each unit, that a graph break ends a graph that is to be compiled.

    An unsharded flat parameter, which users do not see, leaves a graph only where one ends before
    the unit's module is called.
    """
    outputs = gm.graph.output_node().all_input_nodes
    if not ends_with_a_break(gm) and not any(node.target is UNSHARD for node in outputs):
        return
    units = set(units_that_stay(gm).items()) or {("", 0)}
    if units <= _warned:
        return
    _warned.update(units)
    named = ", ".join(f"'{fqn}' ({num_bytes} bytes)" for fqn, num_bytes in sorted(units) if fqn)
    stays = f", but units in which a graph ends stay unsharded until their backward: {named}"
    warnings.warn(
        error_message(
            expected="one graph of the whole model",
            got="a graph break",
            where="torch.compile",
            fix=f"Results are the same{stays if named else ''}. TORCH_LOGS=graph_breaks and "
            "explain(model) say where and why; with fullgraph=True it is an error.",
        ),
        stacklevel=2,
    )


def units_that_stay(gm: fx.GraphModule) -> dict[str, int]:
    """Bytes of what leaves a graph unsharded, by the unit's FQN.

    The root is left out: it stays unsharded until its backward in any case.
    """
    found: dict[str, int] = {}
    for source in dict.fromkeys(map(unsharded_behind, gm.graph.output_node().all_input_nodes)):
        if source is None:
            continue
        tensor = source.meta.get("example_value")
        fqn = unit_of(source)
        if fqn and isinstance(tensor, torch.Tensor):
            found[fqn] = found.get(fqn, 0) + hint(tensor.numel()) * tensor.element_size()
    return found
