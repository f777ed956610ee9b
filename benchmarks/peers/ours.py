"""This project's three ways."""

from __future__ import annotations

from torch import nn

from benchmarks.peers.base import Peer, Setting, compiled, wrapped
from fsdp_dynamo import FSDP, MixedPrecision
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

GRAPH_BACKENDS = {"fsdp_dynamo": "inductor", "fsdp_dynamo_aot_eager": "aot_eager"}
"""Our backends, and what compiles the pieces of their graphs."""


def wrap(model: nn.Module, setting: Setting) -> FSDP:
    """The wrapper, one unit a block and a root."""
    policy = ModuleWrapPolicy(set(setting.workload.block_classes)) if setting.wrap else None
    precision = (
        None if setting.param_dtype is None else MixedPrecision(param_dtype=setting.param_dtype)
    )
    device = None if setting.device.type == "cpu" else setting.device
    return FSDP(model, auto_wrap_policy=policy, mixed_precision=precision, device_id=device)


def ours(backend: str | None) -> Peer:
    """The way that a backend stands for: eager, graph path (our backends), hooks path (others)."""
    if backend is None:
        key, title = "ours", "fsdp_dynamo, eager"
    elif backend in GRAPH_BACKENDS:
        inner = GRAPH_BACKENDS[backend]
        key, title = f"ours_graph_{inner}", f"fsdp_dynamo, graph path ({inner})"
    else:
        key, title = f"ours_hooks_{backend}", f"fsdp_dynamo, hooks path ({backend})"

    def shard(model: nn.Module, setting: Setting) -> nn.Module:
        return compiled(wrap(model, setting), backend, fullgraph=backend in GRAPH_BACKENDS)

    return Peer(key, title, wrapped(shard), ours=True)


PEERS = (
    ours(None),
    ours("aot_eager"),
    ours("inductor"),
    ours("fsdp_dynamo_aot_eager"),
    ours("fsdp_dynamo"),
)
