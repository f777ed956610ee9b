"""The root's schedule: prefetch, reshards and reductions of all units.

One ``Root`` serves all units below the outermost wrapper. Order of a step for units 1..L::

    forward:   AG(1) [AG(2) F(1)] [AG(3) F(2)] ... F(L)
    backward:  AG(L) [AG(L-1) B(L)] RS(L) [AG(L-2) B(L-1)] RS(L-1) ...

Brackets contain a collective that runs beside a computation. At most one unit is unsharded ahead of
the unit that computes, and at most ``max_reduces`` gradients are being reduced (``ReduceQueue``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from fsdp_dynamo import events
from fsdp_dynamo.api import BackwardPrefetch
from fsdp_dynamo.core.accumulation import Accumulation
from fsdp_dynamo.core.reduction import ReduceQueue, reduce_frozen, unused_of, without_frozen
from fsdp_dynamo.core.unit import RootState, StateMachine, Unit, UnitState
from fsdp_dynamo.dynamo.private_api import in_compiled_autograd
from fsdp_dynamo.dynamo.untraced import BY_AUTOGRAD, untraced
from fsdp_dynamo.eager.end_of_calls import CallsInARow, EndOfCalls
from fsdp_dynamo.eager.execution_order import ExecutionOrder
from fsdp_dynamo.eager.forward_call import (
    ForwardCall,
    begin_call,
    let_forwards_register_parametrizations,
)
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError, unit_name
from fsdp_dynamo.events import NO_GRAPH_TASK, current_graph_task
from fsdp_dynamo.module_tree import UnitPaths


class Root:
    """Schedule of all units under one outermost wrapper.

    Args:
        units: every unit with its modules' paths, in left-to-right depth-first order; the first is
            the outermost.

    Attributes:
        secondary: secondary shards of the units.
        trained: which parameters were trained when the forward began, one character each; ``None``:
            no code depends on it. Guards of compiled code in which units are leaves read it,
            because it decides which outputs of a leaf require gradients.
        variable: registered names of unit modules that cannot be leaves, as their output varies.
        changes_state: whether a trace has seen the forward change Python state.
        ends_backward_by_hand: whether ``finalize_backward`` ends backwards.
    """

    def __init__(self, units: Sequence[tuple[UnitPaths, Unit]]) -> None:
        self.units: list[Unit] = []
        self.machine: StateMachine[RootState] = StateMachine(RootState.IDLE, "")
        self.trained: str | None = None
        self.variable: list[str] = []
        self.changes_state = False  # its forward changes Python state, seen in a trace
        self.ends_backward_by_hand = False
        self._depth = 0
        self._around: events.Step | None = None  # step of another model that calls this one
        self._step: events.Step | None = None  # newest step whose backward has begun
        self._backward_id = 0
        self._creates_graph = False  # the current backward runs with create_graph=True
        self._stays_unsharded = False  # such a backward was run: its graph needs the parameters
        self._reduces = ReduceQueue()
        self._open: dict[Unit, ForwardCall] = {}  # open calls of units with several modules
        self._waiting: list[ForwardCall] = []  # calls with a finished segment
        self._ends: dict[Unit, EndOfCalls] = {}
        self._in_a_row = CallsInARow()
        self.execution_order = ExecutionOrder()
        let_forwards_register_parametrizations()
        for paths, unit in units:
            unit.rename(paths)
            self.units.append(unit)
        self._needs_planner = unit_with_planner(self.units)
        flats = [flat for unit in self.units for flat in unit.flats]
        model = events.Model(type(self.units[0].modules[0]).__name__)
        self.accumulation = Accumulation([flat.grad_sum for flat in flats], model)
        self.accumulation.refresh()
        self.secondary = SecondaryShards(self.units, self.accumulation)

    def record_trained(self) -> None:
        originals = (original for unit in self.units for original in unit.originals())
        self.trained = "".join(["01"[original.param.requires_grad] for original in originals])
        if self.variable:
            self.trained += f", without {', '.join(self.variable)}"

    def record_variable(self, names: Sequence[str]) -> None:
        """Make graphs of hooks mode end at these unit modules from now on: their output varies."""
        self.variable = list(dict.fromkeys([*self.variable, *names]))
        self.record_trained()

    @property
    def is_outside(self) -> bool:
        return self.machine.state is RootState.IDLE

    @property
    def in_backward(self) -> bool:
        return self.machine.state is RootState.BACKWARD

    def _sync_gathers(self) -> None:
        """Make later gathers wait for all work enqueued so far; free retired storage."""
        for unit in self.units:
            if unit.flats:
                unit.sync_gathers()
                return

    # -- forward -----------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> ForwardCall:
        """Unshard ``unit``, prefetch the next one, show the views.

        If the unit has several modules, one call spans all of them: only the first begins it.
        """
        if unit in self._open and not self.in_backward:
            self._depth += 1
            return self._continue_call(unit)
        recomputes = self.in_backward
        if self.is_outside:
            self._begin_forward()
        if not recomputes:
            self._in_a_row.begin(unit)
            unit.drop_outdated()
            # A prefetched unit was checked when its gather was issued.
            if unit.is_ahead or not unit.is_unsharded:
                unit.check_originals()
        unit.machine.advance(UnitState.FORWARD)
        unit.issue_unshard("forward")
        unit.wait_unshard()
        if not recomputes:
            self.execution_order.add(unit)
            # After the wait, so that the two gathers do not share the link; before the unit
            # computes, so that the next gather runs beside it.
            self._prefetch_forward(unit)
        call = begin_call(unit, self, self._end_if_tracked(unit))
        if len(unit.modules) > 1 and not recomputes:
            self._open[unit] = call
        unit.event = events.begin(unit.fqn, "forward", "forward")
        self._depth += 1  # last: after an error above, no `fail_forward` follows for this unit
        return call

    def _continue_call(self, unit: Unit) -> ForwardCall:
        """Return the open call of a unit with several modules for its next module."""
        call = self._open[unit]
        if call.is_tracked or not torch.is_grad_enabled():
            call.show_views()  # a trace may have replaced them
            return call
        call = self._open[unit] = begin_call(unit, self, self._end_if_tracked(unit), call.left)
        return call

    def _end_if_tracked(self, unit: Unit) -> EndOfCalls | None:
        return self._end_of_calls(unit) if torch.is_grad_enabled() and unit.flats else None

    def _end_of_calls(self, unit: Unit) -> EndOfCalls:
        end = self._ends.get(unit)
        if end is None or end.device != unit.flats[0].device:
            end = self._ends[unit] = EndOfCalls(unit, self.reached_end_of_calls)
        return end

    def post_forward(self, unit: Unit, call: ForwardCall, module: nn.Module) -> None:
        """End the forward of one of the unit's modules; the last one ends the unit's call."""
        self._depth -= 1
        recomputes, outermost = self.in_backward, self._depth == 0
        if unit in self._open and not recomputes:
            call.left.discard(module)
            if call.left and not outermost:
                return
        self._end_call(unit, call, outermost)
        if outermost and not recomputes:
            for left in [*self._open]:  # one of their modules was not called
                self._end_call(left, self._open[left], outermost=False)
            self._end_forward()

    def _end_call(self, unit: Unit, call: ForwardCall, outermost: bool) -> None:
        """Put the original parameters back and reshard ``unit`` if its strategy says so."""
        recomputes = self.in_backward
        if not recomputes:
            self._open.pop(unit, None)
        events.finish(unit.event)
        unit.use_sharded_views()
        if not recomputes:
            if torch.is_grad_enabled():
                self.execution_order.end_call(call)
            if self._reshards_after_forward(unit, outermost):
                if torch.is_grad_enabled():
                    unit.keep_shards()
                self._in_a_row.keep(unit, "forward", unit in self.execution_order.repeated)
            else:
                unit.stay_unsharded()
        unit.machine.advance(UnitState.IDLE)

    def _begin_forward(self) -> None:
        if self._needs_planner is not None:
            raise no_planner_error(self._needs_planner)
        self.machine.advance(RootState.FORWARD)
        self._around = events.begin_forward(self.accumulation.model)
        self.execution_order.begin()
        if self.trained is not None:
            self.record_trained()
        self.secondary.begin_forward()
        for unit in self.units:
            reduce_frozen(unit.flats)
            unit.drop_kept_shards()  # left over from a forward that no backward followed
            if not unit.outlives_forwards and not self._stays_unsharded:
                unit.reshard("forward")
        self._sync_gathers()  # gathers must see what the optimizer wrote on the computing stream
        self.secondary.gather()

    def _end_forward(self) -> None:
        self.machine.advance(RootState.IDLE)
        self._in_a_row.end()
        root = self.units[0]
        self.secondary.end_forward()
        if not torch.is_grad_enabled():  # else the last unit's storage is kept for its backward
            self._sync_gathers()
        self.execution_order.end(root.config.groups.shard, root.modules[0].training)
        events.end_forward(self._around)

    def _reshards_after_forward(self, unit: Unit, outermost: bool) -> bool:
        if self._stays_unsharded:
            return False
        if unit.settings.reshards_after_forward is not None:
            return unit.settings.reshards_after_forward
        if not torch.is_grad_enabled():
            return True
        return unit.config.sharding_strategy.reshards_after_forward and not outermost

    def _prefetch_forward(self, unit: Unit) -> None:
        """Issue the all-gathers that the user chose, or that of the next unit in the last step."""
        chosen = unit.settings.forward_prefetch
        if not chosen and unit.config.forward_prefetch is not False:
            following = self.execution_order.following()
            chosen = () if following is None else (following,)
        for other in chosen:
            if other.machine.state is UnitState.IDLE:
                other.drop_outdated()
                other.check_originals()
                other.issue_unshard("forward")

    # -- backward ----------------------------------------------------------------------------

    def pre_backward(self, call: ForwardCall) -> None:
        """Unshard a unit whose output has got a gradient, and prefetch the next unit."""
        if call.trainable:
            self.accumulation.require_whole_backward(call.unit.settings, call.unit.fqn)
        if not self.in_backward:
            self._begin_backward()
        events.enter_backward(call.step)
        if self._step is None or (call.step and call.step.number > self._step.number):
            self._step = call.step
        if call.backward_id == self._backward_id:
            return  # another output of the call has got a gradient before
        self._finish_segments(call)
        unit = call.unit
        self._in_a_row.begin(unit)
        unit.machine.advance(UnitState.BACKWARD_PRE)
        call.backward_id = self._backward_id
        call.graph_task = current_graph_task()
        call.segment_grads = None
        unit.pending_calls += 1
        if unit.settings.unshards_in_backward:
            unit.issue_unshard("backward")
            unit.wait_unshard()
        if unit.config.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch_backward(call)
        call.show_views()
        unit.event = events.begin(unit.fqn, "backward", "backward")

    def post_backward(self, call: ForwardCall, grads: Sequence[torch.Tensor | None]) -> None:
        """End the backward of a call, or of a segment of it, with the gradients of its views."""
        if not self.in_backward:
            self._begin_backward()
        if self._creates_graph:
            raise _graph_of_grads_error(call.unit)
        if call.graph_task not in (NO_GRAPH_TASK, current_graph_task()):
            call.add_segment(grads)
            if call not in self._waiting:
                self._waiting.append(call)
            return
        if call in self._waiting:
            call.add_segment(grads)
            self._finish_segments(call)
            return
        self._finish_segments(call)
        self._finish_backward(call, grads)

    def _finish_segments(self, reached: ForwardCall | None = None) -> None:
        """Finish calls with segments that began after the call that the backward has reached.

        The engine runs newer nodes before older ones. So all segments of a call have run when a
        call that began earlier is reached. This makes the order of reductions equal on all ranks,
        whether a rank has segments or not.
        """
        while self._waiting:
            call = max(self._waiting, key=lambda waiting: waiting.began)
            if reached is not None and call.began < reached.began:
                return
            self._waiting.remove(call)
            grads, call.segment_grads = call.segment_grads, None
            self._finish_backward(call, grads or ())
            self.reached_end_of_calls(call.unit)

    def _finish_backward(self, call: ForwardCall, grads: Sequence[torch.Tensor | None]) -> None:
        """Reshard a unit whose backward is done, and add its gradients to the unit's sum."""
        unit = call.unit
        events.enter_backward(call.step)
        events.finish(unit.event)
        if unit.machine.state is UnitState.BACKWARD_PRE:
            unit.pending_calls -= 1
        if unit.pending_calls <= 0:  # no other call of the unit is in its backward
            unit.machine.advance(UnitState.BACKWARD_POST)
            unit.use_sharded_views()
            if not self._stays_unsharded:
                self._in_a_row.keep(unit, "backward", unit in self.execution_order.repeated)
        if unit.config.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch_backward(call)
        for flat, own in call.grads_by_flat(grads):
            self._end_of_calls(unit).add(flat, own)

    def _begin_backward(self) -> None:
        # Everything that may raise comes before any change of state.
        if in_compiled_autograd():
            raise UnsupportedError(
                "eager and hooks mode: expected a backward that autograd runs, got one that "
                "compiled autograd has made a graph of. Leave "
                "torch._dynamo.config.compiled_autograd off, or use graph mode: "
                'torch.compile(model, fullgraph=True, backend="fsdp_dynamo").'
            )
        if any(unit.settings.reduces for unit in self.units):
            self.execution_order.require_same_calls()
        self.machine.advance(RootState.BACKWARD)
        self._creates_graph = torch.is_grad_enabled()  # the engine enables it for create_graph
        self._stays_unsharded |= self._creates_graph
        self._backward_id += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    @untraced(BY_AUTOGRAD)
    @torch.no_grad()
    def _end_backward(self) -> None:
        """Finish all reductions; make all units sharded and idle. The engine's last callback."""
        self._finish_segments()
        events.enter_backward(self._step)
        self._in_a_row.forget()
        if self.accumulation.is_last_backward and not self.ends_backward_by_hand:
            self._reduces.finish()
        for end in filter(None, self._ends.values()):  # a deep copy has `None` there
            end.join()
        self._stays_unsharded = self._creates_graph
        for unit in self.units:
            unit.use_sharded_views()  # also of units whose outputs got gradients and views none
            if not self._stays_unsharded:
                unit.end_backward()
            unit.pending_calls = 0
            unit.drop_kept_shards()
            unit.machine.advance(UnitState.IDLE)
        self.secondary.end_backward()
        self._sync_gathers()
        if not self._stays_unsharded:
            self.execution_order.forget_calls()
        self.accumulation.refresh()
        self.machine.advance(RootState.IDLE)
        events.enter_backward(None)

    def _prefetch_backward(self, call: ForwardCall) -> None:
        """Issue the all-gathers that the user chose, or that of the unit that ran before."""
        chosen = call.unit.settings.backward_prefetch
        for unit in chosen or self.execution_order.ended_before(call):
            if not unit.needs_unshard or not unit.settings.unshards_in_backward:
                continue
            if chosen:
                unit.issue_unshard("backward")
            elif unit is not call.unit and not unit.is_ahead:
                unit.issue_unshard("backward")  # no effect if it was issued before
                return

    @torch.no_grad()
    def reached_end_of_calls(self, unit: Unit) -> None:
        """Reduce the sum of the gradients of a unit's calls, or keep it without sync."""
        events.enter_backward(self._step)  # newest step: the sum is of calls in all forwards
        end = self._end_of_calls(unit)
        with end.on_stream():
            self._reduces.advance()  # second collectives of earlier units go first
            for flat, grads in without_frozen(end.take()):
                if flat.grad_sum.settings.reduces:
                    # before the next flat gradient is made
                    self._reduces.make_room(flat.grad_sum.settings.max_reduces)
                    unused = unused_of(grads) - flat.grad_sum.used()
                    self._reduces.issue(flat, flat.grad_to_reduce(grads), unused)
                else:
                    flat.keep_grads(grads, unused_of(grads))

    # -- errors and contexts -----------------------------------------------------------------

    def fail_forward(self, unit: Unit) -> None:
        """Undo a unit's forward that raised; at the outermost unit, reset everything."""
        self._depth -= 1
        self._open.pop(unit, None)
        unit.use_sharded_views()
        if self.in_backward:  # a recomputation that ended early: its backward goes on
            unit.machine.reset()
        elif self._depth <= 0:
            self.reset()

    def reset(self) -> None:
        """Drop everything in flight; make all units sharded and idle."""
        if self.machine.state is RootState.FORWARD:
            events.end_forward(self._around)
        self._waiting = []
        self._open = {}
        for end in filter(None, self._ends.values()):  # a deep copy has `None` there
            end.take()
            end.join()
        self._in_a_row.forget()
        self._stays_unsharded = False
        self._reduces.abandon()
        for unit in self.units:
            unit.use_sharded_views()
            unit.abandon()
            unit.drop_kept_shards()
            unit.pending_calls = 0
            unit.machine.reset()
        self._sync_gathers()
        self.execution_order.begin()
        self._depth = 0
        self.machine.reset()

    def recover(self) -> None:
        """Reset if a backward raised: the engine then never called ``_end_backward``."""
        if self.in_backward and not events.is_in_backward():
            self.reset()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sum unsharded gradients locally, without communication, inside the context."""
        before = [(unit, unit.settings.reduces) for unit in self.units]
        self.set_sync_gradients(False, self.units)
        try:
            yield
        finally:
            for unit, reduces in before:
                unit.settings.reduces = reduces
            self.accumulation.refresh()

    @torch.no_grad()
    def reduce_sums(self) -> None:
        """Reduce gradients that steps under ``no_sync()`` have left; every rank must call it."""
        if self.accumulation.has_sums:
            with events.continued(self._step):
                for unit in self.units:
                    for flat in unit.flats:
                        self._reduces.issue_sum(flat)
        self._reduces.finish()
        self.secondary.drop()  # summon_full_params() calls this first, and may change parameters
        self.accumulation.refresh()

    @torch.no_grad()
    def finalize_backward(self) -> None:
        """Do the work that backwards leave when they are ended by hand; ``wait_ended`` waits."""
        with events.continued(self._step):
            for unit in reversed(self.units):
                for flat in unit.flats if unit.settings.reduces else ():
                    self._reduces.issue_sum(flat)
                unit.end_backward()

    @torch.no_grad()
    def wait_ended(self) -> None:
        self._reduces.finish()
        self.secondary.drop()
        self.accumulation.refresh()

    def set_sync_gradients(self, wanted: bool, units: Iterable[Unit]) -> None:
        """Choose whether later steps reduce the units' gradients or sum them unsharded."""
        if not self.is_outside:
            raise FSDPStateError(
                f"{unit_name('')}: expected gradient synchronization to change between steps, got "
                f"a change in state {self.machine.state.name}. Enter and leave no_sync(), or call "
                "set_requires_gradient_sync(), before the forward or after the backward."
            )
        for unit in units:
            unit.settings.reduces = wanted
        self.accumulation.refresh()


def _graph_of_grads_error(unit: Unit) -> UnsupportedError:
    return UnsupportedError(
        f"{unit_name(unit.fqn)}: expected gradients of inputs only, where they are to be "
        "differentiated again, got create_graph=True in a backward that reaches parameters, whose "
        "gradients are reduced. Use torch.autograd.grad(loss, inputs, create_graph=True) for "
        "inputs or activations, and call backward() without create_graph."
    )


# -- secondary shards ------------------------------------------------------------------------------
# Secondary shards live from the beginning of a forward to the end of the backward that reduces
# gradients, because an optimizer step may follow. Steps that only accumulate gradients share them,
# unless parameters change in between: in place, by a state dict or in ``summon_full_params()``.
# Writes through ``param.data`` cannot be detected, and count from the next accumulation on. A
# forward without gradients gathers its own, so that weights may be swapped for it in any way.
#
# All ranks must decide alike, but each sees the versions of its own parameters only. So a changed
# parameter in any unit makes all units gather anew.


class SecondaryShards:
    """Secondary shards of all units of a root; units without a hierarchy have none."""

    def __init__(self, units: Sequence[Unit], accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        self._units = [unit for unit in units if unit.config.groups.hierarchy is not None]

    def begin_forward(self) -> None:
        accumulates = self._accumulation.has_sums or not self._accumulation.sync
        keeps = accumulates and torch.is_grad_enabled()
        if not (keeps and all(unit.is_secondary_current for unit in self._units)):
            self.drop()

    def gather(self) -> None:
        """Start to gather missing secondary shards of all units, so that the link is never idle."""
        for unit in self._units:
            unit.gather_secondary()

    def end_forward(self) -> None:
        if not torch.is_grad_enabled():
            self.drop()

    def end_backward(self) -> None:
        for unit in self._units:
            if unit.settings.reduces:
                unit.drop_secondary()

    def abandon(self) -> None:
        for unit in self._units:
            unit.abandon()

    def drop(self) -> None:
        for unit in self._units:
            unit.drop_secondary()


# -- arguments for graph mode only -----------------------------------------------------------------


def unit_with_planner(units: Iterable[Unit]) -> Unit | None:
    """Return the first unit that compresses exposed collectives only, which needs graph mode."""
    for unit in units:
        precisions = [flat.collective_precision for flat in unit.flats]
        if any(one is not None and one.only_where_exposed for one in precisions):
            return unit
    return None


def no_planner_error(unit: Unit) -> UnsupportedError:
    """Make the error of a forward of such a unit in eager or hooks mode."""
    return UnsupportedError(
        f"collective_precision of {unit_name(unit.fqn)}: expected graph mode, whose planner knows "
        "which collectives it cannot hide, got a forward in eager or hooks mode with "
        'only_where_exposed=True. Run torch.compile(model, fullgraph=True, backend="fsdp_dynamo"), '
        "or leave only_where_exposed out and choose units by a policy's dict of arguments; python "
        "-m fsdp_dynamo.estimator --only-where-exposed says whether it pays."
    )
