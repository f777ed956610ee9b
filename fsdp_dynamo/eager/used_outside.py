"""Parameters that are used outside of the forward of their unit: sharded, of another shape."""

from __future__ import annotations

from types import TracebackType

from torch import nn

from fsdp_dynamo.core.original_parameter import owner_of
from fsdp_dynamo.errors import FSDPError, FSDPStateError


def used_outside(error: BaseException) -> FSDPStateError | None:
    """What to raise from an error of a unit's forward; ``None``: the error itself.

    Args:
        error: the last module that ran in it may belong to a unit whose forward does not run.
    """
    if isinstance(error, FSDPError) or not isinstance(error, Exception):
        return None
    module = _last_module(error.__traceback__)
    if module is None:
        return None
    sharded = [name for name in map(owner_of, module._parameters.values()) if name is not None]
    if not sharded:
        return None
    return FSDPStateError(
        expected="its parameters to be used in the forward of their unit",
        got=f"a call from elsewhere, with '{sharded[0]}' sharded",
        where=f"module {type(module).__name__}",
        fix=f"Let it be a unit of its own (add {type(module).__name__} to the policy), or call it "
        "in the forward of the unit that it is in.",
    )


def _last_module(traceback: TracebackType | None) -> nn.Module | None:
    module = None
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and any(p is not None for p in owner._parameters.values()):
            module = owner
        traceback = traceback.tb_next
    return module
