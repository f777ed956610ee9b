"""One training step for ``explain``, after which everything is as it was before."""

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
from fsdp_dynamo.errors import FSDPStateError, FSDPTypeError, FSDPValueError, error_message
from fsdp_dynamo.pytree import tensors_of

Loss = Callable[[Any], torch.Tensor] | None

DEFAULT_BACKEND = "fsdp_dynamo_aot_eager"


@dataclass(frozen=True)
class Target:
    """What is explained.

    Attributes:
        module: the model, uncompiled.
        run: the model, to be compiled anew at its first call.
        backend: name of its backend.
        is_graph_path: whether collectives are in its graph.
        units: outermost first.
    """

    module: nn.Module
    run: Callable[..., Any]
    backend: str
    is_graph_path: bool
    units: tuple[Unit, ...]


def target_of(model: object, options: Mapping[str, Any] | None) -> Target:
    """Look at what the user gave, and prepare a compilation that shares no code with others.

    Raises:
        FSDPTypeError: not a module, or options where there is nothing to take them.
        FSDPStateError: no process group.
        FSDPValueError: no unit, or a module that was compiled before it was wrapped.
    """
    if not isinstance(model, nn.Module):
        raise _wrong(FSDPTypeError, "a model, or torch.compile(model)", repr(type(model)))
    if not torch.distributed.is_initialized():
        raise _wrong(
            FSDPStateError,
            "a process group",
            "none",
            "Call torch.distributed.init_process_group() first.",
        )
    module, backend, fullgraph = compiled_parts(model)
    units = tuple(units_in(module))
    if not units:
        raise _wrong(
            FSDPValueError,
            "a model with a unit",
            "none",
            "Shard it: FullyShardedDataParallel(...) or fully_shard(...).",
        )
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise _wrong(
            FSDPValueError,
            "torch.compile(FullyShardedDataParallel(model), ...)",
            "a model that was compiled before it was wrapped, or by model.compile()",
            "Compile the wrapper by torch.compile for the explanation.",
        )
    is_graph = backend is None or mode_of(backend) == GRAPH_MODE
    if options is not None and not is_graph:
        raise _wrong(
            FSDPTypeError,
            "no options in hooks mode",
            repr(dict(options)),
            'They are those of backend="fsdp_dynamo" and "fsdp_dynamo_aot_eager".',
        )
    entry = entry_of(module, own_code=True)
    if backend is None:
        run = compile_again(DEFAULT_BACKEND, entry, True, options)
    else:
        run = compile_again(backend, entry, fullgraph, options)
    return Target(module, run, _name_of(backend), is_graph, units)


def _name_of(backend: Any) -> str:
    if backend is None:
        return DEFAULT_BACKEND
    return str(getattr(backend, "compiler_name", getattr(backend, "__name__", backend)))


def _wrong(kind: type[Exception], expected: str, got: str, fix: str = "") -> Exception:
    return kind(error_message(expected=expected, got=got, where="explain()", fix=fix).strip())


def run_step(
    target: Target, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], loss_fn: Loss
) -> None:
    """A forward and a backward; gradients are thrown away.

    Raises:
        FSDPValueError: nothing to differentiate comes out.
    """
    with torch.enable_grad():
        output = target.run(*inputs, **kwargs)
        loss = sum_of(output) if loss_fn is None else loss_fn(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise _wrong(
                FSDPValueError,
                "loss_fn(output) to be a scalar tensor that depends on the parameters",
                repr(getattr(loss, "shape", type(loss))),
                "Return the loss itself.",
            )
        loss.backward()  # type: ignore[no-untyped-call]


def sum_of(output: Any) -> torch.Tensor:
    """The sum of all floating-point outputs that depend on a parameter."""
    tensors = [t for t in tensors_of(output) if t.is_floating_point() and t.requires_grad]
    if not tensors:
        raise _wrong(
            FSDPValueError,
            "a floating-point output that depends on the parameters",
            repr(type(output)),
            "Give a loss_fn(output).",
        )
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()
