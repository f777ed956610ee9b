"""Copies in host memory of what a checkpoint holds, so that training may go on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_dynamo.core.dtensors import local_of, with_local
from fsdp_dynamo.state_dict.optim_state import copied


def in_host_memory(state: Any) -> Any:
    """A copy of a nested state, with all of its tensors in host memory.

    Tensors of a device are copied into pinned memory, which is kept as long as they live: the next
    copy overwrites this one. It is complete when this returns, so no later write can get into it,
    whoever makes it and on whichever stream.
    """
    elements: dict[Any, torch.Tensor] = {
        id(leaf): local_of(leaf).detach() for leaf in tree_leaves(state) if _is_on_device(leaf)
    }
    staged: Any = _stager().stage(elements, non_blocking=True) if elements else {}
    for device in {tensor.device for tensor in elements.values()}:
        torch.accelerator.synchronize(device)

    def in_host(leaf: Any) -> Any:
        if id(leaf) not in staged:
            return copied(leaf, to_cpu=True, is_deep=True)
        values = staged[id(leaf)]
        return with_local(leaf, values) if isinstance(leaf, DTensor) else values

    return tree_map(in_host, state)


def _is_on_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"


@cache
def _stager() -> StateDictStager:
    return StateDictStager(pin_memory=torch.cuda.is_available())
