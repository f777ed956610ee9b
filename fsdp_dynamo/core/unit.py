"""One unit: unshard, reshard and views of the modules that share flat parameters.

A unit holds one flat parameter per group of parameters with equal dtype, ``requires_grad`` and
precision. The schedule decides when it unshards and reshards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_dynamo import events
from fsdp_dynamo.api import (
    ShardingStrategy,
    StateDictSettings,
    UnitArguments,
)
from fsdp_dynamo.comm import collectives
from fsdp_dynamo.comm.in_flight import InFlight
from fsdp_dynamo.comm.process_groups import Groups, Hierarchy
from fsdp_dynamo.comm.registered_memory import allocating
from fsdp_dynamo.comm.streams import SideStreams, side_streams, time_events_on
from fsdp_dynamo.core.accumulation import UnitSettings
from fsdp_dynamo.core.flat_parameter import FlatParameter, KeptShard
from fsdp_dynamo.core.module_parameters import LateParameterCheck
from fsdp_dynamo.core.original_parameter import OriginalParameter
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError, unit_name
from fsdp_dynamo.module_tree import UnitPaths
from graph_passes.wire_format import WireFormat


@dataclass(frozen=True, kw_only=True)
class UnitConfig(UnitArguments):
    """Configuration of a unit: the arguments that it keeps, and what follows from the others.

    ``sharding_strategy`` is the strategy in force.

    Attributes:
        offload: whether shards are kept in host memory while another device computes.
        mesh: mesh of the DTensors; ``None``: one is made.
    """

    groups: Groups
    offload: bool
    mesh: DeviceMesh | None

    @property
    def is_sharded(self) -> bool:
        """Whether the unit is sharded over several ranks."""
        return self.sharding_strategy is not ShardingStrategy.NO_SHARD


def refuse_formats(units: Iterable[Unit], kind: str, where: str) -> None:
    """Raise if the user's own collective would replace one that has a wire format.

    ``kind`` is ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``, ``where`` the user's
    call.
    """
    for unit in units:
        precision = unit.config.collective_precision
        if precision is not None and getattr(precision, kind) is not None:
            raise UnsupportedError(
                f"{where}, {unit_name(unit.fqn)}: expected an uncompressed "
                f"{kind.replace('_', '-')}, got collective_precision with "
                f"{getattr(precision, kind)!r}. Leave one of the two out: a collective of your own "
                "chooses its format."
            )


class Unit:
    """The modules that share flat parameters, and their state.

    Args:
        modules: outermost modules (the user's, not the wrapper): one, or the list that
            ``fully_shard`` was given.
        flats: flat parameters; empty for a unit without parameters.
        config: arguments of the wrapper call.

    Attributes:
        is_unsharded: whether the parameters are gathered, or being gathered.
        is_ahead: whether the next forward may use the unsharded parameters as they are.
        pending_calls: forward calls whose backward has begun and not ended.
        is_summoned: whether ``summon_full_params`` has made the parameters whole; still true after
            an error that has reset ``machine``.
        may_call_operators: whether its code may call operators with bodies, such as ``torch.cond``;
            ``None`` before its first forward.
    """

    def __init__(
        self, modules: Sequence[nn.Module], flats: Sequence[FlatParameter], config: UnitConfig
    ):
        self.modules = tuple(modules)
        self.flats = tuple(flats)
        for ordinal, flat in enumerate(self.flats):
            flat.ordinal = ordinal
        self.config = config
        self.paths, self.fqn = UnitPaths(("",)), ""
        self.late_parameters: LateParameterCheck | None = None  # set once modules are complete
        self.machine: StateMachine[UnitState] = StateMachine(UnitState.IDLE, "")
        self.settings = UnitSettings()
        for flat in self.flats:
            flat.grad_sum.settings = self.settings
        self.pending_calls = 0
        self.is_unsharded = False
        self.is_ahead = False
        self._is_unsharded_by_hand = False
        self.is_summoned = False
        self.may_call_operators: bool | None = None
        self.state_dict_settings = StateDictSettings()
        self.event: events.Event | None = None
        self._gathers: list[InFlight] = []
        self._readers: list[Any] = []  # streams that have waited for these gathers
        self._has_kept_shards = False  # post-forward shards are kept
        self._gathered_versions: list[int] = []  # of the parameters, at the last gather
        self._secondary_versions: list[int] = []  # at the last gather of secondary shards

    def rename(self, paths: UnitPaths) -> None:
        self.paths, self.fqn = paths, paths.name
        self.machine.fqn = self.fqn
        for flat in self.flats:
            flat.rename(paths)

    def below(self, module: nn.Module, fqn: str) -> str | None:
        """Return a parameter's name below ``module``; ``None`` if another of ``modules`` holds it.

        ``fqn`` is the unit's name for the parameter: with several modules, the module's index comes
        first.
        """
        if len(self.modules) == 1:
            return fqn
        position, _, rest = fqn.partition(".")
        return rest if self.modules[int(position)] is module else None

    @property
    def device(self) -> torch.device | None:
        """Device to move inputs to: the parameters' accelerator, or ``None`` on the CPU."""
        if not self.flats or self.flats[0].device.type == "cpu":
            return None
        return self.flats[0].device

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parameters; units of equal class and shapes share compiled code."""
        return tuple([slot.shape for flat in self.flats for slot in flat.layout.slots])

    @property
    def needs_unshard(self) -> bool:
        """Whether an unshard does anything: not for NO_SHARD without a cast or offload."""
        return any(flat.needs_storage for flat in self.flats)

    @property
    def output_dtype(self) -> torch.dtype | None:
        """Dtype to which floating-point outputs are cast; ``None``: no cast."""
        precision = self.config.mixed_precision
        return None if precision is None else precision.output_dtype

    @property
    def trainable(self) -> tuple[FlatParameter, ...]:
        """Flat parameters with a parameter that was trained in the last forward."""
        return tuple([flat for flat in self.flats if flat.is_trainable])

    def all_reduce_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups whose ranks all-reduce whole gradients or gradient shards."""
        groups = self.config.groups
        reduces_whole = any(not flat.is_sharded for flat in self.trainable)
        among = groups.reductions if reduces_whole else [groups.replicate]
        return [group for group in among if group is not None] if self.trainable else []

    @property
    def has_whole_originals(self) -> bool:
        """Whether its modules hold whole original parameters, so that it can run without hooks."""
        return self.is_summoned and all(flat.module_parameters.is_whole for flat in self.flats)

    def _side_streams(self) -> SideStreams | None:
        return side_streams(self.flats[0].device) if self.flats else None

    # -- unshard and reshard -----------------------------------------------------------------

    def issue_unshard(self, phase: events.Phase) -> None:
        """Allocate the unsharded buffers and start to gather them."""
        if events.recorder is not None and self.flats:
            time_events_on(self.flats[0].device)
        if self.is_unsharded:
            return
        self.is_unsharded = True
        streams = self._side_streams()
        before = self._gathered_versions
        # A backward on CPUs gathers anew in any case. With streams it may take back storage that
        # the forward retired, so it compares versions too.
        if phase == "forward" or streams is not None:
            self._gathered_versions = self._versions()
        if self._secondary_versions != self._gathered_versions:
            self.drop_secondary()
            self._secondary_versions = self._gathered_versions
        if streams is None:
            self._issue_gathers(phase)
            return
        # Resharded storage is freed later: its values are still there.
        retired = [storage for flat in self.flats for storage in flat.storages_to_free()]
        if retired and before != self._gathered_versions:
            streams.free_pending()  # frees the storage: it holds outdated values
        elif retired and streams.cancel_free(retired):
            events.instant(self.fqn, "unshard", phase, sum(one.nbytes() for one in retired))
            self.drop_kept_shards()
            return
        self._readers = []
        with streams.gathering():
            self._issue_gathers(phase)
            if any(flat.needs_storage and not flat.is_sharded for flat in self.flats):
                self._gathers.append(InFlight([streams.after_gathers()]))

    def _issue_gathers(self, phase: events.Phase) -> None:
        memory = self.settings.gather_memory
        with allocating(memory):
            outputs = [(flat, flat.allocate()) for flat in self.flats if flat.needs_storage]
        if events.recorder is not None and outputs:
            num_bytes = sum(output.nbytes for _, output in outputs)
            events.instant(self.fqn, "unshard", phase, num_bytes)
        for flat, output in outputs:
            if flat.hierarchy is not None:
                self._gather_secondary(flat, flat.hierarchy, phase)
            has_kept = self._has_kept_shards or flat.hierarchy is not None
            kept = flat.kept_shard_to_gather() if has_kept else None
            with allocating(memory):
                shard, group = kept or (flat.shard_to_gather(), flat.group)
            if flat.is_sharded:
                wire = None if kept else flat.gather_wire
                gather = self._issue_gather(flat, output, shard, group, phase, wire)
                self._gathers.append(gather)
            else:
                output.copy_(shard)

    def _issue_gather(
        self,
        flat: FlatParameter,
        output: torch.Tensor,
        shard: torch.Tensor,
        group: dist.ProcessGroup,
        phase: events.Phase,
        wire: WireFormat | None,
    ) -> InFlight:
        event = events.begin(self.fqn, "all_gather", phase, output.nbytes)
        custom = self.settings.all_gather
        plan = flat.gather_plan(shard.numel(), is_packed=custom is not None or wire is not None)
        if custom is None:
            return collectives.issue_all_gather(
                output,
                shard,
                group,
                event,
                self.fqn,
                wire=wire,
                plan=plan,
                memory=self.settings.gather_memory,
            )
        return collectives.issue_custom_gather(custom, output, shard, group, event, plan)

    def keep_shards(self) -> None:
        """Keep this rank's post-forward shards before a reshard, if the user asked for them."""
        group = self.settings.regathers_among
        if group is not None and self.is_unsharded:
            self._has_kept_shards = True
            with allocating(self.settings.gather_memory):
                for flat in self.flats:
                    flat.keep_shard(group)

    # -- secondary shards --------------------------------------------------------------------

    def gather_secondary(self) -> None:
        """Start to gather missing secondary shards for a forward that begins."""
        if self.config.groups.hierarchy is None:
            return
        self.drop_outdated()
        self.check_originals()  # may copy new values into the shards
        self._secondary_versions = self._versions()
        for flat in self.flats:
            if flat.hierarchy is not None:
                self._gather_secondary(flat, flat.hierarchy, "forward")

    def _gather_secondary(
        self, flat: FlatParameter, hierarchy: Hierarchy, phase: events.Phase
    ) -> None:
        if flat.kept_shard is not None and flat.kept_shard.tensor.dtype == flat.param_dtype:
            return
        streams, across = self._side_streams(), hierarchy.across
        with nullcontext() if streams is None else streams.gathering_between_nodes():
            with allocating(self.settings.gather_memory):
                shard = flat.shard_to_gather()
                secondary = shard.new_empty(shard.numel() * across.size())
            in_flight = self._issue_gather(flat, secondary, shard, across, phase, flat.gather_wire)
        flat.kept_shard = KeptShard(secondary, hierarchy.node, in_flight)

    @property
    def is_secondary_current(self) -> bool:
        return self._secondary_versions == self._versions() and all(
            flat.module_parameters.are_unchanged() for flat in self.flats
        )

    def drop_secondary(self) -> None:
        """Free the secondary shards: the next gather includes the one between nodes."""
        for flat in self.flats:
            if flat.hierarchy is not None and flat.kept_shard is not None:
                if flat.kept_shard.made is not None:
                    flat.kept_shard.made.wait()
                flat.kept_shard = None

    # -- unsharded between steps -------------------------------------------------------------

    def drop_kept_shards(self) -> None:
        """Free post-forward shards: the next gather is among all ranks."""
        if self._has_kept_shards:
            self._has_kept_shards = False
            for flat in self.flats:
                flat.kept_shard = None

    def unshard_ahead(self) -> None:
        """Start to gather for a later forward, on the user's request."""
        self.sync_gathers()
        self.drop_secondary()  # parameters may have changed since
        self.issue_unshard("forward")
        self.stay_unsharded()
        self._is_unsharded_by_hand = True

    @property
    def outlives_forwards(self) -> bool:
        """Whether the user wants the unsharded parameters to serve the next root forward too."""
        if not self.is_ahead:
            return False
        settings = self.settings
        reshards = settings.reshards_after_forward
        if reshards is None:  # microbatches of a pipeline share one unshard
            strategy = self.config.sharding_strategy
            reshards = strategy.reshards_after_forward or strategy is ShardingStrategy.NO_SHARD
        return self._is_unsharded_by_hand or not reshards or not settings.reshards_after_backward

    def stay_unsharded(self) -> None:
        """Reuse this all-gather in the next forward unless a parameter changes."""
        self.is_ahead = self.is_unsharded

    def show_gathered(self) -> None:
        if self.is_unsharded and self.machine.state is UnitState.IDLE:
            for flat in self.flats:
                flat.module_parameters.show_gathered(flat.make_views())

    def hide_gathered(self) -> None:
        """Make modules hold DTensors again."""
        for flat in self.flats:
            flat.module_parameters.hide_gathered()

    def drop_outdated(self) -> None:
        """Reshard before a forward if parameters have changed since they were gathered."""
        if not self.is_unsharded:
            return
        if self.is_ahead:
            self.hide_gathered()
        if self.pending_calls:
            self.require_gathered_values()
        is_current = self._versions() == self._gathered_versions
        for flat in self.flats:
            is_current = is_current and flat.module_parameters.are_in_place()
        if not is_current:
            self.reshard("forward")

    def _versions(self) -> list[int]:
        versions: list[int] = []
        for flat in self.flats:
            flat.module_parameters.add_versions(versions)
        return versions

    def wait_unshard(self) -> None:
        """Wait for the all-gathers of ``issue_unshard``, before the unit computes."""
        self._wait_gathers()
        for flat in self.flats:
            flat.set_readable(True)
        streams = self._side_streams()
        if streams is not None:
            # Earlier units are enqueued completely: gathers issued from now on may reuse the
            # storage that these have given up.
            streams.join(self._readers)

    def _wait_gathers(self) -> None:
        for in_flight in self._gathers:
            in_flight.wait()
        self._gathers = []

    def sync_gathers(self) -> None:
        """Make later gathers wait for all work enqueued so far; nothing on CPUs."""
        streams = self._side_streams()
        if streams is not None:
            streams.free_pending()

    def free_buffers(self) -> None:
        """Free what gathers have allocated, so that later gathers allocate anew."""
        self.reshard("forward")
        self.drop_secondary()
        self.drop_kept_shards()
        self.sync_gathers()  # frees resharded storage
        for flat in self.flats:
            flat.free()  # set_keep_unsharded_storage()

    def reshard(self, phase: events.Phase) -> None:
        """Free the unsharded buffers."""
        if not self.is_unsharded:
            return
        if self.is_ahead:
            self.hide_gathered()
        if self._gathers:
            self._wait_gathers()  # a gather that nobody used may still write
        self.is_unsharded = self.is_ahead = self._is_unsharded_by_hand = False
        for flat in self.flats:
            flat.set_readable(False)  # also with `keeps_storage`: its values may become outdated
        if not self.settings.keeps_storage:
            self._free(phase)

    def _free(self, phase: events.Phase) -> None:
        storages = [storage for flat in self.flats for storage in flat.storages_to_free()]
        if not storages:
            return
        if events.recorder is not None:
            num_bytes = sum(storage.nbytes() for storage in storages)
            events.instant(self.fqn, "reshard", phase, num_bytes)
        streams = self._side_streams()
        if streams is None:
            for storage in storages:
                storage.resize_(0)
            return
        streams.free_later(storages, self._readers)
        if self.machine.state is UnitState.IDLE:  # outside of its own forward and backward
            streams.free_pending()

    def end_backward(self) -> None:
        """Reshard after the backward, or stay unsharded for the next forward."""
        if self.settings.reshards_after_backward:
            self.reshard("backward")
        else:
            self.stay_unsharded()

    def abandon(self) -> None:
        """Free the unsharded buffers after an error, with gathers in any state."""
        gathers, self._gathers = self._gathers, []
        for in_flight in gathers:
            in_flight.abandon()
        self.reshard("forward")
        for flat in self.flats:
            if flat.kept_shard is not None and isinstance(flat.kept_shard.made, InFlight):
                flat.kept_shard.made.abandon()
            flat.kept_shard = None

    # -- views -----------------------------------------------------------------------------

    def require_kept_views(self) -> None:
        """Raise after a forward that has removed or replaced its parameters."""
        for flat in self.flats:
            flat.module_parameters.require_kept_views()

    def use_sharded_views(self) -> None:
        """Put the original parameters back into modules."""
        for flat in self.flats:
            flat.module_parameters.unset_views()

    def require_idle(self, action: str) -> None:
        """Raise if the unit is in its forward, its backward or a summon."""
        if self.machine.state is not UnitState.IDLE:
            raise FSDPStateError(
                f"{unit_name(self.fqn)}: expected {action} between two steps, or between a forward "
                f"and its backward, got a call in state {self.machine.state.name}. Call it outside "
                "of the unit's own forward and backward."
            )

    def check_originals(self) -> None:
        """Check before a forward that the shards hold the values of all parameters."""
        self.check_late_parameters()
        for flat in self.flats:
            flat.check_originals()

    def check_late_parameters(self) -> None:
        """Raise if a trainable parameter was added to the unit's modules after wrapping."""
        if self.late_parameters is not None:
            self.late_parameters.check(self.paths)

    def require_gathered_values(self) -> None:
        """Raise if a parameter was given other values between a forward and its backward."""
        for flat in self.flats:
            flat.module_parameters.require_gathered_values()

    def write_back(self) -> None:
        """Copy values that were put in the place of parameters into the shards."""
        for flat in self.flats:
            flat.module_parameters.write_back()

    def write_back_uninitialized(self) -> None:
        for flat in self.flats:
            flat.module_parameters.write_back_uninitialized()

    def materialize(self, module: nn.Module, fqns: Collection[str]) -> None:
        """Materialize parameters that are among ``fqns``, which are relative to ``module``."""
        for flat in self.flats:
            names = [{self.below(module, site) for *_, site in o.sites} for o in flat.originals]
            found = {i for i, of_one in enumerate(names) if not of_one.isdisjoint(fqns)}
            flat.module_parameters.materialize(found)

    # -- parameters ------------------------------------------------------------------------

    def originals(self) -> list[OriginalParameter]:
        return [original for flat in self.flats for original in flat.originals]


# -- training state --------------------------------------------------------------------------------


class UnitState(Enum):
    """Phase of a unit.

    - ``IDLE``: sharded, or kept unsharded until the backward or the next forward.
    - ``FORWARD``: unsharded, inside its forward.
    - ``BACKWARD_PRE``: unsharded, its backward runs.
    - ``BACKWARD_POST``: resharded, its gradient is being reduced.
    - ``SUMMON_FULL_PARAMS``: unsharded on the user's request.
    """

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()
    SUMMON_FULL_PARAMS = auto()

    __hash__ = object.__hash__  # Enum.__hash__ is Python code, and every hook looks a state up


class RootState(Enum):
    """Phase of a root.

    - ``IDLE``: between forwards and backwards.
    - ``FORWARD``: the outermost forward runs.
    - ``BACKWARD``: the engine runs; recomputed forwards are part of it.
    """

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()

    __hash__ = object.__hash__


_U = UnitState
_R = RootState

# (from, to). For illegal transitions, `_HINTS` names the likely mistake by the state requested.
_LEGAL: frozenset[tuple[Enum, Enum]] = frozenset(
    {
        (_U.IDLE, _U.FORWARD),
        (_U.FORWARD, _U.IDLE),
        (_U.IDLE, _U.BACKWARD_PRE),
        (_U.BACKWARD_PRE, _U.BACKWARD_PRE),  # the backward of a second forward call began
        (_U.BACKWARD_PRE, _U.BACKWARD_POST),
        (_U.IDLE, _U.BACKWARD_POST),  # no output had a hook
        (_U.BACKWARD_POST, _U.BACKWARD_PRE),  # a second forward call of the same step
        (_U.BACKWARD_POST, _U.FORWARD),  # recomputed by activation checkpointing around it
        (_U.BACKWARD_POST, _U.BACKWARD_POST),
        (_U.BACKWARD_POST, _U.IDLE),
        (_U.BACKWARD_PRE, _U.IDLE),  # no parameter of the unit took part in the backward
        (_U.IDLE, _U.IDLE),
        (_U.IDLE, _U.SUMMON_FULL_PARAMS),
        (_U.SUMMON_FULL_PARAMS, _U.IDLE),
        (_R.IDLE, _R.FORWARD),
        (_R.FORWARD, _R.IDLE),
        (_R.IDLE, _R.BACKWARD),
        (_R.BACKWARD, _R.IDLE),
    }
)

_HINTS: dict[Enum, str] = {
    _U.FORWARD: "Do not call a unit from inside its own forward or its backward.",
    _U.BACKWARD_PRE: "Do not call backward() inside the forward of a wrapped module.",
    _U.BACKWARD_POST: "Do not call backward() inside the forward of a wrapped module.",
    _U.SUMMON_FULL_PARAMS: "Ask for full parameters or a state dict between two steps only.",
    _R.FORWARD: "Do not call a unit from inside its own forward or its backward.",
    _R.BACKWARD: "Do not call backward() inside the forward of a wrapped module.",
    _U.IDLE: "Leave the context manager that summoned the parameters first.",
    _R.IDLE: "Let the forward or backward that runs end first.",
}

StateT = TypeVar("StateT", UnitState, RootState)


class StateMachine(Generic[StateT]):
    """One state; ``advance`` checks the table of transitions, ``reset`` does not."""

    def __init__(self, initial: StateT, fqn: str) -> None:
        self.state: StateT = initial
        self.fqn = fqn
        self._initial: StateT = initial

    def advance(self, wanted: StateT) -> None:
        """Change the state to ``wanted``; raise ``FSDPStateError`` if that is illegal."""
        if (self.state, wanted) not in _LEGAL:
            raise FSDPStateError(
                f"{unit_name(self.fqn)}: expected a state from which {wanted.name} can be reached, "
                f"got {self.state.name} -> {wanted.name}. {_HINTS[wanted]}"
            )
        self.state = wanted

    def reset(self) -> None:
        self.state = self._initial
