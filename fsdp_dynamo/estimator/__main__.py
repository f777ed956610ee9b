"""``python -m fsdp_dynamo.estimator``: the command line."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_dynamo.config import ShardingStrategy
from fsdp_dynamo.errors import FSDPError, FSDPValueError
from fsdp_dynamo.estimator import models
from fsdp_dynamo.estimator.hardware import ACCELERATORS, Cluster, bytes_of, bytes_per_second_of
from fsdp_dynamo.estimator.inventory import Build, Inventory, take_inventory
from fsdp_dynamo.estimator.predict import Prediction, Setup, predict
from fsdp_dynamo.estimator.report import text_of

STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.NO_SHARD,
)
OPTIMIZER_BYTES = {"adamw": 8, "momentum": 4, "sgd": 0}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; 2 for bad input."""
    options = _parser().parse_args(argv)
    try:
        cluster = cluster_of(options)
        if options.model is not None:
            build = models.named(options.model, options.batch, options.length)
        else:
            build = from_module(options.module)
        dtype = DTYPES[options.dtype]
        inventory = take_inventory(build, options.wrap, dtype)
    except FSDPError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    setup = Setup(dtype.itemsize, dtype.itemsize, 4, OPTIMIZER_BYTES[options.optimizer])
    found = predictions_of(inventory, cluster, setup)
    tokens = options.batch * options.length if options.model is not None else 0
    print(text_of(inventory, cluster, found, tokens))
    if options.json is not None:
        rows = [{**asdict(one), "strategy": one.strategy.name} for one in found]
        data = {"cluster": asdict(cluster), "parameters": inventory.numel, "predictions": rows}
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n")
    return 0


def predictions_of(inventory: Inventory, cluster: Cluster, setup: Setup) -> list[Prediction]:
    """All strategies that the cluster has room for, each with and without checkpointing."""
    nodes = cluster.world_size > cluster.per_node
    strategies = [s for s in STRATEGIES if nodes or s is not ShardingStrategy.HYBRID_SHARD]
    return [
        predict(inventory, cluster, strategy, setup, checkpointing)
        for checkpointing in (False, True)
        for strategy in strategies
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fsdp_dynamo.estimator", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help=f"one of {', '.join(models.CONFIGS)}")
    what.add_argument(
        "--module",
        metavar="PKG:FN",
        help="a function that returns a model and kwargs",
    )
    parser.add_argument("--wrap", action="append", default=[], help="class that becomes a unit")
    parser.add_argument("--world-size", type=int, required=True, help="ranks")
    parser.add_argument("--per-node", type=int, default=8, help="ranks of a node (default: 8)")
    parser.add_argument(
        "--device", choices=list(ACCELERATORS), default="h100", help="of a rank (default: h100)"
    )
    parser.add_argument("--memory", help="of a rank: 80GB (default: the device's)")
    parser.add_argument(
        "--link", default="400Gb/s", help="a rank's share of the network (default: 400Gb/s)"
    )
    parser.add_argument("--node-link", help="a rank's share inside a node (default: the device's)")
    parser.add_argument("--latency", type=float, default=0.02, help="ms of a collective's hop")
    parser.add_argument(
        "--efficiency",
        type=float,
        default=0.6,
        help="how much of the data sheet's rates is reached (default: 0.6)",
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of compute")
    parser.add_argument("--optimizer", choices=list(OPTIMIZER_BYTES), default="adamw")
    parser.add_argument("--json", metavar="FILE", help="write the numbers too")
    return parser


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the options describe.

    Raises:
        FSDPValueError: a size or rate that cannot be read, or ranks that fill no whole nodes.
    """
    device = ACCELERATORS[options.device]
    per_node = min(options.per_node, options.world_size)
    if min(options.world_size, options.per_node) < 1 or options.world_size % per_node:
        raise FSDPValueError(
            expected="--world-size to be a multiple of --per-node, both 1 or more",
            got=f"{options.world_size} and {options.per_node}",
            where="fsdp_dynamo.estimator",
            fix="",
        )
    if not 0 < options.efficiency <= 1:
        raise FSDPValueError(
            expected="--efficiency above 0 and at most 1",
            got=str(options.efficiency),
            where="fsdp_dynamo.estimator",
            fix="",
        )
    node_link, memory = device.node_bytes_per_s, device.memory_bytes
    if options.node_link is not None:
        node_link = bytes_per_second_of(options.node_link, "--node-link")
    if options.memory is not None:
        memory = bytes_of(options.memory, "--memory")
    reached = options.efficiency / 1e3
    return Cluster(
        world_size=options.world_size,
        per_node=per_node,
        flops_per_ms=device.flops_per_s * reached,
        memory_bytes_per_ms=device.bytes_per_s * reached,
        link_bytes_per_ms=bytes_per_second_of(options.link, "--link") / 1e3,
        node_bytes_per_ms=node_link / 1e3,
        latency_ms=options.latency,
        memory_bytes=memory,
    )


def from_module(name: str) -> Build:
    """The function that ``"package.module:function"`` names.

    Raises:
        FSDPValueError: there is none.
    """
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise FSDPValueError(
            expected="--module PKG:FN, a function that returns (model, {name: tensor})",
            got=f"'{name}' ({error})",
            where="fsdp_dynamo.estimator",
            fix="The module is looked for in the current folder too.",
        ) from error

    def build() -> tuple[nn.Module, Mapping[str, Any]]:
        model, kwargs = function()
        return model, kwargs

    return build


if __name__ == "__main__":
    sys.exit(main())
