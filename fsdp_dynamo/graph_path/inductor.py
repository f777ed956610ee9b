"""Inductor's settings: what the user gave, our partition, and our pass over what it compiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch._functorch.config
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options

from fsdp_dynamo.dynamo import artifacts
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.graph_options import GraphOptions
from fsdp_dynamo.graph_path.partitioner import Partitioner
from fsdp_dynamo.graph_path.planning import is_recording
from fsdp_dynamo.graph_path.stretch_compiler import LowerWrites
from graph_passes.pipeline import Pipeline

MAX_AUTOTUNE = "max-autotune-no-cudagraphs"


def mode_settings(mode: str | None, *known: str) -> dict[str, Any]:
    """Inductor's settings for ``torch.compile(mode=...)``.

    Raises:
        FSDPValueError: not one of those that the backend knows.
    """
    if mode is None:
        return {}
    if mode not in known:
        raise FSDPValueError(
            expected=" or ".join(map(repr, ("default", *known))),
            got=repr(mode),
            where="torch.compile(mode=...)",
            fix="Leave mode out: CUDA graphs do not go with collectives in the graph, and "
            f'{MAX_AUTOTUNE!r} needs backend="fsdp_dynamo".',
        )
    return dict(list_mode_options(mode))


def users_settings(options: GraphOptions, is_used: bool = True) -> dict[str, Any]:
    """Settings of Inductor that the user gave beside our options.

    Raises:
        FSDPValueError: one of them is ours to decide, or the backend does not use Inductor.
    """
    ours = {"custom_partitioner_fn", "post_grad_custom_post_pass"}
    for name, value in options.inductor.items():
        if not is_used:
            reason = 'nothing is compiled by Inductor; take backend="fsdp_dynamo"'
        elif name == "triton.cudagraphs" and value:
            reason = "CUDA graphs do not go with collectives in the graph"
        elif name in ours:
            reason = "the backend has one of its own there"
        else:
            continue
        raise FSDPValueError(
            expected="settings of Inductor that the backend leaves to the user",
            got=f"{name}={value!r}",
            where=f"torch.compile(options=...), '{name}'",
            fix=f"Leave it out: {reason}.",
        )
    return dict(options.inductor)


def inductor_settings(partitioner: Partitioner, pipeline: Pipeline, marks: str) -> dict[str, Any]:
    """Inductor's settings: our partition, and our pass on what it compiles.

    The pass holds the keys of the plan: AOTAutograd keeps whole programs.
    """
    config: dict[str, Any] = {
        "custom_partitioner_fn": partitioner,
        "post_grad_custom_post_pass": LowerWrites(f"{pipeline.cache_key()}.{marks}"),
    }
    if is_recording() or artifacts.is_recording():
        # Not force_disable_caches: that compiles C++ headers anew as well.
        config |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    return config


def keeps_graphs(settings: Mapping[str, Any]) -> bool:
    """Whether graphs that are compiled with these settings are kept, and found by other ranks."""
    return bool(
        settings.get("fx_graph_cache", inductor_config.fx_graph_cache)
        and torch._functorch.config.enable_autograd_cache
        and not torch.compiler.config.force_disable_caches
    )
