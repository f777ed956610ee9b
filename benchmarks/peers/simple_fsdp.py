"""SimpleFSDP: parameters are DTensors, a parametrization all-gathers them where they are read.

``torchtitan``'s own is used where the package can be imported; else the small one below, which
follows the paper (arXiv 2411.00284): every parameter is sharded on its first axis, each read
redistributes it to a replica (an all-gather, whose backward is a reduce-scatter of the mean), and
the whole model is compiled as one graph. Like the original without passes, it keeps the unsharded
parameters for the backward and has no buckets.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from benchmarks.peers.base import Peer, Setting, Trainee, compiled

_TORCHTITAN = "torchtitan.experiments.graph_trainer.simple_fsdp"


def torchtitan() -> ModuleType | None:
    """The package's own module, or ``None`` where it or one of its needs is missing."""
    try:
        return importlib.import_module(_TORCHTITAN)
    except ImportError:
        return None


class _Replicated(nn.Module):
    """Parametrization: sharded parameter in, this rank's replica out."""

    def __init__(self, param_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.param_dtype = param_dtype

    def forward(self, sharded: DTensor) -> torch.Tensor:
        replica = sharded.redistribute(
            placements=[Replicate()], forward_dtype=self.param_dtype, backward_dtype=None
        )
        return replica.to_local(grad_placements=[Partial("avg")])


_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def _read_through(module: nn.Module, names: tuple[str, ...], replicated: _Replicated) -> None:
    """Make reads of the parameters ``names`` go through ``replicated``.

    A subclass with properties, shared by modules of the same class, so that they share code.
    """
    key = (type(module), names)
    if key not in _classes:

        def reader(name: str) -> property:
            return property(lambda self: replicated(self._parameters[name]))

        _classes[key] = type(
            f"SimpleFSDP{type(module).__name__}", (type(module),), {n: reader(n) for n in names}
        )
    module.__class__ = _classes[key]


def shard_parameters(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """The small SimpleFSDP: shard every parameter and replicate it where it is read."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    replicated = _Replicated(dtype)
    shared: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(model.modules()):
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in own.items():
            if parameter not in shared:
                shared[parameter] = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
            module.register_parameter(name, shared[parameter])
        if own:
            _read_through(module, tuple(own), replicated)


class _Simple(Trainee):
    """Compiled as one graph; torchtitan's sums are turned into means in the gradients."""

    def __init__(self, setting: Setting, backend: str) -> None:
        model = setting.model()
        upstream = torchtitan()
        self._sums = upstream is not None
        if upstream is None:
            shard_parameters(model, setting.device, setting.param_dtype)
        else:
            mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),))
            upstream.data_parallel(
                model,
                mesh,
                mode="fully_shard",
                mp_policy=upstream.MixedPrecisionPolicy(param_dtype=setting.param_dtype),
            )
        super().__init__(compiled(model, backend, fullgraph=True), setting.workload)

    def backward(self, loss: torch.Tensor) -> None:
        # torchtitan divides the loss by the global number of tokens instead.
        super().backward(loss / dist.get_world_size() if self._sums else loss)


def simple_fsdp(backend: str | None) -> Peer:
    """SimpleFSDP under a backend; it is made for the compiler, so the default is aot_eager."""
    backend = backend or "aot_eager"
    whose = "torchtitan's" if torchtitan() is not None else "small version of this harness"
    title = f"SimpleFSDP, {whose} ({backend})"
    return Peer(f"simple_fsdp_{backend}", title, lambda setting: _Simple(setting, backend))


def peers() -> tuple[Peer, ...]:
    """Both backends."""
    return (simple_fsdp("aot_eager"), simple_fsdp("inductor"))
