"""Peers that ship with torch: no communication, DDP, FSDP1, FSDP2."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import MixedPrecision as UpstreamMixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.base import (
    Peer,
    Setting,
    compile_each,
    compiled,
    keyed,
    titled,
    wrapped,
)


def _in_param_dtype(model: nn.Module, setting: Setting) -> nn.Module:
    """Parameters in the compute dtype, where a peer has no mixed precision of its own."""
    return model if setting.param_dtype is None else model.to(setting.param_dtype)


def plain(backend: str | None) -> Peer:
    """The model without communication: the compute floor."""

    def wrap(model: nn.Module, setting: Setting) -> nn.Module:
        if backend is not None:
            compile_each(setting.blocks(model) or [model], backend)
        return _in_param_dtype(model, setting)

    return Peer(
        keyed("plain", backend),
        titled("no communication", "compiled blocks", backend),
        wrapped(wrap),
        communicates=False,
    )


def ddp(backend: str | None) -> Peer:
    """DDP; compiled as a whole, so that torch's own DDPOptimizer cuts it at the buckets."""

    def wrap(model: nn.Module, setting: Setting) -> nn.Module:
        replicated = DistributedDataParallel(
            _in_param_dtype(model, setting), gradient_as_bucket_view=True
        )
        return compiled(replicated, backend)

    return Peer(keyed("ddp", backend), titled("DDP", "compiled", backend), wrapped(wrap))


def fsdp2(backend: str | None) -> Peer:
    """``fully_shard`` on blocks and root; compiled block by block, as torch's recipes do."""

    def wrap(model: nn.Module, setting: Setting) -> nn.Module:
        blocks = setting.blocks(model)
        if backend is not None:
            compile_each(blocks or [model], backend)
        policy = MixedPrecisionPolicy(param_dtype=setting.param_dtype)
        for block in blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    title = "FSDP2 eager" if backend is None else f"FSDP2, compiled blocks ({backend})"
    return Peer(keyed("fsdp2", backend), title, wrapped(wrap))


def fsdp1(backend: str | None) -> Peer:
    """Upstream's FullyShardedDataParallel."""

    def wrap(model: nn.Module, setting: Setting) -> nn.Module:
        policy = ModuleWrapPolicy(set(setting.workload.block_classes))
        precision = UpstreamMixedPrecision(param_dtype=setting.param_dtype)
        sharded = FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy if setting.wrap else None,
            mixed_precision=precision if setting.param_dtype is not None else None,
            # Named also for the CPU: without it FSDP1 refuses to run without an accelerator.
            device_id=setting.device,
            use_orig_params=True,
        )
        return compiled(sharded, backend)

    return Peer(keyed("fsdp1", backend), titled("FSDP1", "compiled", backend), wrapped(wrap))


PEERS = (
    plain(None),
    plain("inductor"),
    ddp(None),
    fsdp1(None),
    fsdp2(None),
    fsdp2("aot_eager"),
    fsdp2("inductor"),
)
