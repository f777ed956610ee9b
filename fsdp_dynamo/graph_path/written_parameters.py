"""Refusal of graphs that write a unit's parameters and gather the unit afterwards.

A graph gathers a unit's shard, and the parameters that it writes are views of that shard. To
AOTAutograd they are unrelated inputs: the gather would read the values from before the write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.original_parameter import owner_of
from fsdp_dynamo.errors import UnsupportedError

_IN_PLACE = {"setitem"} | {
    f"i{name}"
    for name in ("add", "and", "floordiv", "mod", "mul", "or", "pow", "sub", "truediv", "xor")
}


def refuse_writes_before_gathers(gm: fx.GraphModule) -> None:
    """Raise if a parameter is written before its unit is gathered in the same graph.

    Args:
        gm: a graph of Dynamo's, with example values and inputs.

    Raises:
        UnsupportedError: names the parameter.
    """
    aliases: dict[fx.Node, torch.Tensor] = {}  # parameters of units, and views of them
    written: dict[int | None, str] = {}  # FQNs by the storage of their shard
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            example = _real_value(node)
            if isinstance(example, torch.Tensor) and owner_of(example) is not None:
                aliases[node] = example
            continue
        for source in node.all_input_nodes:  # shards have no use but a gather
            fqn = None if source in aliases else written.get(_storage(_real_value(source)))
            if fqn is not None:
                raise _write_error(fqn)
        targets = [source for source in _first_argument(node) if source in aliases]
        if _writes_in_place(node):
            written |= {_storage(aliases[t]): owner_of(aliases[t]) or "" for t in targets}
        elif targets and _fake_storage(node) == _fake_storage(targets[0]):
            aliases[node] = aliases[targets[0]]


def _real_value(node: fx.Node) -> Any:
    argument = node.meta.get("grapharg")
    return None if argument is None else argument.example


def _first_argument(node: fx.Node) -> list[fx.Node]:
    first = node.kwargs.get("out", node.args[0] if node.args else None)
    return [one for one in (first if isinstance(first, (list, tuple)) else [first]) if one]  # type: ignore[misc]


def _writes_in_place(node: fx.Node) -> bool:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    is_operator = name.strip("_") in _IN_PLACE
    schema = getattr(target, "_schema", None)
    is_mutable = schema is not None and schema.is_mutable
    return is_method or is_operator or is_mutable or "out" in node.kwargs


def _fake_storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    if isinstance(value, (tuple, list)) and value:  # views of one tensor
        value = value[0]
    return _storage(value)


def _storage(tensor: Any) -> int | None:
    return local_of(tensor).untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else None


def _write_error(fqn: str) -> UnsupportedError:
    return UnsupportedError(
        expected="parameters that stay as they are until their unit has run",
        got="a write inside the forward, before the unit is gathered",
        where=f"parameter '{fqn}', graph mode",
        fix="Write it before or after the call of the compiled model, or compile with "
        "torch.compile(model), where it counts from the unit's next gather on.",
    )
