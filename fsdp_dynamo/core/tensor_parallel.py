"""Parameters that tensor parallelism has split already: DTensors inside units.

``parallelize_module`` on one dimension of a mesh leaves DTensors; a unit shards their local tensors
over another dimension::

                 tp 0        tp 1
    dp 0     W[:4] [0:8]   W[4:] [0:8]      a row of the mesh holds all of W,
    dp 1     W[:4] [8:16]  W[4:] [8:16]     a column shards one local tensor

The parameter that optimizers see is a DTensor on both dimensions. While the unit is unsharded, its
modules see a DTensor over the whole local tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_dynamo.core.gradient_hooks import hand_over_hooks
from fsdp_dynamo.core.whole_dtensor import whole_of
from fsdp_dynamo.errors import FSDPValueError, UnsupportedError


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """How one parameter is split over the ranks of another mesh than the unit's.

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
            expected="a DTensor that is split or replicated",
            got=str(param.placements),
            where=where,
            fix="Redistribute it first.",
        )
    own = set(map(int, param.device_mesh.mesh.flatten()))
    for group in groups:
        shared = own & set(dist.get_process_group_ranks(group))
        if len(shared) > 1:
            raise FSDPValueError(
                expected="a DTensor whose mesh shares one rank with the unit's groups",
                got=f"ranks {sorted(shared)} in both",
                where=where,
                fix="Use two dimensions of one mesh: parallelize_module(model, mesh['tp'], "
                "...), then FSDP(model, device_mesh=mesh['dp']).",
            )
    if mesh is None or not _have_one_root(mesh, param.device_mesh):
        raise FSDPValueError(
            expected="a unit on named dimensions of the mesh that tensor parallelism uses: its "
            "DTensors have both",
            got="a process_group" if mesh is None else str(mesh),
            where=where,
            fix="Make one mesh, init_device_mesh(..., mesh_dim_names=('dp', 'tp')), and shard with "
            "device_mesh=mesh['dp'] (fully_shard: mesh=mesh['dp']).",
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
                expected="parameters that no tensor parallelism has split",
                got=f"one of placements {parallel.placements}",
                where=f"{what}, parameter '{fqn}'",
                fix="Use state_dict(), which gives whole tensors, and load_state_dict().",
            )


def as_local_parameter(param: nn.Parameter) -> tuple[nn.Parameter, TensorParallel | None]:
    """A plain parameter for a DTensor's local tensor, and how the whole is split."""
    if not isinstance(param, DTensor):
        return param, None
    spec = TensorParallel(param.device_mesh, param.placements, param.shape, param.stride())
    local = nn.Parameter(param.to_local().detach(), requires_grad=param.requires_grad)
    hand_over_hooks(param, local)
    return local, spec
