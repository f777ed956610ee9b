"""Modules, tensors, autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn


def _tables(module: nn.Module) -> list[dict[str, Any]]:
    return [module._parameters, module._buffers, module._modules]


@pytest.mark.private(
    "Module._parameters",
    "Module._buffers",
    "Module._modules",
    need="before each forward, whether a module has got a parameter or a child since it became a "
    "unit: the tables are kept and looked at, for a walk takes as long as all hooks of a forward",
    instead="that walk, over named_parameters() and named_modules()",
)
def test_the_tables_of_a_module_stay_the_same_objects() -> None:
    module = nn.BatchNorm1d(2)
    module.register_parameter("absent", None)
    tables = _tables(module)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.to(torch.float64).load_state_dict(state, assign=True)
    module.requires_grad_(False).train()
    assert module._parameters["absent"] is None
    module.absent = nn.Parameter(torch.ones(2))
    module.child = nn.Linear(2, 2)
    assert module._parameters["absent"] is module.absent
    assert module._modules == {"child": module.child}
    assert all(now is before for now, before in zip(_tables(module), tables, strict=True))


# -- tensors --------------------------------------------------------------------------------------


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


# -- autograd -------------------------------------------------------------------------------------


class _Passing(torch.autograd.Function):
    """Calls a function in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, do: Callable[[], None]) -> torch.Tensor:
        ctx.do = do
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.do()
        return grad, None


@pytest.mark.private(
    "torch.autograd.Variable._execution_engine",
    need="the end of a backward, when the last reductions are waited for; hooks of tensors and of "
    "modules do not tell which of them is the last; an error there ends the user's backward() call",
    instead="torch.optim.optimizer.register_optimizer_step_pre_hook, and a method to be called "
    "before gradients are read elsewhere",
)
def test_callbacks_run_at_the_end_of_the_backward() -> None:
    engine = torch.autograd.Variable._execution_engine
    found: list[Any] = []
    x = torch.ones(2, requires_grad=True)

    def fail() -> None:
        raise ValueError("in the callback")

    def queue() -> None:
        engine.queue_callback(lambda: found.append(None if x.grad is None else x.grad.tolist()))
        engine.queue_callback(lambda: found.append("second"))

    for _ in range(2):
        x.grad = None
        _Passing.apply(x.sin() * 0 + x, queue).sum().backward()
    assert found == [[1, 1], "second"] * 2
    with pytest.raises(ValueError, match="in the callback"):
        _Passing.apply(x, lambda: engine.queue_callback(fail)).sum().backward()


@pytest.mark.private(
    "torch.autograd.Variable._execution_engine",
    need="whether a backward goes to all leaves, or to chosen tensors: stages of pipelines split "
    "theirs so, and a unit's gradients would be left out",
    instead="gradients that are missing when the pipeline ends its backwards, which would tell "
    "nothing where they come of some microbatches only",
)
def test_a_backward_to_chosen_tensors_is_known() -> None:
    engine = torch.autograd.Variable._execution_engine
    found: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    hook = lambda grad: found.append(engine.is_checkpoint_valid())  # noqa: E731
    for take in (lambda out: out.backward(), lambda out: torch.autograd.grad(out, x)):
        out = x.sin()
        out.register_hook(hook)
        take(out.sum())
    assert found == [True, False]


@pytest.mark.private(
    "torch._C._current_graph_task_id",
    need="whether a backward runs, and whether it is the same one as before",
    instead="a flag and a number of our own, set by the first hook of a backward and reset by "
    "the callback at its end",
)
def test_a_backward_has_a_number() -> None:
    numbers: list[int] = []

    def note() -> None:
        numbers.append(torch._C._current_graph_task_id())

    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        out = _Passing.apply(_Passing.apply(x, note), note)
        assert torch._C._current_graph_task_id() == -1
        out.sum().backward()
        assert torch._C._current_graph_task_id() == -1
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]
    assert min(numbers) > -1


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
    "Tensor._base",
    need="start a unit's backward where its output is a view that the caller changes in place",
    instead="a clone of outputs that are views",
)
def test_a_hook_on_the_base_of_a_view_changed_in_place() -> None:
    ran: list[str] = []
    hidden = torch.ones(2, 2, requires_grad=True) * 2
    view = hidden.flatten()
    assert view._base is hidden
    assert hidden._base is None
    view.register_hook(lambda grad: ran.append("view"))
    hidden.grad_fn.register_prehook(lambda grads: ran.append("base"))
    view += 1
    view.sum().backward()
    assert ran == ["base"]


@pytest.mark.private(
    "torch._dispatch.python.enable_python_dispatcher",
    need="batch norm of fake tensors as the operator whose schema names its writes",
    instead="the schema of invoke_subgraph, which traces a body once more",
)
def test_batch_norm_names_its_writes() -> None:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Written(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names += [a.name for a in func._schema.arguments if a.is_write]
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.no_grad(), Written() as written:
        x, mean, variance = torch.empty(3, 4), torch.empty(4), torch.empty(4)
        with enable_python_dispatcher():
            nn.functional.batch_norm(x, mean, variance)
            assert not written.names
            nn.functional.batch_norm(x, mean, variance, training=True)
    assert written.names == ["running_mean", "running_var"]


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
