"""Parameters, and gradients, that are this rank's part of a whole one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakSet

import torch

from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.gradient_hooks import guard_gradient
from fsdp_dynamo.errors import FSDPStateError
from fsdp_dynamo.module_tree import join_fqn

_sharded: WeakSet[FlatParameter] = WeakSet()


def note_parts(flats: Iterable[FlatParameter]) -> bool:
    """Note the parameters of which ranks have different parts; returns whether there are any."""
    found = [flat for flat in flats if has_parts(flat)]
    _sharded.update(found)
    for flat in found:
        for original in flat.originals:
            guard_gradient(original.param, _refuse_gradient)
    return bool(found)


def _refuse_gradient(param: torch.Tensor) -> None:
    """Raise for a gradient of a sharded parameter itself: it was used outside of its unit."""
    for part, fqn in parts_now():
        if part is param:
            raise FSDPStateError(
                expected="its parameters to be used in the forward of their unit",
                got=f"a gradient of this rank's part, {tuple(param.shape)}, of one that was used "
                "while it was sharded",
                where=f"parameter '{fqn}'",
                fix="Call the model, or let the module that holds it be a unit (add its class to "
                "the policy).",
            )


def has_parts(flat: FlatParameter) -> bool:
    """Whether ranks have different parts of a flat parameter."""
    return flat.is_sharded and flat.layout.world_size > 1


def parts_now() -> Iterator[tuple[torch.Tensor, str]]:
    """Parameters and gradients that are parts at this moment, with the parameters' FQNs."""
    for flat in _sharded:
        if flat.module_parameters.is_summoned:
            continue
        for original in flat.originals:
            fqn = join_fqn(flat.unit_fqn, original.fqn)
            yield original.param, fqn
            grad = original.param.grad
            if grad is not None and flat.grad_sum.total is None:  # a sum is shown whole
                yield grad, fqn
