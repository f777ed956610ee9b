"""Modules, tensors, autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.profiler import profile

# -- the tables of a module -----------------------------------------------------------------------


@pytest.mark.private(
    "Module._parameters",
    need="views of the unsharded flat parameter in the places of parameters: a view cannot be "
    "registered, and what is set as an attribute is no parameter to AOTAutograd",
    instead="torch.func.functional_call(module, views, ...) around the user's forward",
)
def test_a_view_stands_for_a_parameter() -> None:
    module = nn.Linear(2, 3, bias=False)
    original = module.weight
    flat = torch.zeros(8, requires_grad=True)
    with torch.no_grad():
        flat[:6] = 1
    module._parameters["weight"] = flat[:6].view(3, 2)
    assert module.weight.grad_fn is not None
    assert dict(module.named_parameters())["weight"] is module.weight
    out = module(torch.ones(1, 2))
    module._parameters["weight"] = original
    assert out.tolist() == [[2, 2, 2]]
    out.sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [1] * 6 + [0] * 2
    assert module.weight is original
    assert original.grad is None


@pytest.mark.private(
    "Module._parameters",
    need="the same while Dynamo traces: views are put in and taken out within the graph",
    instead="torch.func.functional_call(module, views, ...) in the traced forward",
)
@pytest.mark.usefixtures("fresh")
def test_a_view_stands_for_a_parameter_while_traced() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False))

    def call(flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        holder: Any = model._modules["0"]
        original = holder._parameters["weight"]
        holder._parameters["weight"] = flat[:6].view(3, 2)
        out = model(x)
        holder._parameters["weight"] = original
        return out

    original = model[0].weight
    flat = torch.ones(8, requires_grad=True)
    out = torch.compile(call, backend="eager", fullgraph=True)(flat, torch.ones(1, 2))
    assert out.tolist() == [[2, 2, 2]]
    assert model[0].weight is original
    out.sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [1] * 6 + [0] * 2


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


@pytest.mark.private(
    "Module._buffers",
    need="every place that holds a buffer, shared ones included, and another tensor in it: to cast "
    "buffers, and to put back those that a forward has replaced",
    instead="named_buffers(remove_duplicate=False) and setattr(module, name, tensor)",
)
def test_a_buffer_is_replaced() -> None:
    first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    second.running_mean = first.running_mean
    assert second._buffers["running_mean"] is first._buffers["running_mean"]
    other = torch.ones(2, dtype=torch.float64)
    second._buffers["running_mean"] = other
    assert second.running_mean is other
    assert dict(second.named_buffers())["running_mean"] is other
    assert second.state_dict()["running_mean"].dtype == torch.float64
    first.running_mean = None
    assert first._buffers["running_mean"] is None


@pytest.mark.private(
    "Module._modules",
    need="every place that holds a module, shared ones included, and its unit in the place of it, "
    "in containers too",
    instead="named_modules(remove_duplicate=False), and set_submodule",
)
def test_a_module_is_replaced() -> None:
    inner = nn.Linear(2, 2)
    model = nn.Sequential(inner, nn.ReLU(), inner)
    assert [name for name, child in model._modules.items() if child is inner] == ["0", "2"]
    wrapper = nn.Module()
    wrapper._modules["_fsdp_wrapped_module"] = inner
    wrapper.forward = lambda x: inner(x) + 1
    for name in ("0", "2"):
        model._modules[name] = wrapper
    assert [*model] == [wrapper, model[1], wrapper]
    assert wrapper._fsdp_wrapped_module is inner
    assert [name for name, _ in model.named_parameters()] == [
        "0._fsdp_wrapped_module.weight",
        "0._fsdp_wrapped_module.bias",
    ]
    x = torch.ones(1, 2)
    assert torch.equal(model(x), inner((inner(x) + 1).relu()) + 1)


# -- methods of a module --------------------------------------------------------------------------


@pytest.mark.private(
    "Module._apply",
    need="replaced in units: after .to() or .half(), of the unit or of a module above it, the "
    "shard is converted and parameters are its views again",
    instead="a conversion of the shard in the next forward, which finds originals of another dtype",
)
def test_conversions_call_one_method_of_each_module() -> None:
    calls: list[tuple[torch.dtype, bool]] = []

    class Unit(nn.Linear):
        def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
            super()._apply(fn, recurse)
            calls.append((fn(torch.ones(1)).dtype, self.weight.dtype == fn(torch.ones(1)).dtype))
            return self

    model = nn.Sequential(Unit(2, 2))
    for convert in (model.double, model.bfloat16, partial(model.to, torch.float32)):
        assert convert() is model
    dtypes = (torch.float64, torch.bfloat16, torch.float32)
    assert calls == [(dtype, True) for dtype in dtypes]


@pytest.mark.private(
    "Module._apply",
    need="a module moved to its device without its meta tensors",
    instead="a loop over named_parameters() and named_buffers() that sets .data",
)
def test_a_function_is_applied_to_tensors() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, device="meta"))
    meta = model[1].weight
    parameters = [*model.parameters()]
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(torch.float64))
    assert model[1].weight is meta
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert model[0].weight.dtype == model[0].running_mean.dtype == torch.float64


class _Entered(nn.Linear):
    """A linear layer with code of ours around its call."""

    def _entry(self, x: torch.Tensor) -> torch.Tensor:
        body: Any = super()._call_impl
        return body(x + 1) * 10

    _call_impl: Any = _entry

    def give_own_entry(self) -> None:
        """An entry of this module alone, as each unit has one."""
        self.__dict__["_call_impl"] = MethodType(_Entered._entry, self)


def _entered() -> tuple[_Entered, Callable[[torch.Tensor], torch.Tensor]]:
    """A layer with an entry of its own and a forward hook, and what it should give."""
    module = _Entered(2, 2)
    module.give_own_entry()
    module.register_forward_hook(lambda module, args, out: out + 100)
    return module, lambda x: (nn.functional.linear(x + 1, module.weight, module.bias) + 100) * 10


@pytest.mark.private(
    "Module._call_impl",
    need="replaced by fully_shard, in a subclass and in the module itself: it runs around the "
    "module's call and the user's forward hooks",
    instead="__call__ of the subclass, and compile() of our own",
)
def test_a_call_goes_through_what_is_replaced() -> None:
    module, expected = _entered()
    x = torch.ones(1, 2)
    assert torch.equal(module(x), expected(x))
    del module.__dict__["_call_impl"]
    assert torch.equal(module(x), expected(x))


@pytest.mark.private(
    "Module._call_impl",
    need="the same while Dynamo traces the model above",
    instead="__call__ of the subclass, which Dynamo traces, too",
)
@pytest.mark.usefixtures("fresh")
def test_a_traced_call_goes_through_what_is_replaced() -> None:
    module, expected = _entered()
    x = torch.ones(1, 2)
    compiled = torch.compile(nn.Sequential(module), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected(x))


@pytest.mark.private(
    "Module._compiled_call_impl",
    "Module._call_impl",
    need="whether model.compile() was called, which compiles _call_impl; a wrapper of a compiled "
    "module is compiled by setting it",
    instead="compile() of our own on units, which notes it",
)
@pytest.mark.usefixtures("fresh")
def test_compile_in_place_is_seen_and_compiles_what_is_replaced() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    module, expected = _entered()
    x = torch.ones(1, 2)
    assert module._compiled_call_impl is None
    module.compile(backend=backend)
    assert module._compiled_call_impl is not None
    assert torch.equal(module(x), expected(x))
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert len(called) == 4  # ours, the layer, the hook, ours
    other: Any = copy.copy(module)
    other._compiled_call_impl = lambda x: "set"
    assert other(x) == "set"


@pytest.mark.private(
    "torch.nn.Module._load_from_state_dict",
    need="called by what replaces it in compiled wrappers, which loads plain names",
    instead="no such loading: users load into the module inside the compiled one",
)
def test_a_replacement_loads_other_names() -> None:
    class Renaming(nn.Linear):
        def _load_from_state_dict(
            self, state_dict: dict[str, Any], prefix: str, *rest: Any
        ) -> None:
            for name in ("weight", "bias"):
                state_dict[prefix + name] = state_dict.pop(f"{prefix}old_{name}")
            torch.nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)

    model = nn.Sequential(Renaming(2, 1))
    state = {"0.old_weight": torch.ones(1, 2), "0.old_bias": torch.ones(1)}
    report = model.load_state_dict(state)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    assert model[0].weight.tolist() == [[1, 1]]
    assert list(state) == ["0.old_weight", "0.old_bias"]


@pytest.mark.private(
    "Module._get_name",
    need="libraries look a model up by the name of its class, which fully_shard changes",
    instead="the name of the user's class for the subclass that fully_shard makes, too",
)
def test_a_module_may_have_a_name_of_its_own() -> None:
    module: Any = type("FSDPLinear", (nn.Linear,), {})(2, 2)
    assert module._get_name() == "FSDPLinear"
    module._get_name = partial(str, "Linear")
    assert module._get_name() == "Linear"
    assert repr(module).startswith("Linear(")


@pytest.mark.private(
    "torch.nn.modules.batchnorm._BatchNorm",
    need="the default of MixedPrecision._module_classes_to_ignore, as upstream has it",
    instead="a tuple of the public classes: BatchNorm1d, 2d, 3d, and SyncBatchNorm",
)
def test_one_class_stands_for_all_batch_norms() -> None:
    from torch.distributed.fsdp import MixedPrecision

    base = nn.modules.batchnorm._BatchNorm
    for made in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert isinstance(made(2), base)
    assert not isinstance(nn.LayerNorm(2), base)
    assert tuple(MixedPrecision()._module_classes_to_ignore) == (base,)


# -- tensors --------------------------------------------------------------------------------------


@pytest.mark.private(
    "torch._foreach_copy_",
    need="all gradients of a unit copied into one buffer by one call, converted on the way",
    instead="a loop of Tensor.copy_",
)
def test_many_tensors_are_copied_at_once() -> None:
    buffer = torch.zeros(10)
    first, second, rest = buffer.split([4, 3, 3])
    sources = [torch.ones(2, 2, dtype=torch.bfloat16).t(), torch.full((3,), 2.0)]
    torch._foreach_copy_([first.view(2, 2), second], sources)
    assert buffer.tolist() == [1] * 4 + [2] * 3 + [0] * 3
    torch._foreach_copy_([second.data, rest.data], [torch.full((3,), 3.0).data] * 2)
    assert buffer.tolist() == [1] * 4 + [3] * 6


@pytest.mark.private(
    "torch._foreach_norm",
    "torch._foreach_mul_",
    need="norms of gradients, and their scaling, by one call for all",
    instead="loops of torch.linalg.vector_norm and Tensor.mul_",
)
def test_many_tensors_are_measured_and_scaled_at_once() -> None:
    grads = [torch.full((4,), 3.0, dtype=torch.bfloat16), torch.ones(9, dtype=torch.bfloat16)]
    found = torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32))
    assert (found.dtype, found.tolist()) == (torch.float32, [6.0, 3.0])
    assert torch.stack(torch._foreach_norm(grads, float("inf"))).tolist() == [3.0, 1.0]
    torch._foreach_mul_(grads, torch.tensor(0.5, dtype=torch.bfloat16))
    assert [grad[0].item() for grad in grads] == [1.5, 0.5]


@pytest.mark.private(
    "Tensor._version",
    need="whether a tensor was written since, on fake tensors too",
    instead="for integers, a copy to compare with; for regions of a graph, the names of in-place "
    "operators",
)
def test_a_write_raises_the_version() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for mode in (torch.no_grad(), FakeTensorMode()):
        with mode, torch.no_grad():
            tensor = torch.zeros(4, dtype=torch.int64)
            before = tensor._version
            tensor.sum()
            assert tensor._version == before
            tensor.view(2, 2)[0].add_(1)
            assert tensor._version > before


@pytest.mark.private(
    "UntypedStorage._cdata",
    need="which tensors share a storage, of fake tensors too, whose data_ptr() is no address",
    instead="torch.multiprocessing.reductions.StorageWeakRef, which compares storages",
)
def test_a_storage_has_an_identity() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(4), torch.empty(4)
    for tensor, other in (fake, (torch.empty(4), torch.empty(4)), (torch.empty(0), torch.empty(0))):
        own = tensor.untyped_storage()._cdata
        assert isinstance(own, int)
        assert tensor.view(-1, 2).detach()[:1].untyped_storage()._cdata == own
        assert other.untyped_storage()._cdata != own


@pytest.mark.private(
    "Tensor._use_count",
    need="while recording: whether a backend's thread still holds a tensor whose wait is over",
    instead="a pause of 20 ms, the longest that is waited now",
)
def test_uses_outside_of_python_are_counted() -> None:
    tensor, weight = torch.ones(2), torch.ones(2, requires_grad=True)
    before = tensor._use_count()
    names = [tensor, tensor]
    assert names[0]._use_count() == before
    product = tensor * weight  # its node holds the tensor
    assert tensor._use_count() == before + 1
    del product
    assert tensor._use_count() == before


@pytest.mark.private(
    "torch.multiprocessing.reductions.StorageWeakRef",
    need="while recording: when the storage of an unsharded flat parameter is freed; and whether "
    "an initialisation has given a tensor other memory",
    instead="recordings without these moments",
)
def test_a_storage_is_seen_to_be_freed() -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    tensor = torch.ones(2)
    view = tensor.view(1, 2)
    reference = StorageWeakRef(tensor.untyped_storage())
    del tensor
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
    "modules do not tell which of them is the last",
    instead="torch.optim.optimizer.register_optimizer_step_pre_hook, and a method to be called "
    "before gradients are read elsewhere",
)
def test_a_callback_runs_at_the_end_of_the_backward() -> None:
    engine = torch.autograd.Variable._execution_engine
    found: list[Any] = []
    x = torch.ones(2, requires_grad=True)

    def queue() -> None:
        engine.queue_callback(lambda: found.append(None if x.grad is None else x.grad.tolist()))
        engine.queue_callback(lambda: found.append("second"))

    for _ in range(2):
        x.grad = None
        _Passing.apply(x.sin() * 0 + x, queue).sum().backward()
    assert found == [[1, 1], "second"] * 2


@pytest.mark.private(
    "torch.autograd.Variable._execution_engine",
    need="an error of the last reductions ends the user's backward() call",
    instead="the hook before the optimizer's step, which raises it",
)
def test_an_error_in_a_callback_is_the_backwards() -> None:
    def fail() -> None:
        raise ValueError("in the callback")

    def queue() -> None:
        torch.autograd.Variable._execution_engine.queue_callback(fail)

    out = _Passing.apply(torch.ones(2, requires_grad=True), queue)
    with pytest.raises(ValueError, match="in the callback"):
        out.sum().backward()


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


# -- profiler and CUDA ----------------------------------------------------------------------------


@pytest.mark.private(
    "torch.autograd._profiler_enabled",
    need="whether a profiler runs: ranges and their names are made only then",
    instead="torch.profiler.record_function always, at some microseconds each",
)
def test_a_running_profiler_is_seen() -> None:
    assert not torch.autograd._profiler_enabled()
    with profile():
        assert torch.autograd._profiler_enabled()
    assert not torch.autograd._profiler_enabled()


@pytest.mark.private(
    "torch._C._profiler._EventType",
    "profiler.kineto_results",
    need="in benchmarks: every allocation and every operator with its operands' storages, from "
    "the profiler's tree of events, which has no public reader",
    instead="totals without categories, from profile(profile_memory=True).events()",
)
def test_a_profile_has_allocations_and_operands() -> None:
    from torch._C._profiler import _EventType

    x = torch.ones(4, 8)
    profiler = profile(profile_memory=True, record_shapes=True)
    profiler.start()
    out = torch.cat([x, x])
    address, num_bytes = out.data_ptr(), out.nbytes
    del out
    profiler.stop()
    assert profiler.profiler is not None
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    events: list[Any] = []
    while waiting:
        events.append(waiting.pop())
        waiting.extend(events[-1].children)
    events.sort(key=lambda event: event.start_time_ns)
    (operator,) = [one for one in events if one.tag == _EventType.TorchOp]
    assert operator.name == "aten::cat"
    listed = operator.extra_fields.inputs[0]
    assert [one.storage_data_ptr for one in listed] == [x.untyped_storage().data_ptr()] * 2
    assert [(one.sizes, one.dtype) for one in listed] == [([4, 8], torch.float32)] * 2
    assert operator.extra_fields.inputs[-1] == 0  # the dimension
    changes = [one.extra_fields for one in events if one.tag == _EventType.Allocation]
    assert [one.alloc_size for one in changes if one.ptr == address] == [num_bytes, -num_bytes]


@pytest.mark.private(
    "torch.cuda._sleep",
    need="a stream that is busy while the host goes on, behind which a collective begins late",
    instead="a kernel of our own, as the simulated cluster's delay, or a matrix product",
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stream_sleeps_for_cycles() -> None:
    cycles = 20_000_000
    stream = torch.cuda.Stream()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)  # clocks rise under load
        events[0].record()
        torch.cuda._sleep(cycles)
        events[1].record()
        torch.cuda._sleep(3 * cycles)
        events[2].record()
    assert not events[2].query()
    events[2].synchronize()
    once, thrice = (a.elapsed_time(b) for a, b in pairwise(events))
    assert 2 < thrice / once < 4


@pytest.mark.private(
    "torch.cuda._compile_kernel",
    need="a kernel that waits for the device's global timer: the simulated cluster's collectives "
    "on CUDA; NVRTC comes with torch, and no compiler is needed",
    instead="a Triton kernel that reads triton.language.extra.cuda.globaltimer",
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_kernel_is_compiled_from_its_text() -> None:
    source = """
    extern "C" __global__ void add(int* out, int amount) {
      if (threadIdx.x == 0) atomicAdd(out, amount);
    }
    """
    add = torch.cuda._compile_kernel(source, "add")
    total = torch.zeros(1, dtype=torch.int32, device="cuda")
    add(grid=(4, 1, 1), block=(32, 1, 1), args=[total, 5])
    assert total.item() == 20


# -- hooks of parameters ---------------------------------------------------------------------------


@pytest.mark.private(
    "Tensor._post_accumulate_grad_hooks",
    need="users' hooks of register_post_accumulate_grad_hook(): autograd never accumulates into an "
    "original parameter, so they are called when its reduced gradient is there",
    instead="a method register_post_accumulate_grad_hook of ours on each original parameter",
)
def test_hooks_of_a_parameter_can_be_called() -> None:
    param = nn.Parameter(torch.ones(2))
    assert not param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    seen: list[torch.Tensor] = []
    handles = [param.register_post_accumulate_grad_hook(seen.append) for _ in range(2)]
    for hook in param._post_accumulate_grad_hooks.values():  # type: ignore[attr-defined]
        hook(param)
    assert [one is param for one in seen] == [True, True]
    param.data = torch.ones(1)  # as when it is sharded
    assert len(param._post_accumulate_grad_hooks) == 2  # type: ignore[attr-defined]
    for handle in handles:
        handle.remove()
    assert not param._post_accumulate_grad_hooks  # type: ignore[attr-defined]


@pytest.mark.private(
    "Tensor._in_backward_optimizers",
    need="optimizers of torch.distributed.optim._apply_optimizer_in_backward: its hook is "
    "on a node that is in no graph, so they step when the reduced gradient is there",
    instead="a public function that runs them",
)
def test_optimizers_in_backward_are_known_to_the_parameter() -> None:
    param = nn.Parameter(torch.ones(2))
    _apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.5})
    param.grad = torch.ones(2)
    for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
        optimizer.step()
    assert param.tolist() == [0.5, 0.5]


@pytest.mark.private(
    "Tensor._backward_hooks",
    need="a parameter with a hook of register_hook(), which would never be called, is refused",
    instead="nothing: such hooks are silently left out, which the docs then say",
)
def test_a_parameter_tells_of_its_hooks() -> None:
    param = nn.Parameter(torch.ones(2))
    assert not param._backward_hooks
    handle = param.register_hook(lambda grad: grad)
    assert param._backward_hooks
    handle.remove()
    assert not param._backward_hooks


@pytest.mark.private(
    "Module._forward_pre_hooks",
    "Module._forward_hooks",
    "Module._backward_pre_hooks",
    "Module._backward_hooks",
    need="units with hooks inside are not compiled in hooks mode: Dynamo traces them into code "
    "that equal units share",
    instead="such hooks are called in the block that is traced first, or in none, and documented "
    "so",
)
def test_a_module_tells_of_its_hooks() -> None:
    module = nn.Linear(2, 2)
    kinds = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")
    tables = [
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    ]
    for kind, table in zip(kinds, tables, strict=True):
        hook = getattr(module, f"register_{kind}")(print)
        assert [*table.values()] == [print]
        hook.remove()
    assert not any(tables)
    assert module._forward_hooks is tables[1]


@pytest.mark.private(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    need="quantised parameters of other libraries, which a flat parameter would break, are refused",
    instead="ask for __tensor_flatten__",
)
def test_wrapper_subclasses_are_told_from_plain_tensors() -> None:
    from torch.testing._internal.two_tensor import TwoTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    plain = torch.ones(2)
    assert is_traceable_wrapper_subclass(nn.Parameter(TwoTensor(plain, plain)))
    assert not is_traceable_wrapper_subclass(nn.Parameter(plain))


# -- versions and bases ----------------------------------------------------------------------------


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
    "torch.fx._symbolic_trace.is_fx_symbolic_tracing",
    need="an error where torch.fx traces a sharded model: it may call none of the unit's hooks",
    instead="a search for torch.fx.Proxy among the inputs, which misses a model of one unit",
)
def test_torch_fx_asks_a_model_for_its_modules_while_it_traces() -> None:
    seen = []

    class _Asked(nn.Linear):
        def named_modules(self, *arguments: Any, **named: Any) -> Any:
            seen.append(torch.fx._symbolic_trace.is_fx_symbolic_tracing())
            return super().named_modules(*arguments, **named)

    model = _Asked(2, 2)
    torch.fx.symbolic_trace(model)
    assert seen[0] is True
    assert not torch.fx._symbolic_trace.is_fx_symbolic_tracing()
