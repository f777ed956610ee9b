"""Compile before the first step, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.core.unit_modules import clear_gradients, preserve_state, roots_in, units_in
from fsdp_dynamo.dynamo.progress import told
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.health.comparison import require_same
from fsdp_dynamo.observe.training_step import sum_of
from fsdp_dynamo.state_dict.methods import uncompiled

Step = Callable[[Any, Any], torch.Tensor]
"""Called with the model and a batch; returns the loss, a scalar."""


def warmup(
    model: nn.Module,
    batches: Iterable[Any],
    step: Step | None = None,
    *,
    accumulation: bool = False,
    evaluation: bool = False,
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
        accumulation: also compile what a step under ``no_sync()`` needs, and the step that
            reduces what such steps have left.
        evaluation: also compile a forward in evaluation mode without gradients.

    Raises:
        FSDPValueError: no module of ``model`` is a unit; ``step`` returns no loss; without
            ``step``, no output depends on a parameter.
        DivergenceError: ranks give different numbers of batches, or one does not come.
    """
    given = list(batches)
    module = uncompiled(model)
    units = _units_of(module)
    groups = units[0].config.groups.all

    def run(batch: Any) -> None:
        loss = _loss_of_outputs(model, batch) if step is None else step(model, batch)
        if torch.is_grad_enabled():
            _require_loss(loss)
            loss.backward()  # type: ignore[no-untyped-call]

    with preserve_state(module, units):
        for number, batch in enumerate(given, 1):
            for group in groups:
                require_same(group, "batch to warm up", f"{number} of {len(given)}")
            with told(f"warming up with batch {number} of {len(given)}"):
                run(batch)
                if accumulation:
                    with ExitStack() as stack:
                        for root in roots_in(module):
                            stack.enter_context(root.no_sync())
                        run(batch)
                    run(batch)
                clear_gradients(list(module.parameters()), units)
                if evaluation:
                    with _in_evaluation(module), torch.no_grad():
                        run(batch)
    for group in groups:
        require_same(group, "end of the warm-up", "reached")


@contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    were_training = [one for one in module.modules() if one.training]
    module.eval()
    try:
        yield
    finally:
        for one in were_training:
            one.training = True


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


__all__ = ["Step", "warmup"]
