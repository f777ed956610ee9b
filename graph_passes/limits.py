"""Bounds of a schedule. Public names of ``graph_passes.scheduling.limits``."""

from graph_passes.scheduling.limits import BudgetError, Limits

__all__ = ["BudgetError", "Limits"]
