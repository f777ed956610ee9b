"""Memory that NCCL has registered, for the tensors that a unit's collectives read and write.

NCCL sends from registered memory and receives into it without staging buffers of its own. The
memory is a pool of ``torch.cuda`` with NCCL's allocator. Tensors come from the pool if they are
allocated inside ``allocating``, and so do storages that are resized there.

[Note: symmetric memory]

NCCL's kernels for symmetric memory read and write the memory of other ranks, which have to know it:

- A *rendezvous* makes a window of the memory segment that holds a tensor. All ranks of the group
  have to take part in the first rendezvous of a segment; later ones look the window up. A resized
  storage may lie in another segment than before, so each collective starts with a rendezvous of its
  tensors. ``register_mem_pool(pool, symm=True)`` would need none, but makes windows while torch's
  allocator is locked, so that ranks which allocate in another order wait for each other forever
  (PyTorch 192112). A rendezvous allocates, too: it is no work for the inside of ``allocating``.
- Windows have the same size on all ranks, and a tensor has the same offset in its window. So ranks
  have to allocate equal sizes in an equal order. Shards are padded to equal sizes, all ranks run
  the same schedule, and no tensor that only some ranks need is allocated in the pool, such as one
  for gradients which a rank does not have. A gradient lives in the pool until ``zero_grad()``,
  which every rank has to call at the same point of the program.

None of this has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symm_mem  # public names do not exist yet

from fsdp_dynamo.comm.group_state import state_of


@dataclass(frozen=True)
class RegisteredMemory:
    """Pool of a device's memory that is registered with process groups.

    Attributes:
        pool: a ``torch.cuda.MemPool``.
        device: device of the memory.
        is_symmetric: whether collectives start with a rendezvous: see the note above.
    """

    pool: Any
    device: torch.device
    is_symmetric: bool = False

    def prepare(self, tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Make the windows of tensors that a collective of ``group`` is about to read and write."""
        if self.is_symmetric:
            of_storages = {one.untyped_storage().data_ptr(): one for one in tensors if one.numel()}
            for tensor in of_storages.values():
                symm_mem.rendezvous(tensor, group.group_name)

    def __deepcopy__(self, memo: dict[int, object]) -> RegisteredMemory:
        """Return the memory itself: copies of a model share the pool."""
        return self


_TORCHS_POOL = nullcontext()


def allocating(memory: RegisteredMemory | None) -> AbstractContextManager[object]:
    """Allocate and resize from a memory's pool inside; ``None``: from torch's default pool.

    Only the current thread is affected. Do not nest: torch refuses to enter a pool that this or
    another thread has entered.
    """
    if memory is None:
        return _TORCHS_POOL
    return torch.cuda.use_mem_pool(memory.pool, memory.device)


class _Pools:
    """Pool that was made for a process group, and the pools that its backend has registered."""

    def __init__(self) -> None:
        self.own: Any = None
        self.registered: list[Any] = []


def memory_of(groups: Sequence[dist.ProcessGroup], device: torch.device) -> RegisteredMemory | None:
    """Return memory of the allocator of the first group, registered with all groups.

    All ranks have to call it, because it may run a collective in each group.

    Returns:
        ``None`` if the backend has no allocator for the device, as gloo.
    """
    backend = _backend(groups[0], device)
    if not backend.supports_tensor_alloc(device):
        return None
    pools = state_of(groups[0], _Pools)
    with torch.cuda.device(device):
        if pools.own is None:
            pools.own = torch.cuda.MemPool(backend.mem_allocator)
        for group in groups:
            registered = state_of(group, _Pools).registered
            if not any(one is pools.own for one in registered):
                registered.append(pools.own)
                _connect(group, device)
                _backend(group, device).register_mem_pool(pools.own)
    return RegisteredMemory(pools.own, device)


def has_symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether NCCL serves a group's tensors on the device."""
    return device.type == "cuda" and _backend(group, device).name() == "nccl"


def symmetric_memory(groups: Sequence[dist.ProcessGroup], device: torch.device) -> RegisteredMemory:
    """Return torch's symmetric memory of the device, for NCCL; all ranks have to call it."""
    symm_mem.set_backend("NCCL")
    with torch.cuda.device(device):
        for group in dict.fromkeys(groups):
            _connect(group, device)
        return RegisteredMemory(symm_mem.get_mem_pool(device), device, is_symmetric=True)


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Run the collective that makes the communicator which registering and rendezvous need."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    return group._get_backend(device)
