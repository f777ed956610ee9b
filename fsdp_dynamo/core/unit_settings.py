"""What the user sets of a unit's schedule after it was built: FSDP2's setters.

One object for each unit. The schedule and the reductions read it where they decide; its defaults
are what units do without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

_PLANNED = "the plan of a graph places its all-gathers"
_NODES = "the reductions of a graph are its own nodes"
_BUFFERS = "unsharded parameters are the graph's own buffers"

_EAGER_ONLY = {
    "all_reduces": ("set_requires_all_reduce(False)", _NODES),
    "regathers_among": ("reshard_after_forward=<number of ranks>", _PLANNED),
    "reshards_after_backward": ("set_reshard_after_backward(False)", _BUFFERS),
    "keeps_storage": ("set_keep_unsharded_storage(True)", _BUFFERS),
    "forward_prefetch": ("set_modules_to_forward_prefetch()", _PLANNED),
    "backward_prefetch": ("set_modules_to_backward_prefetch()", _PLANNED),
    "sums_only": ("set_force_sum_reduction_for_comms(True)", _NODES),
    "all_reduce_hook": ("set_all_reduce_hook()", _NODES),
    "all_gather": ("set_custom_all_gather()", _PLANNED),
    "reduce_scatter": ("set_custom_reduce_scatter()", _NODES),
}
"""Settings that a whole graph cannot follow: who sets them, and why it cannot."""


@dataclass(eq=False)
class UnitSettings:
    """Settings of one unit.

    Attributes:
        reduces: whether backwards reduce its gradients, or sum them unsharded.
        all_reduces: whether they are reduced over replicas, too, or wait for a backward that does.
        reshards_after_forward: in place of what its strategy says; ``None``: as that says.
        regathers_among: the ranks that hold it between a forward and its backward, and gather it
            again among themselves; ``None``: all that shard it.
        reshards_after_backward: whether it is resharded after a backward.
        unshards_in_backward: whether its backward needs its parameters.
        keeps_storage: whether the unsharded storage stays allocated when it is resharded.
        forward_prefetch: units to unshard ahead when its forward begins; empty: as by default.
        backward_prefetch: the same in the backward.
        grad_scale: factor of reduced gradients, which are means.
        sums_only: whether gradients are divided before they are summed, by sums alone.
        all_reduce_hook: called with each reduced gradient, before it is in ``.grad``.
        all_gather: FSDP2's ``AllGather``, in place of ours.
        reduce_scatter: FSDP2's ``ReduceScatter``, in place of ours.
    """

    reduces: bool = True
    all_reduces: bool = True
    reshards_after_forward: bool | None = None
    regathers_among: dist.ProcessGroup | None = None
    reshards_after_backward: bool = True
    unshards_in_backward: bool = True
    keeps_storage: bool = False
    forward_prefetch: tuple[Any, ...] = ()
    backward_prefetch: tuple[Any, ...] = ()
    grad_scale: float = 1.0
    sums_only: bool = False
    all_reduce_hook: Callable[[torch.Tensor], object] | None = None
    all_gather: Callable[..., Any] | None = None
    reduce_scatter: Callable[..., Any] | None = None

    def eager_only(self) -> tuple[str, str] | None:
        """A setter in force that a whole graph cannot follow, with the reason."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        return next((_EAGER_ONLY[name] for name in changed if name in _EAGER_ONLY), None)

    def in_graphs(self) -> str:
        """What a whole graph is made for, as Dynamo guards it."""
        return f"{self.reshards_after_forward} {self.grad_scale} {self.eager_only()}"
