"""Formats in which the collectives of a flat parameter travel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsdp_dynamo.config import CollectivePrecision
from graph_passes.wire_format import WireFormat


class Wires(NamedTuple):
    """Formats in which shards travel; ``None``: as they are.

    Attributes:
        gather: of the shards of a flat parameter.
        reduce: of those of its gradient.
        replicas: of gradients that replicas average.
    """

    gather: WireFormat | None = None
    reduce: WireFormat | None = None
    replicas: WireFormat | None = None


_AS_THEY_ARE = Wires()


def wires_of(
    precision: CollectivePrecision | None,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    is_sharded: bool,
) -> Wires:
    """The formats that a user asked for, of a flat parameter of these dtypes."""
    if precision is None:
        return _AS_THEY_ARE
    of_replicas = precision.wire_of("all_reduce", reduce_dtype)
    if not is_sharded:
        return Wires(replicas=of_replicas)
    return Wires(
        precision.wire_of("all_gather", param_dtype),
        precision.wire_of("reduce_scatter", reduce_dtype),
        of_replicas,
    )


__all__ = ["Wires", "wires_of"]
