"""What makes a module of ``fully_shard`` an ``FSDPModule`` of torch's to other people's code.

It inherits from torch's class, whose methods are all overridden. Code that goes on to torch's
private state gets an error, but for the end of a backward in ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.distributed import fsdp

from fsdp_dynamo.errors import UnsupportedError, unit_name
from fsdp_dynamo.wrap.build import set_composable_state
from fsdp_dynamo.wrap.fsdp2_methods import FSDP2Methods

_FULLY_SHARD = fsdp.fully_shard
"""Torch's own, also where a script has put ours in its place."""


class TorchFSDPModule(FSDP2Methods, fsdp.FSDPModule):
    """Torch's class with our methods."""

    def _get_fsdp_state(self) -> NoReturn:
        raise UnsupportedError(
            expected="a use of FSDPModule's public methods",
            got="one of torch's private state",
            where=unit_name(self._fsdp_unit.fqn),
            fix="In place of register_fsdp_forward_method of torch use that of fsdp_dynamo; "
            "share_comm_ctx, deferred reductions of pipelines and torch's FSDP2 memory tracker "
            "have nothing to work on.",
        )


class PipelineState:
    """What stages of pipelines take for FSDP2's state up to torch 2.14.

    They set ``set_requires_gradient_sync(True)`` after the last microbatch, then go through the
    states of all units, of which there are none here, and call the last method.
    """

    def __init__(self, module: FSDP2Methods) -> None:
        self._module = module
        self._state_ctx = self
        self.all_states: tuple[Any, ...] = ()

    def _root_post_backward_final_callback(self) -> None:
        self._module.finalize_backward()


def let_pipelines_end_backwards(module: FSDP2Methods) -> None:
    """Give a module the state that ``torch.distributed.pipelining`` asks for."""
    set_composable_state(module, _FULLY_SHARD, PipelineState(module))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a unit run with its parameters unsharded; other modules are left alone.

    Args:
        module: any module.
        method_name: see ``register_forward_method`` of units.

    Raises:
        FSDPValueError: the module has no such method.
    """
    if isinstance(module, FSDP2Methods):
        module.register_forward_method(method_name)
