"""What Dynamo knows of a call, and its graph while it is made: calls that are traced once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo import guards as dynamo_guards
from torch._ops import HigherOrderOperator

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.skipif(
        not hasattr(dynamo_guards, "GUARD_VALUE_DISPATCH"), reason="torch 2.11 asks no guards"
    ),
]

X = torch.ones(2)


class Scale(nn.Module):
    """A module with an attribute and a buffer, of which Dynamo guards what it reads."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.register_buffer("shift", torch.full((2,), factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.shift


class _Operator(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("private_api_call")

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)


CALL = _Operator()


class Pair(nn.Module):
    """Two modules, called one after the other."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.first, self.second = Scale(first), Scale(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = CALL(type(self.first).forward, self.first, x)
        return CALL(type(self.second).forward, self.second, x)


class Recorder:
    """A backend that keeps its graphs."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward


@pytest.fixture
def calls() -> Iterator[list[Callable[..., Any]]]:
    """What Dynamo does when it meets the operator: functions of translator and variables."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.higher_order_ops import _hop_name_to_variable_class

    handlers: list[Callable[..., Any]] = []

    class Variable(VariableTracker):
        def __init__(self, value: Any, source: Any = None, **options: Any) -> None:
            super().__init__(source=source, **options)

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return handlers[0](tx, *args)

    _hop_name_to_variable_class["private_api_call"] = Variable
    yield handlers
    del _hop_name_to_variable_class["private_api_call"]


def _traced(tx: Any, fn: Any, module: Any, x: Any) -> Any:
    return fn.call_function(tx, [module, x], {})


@pytest.mark.private(
    "torch._dynamo.variables.higher_order_ops._hop_name_to_variable_class",
    "torch._dynamo.variables.base.VariableTracker",
    need="a call in traced code of which we decide whether Dynamo traces it",
    instead="every unit is traced: the first step grows by 0.07 s a unit",
)
def test_an_operator_may_have_a_variable_of_ours(calls: list[Any]) -> None:
    met = []

    def note(tx: Any, *args: Any) -> Any:
        met.append([type(one.realize()).__name__ for one in args])
        return _traced(tx, *args)

    calls.append(note)
    model = Pair(2.0, 3.0)
    compiled = torch.compile(model, backend=Recorder(), fullgraph=True)
    torch.testing.assert_close(compiled(X), model.second(model.first(X)))
    assert len(met) == 2
    assert met[0][0] == "UserFunctionVariable"


@pytest.mark.private(
    "torch._dynamo.guards",
    "torch._dynamo.guards.GUARD_VALUE_DISPATCH",
    "torch._dynamo.guards.SKIP_GUARD",
    "torch._dynamo.guards.UnsupportedGuardCheckSpec",
    "torch._dynamo.guards.install_guard",
    "torch._dynamo.source.TypeSource",
    "torch._dynamo.source.is_from_source",
    "torch._guards.ChainedSource",
    "torch._guards.Source",
    need="the guards on a unit, asked of another unit and installed for it",
    instead="every unit is traced",
)
@pytest.mark.parametrize("second", [2.0, 3.0])
def test_guards_on_one_module_are_asked_of_another(calls: list[Any], second: float) -> None:
    from torch._dynamo.source import TypeSource, is_from_source
    from torch._guards import ChainedSource, Source

    answers: dict[str, bool] = {}
    first: list[Any] = []

    def moved(source: Any, before: Any, after: Any) -> Any:
        return source.clone(lambda one: after if one == before else one)

    def ask(tx: Any, fn: Any, module: Any, x: Any) -> Any:
        source = module.realize().source
        assert isinstance(source, ChainedSource)
        assert isinstance(source.base, Source)
        scope = {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}
        for guard in [*tx.output.guards] if first else []:
            if is_from_source(guard.originating_source, first[0]):
                spec = dynamo_guards.GUARD_VALUE_DISPATCH[guard.create_fn_name()]
                if spec is dynamo_guards.SKIP_GUARD:
                    continue
                assert not isinstance(spec, dynamo_guards.UnsupportedGuardCheckSpec)
                expected = spec.get_metadata_fn(
                    guard, guard.originating_source.get_value(scope, {}, {})
                )
                other = moved(guard.originating_source, first[0], source)
                answers[other.name] = spec.eval_fn(other.get_value(scope, {}, {}), expected)
                if not isinstance(other, TypeSource) and guard.create_fn_name() != "TENSOR_MATCH":
                    dynamo_guards.install_guard(other.make_guard(guard.create_fn))
        first.append(source)
        return _traced(tx, fn, module, x)

    calls.append(ask)
    torch.compile(Pair(2.0, second), backend=Recorder(), fullgraph=True)(X)
    assert answers.pop("L['self']._modules['second'].factor") == (second == 2.0)
    assert answers
    assert all(answers.values())


@pytest.mark.private(
    "torch._dynamo.side_effects.SideEffects",
    "torch._dynamo.side_effects.SideEffects.check_allowed_side_effect",
    "SideEffects.mutated_sources",
    "SubgraphTracer.traced_sources",
    need="what the trace of a unit reads, and that it changes nothing",
    instead="every unit is traced",
)
def test_a_trace_tells_what_it_reads_and_changes(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.side_effects import SideEffects

    class Counting(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.factor += 1
            return super().forward(x)

    changed, read, mutated = [], [], []
    check = SideEffects.check_allowed_side_effect

    def note(effects: Any, item: Any) -> Any:
        if item.source is not None:
            changed.append(item.source.name)
        return check(effects, item)

    def look(tx: Any, *args: Any) -> Any:
        result = _traced(tx, *args)
        read.extend(source.name for source in tx.output.current_tracer.traced_sources)
        mutated.extend(source.name for source in tx.output.side_effects.mutated_sources)
        return result

    monkeypatch.setattr(SideEffects, "check_allowed_side_effect", note)
    calls.append(look)
    model = Pair(2.0, 2.0)
    model.first = Counting(2.0)
    torch.compile(model, backend=Recorder(), fullgraph=True)(X)
    assert changed == ["L['self']._modules['first']"]
    assert "L['self']._modules['second'].factor" in read
    assert {*mutated} == {"L['self']._modules['first'].factor"}


@pytest.mark.private(
    "torch._dynamo.variables.functions",
    "torch._dynamo.variables.functions.invoke_and_store_as_constant",
    "torch._dynamo.variables.nn_module.invoke_and_store_as_constant",
    need="whether the trace of a unit holds what a method of it was assumed to return for ever",
    instead="every unit is traced",
)
def test_a_constant_of_a_method_is_noticed(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.variables import functions, nn_module

    class Constant(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.twice()

        @torch.compiler.assume_constant_result
        def twice(self) -> float:
            return self.factor * 2

    seen: list[Any] = []
    constant = functions.invoke_and_store_as_constant
    assert nn_module.invoke_and_store_as_constant is constant

    def note(tx: Any, fn: Any, *args: Any) -> Any:
        seen.append(fn.__self__)
        return constant(tx, fn, *args)

    monkeypatch.setattr(functions, "invoke_and_store_as_constant", note)
    calls.append(_traced)
    model = Pair(2.0, 2.0)
    model.first = Constant(2.0)
    torch.compile(model, backend=Recorder(), fullgraph=True)(X)
    assert seen == [model.first]


@pytest.mark.private(
    "torch._dynamo.variables.base.VariableTracker.build",
    "torch._dynamo.variables.builder.wrap_fx_proxy",
    "torch._dynamo.variables.dicts.ConstDictVariable",
    "torch._dynamo.variables.lists.ListVariable",
    "torch._dynamo.variables.lists.TupleVariable",
    "torch._dynamo.variables.tensor.SymNodeVariable",
    "torch._dynamo.variables.tensor.TensorVariable",
    "torch._subclasses.FakeTensor",
    "SubgraphTracer.create_node",
    need="copies of a unit's nodes in the graph, and variables of what they return",
    instead="every unit is traced",
)
def test_nodes_may_be_copied_into_the_graph(calls: list[Any]) -> None:
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.lists import ListVariable, TupleVariable
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
    from torch._subclasses import FakeTensor

    noted: list[fx.Node] = []

    def copy(tx: Any, fn: Any, module: Any, x: Any) -> Any:
        module, x, tracer = module.realize(), x.realize(), tx.output.current_tracer
        if not noted:
            last = tracer.graph._root.prev
            result = _traced(tx, fn, module, x)
            while last.next is not tracer.graph._root:
                last = last.next
                if last.op != "placeholder":
                    noted.append(last)
            return result
        source = noted[1].args[1].meta["grapharg"].source
        other = source.clone(lambda one: module.source if "first" in one.name[-8:] else one)
        shift = VariableTracker.build(tx, module.value.shift, other).as_proxy().node
        product = tracer.create_node("call_function", noted[0].target, (x.as_proxy().node, 2.0), {})
        total = tracer.create_node("call_function", noted[1].target, (product, shift), {})
        value = noted[1].meta["example_value"].clone()
        assert type(value) is FakeTensor
        variable = wrap_fx_proxy(tx, fx.Proxy(total, tracer), example_value=value)
        assert type(variable) is TensorVariable
        assert type(x) is TensorVariable
        return variable

    calls.append(copy)
    model = Pair(2.0, 2.0)
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    torch.testing.assert_close(compiled(X), model.second(model.first(X)))
    (gm,) = recorder.graphs
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert targets == [noted[0].target, noted[1].target] * 2

    kinds: list[Any] = []

    def note(tx: Any, fn: Any, given: Any) -> Any:
        kinds.extend(type(one.realize()) for one in given.realize().items)
        return given.realize().items[0]

    def containers(x: torch.Tensor) -> Any:
        return CALL(_traced, (x, (x, x), [x], {"x": x}, x.shape[0]))

    calls[0] = note
    torch.compile(containers, backend=Recorder(), fullgraph=True, dynamic=True)(torch.ones(3))
    assert kinds == [
        TensorVariable,
        TupleVariable,
        ListVariable,
        ConstDictVariable,
        SymNodeVariable,
    ]
