"""One parameter of the user's model: its places, and the mark that says that a unit holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from fsdp_dynamo.core.tensor_parallel import TensorParallel, as_local_parameter

_OWNER = "_fsdp_dynamo_owner"
_UPSTREAMS_MARK = "_fsdp_flattened"


@dataclass
class OriginalParameter:
    """One parameter of the user's model and every place that holds it.

    Attributes:
        param: the object that optimizers hold. Another one takes its place only if the user has put
            it into the module after wrapping.
        fqn: FQN relative to the unit.
        sites: ``(module, name, FQN)`` of every place; more than one where tied.
        parallel: how tensor parallelism has split it, if it has.
        keeps_dtype: whether mixed precision leaves it in its own dtype.
        rows_together: how many rows of it stay on one rank; the last ones may be fewer.
    """

    param: nn.Parameter
    fqn: str
    sites: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    parallel: TensorParallel | None = None
    keeps_dtype: bool = False
    rows_together: int = 1

    def take_local(self) -> None:
        """Put a plain parameter in the place of a DTensor: its local tensor."""
        self.param, self.parallel = as_local_parameter(self.param)
        if self.parallel is not None:
            for module, name, _ in self.sites:
                module._parameters[name] = self.param

    def present(self) -> Sequence[object]:
        """The objects that modules hold now, each once; none where it was removed."""
        found = [module._parameters.get(name) for module, name, _ in self.sites]
        return list({id(param): param for param in found if param is not None}.values())

    def replace(self, new: nn.Parameter) -> None:
        """Hold ``new``, which the modules hold already; the object before it is free again.

        It keeps its values, in storage of its own, and no gradient goes to it any more.
        """
        old, self.param = self.param, new
        old.data = old.data.clone()
        for mark in (_OWNER, _UPSTREAMS_MARK):
            setattr(new, mark, getattr(old, mark))
            delattr(old, mark)


def owner_of(param: object) -> str | None:
    """The FQN under which a unit holds a parameter; ``None``: no unit does."""
    owner: str | None = getattr(param, _OWNER, None)
    return owner


def mark_managed(param: nn.Parameter, fqn: str) -> None:
    """Let a parameter say that a unit holds it, and under which name."""
    setattr(param, _OWNER, fqn)
    setattr(param, _UPSTREAMS_MARK, True)
