"""Split a Dynamo graph at opaque nodes and compile the segments in between."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

Backend = Callable[..., Any]


def split_at_leaves(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    leaf: Callable[..., Any],
    run_leaf: Callable[..., Any],
    backend: Backend,
    cache: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile a graph with leaves: segments with ``backend``, leaves as plain calls.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its example inputs.
        leaf: target of the opaque nodes.
        run_leaf: called in its place at run time.
        backend: compiles one segment: ``backend(gm, example_inputs)``.
        cache: segments compiled before; equal segments are compiled once.
    """
    if not any(node.target is leaf for node in gm.graph.nodes):
        compiled: Callable[..., Any] = backend(gm, example_inputs)
        return compiled
    parts, leaf_parts = _assign_parts(gm, leaf)
    split = split_module(gm, None, parts.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    for name, child in list(split.named_children()):
        if not name.startswith("submod_"):
            continue
        if int(name.removeprefix("submod_")) in leaf_parts:
            _redirect(child, leaf, run_leaf)
        else:
            split.register_module(name, _Segment(_compile(child, backend, cache)))
    return split.forward


def _assign_parts(
    gm: fx.GraphModule, leaf: Callable[..., Any]
) -> tuple[dict[fx.Node, int], set[int]]:
    """A part number for each node; a leaf and what unpacks it are one part."""
    parts: dict[fx.Node, int] = {}
    leaf_parts: set[int] = set()
    current = 0
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is leaf:
            current += 1
            parts[node] = current
            leaf_parts.add(current)
            current += 1
        elif node.target is operator.getitem and node.args[0].target is leaf:
            parts[node] = parts[node.args[0]]
        else:
            parts[node] = current
    return parts, leaf_parts


def _redirect(part: Any, leaf: Callable[..., Any], run_leaf: Callable[..., Any]) -> None:
    for node in part.graph.nodes:
        if node.target is leaf:
            node.target = run_leaf
    part.recompile()


class _Segment(torch.nn.Module):
    """A compiled segment in the place of the traced one."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, *args: Any) -> Any:
        return self.compiled(*args)


def _compile(
    part: Any, backend: Backend, cache: dict[Any, Callable[..., Any]]
) -> Callable[..., Any]:
    """Compile one segment; backends expect a tuple of outputs, so one output is wrapped."""
    single = _return_tuple(part)
    inputs = [n.meta["example_value"] for n in part.graph.nodes if n.op == "placeholder"]
    key = _sharing_key(part, inputs)
    compiled = cache.get(key) if key is not None else None
    if compiled is None:
        compiled = backend(part, inputs)
        if key is not None:
            cache[key] = compiled
    if not single:
        return compiled
    whole = compiled
    return lambda *args: whole(*args)[0]


def _return_tuple(part: fx.GraphModule) -> bool:
    output = next(n for n in part.graph.nodes if n.op == "output")
    if isinstance(output.args[0], fx.Node):
        output.args = ((output.args[0],),)
        part.recompile()
        return True
    return False


def _sharing_key(part: fx.GraphModule, inputs: list[Any]) -> Any:
    """Key of segments that can share compiled code; ``None``: never shared."""
    numbers: dict[fx.Node, int] = {}
    rows: list[Any] = []
    for node in part.graph.nodes:
        if node.op == "get_attr":
            return None
        numbers[node] = len(numbers)
        args = fx.map_arg(
            (node.args, node.kwargs),
            lambda n: _Ref(numbers[n]),  # type: ignore[arg-type,return-value]
        )
        target = "" if node.op == "placeholder" else str(node.target)
        rows.append((node.op, target, repr(args)))
    metas: list[Any] = []
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            return None
        if any(not isinstance(s, int) for s in (*value.size(), *value.stride())):
            return None
        metas.append(
            (tuple(value.size()), value.stride(), value.dtype, value.device, value.requires_grad)
        )
    return (tuple(rows), tuple(metas), torch.is_grad_enabled())


class _Ref:
    """A reference to an earlier node, by position."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"
