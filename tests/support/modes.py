"""The three modes of running a wrapped model, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "hooks": {"backend": "aot_eager"},
    "graph": {"backend": "fsdp_dynamo_aot_eager", "fullgraph": True},
}

INDUCTOR_MODES: dict[str, dict[str, Any]] = {
    "hooks-inductor": {"backend": "inductor"},
    "graph-inductor": {"backend": "fsdp_dynamo", "fullgraph": True},
}


def in_mode(model: nn.Module, mode: str, **graph_options: Any) -> nn.Module:
    """The model, run in the mode named; ``graph_options`` are those of our backends."""
    arguments = {**MODES, **INDUCTOR_MODES}[mode]
    if arguments is None:
        return model
    if graph_options and mode.startswith("graph"):
        arguments = {**arguments, "options": graph_options}
    return torch.compile(model, **arguments)
