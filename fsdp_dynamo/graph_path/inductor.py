"""Inductor's settings: our partition, our passes as its last one, and no reordering after them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass

from fsdp_dynamo.dynamo import artifacts
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.graph_options import GraphOptions
from fsdp_dynamo.graph_path import generated_code
from fsdp_dynamo.graph_path.cache_keys import source_key
from fsdp_dynamo.graph_path.lowering import lower_to_operators
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
    ours = {"custom_partitioner_fn", "post_grad_custom_post_pass", *generated_code.SETTINGS}
    for name, value in options.inductor.items():
        if not is_used:
            reason = 'nothing is compiled by Inductor; take backend="fsdp_dynamo"'
        elif name == "triton.cudagraphs" and value:
            reason = "CUDA graphs do not go with collectives in the graph"
        elif name in ours:
            reason = "it would change the order of collectives, which the plan decides"
        else:
            continue
        raise FSDPValueError(
            expected="settings of Inductor that leave collectives where they are",
            got=f"{name}={value!r}",
            where=f"torch.compile(options=...), '{name}'",
            fix=f"Leave it out: {reason}.",
        )
    return dict(options.inductor)


class ScheduleAndLower(CustomGraphPass):
    """The pipeline and the lowering as Inductor's last pass on a graph."""

    def __init__(self, pipeline: Pipeline, marks: str) -> None:
        self.pipeline = pipeline
        self._marks = marks

    def __call__(self, graph: fx.Graph) -> None:
        self.pipeline.run(graph)
        lower_to_operators(graph)
        artifacts.emit_graph(graph, "lowered")

    def uuid(self) -> str:
        return f"fsdp_dynamo.schedule.{source_key()}.{self.pipeline.cache_key()}.{self._marks}"


def inductor_settings(partitioner: Partitioner, pipeline: Pipeline, marks: str, stretches: bool) -> dict[str, Any]:
    """Inductor settings: our partition and passes, and no reordering after them."""
    last: CustomGraphPass = ScheduleAndLower(pipeline, marks)
    config = {
        "custom_partitioner_fn": partitioner,
        "post_grad_custom_post_pass": LowerWrites(f"stretches.{last.uuid()}") if stretches else last,
        **generated_code.SETTINGS,
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
