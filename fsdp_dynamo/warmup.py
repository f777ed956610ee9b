"""Compile before the first step, on all ranks together, and bound what is compiled afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.core.unit_modules import clear_gradients, preserve_state, units_in
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.graph_mode.backends import told
from fsdp_dynamo.health.comparison import require_same
from fsdp_dynamo.observe.training_step import sum_of
from fsdp_dynamo.state_dict.methods import uncompiled
from fsdp_dynamo.untraced import UNDER_LOCK, untraced

Step = Callable[[Any, Any], torch.Tensor]
"""Called with the model and a batch; returns the loss, a scalar."""


def warmup(
    model: nn.Module,
    batches: Iterable[Any],
    step: Step | None = None,
    *,
    max_recompiles: int | None = None,
) -> None:
    """Run a forward and a backward of each batch, so that all that they need is compiled.

    Every rank calls it with as many batches, before the first step. No rank begins a batch before
    all have done the one before, and none is called late while another compiles. Parameters,
    gradients, buffers and random states are afterwards what they were; under ``torch.no_grad()``
    only the forwards run. A batch that takes more than 5 s is told on rank 0's stderr.

    Args:
        model: compiled or not.
        batches: one of each shape that will come: a tensor, or a tuple of positional or a dict of
            keyword inputs.
        step: the loss of ``(model, batch)``, as the training computes it; by default the sum of
            all outputs.
        max_recompiles: for ``limit_recompiles``, once all is done.

    Raises:
        FSDPValueError: ``max_recompiles`` is no number of at least 0; no module of ``model`` is a
            unit; ``step`` returns no loss; without ``step``, no output depends on a parameter.
        DivergenceError: ranks give different numbers of batches, or one does not come.
    """
    _check_count(max_recompiles, "warmup(max_recompiles=...)")
    given = list(batches)
    module = uncompiled(model)
    units = _units_of(module)
    groups = units[0].config.groups.all
    with preserve_state(module, units):
        for number, batch in enumerate(given, 1):
            for group in groups:
                require_same(group, "batch to warm up", f"{number} of {len(given)}")
            with told(f"warming up with batch {number} of {len(given)}"):
                loss = _loss_of_outputs(model, batch) if step is None else step(model, batch)
                if torch.is_grad_enabled():
                    _require_loss(loss)
                    loss.backward()  # type: ignore[no-untyped-call]
            clear_gradients(list(module.parameters()), units)
    for group in groups:
        require_same(group, "end of the warm-up", "reached")
    if max_recompiles is not None:
        limit_recompiles(max_recompiles)


def _require_loss(loss: object) -> None:
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return
    got = f"a tensor {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
    raise FSDPValueError(
        "warmup(): expected a loss, one number that depends on a parameter, from step, got "
        f"{got}. Let step return the loss; warmup() calls backward()."
    )


def _units_of(module: nn.Module) -> list[Unit]:
    units = units_in(module)
    if not units:
        raise FSDPValueError(
            f"warmup(): expected a model with units, got {type(module).__name__}. Wrap it first: "
            "FSDP(model), or fully_shard(model)."
        )
    return units


def _loss_of_outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    if not torch.is_grad_enabled():
        return torch.zeros(())
    return sum_of(output, "warmup()", "Pass step=, which returns the loss.")


# -- the budget ------------------------------------------------------------------------------------

_left = 0


def limit_recompiles(count: int | None) -> None:
    """Let Dynamo compile ``count`` functions of this process anew; one more is an error.

    The error is ``torch._dynamo.exc.RecompileError``, with the guards that failed. A function that
    is compiled for the first time does not count. ``None`` ends the limit; so does
    ``torch.compiler.reset()`` where it is above 0.

    Args:
        count: 0 or more, or ``None``.

    Raises:
        FSDPValueError: not a number of at least 0.
    """
    global _left
    _check_count(count, "limit_recompiles()")
    if _count in callback_handler.start_callbacks:
        callback_handler.remove_start_callback(_count)
    if count:
        callback_handler.register_start_callback(_count)
    _left = count or 0
    torch._dynamo.config.error_on_recompile = count == 0


def _check_count(count: int | None, where: str) -> None:
    if count is not None and not (isinstance(count, int) and count >= 0):
        raise FSDPValueError(
            f"{where}: expected a number of recompiles, 0 or more, or None, got {count!r}. Pass "
            "how often Dynamo may still compile anew."
        )


def is_recompile(args: CallbackArgs) -> bool:
    """Whether the compilation that begins is not a function's first, nor that of a backward."""
    # Those of a function are numbered from 0, after the last "/".
    number = args.compile_id.rpartition("/")[2]
    return args.callback_trigger is CallbackTrigger.DYNAMO and number != "0"


@untraced(UNDER_LOCK)
def _count(args: CallbackArgs) -> None:
    global _left
    if not is_recompile(args):
        return
    _left -= 1
    if _left == 0:
        torch._dynamo.config.error_on_recompile = True


__all__ = ["Step", "limit_recompiles", "warmup"]
