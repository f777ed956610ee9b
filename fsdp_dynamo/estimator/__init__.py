"""What would it take? Memory, communication and step time of a model on a cluster, in seconds.

``python -m fsdp_dynamo.estimator --model llama3-8b --world-size 512 --memory 80GB --link 400Gb/s``
"""

from fsdp_dynamo.estimator.hardware import ACCELERATORS, Accelerator, Cluster
from fsdp_dynamo.estimator.inventory import Build, Inventory, UnitInventory, Work, take_inventory
from fsdp_dynamo.estimator.predict import Prediction, Setup, predict
from fsdp_dynamo.estimator.report import best_of, text_of

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Build",
    "Cluster",
    "Inventory",
    "Prediction",
    "Setup",
    "UnitInventory",
    "Work",
    "best_of",
    "predict",
    "take_inventory",
    "text_of",
]
