"""A graph as text to read and compare: a line for each node, with its unit at the end.

::

    wait_tensor_1: "f32[4096]" = _c10d_functional.wait_tensor(gather_1)  # all_gather wait layers.1
    mm: "f32[16, 64]" = aten.mm.default(primals_1, view)  # layers.0
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import fx

from graph_passes.graph_utils import (
    collectives,
    is_backward,
    is_collective,
    is_compute,
    is_region,
    is_wait,
    op_name,
    plan_of,
)
from graph_passes.markers import (
    CollectiveKind,
    decode_name,
    encode_name,
    graph_of,
    has_optional_format,
    launch_of,
    mark_of,
    unit_of,
    wire_of,
)
from graph_passes.wire_format import text_of

ROOT = "(root)"
"""Name of the unit whose FQN is empty."""

_REMARK = "  # "


@dataclass(frozen=True)
class Line:
    """One line of a listing.

    Attributes:
        code: the line without its remark.
        unit: FQN of the unit that it belongs to, if any.
        kind: kind of the collective that it issues or waits for; ``""`` for compute.
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
        """Read what ``str()`` of a line returned."""
        code, bar, remark = text.rpartition(_REMARK)
        if not bar or not remark or not code.strip():
            return Line(text)
        *words, name = remark.split(" ")
        kind = words[0] if words else ""
        return Line(code, "" if name == ROOT else decode_name(name), kind, "wait" in words)


def listing(graph: fx.Graph, name: str = "forward") -> str:
    """Return a graph, and the bodies of regions that it calls, as the source of Python functions.

    ``name`` is the name of the graph's function.
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
    """Return a tensor's annotation: dtype and shape."""
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = str(value.dtype).removeprefix("torch.")
    word = dtype.rstrip("0123456789")
    short = _SHORT.get(word, word) + dtype[len(word) :]
    return f': "{short}[{", ".join(map(str, value.shape))}]"'


# -- one unit's part of a listing ----------------------------------------------------------------


def units_in(lines: Sequence[Line]) -> list[str]:
    """Return the FQNs of the units in a listing, in order of first appearance."""
    return list(dict.fromkeys(line.unit for line in lines if line.unit is not None))


def of_unit(lines: Sequence[Line], unit: str) -> list[Line]:
    """Return a unit's part of a listing, from its first line to its last.

    Collectives of other units in between are kept; the compute of those units becomes a remark.
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


# -- boundary labels -------------------------------------------------------------------------------
# Labels of collectives and waits in a scheduled graph, as strings that survive code generation.
#
# A label describes its collective, and the units that compute next to it.


Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Label:
    """Label of a collective or a wait in a scheduled graph.

    Attributes:
        unit: FQN of the collective's unit.
        kind: what the collective does.
        phase: graph that it is in.
        before: units that compute before it, if it is the graph's first collective or wait.
        after: units that compute between it and the next boundary, in order.
        ordinal: index of the flat parameter in the unit.
        absent: ranges of elements of a reduced gradient that this rank does not compute.
        wire: format in which shards travel (``WireFormat.encode``), ``""`` for none.
        graph: ``GraphPlan.short_digest`` of its graph; ``""`` without a plan.
    """

    unit: str
    kind: CollectiveKind
    phase: Phase
    before: tuple[str, ...]
    after: tuple[str, ...]
    ordinal: int = 0
    absent: tuple[tuple[int, int], ...] = ()
    wire: str = ""
    graph: str = ""

    def encode(self) -> str:
        """Return the label as a string."""
        lists = [
            "".join(f"{encode_name(name)}," for name in names)
            for names in (self.before, self.after)
        ]
        absent = "".join(f"{begin}-{end}," for begin, end in self.absent)
        fields = [self.kind, self.phase, encode_name(self.unit), *lists]
        return "|".join([*fields, str(self.ordinal), absent, self.wire, self.graph])

    @staticmethod
    def decode(text: str) -> Label:
        """Read what ``encode`` returned."""
        kind, phase, unit, before, after, ordinal, absent, wire, graph = text.split("|")
        names = [tuple(map(decode_name, part.split(",")[:-1])) for part in (before, after)]
        spans = [span.split("-") for span in absent.split(",")[:-1]]
        return Label(
            decode_name(unit),
            kind,  # type: ignore[arg-type]
            phase,  # type: ignore[arg-type]
            names[0],
            names[1],
            int(ordinal),
            tuple((int(begin), int(end)) for begin, end in spans),
            wire,
            graph,
        )


def label_boundaries(graph: fx.Graph) -> dict[fx.Node, Label]:
    """Return the labels of all collectives and waits of a scheduled graph."""
    phase: Phase = "backward" if is_backward(graph) else "forward"
    boundaries: list[tuple[fx.Node, list[fx.Node]]] = []
    before: list[fx.Node] = []
    current = before
    reduced: set[fx.Node] = set()
    for node in graph.nodes:
        if is_collective(node) or is_wait(node):
            current = []
            boundaries.append((node, current))
            mark = mark_of(node)  # a reduction's wait has its mark
            if mark is not None and mark.kind != "all_gather":
                reduced.add(node)
        elif node.all_input_nodes and all(n in reduced for n in node.all_input_nodes):
            reduced.add(node)  # a cast or division of a reduced gradient is no unit's compute
        elif is_compute(node) and not _feeds_a_gather(node):
            current.append(node)
    labels: dict[fx.Node, Label] = {}
    for position, (node, after) in enumerate(boundaries):
        mark = mark_of(node) or mark_of(node.all_input_nodes[0])
        if mark is None:
            continue
        first = _units(before) if position == 0 else ()
        collective = node if is_collective(node) else node.all_input_nodes[0]
        labels[node] = Label(
            mark.unit,
            mark.kind,
            phase,
            first,
            _units(after),
            ordinal=mark.ordinal,
            wire=text_of(wire_of(collective)),
            graph=graph_of(collective),
        )
    return labels


def _feeds_a_gather(node: fx.Node) -> bool:
    """Whether a node casts a shard: it belongs to the all-gather, not to a unit's compute."""
    return (
        bool(node.users)
        and all(is_collective(user) for user in node.users)
        and all(source.op == "placeholder" for source in node.all_input_nodes)
    )


_HEAVY = ("mm", "linear", "conv", "attention", "embedding", "einsum")


def _units(nodes: list[fx.Node]) -> tuple[str, ...]:
    """Return the units that compute, in order; if any node is heavy, only those of heavy nodes."""
    heavy = [node for node in nodes if _is_heavy(node)]
    units: list[str] = []
    for node in heavy or nodes:
        unit = unit_of(node)
        if unit is not None and (not units or units[-1] != unit):
            units.append(unit)
    return tuple(units)


def _is_heavy(node: fx.Node) -> bool:
    return any(part in op_name(node) for part in _HEAVY)


# -- fingerprint -----------------------------------------------------------------------------------
# Ordered collectives of a scheduled graph as text, which all ranks must have in common.


SEPARATOR = ";"
_FIELDS = " "


def fingerprint(graph: fx.Graph) -> str:
    """Return one entry for each collective, in order of issue, joined by ``SEPARATOR``.

    An entry holds:

    - the operator;
    - the unit (``(root)`` for the root) with the ordinal of its flat parameter;
    - the dtype, and the wire format if any (``yes`` or ``no``: whether an optional one is used);
    - the elements of the input, and a checksum of the gather plan;
    - the reduction, ``-`` for none;
    - ``+`` if it is launched together with the collective before, else ``-``;
    - the registered name of the process group, which is local to a rank: ``graph_agreement``
      replaces it by global ranks.
    """
    entries = []
    launch_before = None
    for node in collectives(graph):
        launch = launch_of(node)
        entries.append(_entry(node, launch is not None and launch == launch_before))
        launch_before = launch
    return SEPARATOR.join(entries)


def _entry(node: fx.Node, with_the_one_before: bool) -> str:
    mark = mark_of(node)
    value = node.all_input_nodes[0].meta["val"]
    unit = "?" if mark is None else f"{encode_name(mark.unit) or '(root)'}#{mark.ordinal}"
    strings = [arg for arg in node.args if isinstance(arg, str)]
    reduction = strings[0] if len(strings) > 1 else "-"
    numel = f"{value.numel()}{_short(plan_of(node))}"
    name = op_name(node).rpartition("::")[2]
    dtype = str(value.dtype).removeprefix("torch.")
    if mark is not None and mark.wire:
        decided = "" if not has_optional_format(node) else "yes" if wire_of(node) else "no"
        dtype = f"{dtype}~{mark.wire}{decided}"
    together = "+" if with_the_one_before else "-"
    fields = (name, unit, dtype, numel, reduction, together, strings[-1])
    return _FIELDS.join(fields)


def _short(plan: tuple[int, ...]) -> str:
    """Return a checksum of a gather plan; ``""`` for a plan of one slice in one message."""
    return f"/{zlib.crc32(repr(plan).encode()):08x}" if len(plan) > 4 or plan[:1] == (0,) else ""


def alone(entry: str) -> str:
    """Return an entry as if it shared no launch."""
    fields = entry.split(_FIELDS, 6)
    return _FIELDS.join((*fields[:5], "-", *fields[6:])) if entry else ""


def describe_entry(entry: str) -> str:
    """Describe an entry for a message; ``""`` stands for none."""
    if not entry:
        return "no further collective"
    name, unit, dtype, numel, reduction, together, group = entry.split(_FIELDS, 6)
    fqn, _, ordinal = unit.rpartition("#")
    what = "" if reduction == "-" else f" ({reduction})"
    launch = ", launched with the one before it" if together == "+" else ""
    return (
        f"{name}{what} of unit '{decode_name(fqn)}', flat parameter {ordinal}, {numel} {dtype}, "
        f"ranks {group}{launch}"
    )
