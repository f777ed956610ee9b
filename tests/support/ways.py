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


def in_way(model: nn.Module, way: str, **graph_options: Any) -> nn.Module:
    """The model, run in the way named; ``graph_options`` are those of our backends."""
    arguments = {**WAYS, **INDUCTOR_WAYS}[way]
    if arguments is None:
        return model
    if graph_options and way.startswith("graph"):
        arguments = {**arguments, "options": graph_options}
    return torch.compile(model, **arguments)
