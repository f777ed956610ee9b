"""The three ways of running a wrapped model, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "hooks": {"backend": "aot_eager"},
    "graph": {"backend": "fsdp_dynamo_aot_eager", "fullgraph": True},
}

INDUCTOR_WAYS: dict[str, dict[str, Any]] = {
    "hooks-inductor": {"backend": "inductor"},
    "graph-inductor": {"backend": "fsdp_dynamo", "fullgraph": True},
}


def in_way(model: nn.Module, way: str) -> nn.Module:
    """The model, run in the way named."""
    options = {**WAYS, **INDUCTOR_WAYS}[way]
    return model if options is None else torch.compile(model, **options)
