"""Operators that stand in Dynamo's graph for everything a unit does to its flat parameters.

Dynamo sees one call of each and traces nothing inside. AOTAutograd, which runs the graph, sees what
they are made of::

    unshard          -> all_gather -> wait, and in the backward reduce_scatter -> wait
    parameter_views  -> split -> view ...

``parameters`` replaces ``parameter_views`` in units whose code may call operators with bodies
(see ``traced_unit``). Each collective is marked where it is made. The constants of a unit are
arguments in text form, so that every cache key of the graph contains them.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import traceback

from fsdp_dynamo.dynamo.untraced import untraced
from fsdp_dynamo.graph_mode.collective_operators import ALL_GATHER, REDUCE_SCATTER
from fsdp_dynamo.graph_mode.offloading import TO_DEVICE, TO_HOST
from graph_passes.markers import BODY, COLLECTIVE, UNIT, VIEWS, Mark


class FlatConstants(NamedTuple):
    """Constants of the collectives of one flat parameter.

    Attributes:
        unit: FQN of the unit.
        group_name: registered name of the group that gathers: the shard group, or under
            ``HIERARCHICAL_SHARD`` this node's.
        world_size: size of that group.
        reductions: names of the groups over which gradients are averaged, in order.
        scatters: for each of ``reductions``, the number of ranks over which its result is
            scattered; 0: an all-reduce.
        gather_plan: encoded gather plan of the all-gather.
        reduce_plans: encoded gather plans of the reduce-scatters, in order.
        is_sharded: whether there is anything to gather.
        requires_grad: whether there is a gradient to reduce.
        param_dtype: dtype of the unsharded buffer.
        reduce_dtype: dtype of the reductions.
        sum_dtype: dtype in which gradients that wait for a reduction accumulate.
        grad_dtype: dtype of the gradient that leaves the graph.
        grad_scale: factor of reduced gradients.
        gather_mark: encoded mark of the all-gather.
        reduce_marks: encoded mark of each of ``reductions``.
        offloaded_from: device that computes, if the shard is in host memory; else ``""``.
    """

    unit: str
    group_name: str
    world_size: int
    reductions: Sequence[str]
    scatters: Sequence[int]
    gather_plan: Sequence[int]
    reduce_plans: Sequence[Sequence[int]]
    is_sharded: bool
    requires_grad: bool
    param_dtype: str
    reduce_dtype: str
    sum_dtype: str
    grad_dtype: str
    grad_scale: float
    gather_mark: str
    reduce_marks: Sequence[str]
    offloaded_from: str


class ViewConstants(NamedTuple):
    """Division of an unsharded buffer into parameters, equal for equal units.

    Attributes:
        split_sizes: numel of each slice of the buffer.
        pieces: for each parameter, the index of its slice.
        shapes: shape of each parameter.
    """

    split_sizes: Sequence[int]
    pieces: Sequence[int]
    shapes: Sequence[Sequence[int]]


def encode(constants: FlatConstants | ViewConstants) -> str:
    """Return constants as text."""
    return json.dumps(constants)


@lru_cache(maxsize=4096)
def _decode(kind: Any, text: str) -> Any:
    return kind(*json.loads(text))


def _cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    wanted = getattr(torch, dtype)
    return tensor if tensor.dtype == wanted else tensor.to(wanted)


@contextmanager
def _marked(marks: dict[str, str]) -> Iterator[None]:
    """Put marks on the nodes traced inside.

    ``traceback.annotate`` would change the ``custom`` dictionary in place, which is shared with the
    node of Dynamo's graph that is being run.
    """
    meta = traceback.get_current_meta()
    before = meta.get("custom") or {}
    meta["custom"] = {**before, **marks}
    try:
        yield
    finally:
        meta["custom"] = before


def _as_in_the_forward(unit: str) -> AbstractContextManager[None]:
    """Mark nodes traced in a backward as the unit's.

    AOTAutograd copies the marks of the forward node (here the all-gather's) to what it knows to be
    its backward. With other metadata in force, it does not.
    """
    node = fx.Graph().create_node("placeholder", "backward")
    node.meta["custom"] = {UNIT: unit, BODY: "0"}
    return traceback.set_current_meta(node)


def _gather(
    shard: torch.Tensor, secondary: torch.Tensor | None, flat: FlatConstants
) -> torch.Tensor:
    if secondary is not None:
        shard = secondary
    elif flat.offloaded_from:
        shard = TO_DEVICE(shard, flat.offloaded_from, getattr(torch, flat.param_dtype))
    else:
        shard = _cast(shard, flat.param_dtype)
    if not flat.is_sharded:
        return shard.view_as(shard)
    with _marked({COLLECTIVE: flat.gather_mark}):
        gathered = ALL_GATHER(shard, flat.world_size, flat.group_name, flat.gather_plan)
        unsharded: torch.Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
    return unsharded


def _reduce(grad: torch.Tensor, flat: FlatConstants) -> torch.Tensor:
    grad = _cast(grad, flat.reduce_dtype)
    plans = iter(flat.reduce_plans)
    for group, size, mark in zip(flat.reductions, flat.scatters, flat.reduce_marks, strict=True):
        with _marked({COLLECTIVE: mark}):
            if size:
                reduced = REDUCE_SCATTER(grad, "avg", size, group, next(plans))
            else:
                reduced = torch.ops._c10d_functional.all_reduce(grad, "avg", group)
            grad = torch.ops._c10d_functional.wait_tensor(reduced)
    if flat.grad_scale != 1:
        grad = grad * flat.grad_scale
    grad = _cast(grad, flat.grad_dtype)
    return TO_HOST(grad) if flat.offloaded_from else grad


class _Unshard(torch.autograd.Function):
    """Autograd function: the forward is the all-gather, the backward the reduce-scatter."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        shard: torch.Tensor,
        secondary: torch.Tensor | None,
        total: torch.Tensor | None,
        unreduced: torch.Tensor | None,
        flat: FlatConstants,
    ) -> torch.Tensor:
        ctx.flat, ctx.is_unreduced = flat, unreduced is not None
        ctx.save_for_backward(*(() if total is None else (total,)))
        return _gather(shard, secondary, flat)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        with _as_in_the_forward(ctx.flat.unit):
            if ctx.is_unreduced:
                return None, None, None, _cast(grad, ctx.flat.sum_dtype), None
            for total in ctx.saved_tensors:
                grad = _cast(grad, ctx.flat.sum_dtype) + total
            return _reduce(grad, ctx.flat), None, None, None, None


class _FirstCopy(torch.autograd.Function):
    """Parameter of which every shard holds a whole copy; each copy gets the gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, copies: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        numel = math.prod(shape)
        ctx.num_copies = copies.numel() // numel
        return copies[:numel].view(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad.reshape(1, -1).expand(ctx.num_copies, -1).reshape(-1), None


_first_copy: Any = _FirstCopy.apply


def unshard(
    shard: torch.Tensor,
    secondary: torch.Tensor | None,
    total: torch.Tensor | None,
    unreduced: torch.Tensor | None,
    constants: str,
) -> torch.Tensor:
    """Return the unsharded buffer ``(padded_numel,)``; its gradient is reduced to the shard's.

    Args:
        shard: ``(padded_numel / N,)``.
        secondary: secondary shard ``(padded_numel / ranks in a node,)``, gathered in place of
            ``shard``.
        total: unsharded gradients of earlier steps, which are reduced with this step's.
        unreduced: input that takes the unsharded gradient in a step that reduces nothing.
        constants: encoded ``FlatConstants``.
    """
    flat: FlatConstants = _decode(FlatConstants, constants)
    if not flat.requires_grad:
        return _gather(shard, secondary, flat)
    unsharded: torch.Tensor = _Unshard.apply(shard, secondary, total, unreduced, flat)  # type: ignore[no-untyped-call]
    return unsharded


def parameter_views(unsharded: torch.Tensor, constants: str) -> list[torch.Tensor]:
    """Return the parameters as views of the unsharded buffer.

    Args:
        unsharded: ``(padded_numel,)``.
        constants: encoded ``ViewConstants``.
    """
    sizes, pieces, shapes = _decode(ViewConstants, constants)
    with _marked({VIEWS: ""}):
        cut = torch.split(unsharded, sizes)
        return [
            cut[piece].view(shape)
            if sizes[piece] == math.prod(shape)
            else _first_copy(cut[piece], shape)
            for piece, shape in zip(pieces, shapes, strict=True)
        ]


def parameters(unsharded: torch.Tensor, constants: str) -> list[torch.Tensor]:
    """Return the parameters as ``parameter_views``, but each in a storage of its own."""
    return [view.clone() for view in parameter_views(unsharded, constants)]


_library = torch.library.Library("fsdp_dynamo", "FRAGMENT")
for _function, _schema in (
    (
        unshard,
        "(Tensor shard, Tensor? secondary, Tensor? total, Tensor? unreduced, str constants)"
        " -> Tensor",
    ),
    (parameters, "(Tensor unsharded, str constants) -> Tensor[]"),
    (parameter_views, "(Tensor(a) unsharded, str constants) -> Tensor(a)[]"),
):
    _library.define(_function.__name__ + _schema)
    # After a graph break inside a unit, these run eagerly; Dynamo must not compile them.
    _function = untraced("made of what a graph would hold")(_function)
    _library.impl(_function.__name__, _function, "CompositeImplicitAutograd")

UNSHARD = torch.ops.fsdp_dynamo.unshard.default
PARAMETERS = torch.ops.fsdp_dynamo.parameters.default
PARAMETER_VIEWS = torch.ops.fsdp_dynamo.parameter_views.default


# -- in graphs -------------------------------------------------------------------------------------


def unshard_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield all calls of ``unshard`` in a graph of Dynamo's and its subgraphs."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.find_nodes(op="call_function", target=UNSHARD)


def share_unshards(gm: fx.GraphModule) -> None:
    """Replace the ``unshard`` calls of a unit by its first, so that its gradients are reduced once.

    Autograd then sums the gradients of all calls before the reduction. Calls with and without
    gradients are not merged.
    """
    first: dict[Any, fx.Node] = {}
    for node in [*unshard_nodes(gm)]:
        key = (node.graph, node.args, node.meta["example_value"].requires_grad)
        same = first.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            node.graph.erase_node(node)
    gm.recompile()


class Collectives(NamedTuple):
    """Facts about the collectives that a graph will have.

    Attributes:
        groups: registered names of their groups; groups that gather come first.
        formats: wire formats that they have or may have, as text.
        marks: encoded mark of each, with dtype and numel of its unsharded side.
    """

    groups: list[str]
    formats: list[str]
    marks: list[str]


def collectives_of(gm: fx.GraphModule) -> Collectives:
    """Return facts about the collectives of a graph of Dynamo's."""
    gathers: dict[str, None] = {}
    reductions: dict[str, None] = {}
    marks: list[tuple[str, str]] = []
    for node in unshard_nodes(gm):
        *_, unreduced, constants = node.args
        flat: FlatConstants = _decode(FlatConstants, str(constants))
        unsharded = node.meta["example_value"]
        kind = f"{unsharded.dtype} {unsharded.numel()}"
        if flat.is_sharded:
            gathers[flat.group_name] = None
            marks.append((flat.gather_mark, kind))
        if unreduced is None and unsharded.requires_grad:
            reductions |= dict.fromkeys(flat.reductions)
            marks += [(mark, kind) for mark in flat.reduce_marks]
    wires = {Mark.decode(mark).wire for mark, _ in marks}
    texts = [f"{mark} {kind}" for mark, kind in marks]
    return Collectives(list(gathers | reductions), sorted(wires - {""}), texts)


def unsharded_behind(node: fx.Node) -> fx.Node | None:
    """Return the unsharded buffer that a node of Dynamo's graph is, or is a parameter of."""
    if node.target is operator.getitem:
        source = node.all_input_nodes[0]
        if source.target is PARAMETERS or source.target is PARAMETER_VIEWS:
            return source.all_input_nodes[0]
    return node if node.target is UNSHARD else None
