"""DTensors over the rows of a flat parameter's shards.

torch's own DTensors compute from the number of ranks where each rank's rows begin. Shards of a
flat parameter begin where padding is smallest, so rows are spread unevenly, and whatever divides by
the number of ranks would be silently wrong. A ``RowDTensor`` is a DTensor for all who ask
(``isinstance``, ``shape``, ``placements``, ``to_local()``, ``full_tensor()``), but its operators
are ours: what works element by element runs on the rows, sums and norms are of the whole tensor,
anything else gathers it, or raises where a gradient is needed (``row_operators``).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import astuple
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import optimizer
from torch.utils import _foreach_utils

from fsdp_dynamo.core import row_operators, row_reductions
from fsdp_dynamo.core.layout.chunked_tensor import ChunkedTensor
from fsdp_dynamo.core.layout.chunks import Chunk
from fsdp_dynamo.core.layout.flat_layout import ShardRange, Slot
from fsdp_dynamo.core.row_gathers import WholeDTensor
from fsdp_dynamo.core.row_operands import is_made_of_rows
from fsdp_dynamo.core.rows import Rows, mesh_of
from fsdp_dynamo.core.tensor_parallel import TensorParallel
from fsdp_dynamo.errors import FSDPValueError, UnsupportedError


class Placing:
    """What the DTensors of one parameter have in common: its rows, and torch's words for them.

    Args:
        rows: which rank holds which.
        mesh: the user's, of which the last dimension shards; by default, that of the group.
        device: of the parameter while the model computes.

    Attributes:
        unit_mesh: ``mesh``, or that of the group.
        mesh: ``unit_mesh``; under tensor parallelism, followed by the dimensions that it uses.
        placements: one a dimension of ``mesh``.
    """

    def __init__(self, rows: Rows, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.rows = rows
        self.device = device
        self.unit_mesh = mesh_of(rows.group, device) if mesh is None else mesh
        self.mesh, self.placements = _placed(self.unit_mesh, rows.parallel)
        self._specs: dict[torch.dtype, DTensorSpec] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Placing:
        """Groups of ranks are shared between copies."""
        return self

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """torch's description of a DTensor of this dtype."""
        if dtype not in self._specs:
            meta = TensorMeta(self.rows.shape, self.rows.stride, dtype)
            self._specs[dtype] = _RowSpec(self.mesh, _Placements(self.placements), meta)
            self._specs[dtype].placements.placing = self  # type: ignore[attr-defined]
        return self._specs[dtype]

    def on(self, mesh: Any) -> Placing:
        """The same rows on what stands for the mesh in a trace."""
        if mesh is self.mesh:
            return self
        traced = copy.copy(self)
        traced.mesh, traced._specs = mesh, {}
        return traced

    def dtensor(self, local: torch.Tensor) -> RowDTensor:
        """The DTensor of which this rank holds ``local``, whose memory it shares."""
        made: Any = RowDTensor.__new__(
            RowDTensor, local, self.spec(local.dtype), requires_grad=False
        )
        made._placing = self
        return made  # type: ignore[no-any-return]

    def replicated(self, value: torch.Tensor) -> DTensor:
        """A DTensor of which every rank holds ``value``."""
        if not (value.requires_grad or torch.compiler.is_compiling()):
            return WholeDTensor.of(value, self.mesh)
        return DTensor.from_local(value, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)


class _Placements(tuple[Any, ...]):
    """Placements of a DTensor that also say which ``Placing`` it is of: traces make others."""

    placing: Placing

    def __reduce__(self) -> Any:
        raise TypeError("Rows of a sharded parameter cannot be pickled: they know process groups.")

    def __deepcopy__(self, memo: dict[int, Any]) -> _Placements:
        return self


class _RowSpec(DTensorSpec):
    """torch's description of a DTensor, equal to another one only if ranks hold equal rows.

    Dynamo's guards compare it: a graph gives its results the rows that its inputs had.
    """

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        if not isinstance(other, _RowSpec):
            return False
        theirs, own = other.placements, self.placements
        rows: Rows = theirs.placing.rows  # type: ignore[attr-defined]
        return own.placing.rows.holds_as(rows) and super()._check_equals(other, skip_shapes)  # type: ignore[attr-defined]


def _placed(
    unit_mesh: DeviceMesh, parallel: TensorParallel | None
) -> tuple[DeviceMesh, tuple[Any, ...]]:
    """The mesh and placements of a DTensor, as FSDP2 says them.

    Where tensor parallelism has split the parameter on other dimensions of the same mesh, both are
    named. Without such a mesh, as when the unit has a process group, only the unit's can be.
    """
    whole = [Replicate()] * (unit_mesh.ndim - 1)
    if parallel is None or not _have_one_root(unit_mesh, parallel.mesh):
        return unit_mesh, (*whole, Shard(0))
    pieces = math.prod(
        parallel.mesh.size(i) for i, one in enumerate(parallel.placements) if one.is_shard(0)
    )
    rows = Shard(0) if pieces == 1 else _StridedShard(0, split_factor=pieces)
    return DeviceMesh._concatenate([unit_mesh, parallel.mesh]), (*whole, rows, *parallel.placements)


def _have_one_root(*meshes: DeviceMesh) -> bool:
    """Whether meshes are dimensions of one, by name."""
    roots = {mesh._get_root_mesh() for mesh in meshes}
    return len(roots) == 1 and all(mesh.mesh_dim_names for mesh in meshes)


class _Probe(DTensor):
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return torch.ones(1)


@cache
def has_own_operators() -> bool:
    """Whether torch lets a subclass of DTensor have operators of its own; torch 2.11 does not."""
    meta = TensorMeta(torch.Size([1]), (1,), torch.float32)
    no_mesh: Any = None
    probe: Any = _Probe.__new__(
        _Probe, torch.zeros(1), DTensorSpec(no_mesh, (Shard(0),), meta), requires_grad=False
    )
    try:
        return not isinstance(torch.abs(probe), DTensor)
    except RuntimeError:  # of torch's own operators
        return False


def require_own_operators() -> None:
    """Raise where ``has_own_operators()`` is false.

    Raises:
        UnsupportedError: torch 2.11.
    """
    if not has_own_operators():
        raise UnsupportedError(
            expected="a version of torch that lets subclasses of DTensor have their own operators",
            got=torch.__version__,
            where="argument 'use_dtensor'",
            fix="Use torch 2.13 or later, or plain parameters, which are 1-D.",
        )


class RowDTensor(ChunkedTensor, DTensor):
    """A DTensor of which this rank holds some rows; others may hold more or fewer.

    ``placements`` says ``Shard(0)``: how many rows a rank has is in no placement of torch's. Under
    tensor parallelism mesh and placements have its dimensions too, as FSDP2's DTensors. Rows
    of parameters that do not fit the ranks are finer than those of dimension 0
    (``core.layout.row_planner``), and so is ``to_local()`` then.
    """

    _placing: Placing
    _local_tensor: torch.Tensor

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "Parameter containing:\n" if isinstance(self, nn.Parameter) else ""
        rows = self._placing.rows
        return (
            f"{kind}RowDTensor(local_tensor={self._local_tensor}, shape={tuple(self.shape)}, "
            f"first_element={rows.part.param_start}, device_mesh={self._placing.mesh})"
        )

    # -- the whole tensor, and this rank's rows ------------------------------------------------

    def full_tensor(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """The whole tensor, a plain one, which has a gradient; all ranks must call it.

        Args:
            grad_placements: ``None``, or replicated: the gradient is equal on all ranks.
        """
        if any(not placement.is_replicate() for placement in grad_placements or ()):
            raise _unsupported("full_tensor()", f"grad_placements={grad_placements}", self)
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._placing.rows.gather(self._local_tensor)
        whole: torch.Tensor = _Gather.apply(self)  # type: ignore[no-untyped-call]
        return whole

    def to_local(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """This rank's rows, a plain tensor ``(rows, *shape[1:])``, whose memory is shared.

        Args:
            grad_placements: of its gradient; ``None``: as this one's.
        """
        if grad_placements is not None and tuple(grad_placements) != self._placing.placements:
            raise _unsupported("to_local()", f"grad_placements={grad_placements}", self)
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._local_tensor
        local: torch.Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
        return local

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Any] | None = None,
        **_: Any,
    ) -> DTensor:
        """This tensor itself, or a replicated one.

        Raises:
            UnsupportedError: another mesh or placements.
        """
        wanted = self._placing.placements if placements is None else tuple(placements)
        if device_mesh is not None and device_mesh != self._placing.mesh:
            raise _unsupported("redistribute()", f"device_mesh={device_mesh}", self)
        if wanted == self._placing.placements:
            return self
        if any(not placement.is_replicate() for placement in wanted):
            raise _unsupported("redistribute()", f"placements={placements}", self)
        return self._placing.replicated(self.full_tensor())

    # -- values ----------------------------------------------------------------------------------

    def data_ptr(self) -> int:
        """Zero: the memory is that of the local tensor. Of torch it would be the local offset, and
        code that copies whatever has an address would copy none."""
        return 0

    @property
    def data(self) -> RowDTensor:
        """The same rows, without a gradient; setting it copies values into them."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.dtype != self.dtype:
            raise FSDPValueError(
                expected=f"values of {self.dtype}",
                got=str(value.dtype),
                where=f"data of parameter '{self._placing.rows.fqn}'",
                fix="Convert the model: model.to(dtype).",
            )
        with torch.no_grad():
            self.copy_(value)

    def move_to(self, local: torch.Tensor) -> None:
        """Let ``local`` be the memory of this rank's rows, of any dtype and on any device."""
        if local.dtype != self.dtype or local.device != self.device:
            torch.Tensor.data.__set__(self, self._placing.dtensor(local))  # type: ignore[attr-defined]
            self._spec = self._placing.spec(local.dtype)
        self._local_tensor = local

    def __deepcopy__(self, memo: dict[int, Any]) -> RowDTensor:
        new = self._placing.dtensor(self._local_tensor.clone())
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        new.requires_grad_(self.requires_grad)
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As torch's DTensors: this rank's rows and the mesh, which the same ranks load again."""
        rows, parallel = self._placing.rows, self._placing.rows.parallel
        split = parallel and (parallel.mesh, parallel.placements, parallel.shape, parallel.stride)
        facts = (astuple(rows.slot), [astuple(part) for part in rows.parts], rows.fqn, split)
        return _rebuilt, (self._local_tensor, self._placing.unit_mesh, facts, self.requires_grad)

    # -- torch.distributed.checkpoint ------------------------------------------------------------

    def held_chunks(self) -> list[Chunk]:
        """This rank's chunks of the whole tensor."""
        return self._placing.rows.chunks

    def held_elements(self) -> torch.Tensor:
        """The memory of all of them, 1-D."""
        return self._local_tensor.view(-1)

    @property
    def is_copy(self) -> bool:  # type: ignore[override]
        """Whether another rank of tensor parallelism writes it."""
        parallel = self._placing.rows.parallel
        return parallel is not None and parallel.is_copy

    # -- traces ----------------------------------------------------------------------------------

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> RowDTensor:
        """A tensor of a trace, from what ``DTensor.__tensor_flatten__`` has taken apart."""
        placements, _, _, requires_grad = flatten_spec
        placing = placements.placing.on(inner_tensors["device_mesh"])
        made = placing.dtensor(inner_tensors["_local_tensor"])
        return made.requires_grad_(requires_grad)  # type: ignore[no-any-return]

    def _stable_hash_for_caching(self) -> str:
        """Keeps compiled code out of AOTAutograd's cache: a ``Placing`` cannot be read from a file.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("rows of a sharded parameter know process groups")

    # -- operators -------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return row_operators.run(cls, func, args, kwargs or {})


def norm_of_rows(
    tensors: Sequence[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """``torch.nn.utils.get_total_norm`` where DTensors of ours are among the tensors.

    Returns:
        A replicated DTensor; if there are plain tensors too, a plain one, which scales both kinds.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
    """
    rows = [tensor for tensor in tensors if isinstance(tensor, RowDTensor)]
    others = [tensor for tensor in tensors if not isinstance(tensor, RowDTensor)]
    plain = [one.full_tensor() if isinstance(one, DTensor) else one for one in others]
    dtype = row_reductions.norm_dtype_of(tensor.dtype for tensor in tensors)
    total = row_reductions.total_norm(rows, plain, float(norm_type)).to(dtype)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The norm of order {norm_type} of all gradients is not finite, so they cannot be "
            "clipped. To scale them anyway, set error_if_nonfinite=False."
        )
    return total if plain else rows[0]._placing.replicated(total)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a ``RowDTensor``; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, RowDTensor) else tensor


def rows_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local``, as rows of a ``RowDTensor`` where ``tensor`` is one."""
    return tensor._placing.dtensor(local) if isinstance(tensor, RowDTensor) else local


def rows_of_state(param: torch.Tensor, value: Any) -> Any:
    """An optimizer's state as rows, where it is a DTensor of torch's over a ``RowDTensor``'s rows.

    Quantised ones are copied into the dtype that they stand for. Replicated DTensors become plain
    tensors, as all states are that every rank has. Anything else is itself.
    """
    if not isinstance(param, RowDTensor) or not isinstance(value, DTensor):
        return value
    if all(placement.is_replicate() for placement in value.placements):
        return value.to_local().detach()
    if isinstance(value, RowDTensor) or not is_made_of_rows(param._placing, value):
        return value
    local = value._local_tensor
    if type(local) is not torch.Tensor:
        local = torch.empty(local.shape, dtype=local.dtype, device=local.device).copy_(local)
    return param._placing.dtensor(local)


def _rebuilt(
    local: torch.Tensor, mesh: DeviceMesh, facts: tuple[Any, ...], requires_grad: bool
) -> RowDTensor:
    """A ``RowDTensor`` from a file."""
    slot, parts, fqn, split = facts
    group = mesh.get_group(mesh.ndim - 1)
    parallel = None if split is None else TensorParallel(*split)
    rows = Rows(Slot(*slot), [ShardRange(*part) for part in parts], group, fqn, parallel)
    return Placing(rows, mesh, local.device).dtensor(local).requires_grad_(requires_grad)  # type: ignore[return-value]


torch.serialization.add_safe_globals([_rebuilt])
for _types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _types.append(RowDTensor)  # optimizers and clipping may take lists of them, as of DTensors


class _Gather(torch.autograd.Function):
    """``full_tensor()`` with a gradient."""

    @staticmethod
    def forward(ctx: Any, row: RowDTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.placing = row._placing
        return row._placing.rows.gather(row._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.placing.dtensor(ctx.placing.rows.take(grad).clone())


class _ToLocal(torch.autograd.Function):
    """``to_local()`` with a gradient."""

    @staticmethod
    def forward(ctx: Any, row: RowDTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.placing = row._placing
        return row._local_tensor.view_as(row._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.placing.dtensor(grad)


def _unsupported(where: str, got: str, tensor: RowDTensor) -> UnsupportedError:
    return UnsupportedError(
        expected=f"this tensor's own placements, {tensor._placing.placements}, or replicated ones",
        got=got,
        where=f"{where}, '{tensor._placing.rows.fqn}'",
        fix="Use full_tensor(), and distribute that.",
    )
