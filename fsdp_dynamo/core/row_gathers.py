"""Operators of ``RowDTensor`` that need whole tensors, and the whole tensors that they make.

Outside of a forward, where nothing has a gradient, all ranks run the same operators on parameters,
gradients and states: Muon's matrix products, a norm of each row, ``weight[0].zero_()``. Rows are
gathered then, into ``WholeDTensor``s, of which every rank holds the same. Random values are equal
on ranks with equal seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from fsdp_dynamo.core.layout.chunked_tensor import ChunkedTensor
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError
from fsdp_dynamo.pytree import tensors_of
from graph_passes.graph_utils import written_by

_STEP = Optimizer.profile_hook_step(lambda: None).__code__
"""Of what torch puts around the steps of all optimizers."""


def _is_in_step() -> bool:
    """Whether an optimizer makes its step, where plain tensors are states, equal on all ranks."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    return frame is not None


def on_whole(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on whole tensors, which all ranks must call; on one rank, on its own.

    Args:
        cls: ``RowDTensor``, of which one at least is among the arguments.

    Raises:
        UnsupportedError: a gradient is needed, or a plain tensor is among the arguments outside of
            an optimizer's step; it would change a shape in place; of views, in a compiled region.
    """
    tensors = list(tensors_of((args, kwargs)))
    rows: list[Any] = [one for one in tensors if isinstance(one, cls)]
    if _reshapes(func):
        raise UnsupportedError(
            expected="operators that leave a sharded parameter its shape",
            got=f"{func}, which would change it in place",
            where=f"'{rows[0]._placing.rows.fqn}'",
            fix="Use the operator that makes a view: t() instead of t_().",
        )
    is_alone = all(group.size() == 1 for row in rows for group in row._placing.rows.groups)
    if not is_alone:
        _refuse_where_wrong(func, tensors, rows)
    by_id = {id(row): _Gathered(row, is_alone).dtensor() for row in rows}
    return _called(func, args, kwargs, rows, [by_id[id(row)] for row in rows])


def _refuse_where_wrong(func: Any, tensors: Sequence[torch.Tensor], rows: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and any(row.requires_grad for row in rows):
        raise _refusal(func, rows[0], " with a gradient (under torch.no_grad() they are gathered)")
    if _mixes(tensors):
        raise _refusal(func, rows[0], _MIXED)
    if func.is_view and torch.compiler.is_compiling():
        raise _refusal(func, rows[0], " in a compiled region")


_MIXED = " and a plain tensor, which may be another one on each rank"


def _mixes(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether plain tensors are among an operator's which may differ between ranks."""
    plain = (one for one in tensors if not isinstance(one, DTensor))
    return any(one.dim() for one in plain) and not _is_in_step()


def _refusal(func: Any, row: Any, why: str) -> UnsupportedError:
    return UnsupportedError(
        expected="operators that work element by element, sums, norms, to_local() or full_tensor()",
        got=f"{func} on rows of a sharded parameter{why}",
        where=f"'{row._placing.rows.fqn}'",
        fix="Without gradients, or in a loss that is the same on all ranks (a penalty), compute "
        "with full_tensor(), which all ranks must call. With gradients, use it in the forward of "
        "its unit, where it is whole, or in a method that is one (register_forward_method).",
    )


class WholeDTensor(DTensor):
    """A replicated DTensor that is, or was computed from, the whole tensor of a ``RowDTensor``.

    Its operators are those of the plain tensor that each rank holds. In the step of an optimizer
    it mixes with plain tensors, of which each rank has the same then; elsewhere that raises, as for
    torch's own DTensors.

    What is written into a gathered tensor or a view of it, such as ``row[0]`` or ``row.T``, goes
    into the rows. It raises where the rows have changed since. ``to_local()`` gives memory of the
    gathered copy.
    """

    _gathered: _Gathered | None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def of(value: torch.Tensor, mesh: Any, gathered: _Gathered | None = None) -> WholeDTensor:
        """The DTensor of which every rank of ``mesh`` holds ``value``."""
        spec = _spec_of(value, mesh)
        made: Any = WholeDTensor.__new__(WholeDTensor, value, spec, requires_grad=False)
        made._gathered = gathered
        return made  # type: ignore[no-any-return]

    def current(self) -> torch.Tensor:
        """The plain tensor.

        Raises:
            FSDPStateError: it is of rows that have changed since.
        """
        if self._gathered is not None:
            self._gathered.require_current()
        return self._local_tensor

    def as_torchs(self) -> DTensor:
        """The same as a DTensor of torch's own."""
        return DTensor.from_local(
            self.current(), self.device_mesh, self.placements, run_check=False
        )

    def __format__(self, spec: str) -> str:
        """A number as a number, as of plain tensors: ``f"{norm:.2f}"``."""
        return object.__format__(self, spec) if self.dim() else format(self.current().item(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_torchs().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(one, ChunkedTensor) for one in types):
            return NotImplemented  # rows decide
        kwargs = kwargs or {}
        if _reshapes(func):
            return _reshaped(func, args, kwargs)
        tensors = list(tensors_of((args, kwargs)))
        wholes: list[Any] = [one for one in tensors if isinstance(one, cls)]
        is_mixed = _mixes(tensors)
        gathered = next((one._gathered for one in wholes if one._gathered is not None), None)
        if is_mixed and gathered is not None and not gathered.is_alone:
            raise _refusal(func, gathered.row, _MIXED)
        is_for_torch = is_mixed or _is_for_torch(tensors)
        value = cls.as_torchs if is_for_torch else cls.current
        out = _called(func, args, kwargs, wholes, [value(one) for one in wholes])
        for one in written_by(func._schema, args, kwargs):
            if isinstance(one, cls) and one._gathered is not None:
                one._gathered.write_back()
        if is_for_torch:
            return out
        mesh, viewed = wholes[0].device_mesh, wholes[0]._gathered if func.is_view else None
        given = set(map(id, tensors))
        return tree_map_only(
            torch.Tensor, lambda one: one if id(one) in given else cls.of(one, mesh, viewed), out
        )


def _spec_of(value: torch.Tensor, mesh: Any) -> DTensorSpec:
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta)


@cache
def _reshapes(func: Any) -> bool:
    """Whether an operator changes the shape of its argument."""
    return torch.Tag.inplace_view in func.tags


def _reshaped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WholeDTensor:
    """Change a shape in place, as ``vector @ matrix`` does to its result."""
    whole, *others = args
    value = whole.current()
    func(value, *others, **kwargs)
    whole._spec = _spec_of(value, whole.device_mesh)
    returned: WholeDTensor = return_and_correct_aliasing(func, args, kwargs, whole)
    return returned


def _is_for_torch(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether torch's DTensors have to run an operator of these, or to refuse it."""
    return (
        any(isinstance(one, DTensor) and type(one) is not WholeDTensor for one in tensors)
        or (torch.is_grad_enabled() and any(one.requires_grad for one in tensors))
        or torch.compiler.is_compiling()
    )


class _Gathered:
    """The whole tensor of which a ``RowDTensor`` holds rows.

    Args:
        row: the DTensor.
        is_alone: whether this rank holds all rows: the whole tensor is its memory then.

    Attributes:
        num_writes: by operators into any rows; torch counts none of them in ``_version``.
    """

    num_writes = 0

    def __init__(self, row: Any, is_alone: bool) -> None:
        self.row, self.is_alone = row, is_alone
        local = row._local_tensor
        self.whole: torch.Tensor = local if is_alone else row._placing.rows.gather(local)
        self.version = self._version_now()

    def dtensor(self) -> DTensor:
        """The whole tensor, of which this object knows the rows."""
        if torch.compiler.is_compiling():
            made: DTensor = self.row._placing.replicated(self.whole)
            return made
        return WholeDTensor.of(self.whole, self.row._placing.mesh, self)

    def write_back(self) -> None:
        """Copy this rank's rows of the whole tensor into its memory."""
        if not self.is_alone:
            self.row._local_tensor.copy_(self._own())
            count_write()
            self.version = self._version_now()

    def require_current(self) -> None:
        """Raise if this rank's rows have changed since they were gathered.

        A new version may be that of other rows, so values are compared then.
        """
        if self.is_alone or (self.version and self.version == self._version_now()):
            return
        if torch.equal(_bits(self._own()), _bits(self.row._local_tensor)):
            self.version = self._version_now()
            return
        raise FSDPStateError(
            expected="the values that the parameter, gradient or state has now",
            got="a view that was taken before they changed",
            where=f"a view of '{self.row._placing.rows.fqn}'",
            fix="Take the view again after the change.",
        )

    def _version_now(self) -> tuple[int, ...] | None:
        """Changes with what is written into the rows; ``None`` where torch counts nothing."""
        local = self.row._local_tensor
        if local.is_inference() or torch.is_inference_mode_enabled():
            return None
        return self.num_writes, local.data_ptr(), local._version

    def _own(self) -> torch.Tensor:
        own: torch.Tensor = self.row._placing.rows.take(self.whole)
        return own


def count_write() -> None:
    """Say that an operator has written into rows, so that views of rows look at their values."""
    _Gathered.num_writes += 1


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Equal where values are, NaN too."""
    return value.reshape(-1).view(torch.uint8)


def _called(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
) -> Any:
    """Call an operator with others in the place of some tensors among its arguments.

    Returns:
        What it has returned; where that is one of the others, the tensor in whose place it is.
    """
    put_args, put_kwargs = _put((args, kwargs), tensors, others)
    return _put(func(*put_args, **put_kwargs), others, tensors)


def _put(value: Any, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Any:
    by_id = dict(zip(map(id, tensors), others, strict=True))
    return tree_map_only(torch.Tensor, lambda one: by_id.get(id(one), one), value)
