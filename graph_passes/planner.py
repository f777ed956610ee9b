"""The pass that places collectives. Public names of ``graph_passes.scheduling.planner``."""

from graph_passes.scheduling.planner import Planned, Planner

__all__ = ["Planned", "Planner"]
