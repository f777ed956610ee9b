"""Gradients that steps under ``no_sync()`` leave unsharded, in all modes.

They are the user's as any others: until they are reduced, each original parameter's ``.grad`` is
its view of the sum, in its unsharded shape (as upstream shows it). What the user does to it in
place is done to the sum; what the user sets to ``None`` is dropped when the sum is used next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo.core.flat_layout import FlatLayout, ShardLayout, has_value
from fsdp_dynamo.core.original_parameter import OriginalParameter, put_grad
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError, unit_name
from fsdp_dynamo.events import Model
from fsdp_dynamo.module_tree import UnitPaths
from graph_passes.markers import NO_VALUE

REDUCES = "reduces"
ADDS_SUMS = "adds sums and reduces"
ACCUMULATES = "accumulates"
"""States of accumulation that need graphs of their own."""


class Accumulation:
    """Accumulation of gradients over steps in the units of one root.

    Compiled code is guarded by ``sync`` and ``has_sums``.

    Attributes:
        model: whose units these are.
        sync: whether all units reduce their gradients in the step that runs.
        has_sums: whether a flat parameter holds a sum of unsharded gradients.
        is_last_backward: whether backwards wait for the reductions that they have started.
    """

    def __init__(self, sums: Sequence[UnshardedSum] = (), model: Model | None = None) -> None:
        self.model = model or Model("")
        self.sync = True
        self.has_sums = False
        self.is_last_backward = True
        self._sums = tuple(sums)
        for one in self._sums:
            one.accumulation = self

    def require_whole_backward(self, settings: UnitSettings, fqn: str) -> None:
        """Raise where a pipeline's stage takes the gradients of its inputs alone.

        It would look for the weights in the graph later, where it finds none of a unit's, and
        would leave their gradients out. The three settings are what a stage sets before. To be
        called in a backward.

        Args:
            settings: of a unit that is trained.
            fqn: of this unit.

        Raises:
            UnsupportedError: it does.
        """
        if self.is_last_backward or settings.reduces or settings.reshards_after_backward:
            return
        # False in a backward to chosen tensors, which does not reach a unit's parameters.
        whole = torch.autograd.Variable._execution_engine.is_checkpoint_valid()  # type: ignore[attr-defined]
        if not whole and not torch.is_grad_enabled():
            raise UnsupportedError(
                f"{unit_name(fqn)}: expected a backward of inputs and weights at once: a unit's "
                "gradients come together, got one of the inputs alone, as zero-bubble schedules of "
                "pipelines split it. Pass dw_builder=lambda: lambda: None to every PipelineStage: "
                "both then run where the inputs' would, and nothing is left for the weights'. "
                "Outside of pipelines call set_is_last_backward(True) before torch.autograd.grad()."
            )

    def state_in_graphs(self) -> str:
        """State whose graphs the step that runs needs; without gradients all states share them."""
        if not torch.is_grad_enabled() or (self.sync and not self.has_sums):
            return REDUCES
        return ADDS_SUMS if self.sync else ACCUMULATES

    def refresh(self) -> None:
        """Set the first two anew, after sums came or went or settings were changed."""
        self.has_sums = any(one.total is not None for one in self._sums)
        self.sync = all(one.settings.reduces for one in self._sums)


class UnshardedSum:
    """Sum of the unsharded gradients of one flat parameter, shown by its original parameters.

    Args:
        originals: the parameters.
        layout: of the flat parameter.
        shard_layout: of this rank's shard.

    Attributes:
        total: the sum ``(padded_numel,)``, or ``None``. Its views have a version counter of their
            own: a graph that has saved ``total`` does not mind the user's changes.
        keeps_reduced_apart: gradients that are reduced already do not go into the sum, because
            its reduction is no mean (a communication hook); ``.grad`` does not show them, and has
            them again when the sum is taken.
        partial: a gradient that is reduced in its shard group and waits for the reduction over
            replicas, or ``None``.
        in_partial: indices of parameters of which this rank gave something to it.
        settings: of the unit.
        accumulation: of the root.
        paths: of its unit, for messages.
    """

    def __init__(
        self,
        originals: Sequence[OriginalParameter],
        layout: FlatLayout,
        shard_layout: ShardLayout,
    ) -> None:
        self.total: torch.Tensor | None = None
        self.keeps_reduced_apart = False
        self.partial: torch.Tensor | None = None
        self.in_partial: set[int] = set()
        self.settings = UnitSettings()  # until a unit takes over
        self.paths = UnitPaths(("",))
        self.accumulation = Accumulation([self])  # until a root takes over
        self._originals = originals
        self._layout = layout
        self._shard_layout = shard_layout
        self._shown: list[tuple[OriginalParameter, nn.Parameter]] = []  # who shows the views
        self._views: list[torch.Tensor] = []
        self._grads: list[torch.Tensor] = []  # the views, as the parameters show them
        self._reduced: list[torch.Tensor | None] = []  # that are kept apart
        self._trained: set[int] = set()  # of which something may be in the sum
        self._trained_in_partial: set[int] = set()

    @torch.no_grad()
    def put(self, total: torch.Tensor, unused: Collection[int] | None = None) -> None:
        """Let a sum wait for a reduction; gradients that are reduced already go into it, or apart.

        Args:
            total: the sum ``(padded_numel,)``.
            unused: indices of parameters that have no part in it; by default they are looked for.
        """
        grads = [original.grad for original in self._originals]
        self.total = total
        self._reduced = [None] * len(grads)
        self._add_parts(total, grads)
        self._views = self._layout.split(total.data)
        self._grads = [
            view if original.parallel is None else original.parallel.as_dtensor(view)
            for original, view in zip(self._originals, self._views, strict=True)
        ]
        self._shown = [(original, original.param) for original in self._originals]
        self._note_trained()
        if unused is None:
            unused = [index for index, has in enumerate(has_value(self._views)) if not has]
        self._show({index for index in unused if grads[index] is None})
        self.accumulation.has_sums = True

    def add(self, grad: torch.Tensor, unused: Collection[int] = frozenset()) -> None:
        """Add an unsharded gradient; to be called without gradient tracking. As ``put``."""
        if self.total is None:
            self.put(grad, unused)
            return
        self.drop_dropped()
        self.total.data.add_(grad)  # a graph may have saved it for its backward
        self._note_trained()
        self._show(unused)

    def add_reduced(self, parts: Sequence[torch.Tensor | None]) -> None:
        """Add a reduced gradient, in this rank's parts of the parameters, to the sum."""
        assert self.total is not None
        self.drop_dropped()
        self._add_parts(self.total, parts)

    def used(self) -> set[int]:
        """Indices of parameters of which this rank has something in the sum, and no part.

        Nothing else tells it that they are to have a gradient, as on ranks that have a part.
        """
        if self.total is None:
            return set()
        ranges = enumerate(self._shard_layout.ranges)
        without = [i for i, part in ranges if not part.numel]
        has = has_value([self._views[i] for i in without])
        shown = [self._shown[i][1].grad is not None for i in without]
        return {i for i, *both in zip(without, has, shown, strict=True) if all(both)}

    @torch.no_grad()
    def take(self) -> torch.Tensor | None:
        """The sum, which waits no more; ``None`` where there is none or the user has dropped it."""
        if self.total is None:
            return None
        self.drop_dropped()
        has_grad = any(param.grad is not None for _, param in self._shown)
        for (original, param), reduced in zip(self._shown, self._reduced, strict=True):
            param.grad = None
            if reduced is not None:
                put_grad(param, original.as_param(reduced))
        total, self.total = self.total, None
        self._shown, self._views, self._grads, self._reduced = [], [], [], []
        self._trained = set()
        return total if has_grad else None

    # -- what waits for the reduction over replicas -----------------------------------------------

    def leave_to_replicas(self, grad: torch.Tensor, unused: Collection[int]) -> None:
        """Let a gradient that is reduced in its shard group wait, with those that wait already."""
        self.in_partial.update({*range(len(self._originals))}.difference(unused))
        if self.partial is not None:
            grad.add_(self.partial)
        self.partial = grad
        self._trained_in_partial.update(self._now_trained())

    def take_partial(self) -> torch.Tensor | None:
        """Take the gradient that waits for its reduction over replicas; ``None`` if none does."""
        partial, self.partial = self.partial, None
        self._trained_in_partial, self.in_partial = set(), set()
        return partial

    def frozen_in_partial(self) -> set[int]:
        """As ``frozen_since``, of what waits for the reduction over replicas."""
        return self._trained_in_partial.difference(self._now_trained())

    def give_partial(
        self, parts: Sequence[torch.Tensor], frozen: Collection[int], used: Collection[int]
    ) -> None:
        """Give what waited, reduced, to the parameters: those that are frozen by now, too.

        Args:
            parts: this rank's.
            frozen: indices of parameters that are frozen by now.
            used: those of which this rank gave something to it.
        """
        if self.total is not None:
            trained = self._now_trained()
            self.add_reduced([part if i in trained else None for i, part in enumerate(parts)])
            self.keep_reduced(frozen, parts)
            return
        for index, has in enumerate(has_value(parts)):
            if has or index in used:
                self._originals[index].add_grad(parts[index])

    # -- parameters that are frozen while it waits ------------------------------------------------

    def _now_trained(self) -> list[int]:
        return [index for index, one in enumerate(self._originals) if one.param.requires_grad]

    def _note_trained(self) -> None:
        self._trained.update(self._now_trained())

    def frozen_since(self) -> set[int]:
        """Indices of parameters that were trained when the sum was made, and are frozen now.

        The same on all ranks, also where some ranks have no gradient of them.
        """
        return {one for one in self._trained if not self._originals[one].param.requires_grad}

    def take_of(self, indices: Collection[int]) -> torch.Tensor:
        """Take some parameters out of the sum; the sum of these alone, ``(padded_numel,)``."""
        assert self.total is not None
        self.drop_dropped()
        taken = torch.full_like(self.total.data, NO_VALUE)
        for index, (own, view) in enumerate(
            zip(self._layout.split(taken), self._views, strict=True)
        ):
            if index in indices:
                own.copy_(view)
                view.fill_(NO_VALUE)
        for flat in (taken, self.total.data):
            self._layout.repeat(flat)
        self._trained.difference_update(indices)
        return taken

    def keep_reduced(self, indices: Collection[int], parts: Sequence[torch.Tensor]) -> None:
        """Keep what was reduced of some parameters apart, until the sum is taken.

        It is taken at once if all of its parameters are frozen.
        """
        for index in indices:
            if has_value([parts[index]])[0]:
                kept, part = self._reduced[index], parts[index].clone()
                self._reduced[index] = part if kept is None else kept.add_(part)
                self._show({*range(len(self._originals))} - {index})  # it is not dropped
        if not any(original.param.requires_grad for original in self._originals):
            self.take()

    # -- what the user does to it -----------------------------------------------------------------

    @torch.no_grad()
    def drop_dropped(self) -> None:
        """Take out of the sum what the user has set to ``None``.

        Raises:
            FSDPStateError: a ``.grad`` is another tensor, which may be reduced or not.
        """
        if self.total is None:
            return
        grads = [param.grad for _, param in self._shown]
        for original, grad, shown in zip(self._originals, grads, self._grads, strict=True):
            if grad is not None and grad is not shown:
                raise FSDPStateError(
                    f"parameter '{self.paths.fqn_of(original.fqn)}': expected the gradient that "
                    "steps under no_sync() have left in .grad, got another tensor of shape "
                    f"{tuple(grad.shape)}. Change it in place (p.grad.mul_(...)), or drop it "
                    "(p.grad = None), until a step without no_sync() has reduced it."
                )
        for index, (grad, view) in enumerate(zip(grads, self._views, strict=True)):
            if grad is None:
                view.fill_(NO_VALUE)
                self._reduced[index] = None
        self._layout.repeat(self.total.data)  # what the user has done to the first copies

    def _show(self, unused: Collection[int]) -> None:
        for index, ((_, param), grad) in enumerate(zip(self._shown, self._grads, strict=True)):
            if index not in unused and param.grad is not grad:
                put_grad(param, grad)

    def _add_parts(self, total: torch.Tensor, parts: Sequence[torch.Tensor | None]) -> None:
        """Add reduced gradients to an unsharded one so that its mean over ranks has them once.

        Each rank adds its own parts only, so as many times as there are shards. Those of parameters
        that are frozen by now stay apart: of the mean, nothing is given to these.
        """
        own = self._layout.parts_of(total.data, self._shard_layout.ranges)
        for index, (target, part) in enumerate(zip(own, parts, strict=True)):
            if part is None:
                continue
            is_shared = self._layout.slots[index].copies == 1  # or each rank adds it to its own
            alpha = (self._layout.world_size if is_shared else 1) / self.settings.grad_scale
            if self.keeps_reduced_apart or not self._originals[index].param.requires_grad:
                kept = self._reduced[index]
                self._reduced[index] = part if kept is None else kept.add_(part)
            else:
                target.add_(part.to(target.device), alpha=alpha)


# -- unit settings ---------------------------------------------------------------------------------
# What the user sets of a unit's schedule after it was built: FSDP2's setters.
#
# One object for each unit. The schedule and the reductions read it where they decide; its
# defaults are what units do without it.


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
        """Settings that a whole graph is made for, as text that Dynamo guards."""
        return f"{self.reshards_after_forward} {self.grad_scale} {self.eager_only()}"
