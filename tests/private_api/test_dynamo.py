"""Dynamo."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("fresh")

X = torch.ones(2)


class Recorder:
    """A backend that keeps its graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward


class Double(nn.Module):
    """A module of the user's, whose own frame Dynamo compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2


@torch.compiler.disable
def _break_the_graph() -> None:
    """Runs between two graphs."""


def _with_own_code(fn: Any) -> Any:
    return FunctionType(fn.__code__.replace(), fn.__globals__)


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.private(
    "torch._guards.TracingContext.get",
    need="an object that stands for one trace, as a key of what was seen in it",
    instead="InstructionTranslator.current_tx().output as the key",
)
def test_a_trace_has_an_object_of_its_own() -> None:
    from torch._guards import TracingContext

    seen: weakref.WeakKeyDictionary[TracingContext, int] = weakref.WeakKeyDictionary()

    @torch.compiler.assume_constant_result
    def count() -> int:
        seen[TracingContext.get()] = seen.get(TracingContext.get(), 0) + 1
        return seen[TracingContext.get()]

    def frame(x: torch.Tensor) -> torch.Tensor:
        return x * 10 + count() + count() * 2

    assert torch.compile(frame, backend="eager")(X).tolist() == [15.0, 15.0]
    assert torch.compile(lambda x: frame(x), backend="eager")(X).tolist() == [15.0, 15.0]

    def breaks(x: torch.Tensor) -> torch.Tensor:
        x = x * count()
        _break_the_graph()
        return x + 1

    assert torch.compile(breaks, backend="eager")(X).tolist() == [2.0, 2.0]  # traced afresh


@pytest.mark.private(
    "torch._dynamo.eval_frame.skip_code",
    need="a frame that chooses the code object of the next one, so that each state of accumulation "
    "has Dynamo's limit of graphs for itself; torch.compiler.disable would refuse to be traced",
    instead="users raise torch._dynamo.config.recompile_limit where they accumulate gradients",
)
def test_a_skipped_frame_chooses_who_is_compiled() -> None:
    from torch._dynamo.eval_frame import skip_code

    first, second = _with_own_code(_plus_one), _with_own_code(_plus_one)

    def choose(x: torch.Tensor) -> torch.Tensor:
        return first(x) if len(x) > 1 else second(x)

    skip_code(choose.__code__)
    backend = Recorder()
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled = torch.compile(choose, backend=backend, fullgraph=True)
        for x in (X, X[:1]):
            assert torch.equal(compiled(x), x + 1)
    assert len(backend.graphs) == 2

    traced = torch.compile(lambda x: choose(x) * 2, backend=backend, fullgraph=True)
    assert torch.equal(traced(X), (X + 1) * 2)
    assert len(backend.graphs) == 3


@pytest.mark.private(
    "torch._dynamo.eval_frame.cached_backends",
    need="Dynamo keeps every backend until its reset; that of a model goes with the model",
    instead="nothing: backends then stay until torch.compiler.reset()",
)
@pytest.mark.private(
    "torch._C._dynamo.eval_frame.reset_code",
    need="compiled code that goes with the model: Dynamo keeps it by code object, and keeps that",
    instead="nothing: compiled code of models that are gone stays until torch.compiler.reset()",
)
def test_a_backend_and_its_compiled_code_can_be_let_go() -> None:
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.eval_frame import cached_backends

    backend = Recorder()
    function = _with_own_code(_plus_one)
    compiled = torch._dynamo.optimize(backend=backend)(function)
    assert cached_backends.pop(id(backend)) is backend
    for _ in range(2):
        assert torch.equal(compiled(X), X + 1)
        reset_code(function.__code__)
    assert len(backend.graphs) == 2
    assert id(backend) not in cached_backends

    gone = [weakref.ref(function.__code__), weakref.ref(backend)]
    weakref.finalize(function, reset_code, function.__code__).atexit = False
    del backend, function, compiled
    gc.collect()
    assert [one() for one in gone] == [None, None]


@pytest.mark.private(
    "torch._dynamo.callback.callback_handler",
    need="ranks that wait keep waiting while this one compiles; nothing public tells of it",
    instead="a rank is busy while one of our backends runs, which misses the tracing before it",
)
def test_compilations_begin_and_end_with_callbacks() -> None:
    from torch._dynamo.callback import callback_handler

    told: list[str] = []

    def begin(_: object) -> None:
        told.append("begin")

    def end(_: object = None) -> None:
        told.append("end")

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        told.append("compile")
        if end not in callback_handler.end_callbacks:
            callback_handler.register_start_callback(begin)
            callback_handler.register_end_callback(end)
        return gm.forward

    compiled = torch.compile(_plus_one, backend=backend, dynamic=False)
    compiled(X)
    assert told == ["compile", "end"], "also the compilation that is under way has an end"
    compiled(torch.ones(3))
    compiled(X)
    assert told[2:] == ["begin", "compile", "end"]
    assert begin in callback_handler.start_callbacks
    callback_handler.remove_start_callback(begin)
    assert begin not in callback_handler.start_callbacks
    torch._dynamo.reset()
    assert end not in callback_handler.end_callbacks


@pytest.mark.private(
    "Module._is_fsdp_managed_module",
    need="parameters read afresh at each call, as they are views of this step's memory; by default "
    "Dynamo does so for all modules, with freezing for these only",
    instead="the tag goes, and compilation with freezing is refused",
)
@pytest.mark.parametrize("freezes", [False, True])
def test_parameters_are_read_afresh(freezes: bool) -> None:
    model = Double()
    for module in model.modules():
        module._is_fsdp_managed_module = True
        module._fsdp_use_orig_params = True
    backend = Recorder()
    compiled = torch.compile(model, backend=backend)
    for value in (1.0, 2.0, 3.0):
        flat = torch.full((4,), value, requires_grad=True)
        model.linear._parameters["weight"] = flat.view(2, 2)
        with torch._dynamo.config.patch(prepare_freezing=freezes):
            output = compiled(X)
        assert torch.equal(output, torch.full((2,), 4 * value))
        output.sum().backward()
        assert torch.equal(flat.grad, torch.full((4,), 2.0))
    assert len(backend.graphs) == 1


@pytest.mark.private(
    "FakeTensor.item_memo",
    need="which symbol the number in a tensor is, for a copy of it in another fake mode: segments "
    "are compiled in that of AOTAutograd",
    instead="a graph break at each number that changes between calls",
)
def test_a_fake_tensor_knows_its_number() -> None:
    from torch._guards import TracingContext

    kept: list[bool] = []
    numbers: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        mode: Any = TracingContext.get().fake_mode
        for node in gm.graph.find_nodes(op="placeholder"):
            value = node.meta["example_value"]
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                again = mode.from_tensor(value)
                numbers.append(value.item_memo)
                kept.append(again.item_memo is not None)
                again.item_memo = value.item_memo
                assert str(again.item()) == str(value.item_memo)
        return gm.forward

    run = torch.compile(lambda x, y: x * y, backend=backend)
    run(X, 0.5)
    assert run(X, 0.25).tolist() == [0.25, 0.25]
    assert [type(one) for one in numbers] == [torch.SymFloat]
    assert kept == [False]  # else it need not be handed on
