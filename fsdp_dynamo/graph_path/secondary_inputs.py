"""Secondary shards (``HIERARCHICAL_SHARD``) as inputs of a compiled graph.

They outlive the graph: several backwards that accumulate share them. So they are gathered between
nodes before a graph is called, when eager mode would do it, and the graph gathers them inside the
node. Dynamo sees a stand-in, which every call replaces::

    stand-in -> all_gather -> wait -> ...      shard -> (nothing but its gradient)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch

from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.unit_modules import UnitModuleProtocol

_OWNER = "_fsdp_dynamo_secondary"


class _Owner(NamedTuple):
    """Whose secondary shard a stand-in is for; weakly, as for shards (``mark_shard``)."""

    module: ReferenceType[UnitModuleProtocol]
    flat: ReferenceType[FlatParameter]


def stand_in_for(
    module: UnitModuleProtocol, flat: FlatParameter, *, is_full_precision: bool
) -> torch.Tensor | None:
    """An input of graphs for a secondary shard ``(padded_numel / ranks in a node,)``.

    As large to look at, without memory. ``None``: the flat parameter has no secondary shard.

    Args:
        module: of its unit; its root may still change.
        flat: the flat parameter.
        is_full_precision: the dtype of the graphs.
    """
    if flat.hierarchy is None:
        return None
    stand_in = torch.empty(
        flat.layout.padded_numel // flat.hierarchy.node.size(),
        dtype=flat.dtypes(is_full_precision).param,
        device=flat.device,
    )
    stand_in.untyped_storage().resize_(0)
    setattr(stand_in, _OWNER, _Owner(ref(module), ref(flat)))
    return stand_in


class SecondaryInputs:
    """Secondary shards of one call of a compiled graph, and of its backward.

    Args:
        inputs: of the graph.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._flats: dict[int, FlatParameter] = {}
        roots: dict[Any, None] = {}
        for position, value in enumerate(inputs):
            owner: _Owner | None = getattr(value, _OWNER, None)
            module = None if owner is None else owner.module()
            flat = None if owner is None else owner.flat()
            if module is not None and flat is not None:
                roots[module._fsdp_root] = None
                self._flats[position] = flat
        self._roots = tuple(roots)

    def gather(self, arguments: list[Any]) -> None:
        """Put them in the place of their stand-ins, gathered if they are missing or may be old."""
        try:
            for root in self._roots:
                if root.is_outside:  # else its own forward, around the graph's, has begun
                    root.secondary.begin_forward()
                root.secondary.gather()
            for position, flat in self._flats.items():
                piece = flat.take_piece()
                assert piece is not None
                arguments[position] = piece[0]
        except BaseException:
            self.abandon()
            raise

    def end_forward(self) -> None:
        """Free those of an evaluation."""
        for root in self._roots:
            if root.is_outside:
                root.secondary.end_forward()

    def end_backward(self) -> None:
        """Free those of units whose gradients are reduced."""
        for root in self._roots:
            if root.is_outside:
                root.secondary.end_backward()

    def abandon(self) -> None:
        """Free all after an error."""
        for root in self._roots:
            root.secondary.abandon()
