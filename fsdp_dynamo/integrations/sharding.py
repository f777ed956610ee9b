"""Sharding settings as data, for libraries that run the training loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo.api import MixedPrecision, ShardingStrategy
from fsdp_dynamo.errors import FSDPStateError, FSDPValueError
from fsdp_dynamo.wrap.composable import FSDPModule, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


@dataclass(frozen=True)
class Sharding:
    """Settings that shard and compile a model.

    Attributes:
        layers: module classes, or their names, that become units; ``None``: the model's
            ``_no_split_modules``, which transformers' models define.
        policy: a wrap policy that replaces ``layers``.
        strategy: as for ``fully_shard``.
        mixed_precision: as for ``fully_shard``; ``None``: derived from the library's own settings.
        compile: arguments of ``torch.compile``; ``None``: eager mode.
        others: further arguments of ``fully_shard``, such as ``mesh``.
    """

    layers: Collection[type[nn.Module] | str] | None = None
    policy: object | None = None
    strategy: ShardingStrategy | None = None
    mixed_precision: MixedPrecision | None = None
    compile: Mapping[str, Any] | None = None
    others: Mapping[str, Any] = field(default_factory=dict)


def shard(model: nn.Module, sharding: Sharding, device: torch.device) -> FSDPModule:
    """Shard and compile a model in place, unless it is sharded already, and return it.

    All ranks get rank 0's values, as with ``DistributedDataParallel``. ``sharding`` has the
    settings, ``device`` is the one that computes.

    Raises:
        FSDPStateError: there is no process group.
        FSDPError: see ``fully_shard``.
    """
    if isinstance(model, FSDPModule):
        return model
    if not dist.is_initialized():
        raise FSDPStateError(
            f"sharding of {type(model).__name__}: expected a process group, got a process that was "
            "started alone. Start the script with torchrun; one rank will do."
        )
    class_name = type(model).__name__
    settings: dict[str, Any] = {
        "policy": sharding.policy or ModuleWrapPolicy(_layers_of(model, sharding.layers)),
        "strategy": sharding.strategy,
        "mixed_precision": sharding.mixed_precision,
        "sync_module_states": True,
        "device_id": None if device.type == "cpu" else device,
    }
    fully_shard(model, **{**settings, **sharding.others})
    assert isinstance(model, FSDPModule)
    # Libraries look models up by class name, and fully_shard has changed the class to a subclass.
    model._get_name = partial(str, class_name)  # type: ignore[method-assign]
    if sharding.compile is not None:
        model.compile(**sharding.compile)
    return model


def _layers_of(
    model: nn.Module, layers: Collection[type[nn.Module] | str] | None
) -> set[type[nn.Module]]:
    """Return the module classes that become units; for ``layers`` see ``Sharding``.

    Raises:
        FSDPValueError: no module has a class of this name, or there are no names at all.
    """
    wanted = getattr(model, "_no_split_modules", None) if layers is None else layers
    present = {type(module).__name__: type(module) for module in model.modules()}
    missing = [one for one in wanted or () if isinstance(one, str) and one not in present]
    if layers is None and wanted:  # _no_split_modules lists the layers of a whole model family
        wanted, missing = [one for one in wanted if one in present], []
    if missing or not wanted:
        raise FSDPValueError(
            f"Sharding(layers=...): expected classes of modules that the model has, got "
            f"{repr(missing[0]) if missing else 'none'}. Name some of: "
            f"{', '.join(sorted(present))}."
        )
    return {present[one] if isinstance(one, str) else one for one in wanted}


__all__ = ["Sharding", "shard"]
