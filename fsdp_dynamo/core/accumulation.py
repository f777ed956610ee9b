"""Gradients that steps under ``no_sync()`` leave unsharded, in all modes.

Until a later step reduces them, the ``.grad`` of each original parameter is a view of the unsharded
sum, in the unsharded shape (as in FSDP1). So the user's in-place changes change the sum. A
``.grad`` that the user sets to ``None`` is removed from the sum when the sum is used next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo.comm.registered_memory import RegisteredMemory
from fsdp_dynamo.core.flat_layout import FlatLayout, ShardLayout, has_value
from fsdp_dynamo.core.original_parameter import OriginalParameter, put_grad
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError, unit_name
from fsdp_dynamo.events import Model
from fsdp_dynamo.module_tree import UnitPaths
from graph_passes.markers import NO_VALUE

REDUCES = "reduces"
ADDS_SUMS = "adds sums and reduces"
ACCUMULATES = "accumulates"
"""Accumulation states; each has its own graphs."""


class Accumulation:
    """Accumulation of gradients over steps in the units of one root.

    Guards of compiled code read ``sync`` and ``has_sums``.

    Attributes:
        model: owner of the units.
        sync: whether all units reduce their gradients in the current step.
        has_sums: whether any flat parameter holds a sum of unsharded gradients.
        is_last_backward: whether backwards wait for the reductions that they start.
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
        """Raise if a pipeline stage computes the gradients of its inputs alone.

        It would later look for the weights in the autograd graph, find none of a unit's, and leave
        out their gradients. A stage sets the three settings that are tested first. Call this in a
        backward.
        """
        if self.is_last_backward or settings.reduces or settings.reshards_after_backward:
            return
        # False if the backward was given `inputs`: it then does not reach a unit's parameters.
        whole = torch.autograd.Variable._execution_engine.is_checkpoint_valid()  # type: ignore[attr-defined]
        if not whole and not torch.is_grad_enabled():
            raise UnsupportedError(
                f"{unit_name(fqn)}: expected a backward of inputs and weights at once, because a "
                "unit reduces all its gradients together, got a backward of the inputs alone, as "
                "in zero-bubble pipeline schedules. Pass dw_builder=lambda: lambda: None to every "
                "PipelineStage: its backward of the inputs then includes the weights. "
                "Outside of pipelines call set_is_last_backward(True) before torch.autograd.grad()."
            )

    def state_in_graphs(self) -> str:
        """Return which graphs the current step needs; without gradients all states share one."""
        if not torch.is_grad_enabled() or (self.sync and not self.has_sums):
            return REDUCES
        return ADDS_SUMS if self.sync else ACCUMULATES

    def refresh(self) -> None:
        self.has_sums = any(one.total is not None for one in self._sums)
        self.sync = all(one.settings.reduces for one in self._sums)


@dataclass
class _Entry:
    """Gradient of one original parameter in a sum.

    Attributes:
        original: the parameter.
        param: its object when the sum was made, which holds the gradient.
        view: view of the sum.
        grad: ``view`` as ``.grad``: a DTensor under tensor parallelism.
        reduced: reduced gradient that is kept apart, or ``None``.
    """

    original: OriginalParameter
    param: nn.Parameter
    view: torch.Tensor
    grad: torch.Tensor
    reduced: torch.Tensor | None = None

    def keep(self, part: torch.Tensor) -> None:
        self.reduced = part if self.reduced is None else self.reduced.add_(part)


class UnshardedSum:
    """Sum of the unsharded gradients of one flat parameter; the originals' ``.grad`` are its views.

    Attributes:
        total: the sum ``(padded_numel,)``, or ``None``. The views have their own version counter,
            so a graph that saved ``total`` accepts the user's in-place changes.
        keeps_reduced_apart: whether gradients that are already reduced stay out of the sum, because
            a communication hook need not compute a mean. ``.grad`` gets them back in ``take``.
        partial: gradient that the shard group has reduced and replicas have not, or ``None``.
        in_partial: indices of parameters for which this rank contributed to ``partial``.
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
        self._entries: list[_Entry] = []  # empty without a sum
        self._trained: set[int] = set()  # parameters that may have a gradient in the sum
        self._used: set[int] = set()  # parameters of which this rank has added a gradient
        self._lacks_some = False  # whether some of these have none in the sum
        self._trained_in_partial: set[int] = set()

    @torch.no_grad()
    def put(self, total: torch.Tensor, unused: Collection[int] | None = None) -> None:
        """Start a sum; gradients that are already reduced go into it, unless they are kept apart.

        ``unused`` are indices of parameters without a gradient in ``total``; by default, search it.
        """
        grads = [original.grad for original in self._originals]
        self.total = total
        self._entries = []
        self._lacks_some = unused is None
        self._record_used(unused or ())
        for original, view in zip(self._originals, self._layout.split(total.data), strict=True):
            grad = view if original.parallel is None else original.parallel.as_dtensor(view)
            self._entries.append(_Entry(original, original.param, view, grad))
        self._add_parts(total, grads)
        self._record_trained()
        if unused is None:
            has = has_value([entry.view for entry in self._entries])
            unused = [index for index, has_one in enumerate(has) if not has_one]
        self._show({index for index in unused if grads[index] is None})
        self.accumulation.has_sums = True

    def add(
        self,
        grad: torch.Tensor,
        unused: Collection[int] = frozenset(),
        *,
        lacks_some: bool = False,
    ) -> None:
        """Add an unsharded gradient under ``torch.no_grad()``; arguments as in ``put``.

        ``lacks_some``: whether others than ``unused`` may have no gradient either.
        """
        if self.total is None:
            self.put(grad, unused)
            self._lacks_some = lacks_some
            return
        self.remove_dropped()
        self.total.data.add_(grad)  # `.data`: a graph may have saved `total` for its backward
        self._lacks_some |= lacks_some
        self._record_used(unused)
        self._record_trained()
        self._show(unused)

    def add_reduced(self, parts: Sequence[torch.Tensor | None]) -> None:
        assert self.total is not None
        self.remove_dropped()
        self._add_parts(self.total, parts)

    def used(self) -> set[int]:
        """Indices of parameters with a gradient in the sum and no elements on this rank.

        Other ranks set their ``.grad``. So must this rank, whose part of the reduction is empty.
        """
        if self.total is None:
            return set()
        shown = [
            index
            for index, part in enumerate(self._shard_layout.ranges)
            if not part.numel and self._entries[index].param.grad is not None
        ]
        if not self._lacks_some:
            return self._used.intersection(shown)
        has = has_value([self._entries[index].view for index in shown])
        return {index for index, has_one in zip(shown, has, strict=True) if has_one}

    @torch.no_grad()
    def take(self) -> torch.Tensor | None:
        """Remove and return the sum; ``None`` if there is none or all its ``.grad`` are dropped."""
        if self.total is None:
            return None
        self.remove_dropped()
        has_grad = any(entry.param.grad is not None for entry in self._entries)
        for entry in self._entries:
            entry.param.grad = None
            if entry.reduced is not None:
                put_grad(entry.param, entry.original.as_param(entry.reduced))
        total, self.total = self.total, None
        self._entries, self._trained, self._used = [], set(), set()
        return total if has_grad else None

    # -- gradients that wait for the reduction over replicas --------------------------------------

    def keep_partial(self, grad: torch.Tensor, unused: Collection[int]) -> None:
        """Add a gradient that the shard group has reduced to ``partial``."""
        self.in_partial.update({*range(len(self._originals))}.difference(unused))
        if self.partial is not None:
            grad.add_(self.partial)
        self.partial = grad
        self._trained_in_partial.update(self._now_trained())

    def pop_partial(self) -> torch.Tensor | None:
        partial, self.partial = self.partial, None
        self._trained_in_partial, self.in_partial = set(), set()
        return partial

    def frozen_in_partial(self) -> set[int]:
        """Indices of parameters that were trained when ``partial`` was made and are frozen now."""
        return self._trained_in_partial.difference(self._now_trained())

    def accumulate_partial(
        self, parts: Sequence[torch.Tensor], frozen: Collection[int], used: Collection[int]
    ) -> None:
        """Add ``partial``, reduced over replicas, to the gradients, also of frozen parameters.

        ``parts`` are this rank's; ``used`` are the ``in_partial`` of the gradient.
        """
        if self.total is not None:
            trained = self._now_trained()
            self.add_reduced([part if i in trained else None for i, part in enumerate(parts)])
            self.keep_reduced(frozen, parts)
            return
        for index, has in enumerate(has_value(parts)):
            if has or index in used:
                self._originals[index].add_grad(parts[index])

    # -- parameters frozen while their gradients wait ---------------------------------------------

    def _now_trained(self) -> list[int]:
        return [index for index, one in enumerate(self._originals) if one.param.requires_grad]

    def _record_trained(self) -> None:
        self._trained.update(self._now_trained())

    def _record_used(self, unused: Collection[int]) -> None:
        self._used.update({*range(len(self._originals))}.difference(unused))

    def frozen_since(self) -> set[int]:
        """Indices of parameters trained when the sum was made and frozen now.

        The set is the same on all ranks, also where a rank has no gradient of these parameters.
        """
        return {one for one in self._trained if not self._originals[one].param.requires_grad}

    def take_of(self, indices: Collection[int]) -> torch.Tensor:
        """Move the gradients of some parameters from the sum to a new sum ``(padded_numel,)``."""
        assert self.total is not None
        self.remove_dropped()
        taken = torch.full_like(self.total.data, NO_VALUE)
        views = self._layout.split(taken)
        for index in indices:
            views[index].copy_(self._entries[index].view)
            self._entries[index].view.fill_(NO_VALUE)
        for flat in (taken, self.total.data):
            self._layout.repeat(flat)
        self._trained.difference_update(indices)
        self._used.difference_update(indices)
        return taken

    def keep_reduced(
        self, indices: Collection[int], parts: Sequence[torch.Tensor] | dict[int, torch.Tensor]
    ) -> None:
        """Keep reduced gradients apart until the sum is taken: now, if nothing is trained."""
        for index in indices:
            if has_value([parts[index]])[0]:
                self._entries[index].keep(parts[index].clone())
                # A `.grad` of None would drop it: show the view.
                self._show({*range(len(self._originals))} - {index})
        if not any(original.param.requires_grad for original in self._originals):
            self.take()

    # -- the user's changes -----------------------------------------------------------------------

    @torch.no_grad()
    def remove_dropped(self) -> None:
        """Remove gradients from the sum whose ``.grad`` the user has set to ``None``.

        Raises:
            FSDPStateError: a ``.grad`` is another tensor.
        """
        if self.total is None:
            return
        for entry in self._entries:
            grad = entry.param.grad
            if grad is not None and grad is not entry.grad:
                raise FSDPStateError(
                    f"parameter '{self.paths.fqn_of(entry.original.fqn)}': expected the gradient "
                    "that steps under no_sync() have left in .grad, got another tensor of shape "
                    f"{tuple(grad.shape)}. Change it in place (p.grad.mul_(...)), or drop it "
                    "(p.grad = None), until a step without no_sync() has reduced it."
                )
        for index, entry in enumerate(self._entries):
            if entry.param.grad is None:
                entry.view.fill_(NO_VALUE)
                entry.reduced = None
                self._used.discard(index)
        # `.grad` shows the first copy of a replicated parameter: apply changes to all copies.
        self._layout.repeat(self.total.data)

    def _show(self, unused: Collection[int]) -> None:
        for index, entry in enumerate(self._entries):
            if index not in unused and entry.param.grad is not entry.grad:
                put_grad(entry.param, entry.grad)

    def _add_parts(self, total: torch.Tensor, parts: Sequence[torch.Tensor | None]) -> None:
        """Add reduced gradients to an unsharded sum so that its mean over ranks has them once.

        A rank adds only its own parts, so it multiplies them by the number of shards. Gradients of
        frozen parameters stay apart: the reduction of the sum gives these parameters nothing.
        """
        own = self._layout.parts_of(total.data, self._shard_layout.ranges)
        slots = self._layout.slots
        for slot, entry, target, part in zip(slots, self._entries, own, parts, strict=True):
            if part is None:
                continue
            if self.keeps_reduced_apart or not entry.original.param.requires_grad:
                entry.keep(part)
                continue
            # The mean divides by the number of shards, unless each rank adds to its own copy.
            factor = self._layout.world_size if slot.copies == 1 else 1
            target.add_(part.to(target.device), alpha=factor / self.settings.grad_scale)


# -- unit settings ---------------------------------------------------------------------------------
# Settings that FSDP2's setters change after a unit was built. The schedule and the reductions read
# them at each decision.


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
    "max_reduces": ("set_reduce_scatter_max_input_buffers()", _NODES),
    "sums_only": ("set_force_sum_reduction_for_comms(True)", _NODES),
    "all_reduce_hook": ("set_all_reduce_hook()", _NODES),
    "all_gather": ("set_custom_all_gather()", _PLANNED),
    "reduce_scatter": ("set_custom_reduce_scatter()", _NODES),
    "memory": (
        "set_allocate_memory_from_process_group_for_comm(True) or set_symm_mem_for_comm()",
        _BUFFERS,
    ),
}
"""Settings that a whole graph cannot follow: their setters, and the reasons."""


@dataclass(eq=False)
class UnitSettings:
    """Settings of one unit.

    Attributes:
        reduces: reduce gradients in backwards; ``False``: sum them unsharded.
        all_reduces: reduce gradients over replicas too; ``False``: wait for a backward that does.
        reshards_after_forward: overrides the strategy; ``None``: follow the strategy.
        regathers_among: ranks that keep a part each between forward and backward, and gather it
            again; ``None``: all ranks of the shard group.
        reshards_after_backward: reshard after a backward.
        unshards_in_backward: unshard before a backward.
        keeps_storage: keep the unsharded storage allocated after a reshard.
        forward_prefetch: units to unshard when this unit's forward begins; empty: the next unit.
        backward_prefetch: units to unshard in this unit's backward; empty: the previous unit.
        grad_scale: factor applied to reduced gradients, which are means.
        sums_only: reduce with SUM only, and divide the result.
        zeros_unused: give parameters without a gradient on any rank one of zeros.
        max_reduces: unsharded gradients that are being reduced at a time.
        all_reduce_hook: called with each reduced gradient before ``.grad`` gets it.
        all_gather: FSDP2's ``AllGather`` that replaces ours.
        reduce_scatter: FSDP2's ``ReduceScatter`` that replaces ours.
        memory: memory of the tensors that collectives read and write; ``None``: torch's default.
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
    zeros_unused: bool = False
    max_reduces: int = 2
    all_reduce_hook: Callable[[torch.Tensor], object] | None = None
    all_gather: Callable[..., Any] | None = None
    reduce_scatter: Callable[..., Any] | None = None
    memory: RegisteredMemory | None = None

    @property
    def gather_memory(self) -> RegisteredMemory | None:
        """Memory of all-gathers; collectives of the user's have their own."""
        return self.memory if self.all_gather is None else None

    @property
    def reduce_memory(self) -> RegisteredMemory | None:
        """Memory of reductions; symmetric memory only serves sums (as of NCCL 2.29)."""
        is_used = self.memory is not None and (self.sums_only or not self.memory.is_symmetric)
        return self.memory if is_used and self.reduce_scatter is None else None

    def eager_only(self) -> tuple[str, str] | None:
        """Return a changed setting that a whole graph cannot follow: its setter, and the reason."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        return next((_EAGER_ONLY[name] for name in changed if name in _EAGER_ONLY), None)

    def in_graphs(self) -> str:
        """Settings that a whole graph is specialized on, as text for Dynamo's guards."""
        return f"{self.reshards_after_forward} {self.grad_scale} {self.eager_only()}"
