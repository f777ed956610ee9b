"""A graph as text to read and to compare: one line a node, and whose it is at the line's end.

::

    wait_tensor_1: "f32[4096]" = _c10d_functional.wait_tensor(gather_1)  # all_gather wait layers.1
    mm: "f32[16, 64]" = aten.mm.default(primals_1, view)  # layers.0
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx

from graph_passes.graph_utils import is_region
from graph_passes.markers import decode_name, encode_name, mark_of, unit_of

ROOT = "(root)"
"""How the unit whose FQN is empty is called."""

_REMARK = "  # "


@dataclass(frozen=True)
class Line:
    """One line of a listing.

    Attributes:
        code: without the remark.
        unit: FQN of the unit that it belongs to; ``None`` for lines of no unit.
        kind: of the collective that it issues or waits for; ``""`` for compute.
        is_wait: whether it waits.
    """

    code: str
    unit: str | None = None
    kind: str = ""
    is_wait: bool = False

    def __str__(self) -> str:
        if self.unit is None:
            return self.code
        words = [self.kind, "wait" if self.is_wait else "", encode_name(self.unit) or ROOT]
        return self.code + _REMARK + " ".join(word for word in words if word)

    @staticmethod
    def parse(text: str) -> Line:
        """Back from ``str()`` of a line."""
        code, bar, remark = text.rpartition(_REMARK)
        if not bar or not remark or not code.strip():
            return Line(text)
        *words, name = remark.split(" ")
        kind = words[0] if words else ""
        return Line(code, "" if name == ROOT else decode_name(name), kind, "wait" in words)


def listing(graph: fx.Graph, name: str = "forward") -> str:
    """A graph, and the bodies of the regions that it calls, as Python functions.

    Args:
        graph: what to write down; nothing about it changes.
        name: of the function.
    """
    parts = [*_function(graph, name)]
    for target, body in _bodies(graph):
        parts += [Line(""), Line(""), *_function(body.graph, target)]
    return "\n".join(map(str, parts)) + "\n"


def _bodies(graph: fx.Graph) -> Iterator[tuple[str, fx.GraphModule]]:
    module = graph.owning_module
    calls = [node for node in graph.nodes if is_region(node)]
    for target in dict.fromkeys(str(node.args[0].target) for node in calls):
        body = None if module is None else module.get_submodule(target)
        if isinstance(body, fx.GraphModule):
            yield target, body


def _function(graph: fx.Graph, name: str) -> Iterator[Line]:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    yield Line(f"def {name}(")
    for node in inputs:
        yield Line(f"    {node.name}{_type(node.meta.get('val'))},")
    yield Line("):")
    for node in graph.nodes:
        if node.op == "output":
            yield Line(f"    return {_argument(node.args[0])}")
        elif node.op != "placeholder":
            yield _line(node)


def _line(node: fx.Node) -> Line:
    code = f"    {node.name}{_type(node.meta.get('val'))} = {_call(node)}"
    mark = mark_of(node)
    if mark is None and unit_of(node) is None:
        return Line(code)
    if mark is None:
        return Line(code, unit_of(node))
    return Line(code, mark.unit, mark.kind, _waits(node))


def _waits(node: fx.Node) -> bool:
    """Whether a node is ``wait_tensor.default``, ``graph_ops.wait`` or ``wait_.default``."""
    return any(part.startswith("wait") for part in _target(node).split(".")[-2:])


def _call(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem and not node.kwargs:
        return f"{_argument(node.args[0])}[{_argument(node.args[1])}]"
    arguments = [_argument(arg) for arg in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    return f"{_target(node)}({', '.join(arguments)})"


def _target(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, str):
        return f"self.{target}"
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = str(getattr(target, "__module__", "") or "").removeprefix("_")
    name = str(getattr(target, "__name__", type(target).__name__))
    is_operator = isinstance(target, torch._ops.HigherOrderOperator) or not module
    return name if is_operator else f"{module}.{name}"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple):
        inner = ", ".join(map(_argument, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_argument(item)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({', '.join(map(_argument, (value.start, value.stop, value.step)))})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return repr(value)


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "b8"}


def _type(value: Any) -> str:
    """A tensor's annotation: dtype and shape."""
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = str(value.dtype).removeprefix("torch.")
    word = dtype.rstrip("0123456789")
    short = _SHORT.get(word, word) + dtype[len(word) :]
    return f': "{short}[{", ".join(map(str, value.shape))}]"'


# -- one unit's part of it -----------------------------------------------------------------------


def units_in(lines: Sequence[Line]) -> list[str]:
    """FQNs of the units that a listing has lines of, in order of the first."""
    return list(dict.fromkeys(line.unit for line in lines if line.unit is not None))


def of_unit(lines: Sequence[Line], unit: str) -> list[Line]:
    """A unit's part of a listing: from its first line to its last.

    Collectives of other units that stand in between are kept; compute of others is one remark.
    """
    own = [i for i, line in enumerate(lines) if line.unit == unit]
    if not own:
        return []
    kept: list[Line] = []
    inside = lines[own[0] : own[-1] + 1]
    for folded, group in groupby(inside, lambda line: line.unit != unit and not line.kind):
        members = list(group)
        kept += [_folded(members)] if folded else members
    return kept


def _folded(lines: Sequence[Line]) -> Line:
    others = [encode_name(unit) or ROOT for unit in units_in(lines)]
    of = f" of {', '.join(others)}" if others else ""
    return Line(f"    # ... {len(lines)} line{'' if len(lines) == 1 else 's'}{of}")
