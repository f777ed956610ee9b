"""This project's three ways."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from benchmarks.peers.base import Peer, Setting, wrapped
from fsdp_dynamo import FSDP, MixedPrecision
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def wrap(model: nn.Module, setting: Setting) -> FSDP:
    """The wrapper, one unit a block and a root."""
    policy = ModuleWrapPolicy(set(setting.workload.block_classes)) if setting.wrap else None
    precision = (
        None if setting.param_dtype is None else MixedPrecision(param_dtype=setting.param_dtype)
    )
    device = None if setting.device.type == "cpu" else setting.device
    return FSDP(model, auto_wrap_policy=policy, mixed_precision=precision, device_id=device)


def _eager(model: nn.Module, setting: Setting) -> nn.Module:
    return wrap(model, setting)


def _hooks(backend: str) -> Peer:
    def compiled(model: nn.Module, setting: Setting) -> nn.Module:
        return cast(nn.Module, torch.compile(wrap(model, setting), backend=backend))

    title = f"fsdp_dynamo, hooks path ({backend})"
    return Peer(f"ours_hooks_{backend}", title, wrapped(compiled), ours=True)


def _graph(backend: str, inner: str) -> Peer:
    def compiled(model: nn.Module, setting: Setting) -> nn.Module:
        whole = torch.compile(wrap(model, setting), fullgraph=True, backend=backend)
        return cast(nn.Module, whole)

    title = f"fsdp_dynamo, graph path ({inner})"
    return Peer(f"ours_graph_{inner}", title, wrapped(compiled), ours=True)


PEERS = (
    Peer("ours", "fsdp_dynamo, eager", wrapped(_eager), ours=True),
    _hooks("aot_eager"),
    _hooks("inductor"),
    _graph("fsdp_dynamo_aot_eager", "aot_eager"),
    _graph("fsdp_dynamo", "inductor"),
)
