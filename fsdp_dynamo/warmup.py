"""Compile before the first step, on all ranks together, and bound what is compiled afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.callback import CallbackArgs, callback_handler

from fsdp_dynamo.agreement import require_same, tell_of_failure
from fsdp_dynamo.errors import FSDPStateError, FSDPValueError, explain
from fsdp_dynamo.state_dict_methods import uncompiled, units_in
from fsdp_dynamo.tree import tensors_of

Step = Callable[[Any, Any], torch.Tensor]


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
    only the forwards run.

    Args:
        model: compiled or not.
        batches: one of each shape that will come: a tensor, or a tuple of positional or a dict of
            keyword inputs.
        step: the loss of ``(model, batch)``, as the training computes it; by default the sum of
            the means of the model's outputs.
        max_recompiles: for ``limit_recompiles``, once all is done.

    Raises:
        FSDPStateError: there are gradients already.
        FSDPValueError: no module of ``model`` is a unit.
        DivergenceError: ranks give different numbers of batches, or one does not come.
    """
    given = list(batches)
    group = _group_of(model)
    _refuse_gradients(model)
    try:
        with _nothing_changed(model):
            for number, batch in enumerate(given, 1):
                require_same(group, "batch to warm up", f"{number} of {len(given)}")
                _run(model, batch, step or _mean_of_outputs)
                for parameter in model.parameters():
                    parameter.grad = None
    except Exception as error:
        tell_of_failure(error)  # the others wait for this rank
        raise
    require_same(group, "end of the warm-up", "reached")
    if max_recompiles is not None:
        limit_recompiles(max_recompiles)


def _group_of(model: nn.Module) -> dist.ProcessGroup:
    units = units_in(uncompiled(model))
    if not units:
        raise FSDPValueError(
            explain(
                expected="a model with units",
                got=type(uncompiled(model)).__name__,
                where="warmup()",
                fix="Wrap it first: FSDP(model), or fully_shard(model).",
            )
        )
    return units[0].config.groups.all[0]


def _refuse_gradients(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise FSDPStateError(
                explain(
                    expected="no gradients yet",
                    got="one",
                    where=f"warmup(), parameter '{name}'",
                    fix="Call it before the first backward, or after zero_grad().",
                )
            )


@contextmanager
def _nothing_changed(model: nn.Module) -> Iterator[None]:
    """Buffers and random states are put back at the end."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _run(model: nn.Module, batch: Any, step: Step) -> None:
    loss = step(model, batch)
    if torch.is_grad_enabled():
        loss.backward()  # type: ignore[no-untyped-call]


def _mean_of_outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    found = [t.float().mean() for t in tensors_of(output) if t.is_floating_point()]
    return torch.stack(found).sum()


# -- the budget ------------------------------------------------------------------------------------

_left = 0


def limit_recompiles(count: int | None) -> None:
    """Let Dynamo compile ``count`` functions of this process anew; one more is an error.

    The error is ``torch._dynamo.exc.RecompileError``, with the guards that failed. A function that
    is compiled for the first time does not count. ``None`` ends the limit; so does
    ``torch._dynamo.reset()`` where it is above 0.

    Raises:
        FSDPValueError: a number below 0.
    """
    global _left
    if count is not None and count < 0:
        raise FSDPValueError(
            explain(
                expected="a number of recompiles, 0 or more, or None",
                got=repr(count),
                where="limit_recompiles()",
                fix="Pass how often Dynamo may still compile anew.",
            )
        )
    if _count in callback_handler.start_callbacks:
        callback_handler.remove_start_callback(_count)
    if count:
        callback_handler.register_start_callback(_count)
    _left = count or 0
    torch._dynamo.config.error_on_recompile = count == 0


def _count(args: CallbackArgs) -> None:
    """The compilation that begins: those of a function are numbered from 0, after the last "/"."""
    global _left
    if args.compile_id.rpartition("/")[2] == "0":
        return
    _left -= 1
    if _left == 0:
        torch._dynamo.config.error_on_recompile = True
