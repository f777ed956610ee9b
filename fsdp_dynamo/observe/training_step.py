"""One training step for ``explain``, of a model that is compiled separately."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.core.unit_modules import units_in
from fsdp_dynamo.dynamo.private_api import (
    GRAPH_MODE,
    compile_again,
    compiled_parts,
    entry_of,
    mode_of,
)
from fsdp_dynamo.errors import FSDPStateError, FSDPTypeError, FSDPValueError
from fsdp_dynamo.graph_path.backends import fsdp_dynamo_aot_eager
from fsdp_dynamo.observe.own_backend import OwnBackend
from fsdp_dynamo.pytree import tensors_of

Loss = Callable[[Any], torch.Tensor] | None


@dataclass(frozen=True)
class Target:
    """Model that is explained.

    Attributes:
        module: the uncompiled model.
        run: the model; its first call, in ``backend.apart_from``, compiles it again.
        backend: which compiles it for the explanation.
        is_graph_mode: whether its graph contains the collectives.
        units: its units, outermost first.
    """

    module: nn.Module
    run: Callable[..., Any]
    backend: OwnBackend
    is_graph_mode: bool
    units: tuple[Unit, ...]


def target_of(model: object, options: Mapping[str, Any] | None) -> Target:
    """Prepare a compilation of the user's model that shares no code with others.

    Raises:
        FSDPTypeError: not a module, or options in hooks mode.
        FSDPStateError: no process group, or within ``torch.inference_mode()``.
        FSDPValueError: no unit, or a module that was compiled before it was wrapped.
    """
    if not isinstance(model, nn.Module):
        raise FSDPTypeError(
            expected="a model, or torch.compile(model)",
            got=repr(type(model)),
            where="explain()",
            fix="Pass the model that is trained.",
        )
    if not torch.distributed.is_initialized():
        raise FSDPStateError(
            expected="a process group",
            got="none",
            where="explain()",
            fix="Call torch.distributed.init_process_group() first.",
        )
    if torch.is_inference_mode_enabled():
        raise FSDPStateError(
            expected="a place where gradients can be computed",
            got="torch.inference_mode()",
            where="explain()",
            fix="Call it outside of the context: it runs backwards.",
        )
    module, backend, fullgraph = compiled_parts(model)
    units = tuple(units_in(module))
    if not units:
        raise FSDPValueError(
            expected="a model with a unit",
            got="none",
            where="explain()",
            fix="Shard it: FullyShardedDataParallel(...) or fully_shard(...).",
        )
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise FSDPValueError(
            expected="torch.compile(FullyShardedDataParallel(model), ...)",
            got="a model that was compiled before it was wrapped, or by model.compile()",
            where="explain()",
            fix="Compile the wrapper by torch.compile for the explanation.",
        )
    is_graph = backend is None or mode_of(backend) == GRAPH_MODE
    if options is not None and not is_graph:
        raise FSDPTypeError(
            expected="no options in hooks mode",
            got=repr(dict(options)),
            where="explain()",
            fix='They are those of backend="fsdp_dynamo" and "fsdp_dynamo_aot_eager".',
        )
    entry = entry_of(module, None)
    if backend is None:
        backend, fullgraph, options = fsdp_dynamo_aot_eager, True, options or {}
    own = OwnBackend(backend if options is None else getattr(backend, "compiler_fn", backend))
    run = compile_again(own, entry, fullgraph, options)
    return Target(module, run, own, is_graph, units)


def run_step(
    target: Target, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], loss_fn: Loss
) -> None:
    """Run a forward and a backward.

    Raises:
        FSDPValueError: there is no loss to differentiate.
    """
    with torch.enable_grad():
        output = target.run(*inputs, **kwargs)
        loss = sum_of(output) if loss_fn is None else loss_fn(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise FSDPValueError(
                expected="loss_fn(output) to be a scalar tensor that depends on the parameters",
                got=repr(getattr(loss, "shape", type(loss))),
                where="explain()",
                fix="Return the loss itself.",
            )
        loss.backward()  # type: ignore[no-untyped-call]


def sum_of(
    output: Any, where: str = "explain()", fix: str = "Give a loss_fn(output)."
) -> torch.Tensor:
    """Sum of all floating-point outputs that depend on a parameter.

    Args:
        output: the model's.
        where: caller to name in the error.
        fix: remedy to name in the error.

    Raises:
        FSDPValueError: there is no such output.
    """
    tensors = [t for t in tensors_of(output) if t.is_floating_point() and t.requires_grad]
    if not tensors:
        raise FSDPValueError(
            expected="a floating-point output that depends on the parameters",
            got=repr(type(output)),
            where=where,
            fix=fix,
        )
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()
