"""Parameters as torch's own DTensors: mesh and placements, and this rank's part of a value.

A parameter of a unit is ``Shard(0)``, or of the dimension that ``shard_placement_fn`` chooses, over
the ranks that share it, divided as torch divides it (``core/flat_layout``); ``Replicate()`` over
replicas. A scalar has no rows: every rank holds it. Under tensor parallelism mesh and placements
have its dimensions too, as FSDP2 has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_dynamo.comm.process_groups import Hierarchy
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.flat_layout import ShardRange
from fsdp_dynamo.errors import FSDPStateError, FSDPValueError, UnsupportedError
from fsdp_dynamo.module_tree import UnitPaths

_new: Any = DTensor.__new__


class Placing:
    """Mesh, placements and shape that all DTensors of one parameter have.

    Args:
        shape: of the parameter that the unit divides: under tensor parallelism, the local tensor's.
        part: what this rank holds of it.
        mesh: of the unit: the last dimension shards, or the last two in a hierarchy.
        num_sharding: how many dimensions these are; 0: all ranks hold it.
        parallel: how tensor parallelism has split the parameter before, if it has.
        fqn: of the parameter, for messages.

    Attributes:
        mesh: the unit's; under tensor parallelism, followed by the dimensions that it uses.
        placements: one for each dimension of ``mesh``.
        shape: of the whole parameter in the plain model.
        is_replicated: whether all ranks of the unit's sharding dimensions hold it.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        part: ShardRange,
        mesh: DeviceMesh,
        num_sharding: int,
        parallel: TensorParallel | None,
        fqn: str,
    ) -> None:
        self.fqn = fqn
        self.shape = torch.Size(shape) if parallel is None else parallel.shape
        self.is_replicated = num_sharding == 0
        self._part, self._parallel = part, parallel
        self._specs: dict[torch.dtype, DTensorSpec] = {}
        whole = [Replicate()] * (mesh.ndim - num_sharding)
        shards: list[Any] = [Shard(part.dim)] * num_sharding
        self.mesh, self.placements = mesh, (*whole, *shards)
        if parallel is not None:
            if num_sharding and (split := parallel.num_pieces(part.dim)) > 1:
                shards = [_StridedShard(part.dim, split_factor=split)]
            self.mesh = DeviceMesh._concatenate([mesh, parallel.mesh])
            self.placements = (*whole, *shards, *parallel.placements)

    def __deepcopy__(self, memo: dict[int, Any]) -> Placing:
        """Groups of ranks are shared between copies."""
        return self

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """The DTensor of which this rank holds ``local``, whose memory it shares."""
        spec = self._specs.get(local.dtype) or self._spec_of(local.dtype)
        return _new(DTensor, local, spec, requires_grad=False)  # type: ignore[no-any-return]

    def _spec_of(self, dtype: torch.dtype) -> DTensorSpec:
        shape = self.shape
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        meta = TensorMeta(shape, stride, dtype)
        spec = self._specs[dtype] = DTensorSpec(self.mesh, self.placements, meta)
        return spec

    def without_address(self, local: torch.Tensor) -> DTensor:
        """A DTensor that torch can copy: a value of a state dict.

        A DTensor takes on its local tensor's storage offset. ``deepcopy()`` and torch's checkpoints
        take a subclass of a tensor that has an address for one with memory of its own. Dynamo takes
        one without for a tensor of another offset, so parameters have their addresses.
        """
        made: Any = self.dtensor(local.as_strided(local.shape, local.stride(), 0))
        made._local_tensor = local
        _given[made] = True
        return made  # type: ignore[no-any-return]

    def holds(self, value: DTensor) -> bool:
        """Whether a DTensor is placed as the parameter is."""
        same: bool = value.placements == self.placements and value.device_mesh == self.mesh
        return same and value.shape == self.shape

    def require_own(self, value: torch.Tensor) -> None:
        """Raise for a DTensor that is placed as the parameter is, but is of another rank's file.

        Raises:
            FSDPValueError: its mesh says that it was made where other elements are.
        """
        if not isinstance(value, DTensor) or not self.holds(value):
            return
        own, made_at = self.mesh.get_coordinate(), value.device_mesh.get_coordinate()
        places = zip(self.placements, own or (), made_at or (), strict=False)
        if any(here != there for placed, here, there in places if not placed.is_replicate()):
            raise FSDPValueError(
                f"parameter '{self.fqn}': expected what the rank at {own} of the mesh has saved, "
                f"got what the one at {made_at} has. Let each rank load its own file, or save with "
                "torch.distributed.checkpoint, fsdp_dynamo.checkpoint or a full state dict."
            )

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor that has the parameter's shape.

        Every rank must call it with a DTensor that is placed otherwise, which is gathered.

        Raises:
            FSDPValueError: another shape; what ``require_own`` raises.
        """
        if value.shape != self.shape:
            raise FSDPValueError(
                f"parameter '{self.fqn}': expected a tensor of shape {tuple(self.shape)}, got "
                f"{tuple(value.shape)}. Give a whole tensor, or a DTensor of the parameter's shape."
            )
        if isinstance(value, DTensor):
            if self.holds(value):
                self.require_own(value)
                local: torch.Tensor = value._local_tensor
                return local.detach().contiguous()
            value = whole_of(value)
        return self._part.of(value if self._parallel is None else self._parallel.local(value))


def move_to(param: Any, local: torch.Tensor, placing: Placing) -> None:
    """Let ``local`` be the memory of a DTensor, of any dtype and on any device."""
    if local.dtype != param.dtype or local.device != param.device:
        made: Any = placing.dtensor(local)
        torch.Tensor.data.__set__(param, made)  # type: ignore[attr-defined]
        param._spec = made._spec
    param._local_tensor = local


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local(value: DTensor, local: torch.Tensor) -> DTensor:
    """The DTensor of another local tensor, on another device perhaps."""
    made: Any = DTensor.__new__(DTensor, local, value._spec, requires_grad=False)
    return note_copy(made, value)  # type: ignore[return-value]


_given = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
"""Values of state dicts that are ours, and not those of another library."""


def note_copy(copied: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Note that a copy of a value is of our state dict, too, if the value is; returns the copy."""
    if is_given(value):
        _given[copied] = True
    return copied


def is_given(value: object) -> bool:
    """Whether a tensor is a value of one of our state dicts."""
    return isinstance(value, DTensor) and value in _given


_Meshes = WeakKeyDictionary[dist.ProcessGroup, ReferenceType[DeviceMesh]]
_meshes: _Meshes = WeakKeyDictionary()
_grids: _Meshes = WeakKeyDictionary()
"""Meshes in use; they hold their groups."""


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """The mesh of one dimension that is a group, the same object as long as it is in use."""
    return _kept(_meshes, group, lambda: DeviceMesh.from_group(group, device.type))


def mesh_of_levels(hierarchy: Hierarchy, device: torch.device) -> DeviceMesh:
    """The mesh of two dimensions, position in the node and node, in the order of the shards."""
    levels = [hierarchy.node, hierarchy.across]
    grid, names = torch.tensor(hierarchy.grid), ("position", "node")
    return _kept(
        _grids,
        hierarchy.node,
        lambda: DeviceMesh.from_group(levels, device.type, mesh=grid, mesh_dim_names=names),
    )


def _kept(meshes: _Meshes, group: dist.ProcessGroup, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    known = meshes.get(group)
    mesh = known() if known is not None else None
    if mesh is None:
        mesh = make()
        meshes[group] = ref(mesh)
    return mesh


# -- tensor parallel -------------------------------------------------------------------------------
# Parameters that tensor parallelism has split already: DTensors inside units.
#
# ``parallelize_module`` on one dimension of a mesh leaves DTensors; a unit shards their local
# tensors over another dimension::
#
#                  tp 0        tp 1
#     dp 0     W[:4] [0:8]   W[4:] [0:8]      a row of the mesh holds all of W,
#     dp 1     W[:4] [8:16]  W[4:] [8:16]     a column shards one local tensor
#
# The parameter that optimizers see is a DTensor on both dimensions. While the unit is unsharded,
# its modules see a DTensor over the whole local tensor.


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """Split of one parameter over the ranks of another mesh than the unit's.

    Attributes:
        mesh: those ranks.
        placements: one a dimension of the mesh.
        shape: of the whole parameter.
        stride: of the whole parameter.
    """

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        """Groups of ranks are shared between copies."""
        return self

    def as_dtensor(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor over a whole local tensor; differentiable."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole parameter, a plain tensor; every rank of the mesh must call it."""
        copy = local.detach().clone()  # what is not split would come back as it is
        return whole_of(self.as_dtensor(copy))

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's local tensor of a whole parameter; no communication."""
        split = distribute_tensor(whole.detach(), self.mesh, self.placements, src_data_rank=None)
        return split.to_local()

    def num_pieces(self, dim: int) -> int:
        """Into how many pieces it is split along a dimension."""
        split = [i for i, placement in enumerate(self.placements) if placement.is_shard(dim)]
        return math.prod(self.mesh.size(i) for i in split)

    @property
    def splitting_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups over which its elements are spread: those of a sum over all of them."""
        split = [i for i, placement in enumerate(self.placements) if not placement.is_replicate()]
        return tuple(self.mesh.get_group(i) for i in split)


def check_parallel(
    param: nn.Parameter, fqn: str, groups: Iterable[dist.ProcessGroup], mesh: DeviceMesh | None
) -> None:
    """Raise if a parameter is a DTensor that a unit of these groups cannot shard.

    Args:
        mesh: of the DTensors that the unit's parameters become; ``None``: one that is made.
    """
    if not isinstance(param, DTensor):
        return
    where = f"parameter '{fqn}'"
    if any(placement.is_partial() for placement in param.placements):
        raise UnsupportedError(
            f"{where}: expected a DTensor that is split or replicated, got {param.placements}. "
            "Redistribute it first."
        )
    own = set(map(int, param.device_mesh.mesh.flatten()))
    for group in groups:
        shared = own & set(dist.get_process_group_ranks(group))
        if len(shared) > 1:
            raise FSDPValueError(
                f"{where}: expected a DTensor whose mesh shares one rank with the unit's groups, "
                f"got ranks {sorted(shared)} in both. Use two dimensions of one mesh: "
                "parallelize_module(model, mesh['tp'], ...), then FSDP(model, "
                "device_mesh=mesh['dp'])."
            )
    if mesh is None or not _have_one_root(mesh, param.device_mesh):
        raise FSDPValueError(
            f"{where}: expected a unit on named dimensions of the mesh that tensor parallelism "
            "uses: its DTensors have both, got "
            f"{'a process_group' if mesh is None else str(mesh)}. Make one mesh, "
            "init_device_mesh(..., mesh_dim_names=('dp', 'tp')), and shard with "
            "device_mesh=mesh['dp'] (fully_shard: mesh=mesh['dp'])."
        )


def _have_one_root(*meshes: DeviceMesh) -> bool:
    """Whether meshes are dimensions of one, by name."""
    roots = {mesh._get_root_mesh() for mesh in meshes}
    return len(roots) == 1 and all(mesh.mesh_dim_names for mesh in meshes)


def refuse_parallel(parameters: Mapping[str, TensorParallel | None], what: str) -> None:
    """Raise if one of the parameters, by FQN, is split by tensor parallelism too."""
    for fqn, parallel in parameters.items():
        if parallel is not None:
            raise UnsupportedError(
                f"{what}, parameter '{fqn}': expected parameters that no tensor parallelism has "
                f"split, got one of placements {parallel.placements}. Use state_dict(), which "
                "gives whole tensors, and load_state_dict()."
            )


def as_local_parameter(param: nn.Parameter) -> tuple[nn.Parameter, TensorParallel | None]:
    """A plain parameter for a DTensor's local tensor, and how the whole is split."""
    if not isinstance(param, DTensor):
        return param, None
    spec = TensorParallel(param.device_mesh, param.placements, param.shape, param.stride())
    local = nn.Parameter(param.to_local().detach(), requires_grad=param.requires_grad)
    hand_over_hooks(param, local)
    return local, spec


# -- whole dtensor ---------------------------------------------------------------------------------
# The whole tensor of a DTensor of torch's own, whose collectives are torch's.


_USE = "a DTensor of torch's"


def whole_of(value: Any) -> torch.Tensor:
    """The whole tensor of a ``DTensor``, without a gradient; every rank of its mesh must call it.

    The wait ends when another rank fails, if the mesh has one dimension: of several groups, only
    one could be watched at a time.

    Raises:
        DivergenceError: another rank has posted a notice.
        RankFailedError: a rank is gone, or has not come within the group's timeout.
    """
    mesh = value.device_mesh
    watch = watched(mesh.get_group(), "all_gather", _USE, value.numel()) if mesh.ndim == 1 else None
    with watch or nullcontext():
        return cast(torch.Tensor, value.detach().full_tensor())


# -- gradient hooks --------------------------------------------------------------------------------
# Users' gradient hooks of original parameters: run, or refused.
#
# Autograd never sees an original parameter: modules hold views of the unsharded flat parameter in
# its place. Hooks that want an accumulated gradient run when the reduced one is in ``.grad``.
# Hooks that want to change a gradient on its way would get this rank's, before the mean: there is
# none.


def refuse_tensor_hooks(param: torch.Tensor, paths: UnitPaths, fqn: str) -> None:
    """Raise for a parameter with hooks of ``register_hook()``.

    Args:
        param: an original parameter.
        paths: of its unit, for messages.
        fqn: its own, relative to the unit.

    Raises:
        FSDPStateError: it has one.
    """
    if param._backward_hooks:
        raise FSDPStateError(
            f"parameter '{paths.fqn_of(fqn)}': expected hooks of "
            "register_post_accumulate_grad_hook() on a parameter, got one of register_hook(). "
            "Register it with register_post_accumulate_grad_hook(), and change p.grad there: this "
            "rank's part of the mean over ranks."
        )


def run_post_accumulate_hooks(param: torch.Tensor) -> None:
    """Call hooks of ``register_post_accumulate_grad_hook()``, in the order of registration.

    Then the optimizers of ``torch.distributed.optim._apply_optimizer_in_backward`` step. It has
    given them to the parameter, and a hook to an autograd node that is in no graph here.
    """
    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    for hook in tuple(hooks.values()) if hooks else ():
        hook(param)
    optimizers = getattr(param, "_in_backward_optimizers", ())
    if optimizers and param.grad is not None:
        for optimizer in optimizers:
            optimizer.step()
        param.grad = None


def hand_over_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let a parameter in the place of another have its hooks; their handles hold for both."""
    hooks = old._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if hooks:
        new._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]
