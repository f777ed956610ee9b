"""Arguments that only graph mode, which has a planner, can follow."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.errors import UnsupportedError, unit_name


def unit_with_planner(units: Iterable[Unit]) -> Unit | None:
    """The first unit whose formats are for exposed collectives only, which a planner must find."""
    for unit in units:
        precisions = [flat.collective_precision for flat in unit.flats]
        if any(one is not None and one.only_where_exposed for one in precisions):
            return unit
    return None


def no_planner_error(unit: Unit) -> UnsupportedError:
    """The error of a forward of this unit in eager or hooks mode."""
    return UnsupportedError(
        expected="graph mode, whose planner knows which collectives it cannot hide",
        got="a forward in eager or hooks mode with only_where_exposed=True",
        where=f"collective_precision of {unit_name(unit.fqn)}",
        fix='Run torch.compile(model, fullgraph=True, backend="fsdp_dynamo"), or leave '
        "only_where_exposed out and choose units by a policy's dict of arguments; "
        "python -m fsdp_dynamo.estimator --only-where-exposed says whether it pays.",
    )
