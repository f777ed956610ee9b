"""Estimates of memory, communication and step time of a model on a cluster.

``python -m fsdp_dynamo.estimator --model llama3-8b --world-size 512 --memory 80GB --link 400Gb/s``
"""

from fsdp_dynamo.estimator.inventory import Build, Inventory, UnitInventory, Work, take_inventory
from fsdp_dynamo.estimator.predict import ElementSizes, Prediction, predict
from fsdp_dynamo.estimator.report import format_report, recommend
from fsdp_dynamo.estimator.transfers import ACCELERATORS, Accelerator, Cluster

Setup, best_of, text_of = ElementSizes, recommend, format_report
"""Former names."""

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Build",
    "Cluster",
    "ElementSizes",
    "Inventory",
    "Prediction",
    "UnitInventory",
    "Work",
    "format_report",
    "predict",
    "recommend",
    "take_inventory",
]
