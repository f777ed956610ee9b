"""Parameters, and gradients, that are this rank's part of a whole one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakSet

import torch

from fsdp_dynamo.core.flat_parameter import FlatParameter

_sharded: WeakSet[FlatParameter] = WeakSet()


def note_parts(flats: Iterable[FlatParameter]) -> None:
    """Note the parameters that are plain parts."""
    _sharded.update(flat for flat in flats if has_plain_parts(flat))


def has_parts(flat: FlatParameter) -> bool:
    """Whether ranks have different parts of a flat parameter, by tensor parallelism perhaps."""
    is_sharded = flat.is_sharded and flat.layout.world_size > 1
    return is_sharded or any(original.parallel for original in flat.originals)


def has_plain_parts(flat: FlatParameter) -> bool:
    """Whether it has parts that are plain tensors, which do not say what they are."""
    return has_parts(flat) and flat.originals[0].placing is None


def parts_now() -> Iterator[tuple[torch.Tensor, str]]:
    """Parameters and gradients that are parts at this moment, with the parameters' FQNs."""
    for flat in _sharded:
        if flat.module_parameters.is_summoned:
            continue
        for original in flat.originals:
            fqn = flat.paths.fqn_of(original.fqn)
            yield original.param, fqn
            grad = original.param.grad
            if grad is not None and flat.grad_sum.total is None:  # a sum is shown whole
                yield grad, fqn
