"""The ordered collectives of a final graph as text: what all ranks must have in common."""

from __future__ import annotations

import zlib

from torch import fx

from graph_passes.graph_utils import collectives, op_name, plan_of
from graph_passes.markers import (
    decode_name,
    encode_name,
    has_optional_format,
    launch_of,
    mark_of,
    wire_of,
)

SEPARATOR = ";"
_FIELDS = " "


def fingerprint(graph: fx.Graph) -> str:
    """One entry a collective, in order of issue, joined by ``SEPARATOR``.

    An entry holds the operator, the unit (``(root)`` for the root) with the ordinal of its flat
    parameter, dtype (and the format that it may travel in; of an optional one, ``yes`` or ``no``)
    and elements of the input (and a checksum of its gather plan), the reduction (``-`` for none),
    whether it is launched together with the one before it (``+``, else ``-``) and the registered
    name of the process group, which whoever compares replaces by its global ranks.

    Args:
        graph: a scheduled graph whose collectives carry marks.
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
    """A gather plan with more than one message or piece, as a number."""
    return f"/{zlib.crc32(repr(plan).encode()):08x}" if len(plan) > 4 or plan[:1] == (0,) else ""


def alone(entry: str) -> str:
    """An entry as if it shared no launch."""
    fields = entry.split(_FIELDS, 6)
    return _FIELDS.join((*fields[:5], "-", *fields[6:])) if entry else ""


def describe_entry(entry: str) -> str:
    """An entry in words, for a message; ``""`` stands for none."""
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
