"""The whole tensor of a DTensor of torch's own, whose collectives are torch's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch

from fsdp_dynamo.comm.watchdog import watched

_USE = "a DTensor of torch's"


def whole_of(value: Any) -> torch.Tensor:
    """The whole tensor of a ``DTensor``, without a gradient; every rank of its mesh must call it.

    The wait ends when another rank fails, if the mesh has one dimension: of several groups, only
    one could be watched at a time.

    Raises:
        DivergenceError: another rank has posted a notice.
        RankFailedError: a rank is gone, or has not come within the group's timeout.
    """
    mesh = value.device_mesh
    watch = watched(mesh.get_group(), "all_gather", _USE, value.numel()) if mesh.ndim == 1 else None
    with watch or nullcontext():
        return cast(torch.Tensor, value.detach().full_tensor())
