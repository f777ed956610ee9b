"""Modules, tensors, autograd."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn


@pytest.mark.private(
    "Tensor._version",
    need="whether a tensor was written since, on fake tensors too",
    instead="for integers, a copy to compare with; for regions of a graph, the names of in-place "
    "operators",
)
@pytest.mark.private(
    "UntypedStorage._cdata",
    need="which tensors share a storage, of fake tensors too, whose data_ptr() is no address",
    instead="torch.multiprocessing.reductions.StorageWeakRef, which compares storages",
)
@pytest.mark.parametrize("is_fake", [False, True])
def test_writes_and_shared_storages_are_seen(is_fake: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() if is_fake else nullcontext():
        tensor = torch.zeros(4, dtype=torch.int64)
        before = tensor._version
        tensor.sum()
        assert tensor._version == before
        tensor.view(2, 2)[0].add_(1)
        assert tensor._version > before
        for one, other in ((tensor, torch.empty(4)), (torch.empty(0), torch.empty(0))):
            own = one.untyped_storage()._cdata
            assert one.view(-1, 2).detach()[:1].untyped_storage()._cdata == own
            assert other.untyped_storage()._cdata != own


@pytest.mark.private(
    "Tensor._use_count",
    need="while recording: whether a backend's thread still holds a tensor whose wait is over",
    instead="a pause of 20 ms, the longest that is waited now",
)
@pytest.mark.private(
    "torch.multiprocessing.reductions.StorageWeakRef",
    need="while recording: when the storage of an unsharded flat parameter is freed; and whether "
    "an initialisation has given a tensor other memory",
    instead="recordings without these moments",
)
def test_uses_outside_of_python_and_the_end_of_a_storage_are_seen() -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    tensor, weight = torch.ones(2), torch.ones(2, requires_grad=True)
    before = tensor._use_count()
    names = [tensor, tensor]
    assert names[0]._use_count() == before
    product = tensor * weight  # its node holds the tensor
    assert tensor._use_count() == before + 1
    del product
    assert tensor._use_count() == before

    view = tensor.view(1, 2)
    reference = StorageWeakRef(tensor.untyped_storage())
    del tensor, names
    assert not reference.expired()
    del view
    assert reference.expired()


@pytest.mark.private(
    "torch._C._autograd._unsafe_set_version_counter",
    need="let autograd refuse saved views of a buffer that holds nothing yet",
    instead="torch.autograd.graph.increment_version when it is emptied, and views made anew for "
    "each forward",
)
def test_versions_of_saved_views_can_be_raised_and_put_back() -> None:
    buffer = torch.ones(6)

    def set_version(version: int) -> None:
        torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))

    class Views(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(buffer.split([4, 2]))

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return torch.zeros(())

    view, other = Views.apply(torch.zeros((), requires_grad=True))
    x = torch.ones(1, 2, requires_grad=True)
    for saved in (view.view(2, 2).t(), other.view(2, 1).detach()):
        out = (x @ saved).sum()
        before = buffer._version
        set_version(before + 1000)
        with pytest.raises(RuntimeError, match="inplace"):
            out.backward(retain_graph=True)
        set_version(before)
        out.backward()
    assert x.grad is not None


@pytest.mark.private(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    need="attention on a CPU, whose work torch's formulas leave out",
    instead="the name of the operator that is called then",
)
@pytest.mark.private(
    "torch.ops.aten._to_copy",
    need="what .to() is in a graph: the estimator and the passes take it for a copy or a cast",
    instead="the name that this operator has then, in their tables of copies",
)
def test_operators_in_tables_are_those_that_run() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: dict[str, Any] = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen[str(func.overloadpacket)] = args
            return func(*args, **(kwargs or {}))

    inputs = [torch.rand(1, 1, 4, 8, requires_grad=True) for _ in range(3)]
    with Recorder():
        nn.functional.scaled_dot_product_attention(*inputs).sum().backward()
        torch.ones(2).to("cpu", torch.float64, copy=True)
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    shapes = [one.shape for one in inputs]
    assert [one.shape for one in seen[name][:3]] == shapes
    assert [one.shape for one in seen[f"{name}_backward"][1:4]] == shapes
    assert "aten._to_copy" in seen
