"""This project's three modes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks.cluster.process_group import SimulatedGroup
from benchmarks.peers.base import Peer, Setting, compiled, wrapped
from fsdp_dynamo import FSDP, CollectivePrecision, MixedPrecision, ShardingStrategy
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

Options = Mapping[str, Any] | None

GRAPH_BACKENDS = {"fsdp_dynamo": "inductor", "fsdp_dynamo_aot_eager": "aot_eager"}
"""Our backends, and what compiles the pieces of their graphs."""


UNSCHEDULED = {"prefetch": False, "sink_waits": False, "bucket": False}


INT8 = CollectivePrecision(all_gather="int8", reduce_scatter="int8")
BF16 = CollectivePrecision(all_gather="bfloat16", reduce_scatter="bfloat16")


def wrap(
    model: nn.Module,
    setting: Setting,
    reshard: bool = True,
    collective_precision: CollectivePrecision | None = None,
) -> FSDP:
    """The wrapper, one unit per block and a root."""
    policy = ModuleWrapPolicy(set(setting.workload.block_classes)) if setting.wrap else None
    precision = (
        None if setting.param_dtype is None else MixedPrecision(param_dtype=setting.param_dtype)
    )
    device = None if setting.device.type == "cpu" else setting.device
    strategy = ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP
    return FSDP(
        model,
        auto_wrap_policy=policy,
        mixed_precision=precision,
        device_id=device,
        sharding_strategy=strategy,
        collective_precision=collective_precision,
    )


def _link() -> dict[str, Any]:
    """A simulated cluster's link as its model says; a real one is measured."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(group, SimulatedGroup):
        return {}
    sample_bytes = 1 << 30
    latency_ms = group.model.seconds("all_gather", 0) * 1e3
    moving_ms = group.model.seconds("all_gather", sample_bytes) * 1e3 - latency_ms
    sent = sample_bytes * (group.size() - 1) // group.size()
    return {"link": {"latency_ms": latency_ms, "bytes_per_ms": sent / max(moving_ms, 1e-9)}}


def ours(
    backend: str | None,
    variant: str = "",
    reshard: bool = True,
    options: Options = None,
    collective_precision: CollectivePrecision | None = None,
) -> Peer:
    """Mode of a backend: eager, graph mode (our backends) or hooks mode (others).

    Args:
        backend: Dynamo's; ``None`` for eager.
        variant: in key and title.
        reshard: after the forward.
        options: of graph mode.
        collective_precision: formats in which shards travel.
    """
    is_graph = backend in GRAPH_BACKENDS
    if backend is None:
        key, title = "ours", "fsdp_dynamo, eager"
    elif is_graph:
        inner = GRAPH_BACKENDS[backend]
        key, title = f"ours_graph_{inner}", f"fsdp_dynamo, graph mode ({inner})"
    else:
        key, title = f"ours_hooks_{backend}", f"fsdp_dynamo, hooks mode ({backend})"
    if variant:
        key, title = f"{key}_{variant}", f"{title}, {variant}"

    def shard(model: nn.Module, setting: Setting) -> nn.Module:
        chosen = {**_link(), **(options or {})} if is_graph else None
        wrapped_model = wrap(model, setting, reshard, collective_precision)
        return compiled(wrapped_model, backend, is_graph, chosen)

    return Peer(key, title, wrapped(shard), ours=True)


PEERS = (
    ours(None),
    ours(None, "int8", collective_precision=INT8),
    ours(None, "bf16", collective_precision=BF16),
    ours("fsdp_dynamo", "int8", collective_precision=INT8),
    ours("fsdp_dynamo_aot_eager", "int8", collective_precision=INT8),
    ours("aot_eager"),
    ours("inductor"),
    ours("fsdp_dynamo_aot_eager"),
    ours("fsdp_dynamo"),
    ours("fsdp_dynamo_aot_eager", "unscheduled", options=UNSCHEDULED),
    ours("fsdp_dynamo", "unscheduled", options=UNSCHEDULED),
    ours("fsdp_dynamo", "no_regions", options={"regions": False}),
    ours("fsdp_dynamo", "captured", options={"cuda_graphs": True}),
    ours("fsdp_dynamo_aot_eager", "captured", options={"cuda_graphs": True}),
    ours("fsdp_dynamo_aot_eager", "kept", reshard=False),
    ours("fsdp_dynamo", "kept", reshard=False),
)
