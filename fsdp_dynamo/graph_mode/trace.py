"""A unit's forward as Dynamo traces it, and graph breaks inside units.

Dynamo interprets every instruction of ``traced_forward`` once for each unit, so there are few:
whatever does not depend on the trace is a constant (``traced_unit``) or inside an operator
(``unshard_operators``).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import traceback

from fsdp_dynamo.core.dtensors import TensorParallel
from fsdp_dynamo.core.unit_modules import registered
from fsdp_dynamo.dynamo.private_api import (
    CompileRefusedError,
    ends_with_a_break,
    made_to_require_grad,
    number_of_body,
    with_side_effects,
)
from fsdp_dynamo.eager.hooks import cast_output, prepare_inputs
from fsdp_dynamo.errors import FSDPStateError, unit_name
from fsdp_dynamo.graph_mode.traced_unit import constants_of
from fsdp_dynamo.graph_mode.unshard_operators import (
    PARAMETER_VIEWS,
    PARAMETERS,
    UNSHARD,
    unsharded_behind,
)
from graph_passes.graph_utils import hint
from graph_passes.markers import BODY, UNIT, unit_of


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_originals(name: str) -> None:
    """Check a unit's parameters before its shards become inputs of the graph.

    Args:
        name: registered name of the unit module.

    Raises:
        CompileRefusedError: a parameter is not as it should be (``Unit.check_originals``), or an
            input of the unit was made to require gradients.
    """
    unit = registered(name)._fsdp_unit
    try:
        unit.check_originals()
    except FSDPStateError as error:
        raise CompileRefusedError(*error.args) from None
    if torch.is_grad_enabled() and made_to_require_grad():
        raise CompileRefusedError(
            f"{unit_name(unit.fqn)}: expected activations that require gradients because of "
            "parameters, got requires_grad_() on one before this unit, which Dynamo cannot return "
            "from a graph. Leave the call out: non-reentrant checkpointing does not need it "
            "(transformers: model.disable_input_require_grads(), "
            'gradient_checkpointing_kwargs={"use_reentrant": False}); or compile without fullgraph '
            "(hooks mode)."
        )


Inputs = Sequence[tuple[torch.Tensor | None, ...]]
"""For each flat parameter of a unit, the tensors that ``unshard`` takes, in order."""


def _gather(inputs: Inputs, fqn: str, flats: tuple[str, ...]) -> list[torch.Tensor]:
    unsharded = []
    with traceback.annotate({UNIT: fqn, BODY: "0"}):
        for tensors, flat in zip(inputs, flats):  # noqa: B905  # traced by Dynamo
            unsharded.append(UNSHARD(*tensors, flat))
    return unsharded


_OPEN = ""
"""Key that is present while the outermost unit runs; results are shared only then."""


def _gather_once(
    name: str,
    gathered: dict[str, list[torch.Tensor]],
    inputs: Inputs,
    fqn: str,
    flats: tuple[str, ...],
) -> list[torch.Tensor]:
    """Gather a unit of several modules, once for all of them in the outermost forward."""
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
    """Whether this unit module is the outermost unit's."""
    return registered(name)._fsdp_is_outermost()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def place_of(name: str, has_grad: bool) -> str:
    """Return a key for the unit, the body that is traced and the grad mode.

    Values made in the body of an operator such as ``checkpoint`` do not exist outside of it.
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

    The parameter views stand in ``module._parameters`` while the module runs; the original
    parameters return afterwards. Holders are looked up along their attribute path, as user code
    does, so that Dynamo guards each module once.

    Args:
        name: registered name of the unit module.
        unit_module: the unit module.
        inputs: inputs of the graph for the unit's flat parameters.
        settings: ``UnitSettings.in_graphs``.
        splits: positions of the parameters that tensor parallelism has split, and how.
        args: positional inputs.
        kwargs: keyword inputs.
        gathered: unsharded buffers by unit, shared by the modules of a unit during the outermost
            forward; ``None`` if every unit has one module.
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


# -- broken units ----------------------------------------------------------------------------------
# Graph breaks inside a unit: its unsharded buffer goes from one graph to the next.
#
# The next graph takes the unsharded buffer or its views as inputs and saves them for its backward,
# so no pass can reshard the unit in between (decision 14).


_warned: set[tuple[str, int]] = set()
"""FQN and bytes of units that a warning has named; ``("", 0)`` for a break outside of units."""


def warn_if_the_graph_breaks(gm: fx.GraphModule) -> None:
    """Warn, once for each unit, that a graph break ends the graph that is compiled.

    Users never see an unsharded buffer. One among the outputs therefore also means a graph break,
    between the gather and the call of the unit's module.
    """
    outputs = gm.graph.output_node().all_input_nodes
    if not ends_with_a_break(gm) and not any(node.target is UNSHARD for node in outputs):
        return
    units = set(units_that_stay(gm).items()) or {("", 0)}
    if units <= _warned:
        return
    _warned.update(units)
    named = ", ".join(f"'{fqn}' ({num_bytes} bytes)" for fqn, num_bytes in sorted(units) if fqn)
    stays = f", but units in which a graph ends stay unsharded until their backward: {named}"
    warnings.warn(
        "torch.compile: expected one graph of the whole model, got a graph break. Results are "
        f"the same{stays if named else ''}. TORCH_LOGS=graph_breaks and explain(model) say "
        "where and why; with fullgraph=True it is an error.",
        stacklevel=2,
    )


def units_that_stay(gm: fx.GraphModule) -> dict[str, int]:
    """Return the bytes that leave a graph unsharded, by unit FQN.

    The root's do not count: the root stays unsharded until its backward in any case.
    """
    found: dict[str, int] = {}
    for source in dict.fromkeys(map(unsharded_behind, gm.graph.output_node().all_input_nodes)):
        if source is None:
            continue
        tensor = source.meta.get("example_value")
        fqn = unit_of(source)
        if fqn and isinstance(tensor, torch.Tensor):
            found[fqn] = found.get(fqn, 0) + hint(tensor.numel()) * tensor.element_size()
    return found
