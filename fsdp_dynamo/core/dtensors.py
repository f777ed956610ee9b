"""Parameters as torch's own DTensors: mesh and placements, and this rank's part of a value.

Parameters are ``Shard(0)``, or ``Shard(n)`` where ``shard_placement_fn`` says so, over the ranks of
the shard group, divided as torch divides them (``core/flat_layout``), and ``Replicate()`` over
replicas. Scalars are replicated. Under tensor parallelism, mesh and placements have its dimensions
too, as in FSDP2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakValueDictionary

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
    """Mesh, placements and shape of all DTensors of one parameter.

    Args:
        shape: shape that the unit divides: under tensor parallelism, that of the local tensor.
        part: this rank's part.
        mesh: the unit's mesh; its last dimensions shard.
        num_sharding: number of sharding dimensions: 1, 2 in a hierarchy, 0 if replicated.
        parallel: how tensor parallelism has split the parameter already, or ``None``.
        fqn: FQN of the parameter, for messages.

    Attributes:
        mesh: the unit's mesh, followed by the dimensions of tensor parallelism.
        placements: one per dimension of ``mesh``.
        shape: shape of the whole parameter in the plain model.
        is_replicated: whether all ranks of the shard group hold the whole parameter.
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
        return self  # copies share process groups

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor whose local tensor is ``local``; memory is shared."""
        spec = self._specs.get(local.dtype)
        if spec is None:
            stride = tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
            meta = TensorMeta(self.shape, stride, local.dtype)
            spec = self._specs[local.dtype] = DTensorSpec(self.mesh, self.placements, meta)
        return _new(DTensor, local, spec, requires_grad=False)  # type: ignore[no-any-return]

    def for_state_dict(self, local: torch.Tensor) -> DTensor:
        """Return a DTensor for a state dict, which torch can copy.

        A DTensor has the storage offset of its local tensor. With an offset other than 0 its
        ``data_ptr()`` is not null, and ``deepcopy()`` and torch's checkpoints take it for a tensor
        with its own memory. So values of state dicts have offset 0. Parameters keep the offset,
        which Dynamo compares.
        """
        made: Any = self.dtensor(local.as_strided(local.shape, local.stride(), 0))
        made._local_tensor = local
        _state_dict_values[made] = True
        return made  # type: ignore[no-any-return]

    def holds(self, value: DTensor) -> bool:
        """Return whether a DTensor has the parameter's mesh, placements and shape."""
        same: bool = value.placements == self.placements and value.device_mesh == self.mesh
        return same and value.shape == self.shape

    def require_same_rank(self, value: torch.Tensor) -> None:
        """Raise for a DTensor that another rank has saved, though its placements match."""
        if not isinstance(value, DTensor) or not self.holds(value):
            return
        own, made_at = self.mesh.get_coordinate(), value.device_mesh.get_coordinate()
        places = zip(self.placements, own or (), made_at or (), strict=False)
        if any(here != there for placed, here, there in places if not placed.is_replicate()):
            raise FSDPValueError(
                f"parameter '{self.fqn}': expected a DTensor saved by the rank at {own} of the "
                f"mesh, got one saved by the rank at {made_at}. Let each rank load its own file, "
                "or save with torch.distributed.checkpoint, fsdp_dynamo.checkpoint or a full state "
                "dict."
            )

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a tensor that has the parameter's shape.

        Every rank must call it with a DTensor of other placements, which is gathered.

        Raises:
            FSDPValueError: another shape, or a DTensor of another rank (``require_same_rank``).
        """
        if value.shape != self.shape:
            raise FSDPValueError(
                f"parameter '{self.fqn}': expected a tensor of shape {tuple(self.shape)}, got "
                f"{tuple(value.shape)}. Give a whole tensor, or a DTensor of the parameter's shape."
            )
        if isinstance(value, DTensor):
            if self.holds(value):
                self.require_same_rank(value)
                local: torch.Tensor = value._local_tensor
                return local.detach().contiguous()
            value = whole_of(value)
        return self._part.of(value if self._parallel is None else self._parallel.local(value))


def set_local(param: Any, local: torch.Tensor, placing: Placing) -> None:
    """Make ``local``, of any dtype and device, the memory of a DTensor."""
    if local.dtype != param.dtype or local.device != param.device:
        made: Any = placing.dtensor(local)
        torch.Tensor.data.__set__(param, made)  # type: ignore[attr-defined]
        param._spec = made._spec
    param._local_tensor = local


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself if it is none."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local(value: DTensor, local: torch.Tensor) -> DTensor:
    """Return a copy of a DTensor with another local tensor, perhaps on another device."""
    made: Any = DTensor.__new__(DTensor, local, value._spec, requires_grad=False)
    return mark_copy(made, value)  # type: ignore[return-value]


_state_dict_values = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
"""DTensors that our state dicts have returned."""


def mark_copy(copied: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Mark a copy as a value of our state dicts if the original is one; return the copy."""
    if is_state_dict_value(value):
        _state_dict_values[copied] = True
    return copied


def is_state_dict_value(value: object) -> bool:
    """Return whether a tensor is a value of one of our state dicts."""
    return isinstance(value, DTensor) and value in _state_dict_values


_meshes: WeakValueDictionary[tuple[dist.ProcessGroup, ...], DeviceMesh] = WeakValueDictionary()
"""Meshes in use, by the groups of their dimensions."""


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Return the 1-D mesh of a group, the same object as long as it is in use."""
    mesh = _meshes.get((group,))
    if mesh is None:
        mesh = _meshes[(group,)] = DeviceMesh.from_group(group, device.type)
    return mesh


def mesh_of_levels(hierarchy: Hierarchy, device: torch.device) -> DeviceMesh:
    """Return the 2-D mesh (position in the node, node), in the order of the shards."""
    levels = hierarchy.node, hierarchy.across
    mesh = _meshes.get(levels)
    if mesh is None:
        grid, names = torch.tensor(hierarchy.grid), ("position", "node")
        mesh = DeviceMesh.from_group([*levels], device.type, mesh=grid, mesh_dim_names=names)
        _meshes[levels] = mesh
    return mesh


# -- tensor parallel -------------------------------------------------------------------------------
# Parameters that tensor parallelism has split before the unit was made.
#
# ``parallelize_module`` makes DTensors on one dimension of a mesh; the unit shards their local
# tensors over another dimension::
#
#                  tp 0        tp 1
#     dp 0     W[:4] [0:8]   W[4:] [0:8]      a row of the mesh holds all of W,
#     dp 1     W[:4] [8:16]  W[4:] [8:16]     a column shards one local tensor
#
# Optimizers see a DTensor on both dimensions. While the unit is unsharded, its modules see a
# DTensor on the dimension of tensor parallelism only.


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """Split of one parameter, of this whole shape and stride, over another mesh than the unit's."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self  # copies share process groups

    def as_dtensor(self, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor over an unsharded local tensor; differentiable."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """Return the whole parameter as a plain tensor; every rank of the mesh must call it."""
        copy = local.detach().clone()  # full_tensor() of a replicated DTensor shares memory
        return whole_of(self.as_dtensor(copy))

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's local tensor of a whole parameter, without communication."""
        split = distribute_tensor(whole.detach(), self.mesh, self.placements, src_data_rank=None)
        return split.to_local()

    def num_pieces(self, dim: int) -> int:
        split = [i for i, placement in enumerate(self.placements) if placement.is_shard(dim)]
        return math.prod(self.mesh.size(i) for i in split)

    @property
    def splitting_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups over which the elements are spread: a sum over all elements reduces over these."""
        split = [i for i, placement in enumerate(self.placements) if not placement.is_replicate()]
        return tuple(self.mesh.get_group(i) for i in split)


def check_parallel(
    param: nn.Parameter, fqn: str, groups: Iterable[dist.ProcessGroup], mesh: DeviceMesh | None
) -> None:
    """Raise if a parameter is a DTensor that a unit on these groups, or this mesh, cannot shard."""
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
    if mesh is None or not _share_named_root(mesh, param.device_mesh):
        raise FSDPValueError(
            f"{where}: expected a unit on named dimensions of the mesh that tensor parallelism "
            "uses: its DTensors have both, got "
            f"{'a process_group' if mesh is None else str(mesh)}. Make one mesh, "
            "init_device_mesh(..., mesh_dim_names=('dp', 'tp')), and shard with "
            "device_mesh=mesh['dp'] (fully_shard: mesh=mesh['dp'])."
        )


def _share_named_root(*meshes: DeviceMesh) -> bool:
    roots = {mesh._get_root_mesh() for mesh in meshes}
    return len(roots) == 1 and all(mesh.mesh_dim_names for mesh in meshes)


def refuse_parallel(parameters: Mapping[str, TensorParallel | None], what: str) -> None:
    """Raise if tensor parallelism has split one of the parameters, given by FQN."""
    for fqn, parallel in parameters.items():
        if parallel is not None:
            raise UnsupportedError(
                f"{what}, parameter '{fqn}': expected parameters that no tensor parallelism has "
                f"split, got one of placements {parallel.placements}. Use state_dict() and "
                "load_state_dict(), which handle whole tensors."
            )


def as_local_parameter(param: nn.Parameter) -> tuple[nn.Parameter, TensorParallel | None]:
    """Return a plain parameter for a DTensor's local tensor, and how the whole is split."""
    if not isinstance(param, DTensor):
        return param, None
    spec = TensorParallel(param.device_mesh, param.placements, param.shape, param.stride())
    local = nn.Parameter(param.to_local().detach(), requires_grad=param.requires_grad)
    share_hooks(param, local)
    return local, spec


# -- whole dtensor ---------------------------------------------------------------------------------


_USE = "a DTensor of torch's"


def whole_of(value: Any) -> torch.Tensor:
    """Return the whole tensor of a ``DTensor``, detached; all ranks of its mesh must call it.

    On a mesh of one dimension the wait ends when another rank fails: with ``DivergenceError`` or
    ``RankFailedError``. Of several groups only one could be watched at a time.
    """
    mesh = value.device_mesh
    watch = watched(mesh.get_group(), "all_gather", _USE, value.numel()) if mesh.ndim == 1 else None
    with watch or nullcontext():
        return cast(torch.Tensor, value.detach().full_tensor())


# -- gradient hooks --------------------------------------------------------------------------------
# The user's gradient hooks on original parameters.
#
# Autograd never sees an original parameter: modules hold views of the unsharded buffer in its
# place. Post-accumulate hooks run once the reduced gradient is in ``.grad``. Hooks of
# ``register_hook()`` are refused: they would see this rank's gradient before the mean.


def refuse_tensor_hooks(param: torch.Tensor, paths: UnitPaths, fqn: str) -> None:
    """Raise for a parameter with hooks of ``register_hook()``."""
    if param._backward_hooks:
        raise FSDPStateError(
            f"parameter '{paths.fqn_of(fqn)}': expected hooks of "
            "register_post_accumulate_grad_hook() on a parameter, got one of register_hook(). "
            "Register it with register_post_accumulate_grad_hook(), and change p.grad there: this "
            "rank's part of the mean over ranks."
        )


def has_post_accumulate_hooks(param: torch.Tensor) -> bool:
    """Whether ``register_post_accumulate_grad_hook()`` has given a parameter hooks."""
    return bool(param._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def run_post_accumulate_hooks(param: torch.Tensor) -> None:
    """Call hooks of ``register_post_accumulate_grad_hook()``, in the order of registration.

    Then step the optimizers of ``torch.distributed.optim._apply_optimizer_in_backward``. That
    function stores them on the parameter and hooks an autograd node that is in no graph here.
    """
    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    for hook in tuple(hooks.values()) if hooks else ():
        hook(param)
    optimizers = getattr(param, "_in_backward_optimizers", ())
    if optimizers and param.grad is not None:
        for optimizer in optimizers:
            optimizer.step()
        param.grad = None


def share_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Share the gradient hooks of a parameter with its replacement; handles work for both."""
    hooks = old._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if hooks:
        new._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]
