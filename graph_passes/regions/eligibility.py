"""Conditions under which a unit's body becomes a region, and what a region returns."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graph_passes.graph_utils import is_region, is_view, storage_of, written_by


def why_not(body: fx.GraphModule, inputs: list[fx.Node], outputs: list[fx.Node]) -> str | None:
    """Return the reason why a body cannot be a region, if there is one.

    Args:
        body: the body as a graph of its own.
        inputs: nodes with which it is called.
        outputs: nodes that it returns.
    """
    known = [node.meta.get("example_value") for node in (*inputs, *outputs)]
    values = [value for value in known if isinstance(value, torch.Tensor)]
    if len(values) < len(known):
        return "an input or an output is not a tensor"
    if any(hasattr(value, "__tensor_flatten__") for value in values):
        return "an input or an output is a tensor subclass"
    if any(not isinstance(size, int) for value in values for size in value.shape):
        return "a shape is dynamic"
    if any(_is_symbolic(node) for node in body.graph.nodes):
        return "a number in it is dynamic"
    storages = [storage_of(value) for value in values]
    if len(set(storages)) < len(storages):
        return "an input or an output is a view of another"
    if _writes_to_an_input(body, values[: len(inputs)]):
        return "it writes to an input"
    return None


def carrying_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that get a gradient if all outputs of a Dynamo graph do."""
    carrying: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in carrying:
            carrying.update(source for source in node.all_input_nodes if _requires_grad(source))
    return carrying


def passes_gradients(
    nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node], carrying: set[fx.Node]
) -> bool:
    """Whether each input and output that requires a gradient gets one.

    A region's backward returns zeros where there would be no gradient.

    Args:
        nodes: the run.
        inputs: nodes outside that it uses.
        outputs: nodes of it that are used outside.
        carrying: ``carrying_gradients`` of the whole graph.
    """
    if not torch.is_grad_enabled():
        return True
    users = carrying.intersection(nodes)
    reached = [node in carrying for node in outputs if _requires_grad(node)]
    reached += [not users.isdisjoint(node.users) for node in inputs if _requires_grad(node)]
    return all(reached)


def _requires_grad(node: fx.Node) -> bool:
    leaves = tree_leaves(node.meta.get("example_value"))
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in leaves)


def last_changes(graph: fx.Graph) -> dict[int, int]:
    """Return the positions of the last nodes of a Dynamo graph that change tensors, by storage.

    An in-place operation returns the tensor that it was given; an assignment to an item returns
    nothing. Both raise the tensor's version.
    """
    changes: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        result = node.meta.get("example_value")
        for source in node.all_input_nodes if node.op != "output" else ():
            value = source.meta.get("example_value")
            if not isinstance(value, torch.Tensor) or not value._version:
                continue
            if result is value or result is None:
                changes[storage_of(value)] = position
    return changes


def changed_after(inputs: list[fx.Node], position: int, changes: dict[int, int]) -> bool:
    """Whether an input of a region, which its backward reads, is changed after the region."""
    if not changes:
        return False
    values = (node.meta.get("example_value") for node in inputs)
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return any(changes.get(storage_of(value), -1) > position for value in tensors)


def _is_symbolic(node: fx.Node) -> bool:
    """Whether a node returns symbolic numbers, such as those that change between calls."""
    leaves = tree_leaves(node.meta.get("example_value"))
    return any(isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) for value in leaves)


def _writes_to_an_input(body: fx.GraphModule, values: list[torch.Tensor]) -> bool:
    """Whether an operator writes to an input's memory, found by a run on fake tensors."""
    mode = detect_fake_mode(values)
    if mode is None:
        raise ValueError("regions: expected a graph whose inputs carry fake example values")
    with mode, torch.no_grad(), _Writes() as writes:
        copies = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values
        ]
        with enable_python_dispatcher():  # batch norm with the operator that names its writes
            body(*copies)
    return any(storage_of(copy) in writes.storages for copy in copies)


class _Writes(TorchDispatchMode):
    """Recorder of the storages that operators write to, by their schemas.

    Versions do not tell: batch norm writes its running statistics without raising them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = written_by(func._schema, args, kwargs)
        self.storages |= {storage_of(value) for value in written if value is not None}
        return func(*args, **kwargs)


# -- boundary --------------------------------------------------------------------------------------
# Boundaries of regions: what a region takes and returns, before the graph around is partitioned.
#
# Before::
#
#     y, flat', w', s = region_forward(flat, w)        flat' is flat, w' is a view of w
#     grads = region_backward(flat', w', s, grad_y)
#
# After::
#
#     y, s = region_forward(flat, w)
#     grads = region_backward(flat, w.t(), s, grad_y)
#
# A region that saves an input then saves the input itself, so the graph around can gather again in
# the backward what ``flat`` and ``w`` belong to.


def tidy_region_boundaries(gm: fx.GraphModule) -> None:
    """Let regions return neither inputs nor views of them, and give each call its own values.

    ``gm`` is the joint graph with partitioned regions; changed in place.
    """
    calls: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if is_region(node):
            calls.setdefault(node.args[0].target, []).append(node)
    views: list[fx.Node] = []
    for name, nodes in calls.items():
        body = gm.get_submodule(name)
        assert isinstance(body, fx.GraphModule)
        views += _lead_inputs_past(body, nodes)
        body.recompile()
        for node in nodes:
            _give_own_values(node)
    for view in views:
        arguments = fx.map_arg(view.args, lambda node: node.meta["val"])
        with view.all_input_nodes[0].meta["val"].fake_mode:
            view.meta["val"] = cast(Any, view.target)(*arguments, **view.kwargs)


def _output_of(body: fx.GraphModule) -> fx.Node:
    (output,) = body.graph.find_nodes(op="output")
    return cast(fx.Node, output)


def _items(call: fx.Node) -> dict[int, list[fx.Node]]:
    """Return the ``getitem`` nodes of a call by index."""
    items: dict[int, list[fx.Node]] = {}
    for user in call.users:
        if user.target is not operator.getitem:
            raise ValueError(f"region {call.name}: expected getitem as its users, got {user.name}")
        items.setdefault(cast(int, user.args[1]), []).append(user)
    return items


def _lead_inputs_past(body: fx.GraphModule, calls: list[fx.Node]) -> list[fx.Node]:
    """Drop outputs that are inputs or views of inputs; their users read the caller's values.

    Returns the views that are made for that in the graph around, still without values.
    """
    position = {n: i for i, n in enumerate(body.graph.find_nodes(op="placeholder"))}
    output = _output_of(body)
    outputs = list(output.args[0])  # type: ignore[arg-type]
    views = {i: found for i, n in enumerate(outputs) if (found := _views_of_input(n)) is not None}
    made: list[fx.Node] = []
    if not views:
        return made
    kept = [i for i in range(len(outputs)) if i not in views]
    number = {old: new for new, old in enumerate(kept)}
    output.args = (tuple(outputs[i] for i in kept),)
    for call in calls:
        for index, items in _items(call).items():
            for item in items:
                if index in number:
                    item.args = (call, number[index])
                    continue
                source, *chain = views[index]
                copies = {source: cast(fx.Node, call.args[2 + position[source]])}
                made += _copied(item, chain, copies)
                item.replace_all_uses_with(copies[outputs[index]])
                item.graph.erase_node(item)
        call.meta["val"] = tuple(call.meta["val"][i] for i in kept)
    body.graph.eliminate_dead_code()
    return made


def _views_of_input(node: Any) -> list[fx.Node] | None:
    """Return the input of a body that a node is, or is a view of, and the views up to the node."""
    chain: list[fx.Node] = []
    while isinstance(node, fx.Node):
        chain.insert(0, node)
        if node.op == "placeholder":
            return chain
        if not is_view(node) or len(node.all_input_nodes) != 1:
            return None
        node = node.all_input_nodes[0]
    return None


def _copied(
    item: fx.Node, chain: list[fx.Node], copies: dict[fx.Node, fx.Node]
) -> Iterator[fx.Node]:
    """Copy the views of a chain to the place of an item of a region's call; yield them."""
    for node in chain:
        with item.graph.inserting_before(item):
            copies[node] = item.graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = {"custom": dict(item.meta.get("custom") or {})}
        yield copies[node]


def _give_own_values(call: fx.Node) -> None:
    """Give a call fake tensors of its own: torch gives the same ones to all calls of a region."""
    bases: dict[int, torch.Tensor] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with value.fake_mode:  # type: ignore[attr-defined]
            size, stride = value.shape, value.stride()
            base = bases.get(value.untyped_storage()._cdata)
            if base is not None:
                return base.as_strided(size, stride, value.storage_offset())
            fresh = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        bases[value.untyped_storage()._cdata] = fresh
        return fresh

    call.meta["val"] = tuple(map(own, call.meta["val"]))
    for index, items in _items(call).items():
        for item in items:
            item.meta["val"] = call.meta["val"][index]
