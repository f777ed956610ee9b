"""FX passes that order collectives around compute. They know graphs and marks, not the wrapper.

Stages of a training step between Dynamo and code::

    Dynamo's graph       regions/     outline_regions: equal unit bodies become calls of one graph
        |
    joint graph          regions/     tidy_region_boundaries: what a region saves of its inputs
        |                scheduling/  choose_kept: units that stay unsharded within a budget
        |                scheduling/  tag_reshard_after_forward: gathered again, not saved
        |   partition
    forward, backward    views/       drop_noop_views, cut_views: fewer nodes   (node by node only)
        |   (pipeline)   gradients/   grad_buffer, group_writes: gradients go into the flat gradient
        |                             the user's own passes
        |                views/       sink_views: a view stands where it is used
        |                scheduling/  planner: places all collectives, from a cost model or a plan
        |
    lowering, code       text/        labels, fingerprints and listings of the result

Folders import downward only (import-linter's contracts in ``pyproject.toml``)::

    pipeline, report  ->  spec, scheduling  ->  gradients, memory, regions, text, views
                      ->  cost_model  ->  graph_utils  ->  markers, graph_pass
                      ->  wire_format

The names below are public, and so are the modules.
"""

from graph_passes.cost_model import CostModel, Device, Link
from graph_passes.graph_pass import GraphPass
from graph_passes.graph_utils import collectives, wait_of
from graph_passes.markers import Mark, mark_of
from graph_passes.pipeline import Pipeline, default_passes
from graph_passes.report import GraphReport, report_of
from graph_passes.scheduling.plan import Plan, PlanError
from graph_passes.scheduling.planner import Planner
from graph_passes.scheduling.schedule import Options
from graph_passes.scheduling.simulation import BudgetError, Limits
from graph_passes.spec import SpecError

__all__ = [
    "BudgetError",
    "CostModel",
    "Device",
    "GraphPass",
    "GraphReport",
    "Limits",
    "Link",
    "Mark",
    "Options",
    "Pipeline",
    "Plan",
    "PlanError",
    "Planner",
    "SpecError",
    "collectives",
    "default_passes",
    "mark_of",
    "report_of",
    "wait_of",
]
