"""Initial values of parameters before they are sharded.

A module may hold its values already, may be on the meta device (see ``deferred_init``), and may be
given rank 0's. Each unit is sharded as soon as it has its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo.agreement.run import together
from fsdp_dynamo.comm.process_groups import Groups
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.original_parameter import OriginalParameter
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.wrap.deferred_init import DeferredInit, InitFn


class InitialValues:
    """Values of the parameters and buffers that one wrapper call manages.

    Args:
        modules: all managed modules with their FQNs, in the order of ``modules()``.
        init: ``param_init_fn``.
        device: where values are made that are deferred.
        source: the groups in which rank 0's values go to all; ``None``: each has its own.
        may_lack: whether what is on the meta device stays there, unless ``init`` or ``source``
            give it values.

    Attributes:
        device: as given.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        init: InitFn | None,
        device: torch.device,
        source: Groups | None,
        may_lack: bool,
    ) -> None:
        self._modules = list(modules)
        self._source = source
        stays = may_lack and init is None and source is None
        follows = source is not None and any(group.rank() for group in source.all)
        self._deferred = DeferredInit([] if stays else self._modules, init, device, follows)
        self.device = device

    def check(self, originals: Sequence[OriginalParameter]) -> None:
        """Raise if values could not be had; changes nothing."""
        self._deferred.check()
        if self._source is None or _serves_cpu(self._source.shard):
            return
        tensors = [*(original.param for original in originals), *self._buffers()]
        if any((self.device if t.is_meta else t.device).type == "cpu" for t in tensors):
            raise FSDPValueError(
                expected="parameters on the accelerator",
                got="a CPU tensor with an NCCL group",
                where="argument 'sync_module_states'",
                fix="Pass device_id=torch.cuda.current_device() too, or move the module.",
            )

    def in_order_of_completion(
        self, owned: Mapping[nn.Module, Sequence[OriginalParameter]]
    ) -> Iterator[nn.Module]:
        """Units, each when all of its parameters have their values; then it is to be sharded.

        The order is that of the last module that holds one, on all ranks, deferred or not.
        """
        position = {module: i for i, (_, module) in enumerate(self._modules)}
        holders = {
            owner: {module for original in originals for module, _, _ in original.sites}
            for owner, originals in owned.items()
        }
        steps = self._deferred.run()
        missing = set(self._deferred.modules)
        last = {o: max((position[m] for m in holders[o]), default=-1) for o in owned}
        sources = self._source.all if self._source else ()
        for owner in sorted(owned, key=last.__getitem__):
            with together(sources, self.device, "deferred initialisation"):  # before a broadcast
                while holders[owner] & missing:
                    missing.remove(next(steps))
            self._broadcast([original.param for original in owned[owner]])
            yield owner
            self._deferred.release(holders[owner])
        with together(sources, self.device, "deferred initialisation"):
            for _ in steps:
                pass  # modules that hold buffers only
        self._broadcast(list(self._buffers()))

    def _buffers(self) -> Iterator[torch.Tensor]:
        """All buffers, each once."""
        seen: set[torch.Tensor] = set()
        for _, module in self._modules:
            for buffer in module._buffers.values():
                if buffer is not None and buffer not in seen:
                    seen.add(buffer)
                    yield buffer

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all ranks rank 0's values."""
        if self._source is None:
            return
        for tensor in tensors:
            for group in reversed(self._source.all):  # across replicas, then inside each
                with watched(group, "broadcast", "sync_module_states", tensor.numel()):
                    dist.broadcast(tensor.detach(), group=group, group_src=0)


def _serves_cpu(group: dist.ProcessGroup) -> bool:
    return any(device.type == "cpu" for device in group._device_types)


def device_for(
    module: nn.Module, group: dist.ProcessGroup, device_id: torch.device | None
) -> torch.device:
    """Device of deferred values: as requested, else that of the module's other tensors, else one
    that the group's collectives support."""
    if device_id is not None:
        return device_id
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            return tensor.device
    if _serves_cpu(group) or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
