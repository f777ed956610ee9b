"""``python -m fsdp_dynamo estimate``: the command line."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from fsdp_dynamo.api import CollectivePrecision, ShardingStrategy, coerce_collective_precision
from fsdp_dynamo.errors import FSDPError, FSDPValueError
from fsdp_dynamo.estimator.inventory import CONFIGS, Build, Inventory, build_of, take_inventory
from fsdp_dynamo.estimator.predict import Prediction, format_report, predict
from fsdp_dynamo.estimator.transfers import (
    ACCELERATORS,
    Cluster,
    ElementSizes,
    parse_bytes,
    parse_rate,
)
from graph_passes.wire_format import WIRE_FORMATS

STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.HIERARCHICAL_SHARD,
    ShardingStrategy.NO_SHARD,
)
NODES_ONLY = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HIERARCHICAL_SHARD)
OPTIMIZER_BYTES = {"adamw": 8, "momentum": 4, "sgd": 0}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the predictions and return the exit status: 2 for bad input."""
    options = _parser().parse_args(argv)
    try:
        cluster, precision = cluster_of(options), precision_of(options)
        if options.model is not None:
            build = build_of(options.model, options.batch, options.length)
        else:
            build = _load_function(options.module)
        dtype = DTYPES[options.dtype]
        inventory = take_inventory(build, options.wrap, dtype)
    except FSDPError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    optimizer = OPTIMIZER_BYTES[options.optimizer]
    sizes = ElementSizes(dtype.itemsize, dtype.itemsize, 4, optimizer, precision)
    found = predictions_of(inventory, cluster, sizes)
    tokens = options.batch * options.length if options.model is not None else 0
    print(format_report(inventory, cluster, found, tokens))
    if options.json is not None:
        rows = [{**asdict(one), "strategy": one.strategy.name} for one in found]
        data = {"cluster": asdict(cluster), "parameters": inventory.numel, "predictions": rows}
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n")
    return 0


def predictions_of(inventory: Inventory, cluster: Cluster, sizes: ElementSizes) -> list[Prediction]:
    """Predict each strategy, first without and then with activation checkpointing."""
    has_nodes = cluster.world_size > cluster.per_node
    strategies = [one for one in STRATEGIES if has_nodes or one not in NODES_ONLY]
    return [
        predict(inventory, cluster, strategy, sizes, checkpointing)
        for checkpointing in (False, True)
        for strategy in strategies
    ]


def _load_function(name: str) -> Build:
    """Import ``"package.module:function"``; the current folder is searched first."""
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Build = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise FSDPValueError(
            "fsdp_dynamo.estimator: expected --module PKG:FN, a function that returns (model, "
            f"{{name: tensor}}), got '{name}' ({error}). The module is looked for in the current "
            "folder too."
        ) from error
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fsdp_dynamo estimate", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help=f"one of {', '.join(CONFIGS)}")
    source.add_argument(
        "--module",
        metavar="PKG:FN",
        help="function that returns a model and kwargs",
    )
    parser.add_argument(
        "--wrap", action="append", default=[], help="module class whose modules become units"
    )
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument("--per-node", type=int, default=8, help="ranks per node (default: 8)")
    parser.add_argument(
        "--device",
        choices=list(ACCELERATORS),
        default="h100",
        help="device of a rank (default: h100)",
    )
    parser.add_argument("--memory", help="memory of a rank, such as 80GB (default: the device's)")
    parser.add_argument(
        "--link", default="400Gb/s", help="a rank's share of the network (default: 400Gb/s)"
    )
    parser.add_argument("--node-link", help="a rank's share inside a node (default: the device's)")
    parser.add_argument(
        "--latency", type=float, default=0.02, help="ms for each doubling of the ranks"
    )
    parser.add_argument(
        "--efficiency",
        type=float,
        default=0.6,
        help="fraction of the data sheet's rates that is reached (default: 0.6)",
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--length", type=int, default=4096, help="tokens per sequence")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="bf16", help="data type of compute"
    )
    kinds = {
        "all-gather": "parameters",
        "reduce-scatter": "gradients",
        "all-reduce": "gradients that replicas average",
    }
    for kind, what in kinds.items():
        parser.add_argument(
            f"--{kind}",
            choices=WIRE_FORMATS,
            help=f"format in which {what} travel (default: dtype)",
        )
    parser.add_argument(
        "--only-where-exposed",
        action="store_true",
        help="these formats for collectives that cannot be hidden, and no others",
    )
    parser.add_argument("--optimizer", choices=list(OPTIMIZER_BYTES), default="adamw")
    parser.add_argument("--json", metavar="FILE", help="write the numbers too")
    return parser


def precision_of(options: argparse.Namespace) -> CollectivePrecision:
    """Return the wire formats that the options name.

    Raises:
        FSDPValueError: an unsupported combination, or ``--only-where-exposed`` without a format.
    """
    precision = CollectivePrecision(
        options.all_gather,
        options.reduce_scatter,
        all_reduce=options.all_reduce,
        only_where_exposed=options.only_where_exposed,
    )
    coerce_collective_precision(precision)
    return precision


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Return the cluster that the options describe.

    Raises:
        FSDPValueError: a size or rate cannot be parsed, or the ranks do not fill whole nodes.
    """
    device = ACCELERATORS[options.device]
    per_node = min(options.per_node, options.world_size)
    if min(options.world_size, options.per_node) < 1 or options.world_size % per_node:
        raise FSDPValueError(
            "fsdp_dynamo.estimator: expected --world-size to be a multiple of --per-node, both 1 "
            f"or more, got {options.world_size} and {options.per_node}. Choose whole nodes."
        )
    if not 0 < options.efficiency <= 1:
        raise FSDPValueError(
            "fsdp_dynamo.estimator: expected --efficiency above 0 and at most 1, got "
            f"{options.efficiency}. It is the fraction of the data sheet's rates that is reached."
        )
    node_link, memory = device.node_bytes_per_s, device.memory_bytes
    if options.node_link is not None:
        node_link = parse_rate(options.node_link, "--node-link")
    if options.memory is not None:
        memory = parse_bytes(options.memory, "--memory")
    reached = options.efficiency / 1e3
    return Cluster(
        world_size=options.world_size,
        per_node=per_node,
        flops_per_ms=device.flops_per_s * reached,
        memory_bytes_per_ms=device.bytes_per_s * reached,
        link_bytes_per_ms=parse_rate(options.link, "--link") / 1e3,
        node_bytes_per_ms=node_link / 1e3,
        latency_ms=options.latency,
        memory_bytes=memory,
    )


if __name__ == "__main__":
    sys.exit(main())
