"""Peers that ship with torch: no communication, DDP, FSDP1, FSDP2."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import MixedPrecision as UpstreamMixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.base import Peer, Setting, compile_each, wrapped


def _in_param_dtype(model: nn.Module, setting: Setting) -> nn.Module:
    """Parameters in the compute dtype, where a peer has no mixed precision of its own."""
    return model if setting.param_dtype is None else model.to(setting.param_dtype)


def _plain(model: nn.Module, setting: Setting) -> nn.Module:
    return _in_param_dtype(model, setting)


def _plain_compiled(backend: str) -> Peer:
    def wrap(model: nn.Module, setting: Setting) -> nn.Module:
        compile_each(setting.blocks(model) or [model], backend)
        return _in_param_dtype(model, setting)

    title = f"no communication, compiled blocks ({backend})"
    return Peer(f"plain_{backend}", title, wrapped(wrap), communicates=False)


def _ddp(model: nn.Module, setting: Setting) -> nn.Module:
    return DistributedDataParallel(_in_param_dtype(model, setting), gradient_as_bucket_view=True)


def _fsdp2(model: nn.Module, setting: Setting) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=setting.param_dtype)
    for block in setting.blocks(model):
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _fsdp2_compiled(backend: str) -> Peer:
    def wrap(model: nn.Module, setting: Setting) -> nn.Module:
        compile_each(setting.blocks(model) or [model], backend)
        return _fsdp2(model, setting)

    return Peer(f"fsdp2_{backend}", f"FSDP2, compiled blocks ({backend})", wrapped(wrap))


def _fsdp1(model: nn.Module, setting: Setting) -> nn.Module:
    device = setting.device
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=(
            ModuleWrapPolicy(set(setting.workload.block_classes)) if setting.wrap else None
        ),
        mixed_precision=(
            None
            if setting.param_dtype is None
            else UpstreamMixedPrecision(param_dtype=setting.param_dtype)
        ),
        # Without it FSDP1 refuses to run where there is no accelerator.
        device_id=torch.device("cpu") if device.type == "cpu" else device,
        use_orig_params=True,
    )


PEERS = (
    Peer("plain", "no communication", wrapped(_plain), communicates=False),
    _plain_compiled("inductor"),
    Peer("ddp", "DDP", wrapped(_ddp)),
    Peer("fsdp1", "FSDP1", wrapped(_fsdp1)),
    Peer("fsdp2", "FSDP2 eager", wrapped(_fsdp2)),
    _fsdp2_compiled("aot_eager"),
    _fsdp2_compiled("inductor"),
)
