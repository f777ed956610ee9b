"""Plans: what was decided, as data. Public names of ``graph_passes.scheduling.plan``."""

from graph_passes.scheduling.following import launches_of
from graph_passes.scheduling.plan import (
    VERSION,
    GraphPlan,
    Plan,
    PlanError,
    PlannedTransfer,
    graph_from,
)

__all__ = [
    "VERSION",
    "GraphPlan",
    "Plan",
    "PlanError",
    "PlannedTransfer",
    "graph_from",
    "launches_of",
]
