"""What differs between the supported versions of torch, by feature.

No other file of this package asks for a version, or whether torch has a name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# Public since torch 2.12, where the older names warn.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or (
    dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or (
    dist.reduce_scatter_tensor
)
