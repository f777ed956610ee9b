"""FX passes that order collectives around compute. Knows graphs and marks, not the wrapper.

Its modules are imported by name; those that are listed here are public.
"""

__all__ = [
    "cost_model",
    "graph_utils",
    "limits",
    "markers",
    "pipeline",
    "plan",
    "planner",
    "report",
    "schedule",
    "spec",
]
