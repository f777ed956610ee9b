"""Parameters as torch's own DTensors: mesh and placements, and this rank's part of a value.

A parameter of a unit is ``Shard(0)``, or of the dimension that ``shard_placement_fn`` chooses, over
the ranks that share it, divided as torch divides it (``core/layout``), and ``Replicate()`` over
replicas. A scalar has no rows: every rank holds it. Under tensor parallelism mesh and placements
have its dimensions too, as FSDP2 has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_dynamo.comm.hierarchy import Hierarchy
from fsdp_dynamo.core.layout.flat_layout import ShardRange
from fsdp_dynamo.core.tensor_parallel import TensorParallel
from fsdp_dynamo.core.whole_dtensor import whole_of
from fsdp_dynamo.errors import FSDPValueError

_new: Any = DTensor.__new__


class Placing:
    """What the DTensors of one parameter have in common.

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
        """The same, of which torch makes copies: a value of a state dict.

        A DTensor takes on its local tensor's storage offset. ``deepcopy()`` and torch's checkpoints
        take a subclass of a tensor that has an address for one with memory of its own.
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
                expected=f"what the rank at {own} of the mesh has saved",
                got=f"what the one at {made_at} has",
                where=f"parameter '{self.fqn}'",
                fix="Let each rank load its own file, or save with torch.distributed.checkpoint, "
                "fsdp_dynamo.checkpoint or a full state dict.",
            )

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor that has the parameter's shape.

        Every rank must call it with a DTensor that is placed otherwise, which is gathered.

        Raises:
            FSDPValueError: another shape; what ``require_own`` raises.
        """
        if value.shape != self.shape:
            raise FSDPValueError(
                expected=f"a tensor of shape {tuple(self.shape)}",
                got=str(tuple(value.shape)),
                where=f"parameter '{self.fqn}'",
                fix="Give a whole tensor, or a DTensor of the parameter's shape.",
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
