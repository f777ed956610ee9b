"""Dynamo."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import re
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def _in_two_graphs(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    _break_the_graph()
    return x + 1


# -- what a trace knows ----------------------------------------------------------------------------


@pytest.mark.private(
    "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx",
    "OutputGraph.compiler_fn",
    need="the backend that traces now, whose declared mode decides what a unit's call becomes; "
    "torch.compiler says only that some trace runs",
    instead="the user names the mode when the model is wrapped",
)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_trace_knows_its_backend(fullgraph: bool) -> None:
    from torch._dynamo.eval_frame import innermost_backend
    from torch._dynamo.symbolic_convert import InstructionTranslator

    backends: list[Any] = []

    @torch.compiler.assume_constant_result
    def look() -> int:
        translator: Any = InstructionTranslator.current_tx()
        backends.append(innermost_backend(translator.output.compiler_fn))
        return len(backends)

    backend = Recorder()
    torch._dynamo.optimize(backend=backend, nopython=fullgraph)(lambda x: x * look())(X)
    assert backends == [backend]
    torch.compile(lambda x: x - look(), backend=backend, fullgraph=fullgraph)(X)
    assert backends[1].compiler_fn is backend


@pytest.mark.private(
    "InstructionTranslator.one_graph",
    need="whether fullgraph was requested, which hooks between graphs cannot give",
    instead="nothing: Dynamo's own error about the graph break takes the place of ours",
)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_trace_knows_whether_it_must_be_one_graph(fullgraph: bool) -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    seen: list[bool] = []

    @torch.compiler.assume_constant_result
    def look() -> int:
        translator: Any = InstructionTranslator.current_tx()
        seen.append(translator.one_graph)
        return 1

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * look()

    torch.compile(lambda x: inner(x) + look(), backend="eager", fullgraph=fullgraph)(X)
    assert seen == [fullgraph, fullgraph]


@pytest.mark.private(
    "OutputGraph.current_tracer",
    need="whether a unit is called inside the body of an operator: only that of activation "
    "checkpointing becomes part of the graph; there is no public name",
    instead="the check goes; such a model then fails with an error of torch's",
)
def test_a_tracer_inside_a_body_has_a_parent() -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracers: list[Any] = []

    @torch.compiler.assume_constant_result
    def look() -> int:
        translator: Any = InstructionTranslator.current_tx()
        tracers.append(translator.output.current_tracer)
        return 1

    def body(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * look()

    def frame(x: torch.Tensor) -> torch.Tensor:
        return body(x) + checkpoint(body, x, use_reentrant=False)

    torch.compile(frame, backend="eager", fullgraph=True)(X)
    outside, inside = tracers
    assert outside.parent is None
    assert inside.parent is outside
    assert inside.source_target is torch.ops.higher_order.tag_activation_checkpoint


@pytest.mark.private(
    "torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer",
    need="a unit in a checkpointed body puts parameter views into modules and takes them out "
    "again; Dynamo refuses all changes of objects from outside of a body",
    instead="torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint, which the user "
    "would set, for changes of the user's own too; or checkpoints around units are refused",
)
def test_a_body_may_change_what_it_restores() -> None:
    from torch._dynamo.utils import (
        _disable_side_effect_safety_checks_for_current_subtracer as with_side_effects,
    )

    holder = nn.Linear(2, 2, bias=False)

    def put(value: torch.Tensor) -> None:
        holder._parameters["weight"] = value  # type: ignore[assignment]

    def body(x: torch.Tensor) -> torch.Tensor:
        original = holder._parameters["weight"]
        with_side_effects(put, 2 * torch.eye(2))
        y = holder(x).sin()
        with_side_effects(put, original)
        return y

    backend = Recorder()
    compiled = torch.compile(
        lambda x: checkpoint(body, x, use_reentrant=False), backend=backend, fullgraph=True
    )
    before = holder.weight
    x = X.clone().requires_grad_()
    y = compiled(x)
    y.sum().backward()
    torch.testing.assert_close(y, (2 * X).sin())
    torch.testing.assert_close(x.grad, 2 * (2 * X).cos())
    assert holder.weight is before


@pytest.mark.private(
    "torch.ops.higher_order.tag_activation_checkpoint",
    "_checkpoint_context_fn",
    need="in hooks mode a checkpointed body with units is cut out of the graph and checkpointed "
    "when it runs, with what the user has passed",
    instead="end graphs at calls of checkpoint (the root is then compiled in parts, or not)",
)
def test_a_checkpointed_body_is_a_node() -> None:
    def contexts() -> Any:
        return contextlib.nullcontext(), contextlib.nullcontext()

    def frame(x: torch.Tensor) -> torch.Tensor:
        arguments = {"use_reentrant": False, "context_fn": contexts, "preserve_rng_state": False}
        return checkpoint(torch.sin, x, **arguments)

    backend = Recorder()
    torch.compile(frame, backend=backend, fullgraph=True)(X)
    (gm,) = backend.graphs
    operator = torch.ops.higher_order.tag_activation_checkpoint
    (node,) = (node for node in gm.graph.nodes if node.target is operator)
    body = gm.get_submodule(node.args[0].target)
    assert body.meta["_checkpoint_context_fn"] is contexts
    assert [one.meta["example_value"].shape for one in body.graph.find_nodes(op="placeholder")]
    assert node.kwargs == {"use_reentrant": False, "preserve_rng_state": False}
    assert isinstance(body(X), tuple)


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
    "torch._guards.TracingContext.extract_stack",
    need="whether a nested unit's call is the frame that is compiled, and so no leaf of a graph",
    instead="InstructionTranslator.current_tx().f_code, compared with the code of the unit's call",
)
def test_the_stack_of_a_frame_of_its_own_is_one_deep() -> None:
    from torch._guards import TracingContext

    depths: list[int] = []

    @torch.compiler.assume_constant_result
    def look() -> int:
        depths.append(len(TracingContext.extract_stack()))
        return 1

    class Unit(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * look()

    unit = Unit()
    torch._dynamo.optimize(backend=Recorder())(unit.forward)(X)
    assert depths == [1]
    torch._dynamo.optimize(backend=Recorder())(lambda x: unit(x) + 1)(X)
    assert depths[1] > 1


# -- backends and what they have compiled ----------------------------------------------------------


@pytest.mark.private(
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch._dynamo.eval_frame.innermost_backend",
    need="the backend around a frame that Dynamo runs uncompiled: a unit below is compiled with it",
    instead="nothing: below a root that runs uncompiled, users call Module.compile of each unit",
)
def test_an_uncompiled_frame_knows_the_backend_around_it() -> None:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo.eval_frame import innermost_backend

    callbacks: list[Any] = []

    def frame(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            callbacks.append(get_eval_frame_callback())
            x = x + 1
        return x

    backend = Recorder()
    torch._dynamo.optimize(backend=backend)(frame)(X)
    assert [innermost_backend(callback) is backend for callback in callbacks] == [True, True]
    callbacks.clear()
    torch.compile(frame, backend=backend)(X)
    assert innermost_backend(callbacks[0]) is innermost_backend(callbacks[1])
    assert innermost_backend(callbacks[0]).compiler_fn is backend
    assert not callable(get_eval_frame_callback())


@pytest.mark.private(
    "torch._dynamo.optimize",
    need="a callable compiled with exactly this backend object, so that units share compiled code; "
    "torch.compile puts every backend into a new object",
    instead="torch.compile, and units that tell backends apart by the innermost compiler_fn",
)
def test_callables_with_one_backend_share_compiled_code() -> None:
    from torch._dynamo.eval_frame import innermost_backend

    backend = Recorder()
    for model in (Double(), Double()):
        compiled = torch._dynamo.optimize(backend=backend)(model.__call__)
        assert torch.equal(compiled(X), model(X))
    assert len(backend.graphs) == 1

    made = innermost_backend(torch.compile(nn.ReLU(), backend=backend).dynamo_ctx.callback)
    for function in (_plus_one, lambda x: _plus_one(x)):  # a wrapper of torch.compile's is one too
        again = torch._dynamo.optimize(backend=made, nopython=True, dynamic=None)(function)
        assert torch.equal(again(X), X + 1)
    assert len(backend.graphs) == 3

    assert torch.equal(torch._dynamo.optimize(backend=made)(_in_two_graphs)(X), X * 2 + 1)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="disable"):
        torch._dynamo.optimize(backend=made, nopython=True, dynamic=None)(_in_two_graphs)(X)


@pytest.mark.private(
    "torch._dynamo.eval_frame.cached_backends",
    need="Dynamo keeps every backend until its reset; that of a model goes with the model",
    instead="nothing: backends then stay until torch.compiler.reset()",
)
def test_a_backend_can_be_let_go() -> None:
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.eval_frame import cached_backends

    backend = Recorder()
    function = _with_own_code(_plus_one)
    assert id(backend) not in cached_backends
    compiled = torch._dynamo.optimize(backend=backend)(function)
    assert cached_backends.pop(id(backend), None) is backend
    assert torch.equal(compiled(X), X + 1)
    assert id(backend) not in cached_backends

    gone = weakref.ref(backend)
    reset_code(function.__code__)
    del backend, function, compiled
    gc.collect()
    assert gone() is None


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
    "torch._C._dynamo.eval_frame.reset_code",
    need="compiled code that goes with the model: Dynamo keeps it by code object, and keeps that",
    instead="nothing: compiled code of models that are gone stays until torch.compiler.reset()",
)
def test_compiled_code_can_be_let_go() -> None:
    from torch._C._dynamo.eval_frame import reset_code

    backend = Recorder()
    function = _with_own_code(_plus_one)
    compiled = torch._dynamo.optimize(backend=backend)(function)
    compiled(X)
    reset_code(function.__code__)
    compiled(X)
    assert len(backend.graphs) == 2

    code = weakref.ref(function.__code__)
    weakref.finalize(function, reset_code, function.__code__).atexit = False
    del function, compiled
    gc.collect()
    assert code() is None


@pytest.mark.private(
    "torch._dynamo.trace_rules.check",
    need="whether Dynamo skips a module's own frame, as it does those of torch.nn: such a module "
    "gets a frame in between",
    instead="a frame in between for every module; or for those whose class is defined in torch.nn",
)
def test_frames_of_torch_are_skipped() -> None:
    from torch._dynamo import trace_rules

    for module in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.LayerNorm(2)):
        assert trace_rules.check(module.forward)
    assert not trace_rules.check(Double().forward)

    backend = Recorder()
    torch._dynamo.optimize(backend=backend)(nn.Linear(2, 2).__call__)(X)
    assert not backend.graphs
    torch._dynamo.optimize(backend=backend)(Double().__call__)(X)
    assert len(backend.graphs) == 1


# -- errors and graph breaks -----------------------------------------------------------------------


@pytest.mark.private(
    "torch._dynamo.exc.PackageError",
    need="errors that are raised while tracing and reach the user unchanged, of our own class",
    instead="another of Dynamo's errors as the second base: any that convert_frame raises again",
)
def test_an_error_reaches_the_user_as_it_is() -> None:
    from torch._dynamo.exc import PackageError

    class OurError(RuntimeError):
        pass

    class RefusedError(OurError, PackageError):
        pass

    @torch.compiler.assume_constant_result
    def refuse() -> None:
        raise RefusedError("four parts")

    def frame(x: torch.Tensor) -> torch.Tensor:
        refuse()
        return x + 1

    for fullgraph in (False, True):
        with pytest.raises(OurError) as caught:
            torch.compile(lambda x: frame(x) * 2, backend="eager", fullgraph=fullgraph)(X)
        assert type(caught.value) is RefusedError
        assert str(caught.value).startswith("four parts")


@pytest.mark.private(
    "torch._dynamo.exc.unimplemented",
    "torch._dynamo.exc.Unsupported",
    need="a graph break where a unit returns what no node can; only code that is traced can break "
    "a graph publicly",
    instead="an error: hooks mode then refuses such a unit below another",
)
def test_a_leaf_can_break_the_graph() -> None:
    from torch._dynamo.exc import Unsupported, unimplemented

    with pytest.raises(Unsupported):
        unimplemented(gb_type="a", context="b", explanation="c", hints=[])

    @torch.compiler.allow_in_graph
    def leaf(x: torch.Tensor) -> torch.Tensor:
        if torch._guards.detect_fake_mode([x]) is None:
            return x + 1
        return unimplemented(
            gb_type="unit that cannot be a node of the graph",
            context="a unit that returns a set",
            explanation="a unit that returns a set cannot be a node of the graph around it.",
            hints=["return tuples"],
        )

    def frame(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        return leaf(x) * 3

    backend = Recorder()
    assert torch.equal(torch.compile(frame, backend=backend)(X), X * 9)
    assert backend.graphs[0].compile_subgraph_reason.graph_break
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="unit that cannot be a node") as caught:
        torch.compile(frame, backend=backend, fullgraph=True)(X)
    assert "returns a set cannot be a node of the graph around it." in str(caught.value)
    assert "return tuples" in str(caught.value)


@pytest.mark.private(
    "GraphModule.compile_subgraph_reason",
    need="a warning where a graph break ends a graph of graph mode; a backend is not told of it",
    instead="the counter of graph breaks, read before and after; or no warning",
)
def test_a_graph_knows_whether_a_break_ends_it() -> None:
    backend = Recorder()
    torch.compile(_in_two_graphs, backend=backend)(X)
    assert [gm.compile_subgraph_reason.graph_break for gm in backend.graphs] == [True, False]


@pytest.mark.private(
    "torch._dynamo.utils.counters",
    need="numbers of graphs and of graph breaks by their reasons; only logs are public",
    instead="the artifacts of the trace log, which explain() reads for their places already",
)
def test_graphs_and_graph_breaks_are_counted() -> None:
    from torch._dynamo.utils import counters

    old_breaks, old_graphs = dict(counters["graph_break"]), counters["stats"]["unique_graphs"]
    torch.compile(_in_two_graphs, backend="eager")(X)
    new = {r: n - old_breaks.get(r, 0) for r, n in counters["graph_break"].items()}
    ((reason, count),) = [(reason, count) for reason, count in new.items() if count]
    assert "torch.compiler.disable" in reason
    assert count == 1
    assert counters["stats"]["unique_graphs"] - old_graphs == 2


@pytest.mark.private(
    "torch._dynamo.compiled_autograd.in_compiled_autograd_region",
    need="hooks refuse a backward that compiled autograd runs: it would lose gradients, silently",
    instead="torch._dynamo.config.compiled_autograd, which says less: whether it may be used",
)
def test_a_hook_knows_compiled_autograd() -> None:
    compiled_autograd = torch._dynamo.compiled_autograd
    seen: list[bool] = []

    @torch.compiler.disable
    def hook(grad: torch.Tensor) -> None:
        seen.append(compiled_autograd.in_compiled_autograd_region)

    def step(x: torch.Tensor) -> None:
        y = x.sin()
        y.register_hook(hook)
        y.sum().backward()

    x = torch.ones(2, requires_grad=True)
    step(x)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="eager")(x)
    assert seen == [False, True]
    assert not compiled_autograd.in_compiled_autograd_region


@pytest.mark.private(
    "torch._dynamo.utils.compilation_time_metrics",
    need="seconds of a first step by phase, in a benchmark",
    instead="torch._dynamo.utils.compile_times(), whose numbers have been made text",
)
def test_compile_times_are_kept_by_phase() -> None:
    from torch._dynamo.utils import compilation_time_metrics

    def traces() -> list[float]:
        return list(compilation_time_metrics.get("bytecode_tracing", ()))

    before = traces()
    torch.compile(torch.sin, backend="eager", fullgraph=True)(X)
    (seconds,) = traces()[len(before) :]
    assert seconds > 0


@pytest.fixture
def artifacts() -> Iterator[list[tuple[str, str]]]:
    """Names and texts of what is written to torch's trace log."""
    written: list[tuple[str, str]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            metadata, payload = getattr(record, "metadata", {}), getattr(record, "payload", None)
            if "artifact" in metadata and isinstance(payload, str):
                written.append((metadata["artifact"]["name"], payload))

    listener = Listener(logging.DEBUG)
    log = logging.getLogger("torch.__trace")
    log.addHandler(listener)
    yield written
    log.removeHandler(listener)


def _texts(artifacts: list[tuple[str, str]], wanted: str) -> list[str]:
    return [text for name, text in artifacts if name == wanted]


@pytest.mark.private(
    "dynamo_graph_break_reason",
    need="where a graph breaks and why, in explain(): read from the wording of this artifact",
    instead="new patterns for the new wording; without the artifact, the reasons of the counters",
)
def test_a_graph_break_is_told_with_its_place(artifacts: list[tuple[str, str]]) -> None:
    def breaks_in_a_loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            _break_the_graph()
        return x + 1

    for function in (_in_two_graphs, breaks_in_a_loop):
        artifacts.clear()
        torch.compile(function, backend="eager")(X)
        text = _texts(artifacts, "dynamo_graph_break_reason")[0]
        line = function.__code__.co_firstlineno + 2
        lines = text.splitlines()
        assert lines[0] == f"Graph break in user code at {__file__}:{line}"
        assert lines[1].startswith("Graph Break Reason: ")
        assert lines[2:4] == ["", "Skip calling `torch.compiler.disable()`d function"]
        at = re.search(rf'File "{re.escape(__file__)}", line {line}, in .*\n\s*(.+)', text)
        assert at is not None
        assert at[1] == "_break_the_graph()"
        gave_up = lines[1].startswith("Graph Break Reason: Failed to handle graph break gracefully")
        assert gave_up == (function is breaks_in_a_loop)


@pytest.mark.private(
    "recompile_reasons",
    need="the guards that made Dynamo compile again, in explain(): read from this artifact",
    instead="new patterns for the new form; without the artifact, the log of recompiles",
)
def test_a_recompile_is_told_with_its_guard(artifacts: list[tuple[str, str]]) -> None:
    compiled = torch.compile(_plus_one, backend="eager", dynamic=False)
    for length in (3, 4, 5):
        compiled(torch.ones(length))
    first, second = _texts(artifacts, "recompile_reasons")
    assert re.match(r"\d+/0: tensor 'x' size mismatch at index 0. expected 3, ", first)
    newest, oldest = json.loads(second)
    assert re.match(r"\d+/1: tensor 'x' size mismatch at index 0. expected 4, ", newest)
    assert re.match(r"\d+/0: tensor 'x' size mismatch at index 0. expected 3, ", oldest)


@pytest.fixture
def default_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logs that a test sets are those of the beginning after it."""
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    yield
    torch._logging.set_logs()


@pytest.mark.private(
    "torch._logging.set_logs",
    need="benchmarks/dynamo/distributed.py --verbose shows graph breaks and recompiles",
    instead="the environment variable TORCH_LOGS, set before torch is imported",
)
def test_breaks_and_recompiles_are_logged(
    default_logs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._logging.set_logs(graph_breaks=True, recompiles=True)
    compiled = torch.compile(_in_two_graphs, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    compiled(torch.ones(4))
    said = capsys.readouterr().err
    assert "Graph break in user code" in said
    assert "Recompiling function _in_two_graphs" in said


# -- compiled models -------------------------------------------------------------------------------


@pytest.mark.private(
    "torch._dynamo.eval_frame.OptimizedModule",
    "torch._dynamo.OptimizedModule",
    "OptimizedModule._orig_mod",
    need="the model inside torch.compile(model), which is what has units, state and keys",
    instead="the attribute by its new name; or users call Module.compile, which makes no wrapper",
)
def test_a_compiled_model_holds_the_model() -> None:
    from torch._dynamo.eval_frame import OptimizedModule

    model = Double()
    compiled = torch.compile(model, backend="eager")
    assert OptimizedModule is torch._dynamo.OptimizedModule
    assert type(compiled) is OptimizedModule
    assert not isinstance(model, OptimizedModule)
    assert compiled._orig_mod is model
    assert [name for name, _ in compiled.named_parameters()] == ["_orig_mod.linear.weight"]
    assert list(compiled.state_dict()) == ["_orig_mod.linear.weight"]


@pytest.mark.private(
    "OptimizedModule.dynamo_ctx",
    need="explain() compiles a model again as it was compiled, and a wrapper around a compiled "
    "model compiles itself so; neither the backend nor fullgraph is public",
    instead="arguments backend and fullgraph of explain(); compile the wrapper, not the model",
)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_knows_how_it_was_compiled(fullgraph: bool) -> None:
    from torch._dynamo.eval_frame import innermost_backend

    backend = Recorder()
    compiled = torch.compile(Double(), backend=backend, fullgraph=fullgraph, dynamic=False)
    context = compiled.dynamo_ctx
    assert context.fullgraph is fullgraph
    wrapper = innermost_backend(context.callback)
    assert wrapper.compiler_fn is backend
    assert wrapper.compiler_name == str(backend)
    assert wrapper.dynamic is False

    outer = Double()
    outer._compiled_call_impl = context(outer._call_impl)
    assert torch.equal(outer(X), outer.forward(X))
    assert len(backend.graphs) == 1


@pytest.mark.private(
    "torch._dynamo.eval_frame.OptimizedModule._load_from_state_dict",
    need="a compiled model loads the plain names that it saves; a class has no hook for it",
    instead="a hook before loading on each compiled model, where one is first seen",
)
def test_a_compiled_model_asks_its_class_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.eval_frame import OptimizedModule

    prefixes: list[str] = []

    def load(module: OptimizedModule, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        prefixes.append(prefix)
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}_orig_mod.{key[len(prefix) :]}"] = state_dict.pop(key)
        nn.Module._load_from_state_dict(module, state_dict, prefix, *rest)

    monkeypatch.setattr(OptimizedModule, "_load_from_state_dict", load)
    saved = Double().state_dict()
    compiled = torch.compile(Double(), backend="eager")
    parent = nn.ModuleDict({"part": torch.compile(Double(), backend="eager")})
    compiled.load_state_dict(saved)
    parent.load_state_dict({f"part.{name}": value for name, value in saved.items()})
    assert prefixes == ["", "part."]
    for model in (compiled, parent):
        assert torch.equal(next(model.parameters()), saved["linear.weight"])


# -- compilations ----------------------------------------------------------------------------------


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
    "torch._dynamo.callback.CallbackArgs",
    "torch._dynamo.callback.CallbackTrigger",
    need="which compilation begins: limit_recompiles() counts those of a function after its first",
    instead="the log of recompiles, counted by a handler",
)
def test_a_callback_is_told_which_compilation_it_is() -> None:
    from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

    told: list[tuple[bool, str]] = []

    def begin(args: CallbackArgs) -> None:
        is_forward = args.callback_trigger is CallbackTrigger.DYNAMO
        told.append((is_forward, args.compile_id.rpartition("/")[2]))

    callback_handler.register_start_callback(begin)
    model = Double()
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    for length in (1, 3):
        output = compiled(torch.ones(length, 2))
        assert told[-1][0]
        output.sum().backward()
        assert not told[-1][0]
    assert [number for is_forward, number in told if is_forward] == ["0", "1"]
    torch.compile(_plus_one, backend="eager")(X)
    assert told[-1] == (True, "0")


@pytest.mark.private(
    "torch._guards.CompileContext.current_compile_id",
    need="explain() compiles a model with a backend of its own, apart from the model's code, and "
    "counts which graphs ran",
    instead="the number of calls of the backend",
)
def test_a_backend_of_ones_own_compiles_apart() -> None:
    made: list[str] = []

    class Own:
        def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
            made.append(str(torch._guards.CompileContext.current_compile_id()))
            return gm.forward

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.compile(double, backend="eager")(torch.ones(2))
    compiled = torch._dynamo.optimize(backend=Own())(double)
    for _ in range(2):
        compiled(torch.ones(2))
    assert len(made) == 1
    assert re.fullmatch(r"\d+/1", made[0])


@pytest.mark.private(
    "torch._dynamo.config.error_on_recompile",
    need="an error, with the guards that failed, for one recompilation too many",
    instead="torch.compiler.set_stance with fail_on_recompile, which refuses new functions too",
)
def test_a_recompilation_can_be_an_error() -> None:
    from torch._dynamo.callback import callback_handler

    def forbid_the_next(_: object) -> None:
        torch._dynamo.config.error_on_recompile = True

    compiled = torch.compile(_plus_one, backend="eager", dynamic=False)
    compiled(X)
    callback_handler.register_start_callback(forbid_the_next)
    with torch._dynamo.config.patch(error_on_recompile=False):  # which puts it back
        compiled(torch.ones(3))
        torch.compile(Double(), backend="eager")(X)
        with pytest.raises(RuntimeError, match="size mismatch at index 0") as caught:
            compiled(torch.ones(4))
    assert type(caught.value) is torch._dynamo.exc.RecompileError


@pytest.mark.private(
    "torch._dynamo.convert_frame.register_bytecode_hook",
    need="the bytecode that Dynamo made of a frame, which inspect_graphs() decompiles",
    instead="the log of bytecode, as text; or inspect_graphs() leaves the decompiled code out",
)
def test_a_hook_gets_the_bytecode() -> None:
    seen: list[tuple[CodeType, CodeType]] = []

    def hook(code: CodeType, new_code: CodeType) -> None:
        seen.append((code, new_code))

    compiled = torch.compile(_plus_one, backend="eager", dynamic=False)
    with contextlib.ExitStack() as stack:
        handle = torch._dynamo.convert_frame.register_bytecode_hook(hook)
        stack.callback(handle.remove)
        assert torch.equal(compiled(X), X + 1)
    compiled(torch.ones(3))
    ((code, new_code),) = seen
    assert code is _plus_one.__code__
    assert new_code.co_code != code.co_code


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
    "Module._fsdp_use_orig_params",
    need="managed modules are compiled only with this attribute",
    instead="nothing: the attribute goes",
)
def test_a_managed_module_says_that_it_has_its_parameters() -> None:
    model = Double()
    model._is_fsdp_managed_module = True
    compiled = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)
    for refused in (None, False):
        model._fsdp_use_orig_params = refused
        with pytest.raises(RuntimeError, match="use_orig_params"):
            compiled(X)
    model._fsdp_use_orig_params = True
    compiled(X)


@pytest.mark.private(
    "torch._dynamo.config.optimize_ddp",
    need="benchmarks/dynamo/distributed.py --dynamo_no_optimize_ddp: one graph under DDP",
    instead="the option goes",
)
@pytest.mark.parametrize("splits", [True, False])
def test_ddp_is_one_graph_on_request(splits: bool, group: dist.ProcessGroup) -> None:
    class TwoBuckets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(600, 600), nn.Linear(600, 600)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    parallel = nn.parallel.DistributedDataParallel(TwoBuckets(), bucket_cap_mb=1)
    backend = Recorder()
    with contextlib.ExitStack() as stack:
        if not splits:
            stack.enter_context(torch._dynamo.config.patch(optimize_ddp=False))
        torch.compile(parallel, backend=backend)(torch.ones(1, 600))
    assert len(backend.graphs) == 1 + splits


_kept: list[torch.Tensor] = []
_changes: list[bool] = []


@torch.compiler.assume_constant_result
def _look_for_changes() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    effects: Any = InstructionTranslator.current_tx().output.side_effects
    _changes.append(
        any(
            effects.is_modified(one)
            for one in effects.id_to_variable.values()
            if not isinstance(one.mutation_type, (AttributeMutationNew, ValueMutationNew))
        )
    )
    return True


def _makes_a_list(x: torch.Tensor) -> torch.Tensor:
    made = [x]
    made.append(x + 1)
    _look_for_changes()
    return made[1]


def _appends_to_a_global(x: torch.Tensor) -> torch.Tensor:
    _kept.append(x)
    _look_for_changes()
    return x + 1


@pytest.mark.private(
    "torch._dynamo.variables.base.AttributeMutationNew",
    "torch._dynamo.variables.base.ValueMutationNew",
    "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx",
    need="whether code before a nested unit has changed Python state, which the graph would change "
    "only after the unit has run",
    instead="end graphs at every unit (hooks mode compiles less between units)",
)
def test_changes_of_objects_that_were_there_are_seen() -> None:
    for function in (_makes_a_list, _appends_to_a_global):
        torch.compile(function, backend="eager", fullgraph=True)(X)
    _kept.clear()
    assert _changes == [False, True]


@pytest.mark.private(
    "types.CodeType.co_name",
    need="units of one class and different shapes compile apart: Dynamo remembers by file, line "
    "and name of a frame which sizes have changed",
    instead="torch._dynamo.mark_static on the inputs of units",
)
def test_frames_of_other_names_do_not_make_sizes_dynamic() -> None:
    recorder = Recorder()
    for number, length in enumerate((4, 8, 16)):
        copy = _with_own_code(_plus_one)
        copy.__code__ = copy.__code__.replace(co_name=f"plus_one_{number}")
        torch.compile(copy, backend=recorder)(torch.ones(length))
    sizes = [
        node.meta["example_value"].shape[0]
        for gm in recorder.graphs
        for node in gm.graph.nodes
        if node.op == "placeholder"
    ]
    assert sizes == [4, 8, 16]
    assert all(isinstance(size, int) for size in sizes)


@pytest.mark.private(
    "torch._dynamo.mark_dynamic",
    need="kernels of messages are compiled once for any number of blocks, and for a block's width",
    instead="``dynamic=True``: the width is no constant of the code, which takes twice as long",
)
def test_one_dimension_is_dynamic() -> None:
    recorder = Recorder()
    compiled = torch.compile(lambda x: x * 2, backend=recorder)
    for rows in (4, 6):
        x = torch.ones(rows, 3)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x)
    (gm,) = recorder.graphs
    (given,) = (
        node.meta["example_value"]
        for node in gm.graph.nodes
        if isinstance(node.meta.get("example_value"), torch.Tensor) and node.op == "placeholder"
    )
    assert [isinstance(size, int) for size in given.shape] == [False, True]


@pytest.mark.private(
    "torch._C._set_grad_enabled",
    need="where a region without gradients begins and ends in a graph of Dynamo's: a segment is "
    "compiled in the grad mode in which it begins",
    instead="the mode seen at every leaf while Dynamo traces, as one of its arguments",
)
def test_a_change_of_the_grad_mode_is_a_node() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
        return x * y

    recorder = Recorder()
    torch.compile(region, backend=recorder)(torch.ones(2, requires_grad=True))
    (gm,) = recorder.graphs
    changes = gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    assert [node.args for node in changes] == [(False,), (True,)]


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
