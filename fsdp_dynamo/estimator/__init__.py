"""Estimates of memory, communication and step time of a model on a cluster.

``python -m fsdp_dynamo estimate --model llama3-8b --world-size 512 --memory 80GB --link 400Gb/s``
"""

from fsdp_dynamo.estimator.inventory import Build, Inventory, UnitInventory, Work, take_inventory
from fsdp_dynamo.estimator.predict import Prediction, format_report, predict, recommend
from fsdp_dynamo.estimator.transfers import ACCELERATORS, Accelerator, Cluster, ElementSizes

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
