"""Parameters that are used outside of the forward of their unit: sharded, of another shape.

In the forward of another unit, the error of torch gives way to one that says so (``used_outside``),
also where Dynamo traces it in hooks mode, and in a method of the wrapped module that is called on
its wrapper (``explained``). Outside of any, and in graph mode, nothing of ours runs and nothing can
raise in its place without a cost in every forward; where torch's error ends the rank, a hint stands
below its traceback (in graph mode if torch, by its version, keeps the frames).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, MethodType, TracebackType
from typing import Any

from torch import nn

from fsdp_dynamo.core.parts import parts_now
from fsdp_dynamo.errors import FSDPError, FSDPStateError

_OF_SHAPES = (RuntimeError, ValueError, IndexError, AssertionError)
"""What torch raises where a parameter has another shape."""


def used_outside(
    error: BaseException, run_unit: CodeType, method: str = ""
) -> FSDPStateError | None:
    """What to raise from an error of a unit's forward; ``None``: the error itself.

    Args:
        error: the last module that ran in it may belong to a unit whose forward does not run.
        run_unit: code of the function that runs a unit's forward. The innermost one has asked: what
            failed in its unit is sharded again.
        method: the method of a wrapped module that has raised it, not its forward.
    """
    if isinstance(error, FSDPError) or not isinstance(error, Exception):
        return None
    if [frame.f_code for frame in _frames(error.__traceback__)].count(run_unit) > 1:
        return None
    module = _last_module(error.__traceback__)
    if module is None:
        return None
    parts = {id(part): fqn for part, fqn in parts_now()}
    sharded = [parts[id(p)] for p in module._parameters.values() if id(p) in parts]
    if not sharded:
        return None
    fix = (
        f"Let it be a unit of its own (add {type(module).__name__} to the policy), or call it "
        "in the forward of the unit that it is in; without gradients, inside "
        "FSDP.summon_full_params(model)."
    )
    if method:
        fix = f'Call register_forward_method("{method}") on the wrapper once: then {method}() runs '
        fix += "with the unit unsharded, like its forward."
    return FSDPStateError(
        expected="its parameters to be used in the forward of their unit",
        got=f"a call from {f'{method}()' if method else 'elsewhere'}, with '{sharded[0]}' sharded",
        where=f"module {type(module).__name__}",
        fix=fix,
    )


def explained(method: MethodType, of_units: CodeType) -> MethodType:
    """Return a method whose error about a shape says so if it has used sharded parameters.

    Args:
        method: of a module in a wrapper.
        of_units: as in ``hint_at_use_outside``.
    """
    function = method.__func__

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _OF_SHAPES as error:
            outside = _outside_of_all(error, of_units, method.__name__)
            if outside is None:
                raise
            raise outside from error

    return MethodType(run, method.__self__)


def _outside_of_all(
    error: BaseException, of_units: CodeType, method: str = ""
) -> FSDPStateError | None:
    """``used_outside`` of an error about a shape, where no unit's forward ran."""
    frames = _frames(error.__traceback__)
    if not isinstance(error, _OF_SHAPES) or any(frame.f_code is of_units for frame in frames):
        return None
    return used_outside(error, of_units, method)


def hint_at_use_outside(error: BaseException, of_units: CodeType) -> None:
    """Say on stderr if a module inside a unit was called by itself, and what to do.

    Args:
        error: ends this rank.
        of_units: code that runs a unit's forward. Where it is in the traceback, the parameters were
            unsharded, and ``used_outside`` has been asked.
    """
    outside = _outside_of_all(error, of_units)
    if outside is not None:
        print(f"Perhaps the cause: {outside}", file=sys.stderr, flush=True)


def _last_module(traceback: TracebackType | None) -> nn.Module | None:
    module = None
    for frame in _frames(traceback):
        owner = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == "torch._dynamo.variables.nn_module":
            owner = getattr(owner, "value", None)  # the module whose forward Dynamo traces
        if isinstance(owner, nn.Module) and any(p is not None for p in owner._parameters.values()):
            module = owner
    return module


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
