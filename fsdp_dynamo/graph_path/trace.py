"""The graph path: a unit's forward as Dynamo traces it.

Every instruction here is run by Dynamo once for every unit, so they are few: what can be made
ready before is a constant, and what needs no Dynamo is in ``unshard_operators``. Nothing here
runs outside a trace.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import traceback

from fsdp_dynamo.core.tensor_parallel import TensorParallel
from fsdp_dynamo.core.unit_modules import registered
from fsdp_dynamo.dynamo.private_api import (
    CompileRefusedError,
    made_to_require_grad,
    number_of_body,
    with_side_effects,
)
from fsdp_dynamo.eager.hooks import cast_output, prepare_inputs
from fsdp_dynamo.errors import FSDPStateError, unit_name
from fsdp_dynamo.graph_path.traced_unit import constants_of
from fsdp_dynamo.graph_path.unshard_operators import PARAMETER_VIEWS, PARAMETERS, UNSHARD
from graph_passes.markers import BODY, UNIT


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_originals(name: str) -> None:
    """Check the parameters of the unit module of this name, before its shards become inputs.

    Raises:
        CompileRefusedError: something is wrong with them (``Unit.check_originals``), or an input of
            the unit was made to require gradients.
    """
    unit = registered(name)._fsdp_unit
    try:
        unit.check_originals()
    except FSDPStateError as error:
        raise CompileRefusedError(*error.args) from None
    if torch.is_grad_enabled() and made_to_require_grad():
        raise CompileRefusedError(
            expected="activations that require gradients because of parameters",
            got="requires_grad_() on one before this unit, which Dynamo cannot return from a graph",
            where=unit_name(unit.fqn),
            fix="Leave the call out: non-reentrant checkpointing does not need it "
            "(transformers: model.disable_input_require_grads(), "
            'gradient_checkpointing_kwargs={"use_reentrant": False}); or compile without '
            "fullgraph (hooks mode).",
        )


Inputs = Sequence[tuple[torch.Tensor | None, ...]]
"""Inputs of the graph for a unit's flat parameters, each with those of ``unshard`` in order."""


def _gather(inputs: Inputs, fqn: str, flats: tuple[str, ...]) -> list[torch.Tensor]:
    unsharded = []
    with traceback.annotate({UNIT: fqn, BODY: "0"}):
        for tensors, flat in zip(inputs, flats):  # noqa: B905  # traced by Dynamo
            unsharded.append(UNSHARD(*tensors, flat))
    return unsharded


_OPEN = ""
"""The key that is there while the outermost unit runs, which forgets them all afterwards."""


def _gather_once(
    name: str,
    gathered: dict[str, list[torch.Tensor]],
    inputs: Inputs,
    fqn: str,
    flats: tuple[str, ...],
) -> list[torch.Tensor]:
    """What another module of the unit has gathered, in a forward of the outermost unit."""
    if is_outermost(name):
        with_side_effects(gathered.__setitem__, _OPEN, [])
    key = place_of(name, torch.is_grad_enabled())
    if key in gathered:
        return gathered[key]
    unsharded = _gather(inputs, fqn, flats)
    if _OPEN in gathered:
        with_side_effects(gathered.__setitem__, key, unsharded)
    return unsharded


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_outermost(name: str) -> bool:
    """Whether the unit module of this name is that of the outermost unit."""
    return registered(name)._fsdp_is_outermost()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def place_of(name: str, has_grad: bool) -> str:
    """The unit of the unit module of this name, the body in which it is traced, and whether with
    gradients.

    What is made in the body of an operator like ``checkpoint`` is not seen outside.
    """
    return f"{id(registered(name)._fsdp_unit)} in {number_of_body()}, {has_grad}"


def traced_forward(
    name: str,
    unit_module: Any,
    inputs: Inputs,
    settings: str,
    splits: tuple[tuple[int, TensorParallel], ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gathered: dict[str, list[torch.Tensor]] | None,
) -> Any:
    """A unit's forward with its all-gathers in the graph.

    Views of the unsharded flat parameters stand in ``module._parameters`` while the module is
    called, and the original parameters after it. Holders are reached by their path, as the
    user's own code reaches them, so that Dynamo guards each module once.

    Args:
        name: the unit module's registered name.
        unit_module: the unit module.
        inputs: of the graph.
        settings: ``UnitSettings.in_graphs``.
        splits: positions of the parameters that tensor parallelism has split, and how.
        args: positional inputs.
        kwargs: keyword inputs.
        gathered: unsharded flat parameters of units of several modules, by unit, in a forward of
            the outermost one; ``None`` where there is no such unit.
    """
    constants = constants_of(name, settings)
    fqn, input_dtype, output_dtype, device, flats, layouts, places, are_apart = constants
    if input_dtype or device:
        dtype = getattr(torch, input_dtype) if input_dtype else None
        target = torch.device(device) if device else None
        args, kwargs = prepare_inputs(target, dtype, args, kwargs)
    if gathered is None:
        unsharded = _gather(inputs, fqn, flats)
    else:
        unsharded = _gather_once(name, gathered, inputs, fqn, flats)
    with traceback.annotate({UNIT: fqn, BODY: "1"}):
        views = []
        parameters_of = PARAMETERS if are_apart else PARAMETER_VIEWS
        for flat, layout in zip(unsharded, layouts):  # noqa: B905  # traced by Dynamo
            views.extend(parameters_of(flat, layout))
        for i, split in splits:
            views[i] = split.as_dtensor(views[i])
        paths, holders, parameters, positions = places
        tables = []
        inner = unit_module._fsdp_inner()
        for path in paths:
            holder = inner
            for part in path:
                holder = holder._modules[part]
            tables.append(holder._parameters)
        shown = list(map(tables.__getitem__, holders))
        originals = list(map(operator.getitem, shown, parameters))
        with_side_effects(_put, shown, parameters, map(views.__getitem__, positions))
        try:
            output = unit_module._fsdp_body()(*args, **kwargs)
        finally:
            with_side_effects(_put, shown, parameters, originals)
        if output_dtype:
            output = cast_output(getattr(torch, output_dtype), output)
    if gathered is not None and is_outermost(name):
        with_side_effects(gathered.clear)
    return output


def _put(tables: Any, keys: Any, values: Any) -> None:
    for table, key, value in zip(tables, keys, values):  # noqa: B905  # traced by Dynamo
        table[key] = value
