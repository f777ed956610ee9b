"""Refusal of CUDA graphs around the bodies of units."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_dynamo.comm.streams import host_runs_ahead
from fsdp_dynamo.core.unit_modules import UnitModuleProtocol
from fsdp_dynamo.dynamo.private_api import Backend
from fsdp_dynamo.errors import UnsupportedError, unit_name

_SETTING = "triton.cudagraphs"


def refuse_cuda_graphs(module: UnitModuleProtocol, backend: Backend) -> None:
    """Raise if a backend is to capture a unit's body in a CUDA graph.

    A unit's parameters are inputs of its body, and at another address in each step.

    Raises:
        UnsupportedError: it is, and the unit is on a device that has such graphs.
    """
    flats = module._fsdp_unit.flats
    if not flats or not host_runs_ahead(flats[0].device) or not _captures(backend):
        return
    raise UnsupportedError(
        f"{unit_name(module._fsdp_unit.fqn)}: expected a mode of torch.compile without CUDA "
        "graphs, got one with them ('reduce-overhead', 'max-autotune', or an option). Leave the "
        "mode out, or choose 'max-autotune-no-cudagraphs'. A CUDA graph would copy the unit's "
        "parameters, which are at another address in each step, into memory of its own and keep "
        "that: every unit would stay unsharded."
    )


def _captures(backend: Backend) -> bool:
    if getattr(backend, "compiler_name", "") == "cudagraphs":
        return True
    config: Any = getattr(backend, "config", None)  # of Inductor, with what the user has chosen
    if not isinstance(config, dict):
        return False
    return bool(config.get(_SETTING, torch._inductor.config.triton.cudagraphs))
