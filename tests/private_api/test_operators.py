"""Fake tensors, operators, nested values."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiling import boxed, graphs_of, partition
from torch import fx, nn

pytestmark = pytest.mark.usefixtures("fresh", "cache")

# Fake tensors ----------------------------------------------------------------------------------


@pytest.mark.private(
    "torch._guards.detect_fake_mode",
    need="the mode of a trace, to run a unit's forward in it; a leaf gets tensors only",
    instead="FakeTensor.fake_mode of the first fake tensor",
)
def test_a_function_knows_whether_it_is_traced() -> None:
    from torch._guards import detect_fake_mode

    modes: list[Any] = []
    made: list[torch.Tensor] = []

    @torch.compiler.allow_in_graph
    def leaf(x: torch.Tensor) -> torch.Tensor:
        mode = detect_fake_mode([x])
        modes.append(mode)
        if mode is None:
            return x.sin()
        with mode:
            made.append(torch.empty(2))
            return torch.add(x, made[-1])

    result = torch.compile(lambda x: leaf(x) + 1, backend="eager")(torch.ones(2))
    assert torch.equal(result, torch.ones(2).sin() + 1)
    assert modes[0] is not None
    assert modes[-1] is None
    assert detect_fake_mode([made[0]]) is modes[0]


@pytest.mark.private(
    "example_value",
    need="fake values of the nodes of Dynamo's graph: whether a region's body writes to its inputs",
    instead="the backend's example_inputs, and a run of the whole graph on them",
)
def test_a_graph_runs_on_its_example_values() -> None:
    from torch._guards import detect_fake_mode

    versions: list[int] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        (value,) = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
        mode = detect_fake_mode([value])
        assert mode is not None
        with mode, torch.no_grad():
            copy = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
            before = copy._version
            gm(copy)
        versions.append(copy._version - before)
        return gm

    for function in (torch.sin, torch.sin_):
        torch.compiler.reset()
        torch.compile(lambda x, function=function: function(x), backend=backend)(torch.ones(2))
    assert versions == [0, 1]


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
    "torch._subclasses.fake_tensor.FakeTensor",
    need="which parameters are fake already, when a unit's forward runs in a trace",
    instead="detect_fake_mode of one tensor, or its type's name",
)
def test_only_tensors_of_a_trace_are_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    are_fake: list[bool] = []

    @torch.compiler.allow_in_graph
    def leaf(x: torch.Tensor) -> torch.Tensor:
        are_fake.append(isinstance(x, FakeTensor))
        return x.sin()

    torch.compile(lambda x: leaf(x) + 1, backend="eager")(torch.ones(2))
    assert are_fake[0]
    assert not are_fake[-1]


@pytest.mark.private(
    "torch._subclasses.fake_tensor.FakeTensorMode",
    need="a training step of a model of any size, without its memory, as a real device runs it",
    instead="the device meta, on which other operators run (those of attention)",
)
def test_a_step_takes_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device("cpu"):
        model = nn.Linear(1 << 22, 1 << 22)
        parameter = nn.Parameter(model.weight.detach().to(torch.bfloat16), True)
        model._parameters["weight"] = parameter
        output = model.weight @ torch.ones(1 << 22, dtype=torch.bfloat16)
        output.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.bfloat16
    assert parameter.untyped_storage().nbytes() == 1 << 45
    view = parameter.detach().view(-1)
    cdata = [one.untyped_storage()._cdata for one in (parameter, view, parameter.grad)]
    assert cdata[0] == cdata[1] != cdata[2]


# Operators -------------------------------------------------------------------------------------


@pytest.mark.private(
    "torch._ops.OpOverload",
    need="names of the operators in AOTAutograd's graphs; torch.ops has no public class",
    instead="type(torch.ops.aten.mm.default)",
)
def test_a_graph_calls_overloads() -> None:
    (graph,) = graphs_of(torch.sin, torch.ones(2))
    (node,) = [node for node in graph.nodes if node.op == "call_function"]
    assert isinstance(node.target, torch._ops.OpOverload)
    assert node.target.name() == "aten::sin"
    assert str(node.target) == "aten.sin.default"
    assert node.target.overloadpacket is torch.ops.aten.sin
    assert torch.ops.aten.add.Tensor.name() == "aten::add.Tensor"


@pytest.mark.private(
    "torch._ops.OpOverloadPacket",
    "OpOverloadPacket._qualified_op_name",
    need="names of the operators in Dynamo's graphs, whose overload is not chosen yet",
    instead="str(packet) with :: for the first point",
)
def test_dynamos_graph_calls_packets() -> None:
    targets: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        targets.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
        return gm

    torch.compile(lambda x: torch.ops.aten.sin(x), backend=backend)(torch.ones(2))
    (target,) = targets
    assert isinstance(target, torch._ops.OpOverloadPacket)
    assert target._qualified_op_name == "aten::sin"


@pytest.mark.private(
    "torch._ops.HigherOrderOperator",
    need="in a listing of a graph, the call of a region is shown by the operator's name alone",
    instead="comparison with torch.ops.higher_order.invoke_subgraph, the only one that we show",
)
def test_a_region_is_called_by_a_higher_order_operator() -> None:
    operator = torch.ops.higher_order.invoke_subgraph
    assert isinstance(operator, torch._ops.HigherOrderOperator)
    assert operator.__name__ == "invoke_subgraph"
    assert not isinstance(torch.ops.aten.sin.default, torch._ops.HigherOrderOperator)


@pytest.mark.private(
    "OpOverload._schema",
    need="which arguments an operator aliases or writes, for the lifetimes of storages",
    instead="torch._C._get_schema(name, overload), or lists of the operators that occur",
)
def test_a_schema_says_what_is_aliased_and_written() -> None:
    aten = torch.ops.aten
    add = aten.add_.Tensor._schema
    assert add.name == "aten::add_"
    infos = {argument.name: argument.alias_info for argument in add.arguments}
    assert infos["self"].is_write
    assert infos["other"] is None
    view = aten.view.default._schema
    info = view.arguments[0].alias_info
    assert not info.is_write
    assert info.before_set
    assert info.before_set == view.returns[0].alias_info.before_set
    split = aten.split.Tensor._schema
    assert "*" in split.arguments[0].alias_info.after_set
    assert not split.returns[0].alias_info.before_set
    assert aten.mm.default._schema.returns[0].alias_info is None


@pytest.mark.private(
    "torch.ops._c10d_functional",
    need="collectives as nodes of a graph, with group and size as constants that passes read",
    instead="operators of our own library in their place, which have a fake implementation only",
)
def test_collectives_are_nodes(group: dist.ProcessGroup) -> None:
    from torch._dynamo.backends.common import aot_autograd

    name = group.group_name
    ours = torch.ops._c10d_functional

    class Unshard(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, shard: torch.Tensor) -> torch.Tensor:
            unsharded: torch.Tensor = ours.wait_tensor(ours.all_gather_into_tensor(shard, 1, name))
            return unsharded

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            scattered = ours.wait_tensor(ours.reduce_scatter_tensor(grad, "avg", 1, name))
            reduced: torch.Tensor = ours.wait_tensor(ours.all_reduce(scattered, "avg", name))
            return reduced

    found: list[list[Any]] = []

    def compile_(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.append([])
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target.namespace == "_c10d_functional":
                found[-1].append((node.target.name(), *node.args[1:]))
                assert isinstance(node.args[0], fx.Node)
                assert node.meta["val"].shape == (2,)
                node.args = tuple("sum" if arg == "avg" else arg for arg in node.args)
        gm.recompile()
        return boxed(gm)

    x = torch.ones(2, requires_grad=True)
    backend = aot_autograd(fw_compiler=compile_, partition_fn=partition)
    torch.compile(Unshard.apply, backend=backend, fullgraph=True)(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(2))
    wait = ("_c10d_functional::wait_tensor",)
    assert found == [
        [("_c10d_functional::all_gather_into_tensor", 1, name), wait],
        [
            ("_c10d_functional::reduce_scatter_tensor", "avg", 1, name),
            wait,
            ("_c10d_functional::all_reduce", "avg", name),
            wait,
        ],
    ]


@pytest.mark.private(
    "torch.ops.aten._to_copy",
    need="what .to() is in a graph: the estimator and the passes take it for a copy or a cast",
    instead="the name that this operator has then, in their tables of copies",
)
def test_a_conversion_is_one_operator() -> None:
    seen: list[Any] = []

    class Shard(torch.Tensor):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(torch.ones(2), *args[1:], **(kwargs or {}))

    result = torch.zeros(2).as_subclass(Shard).to("cpu", torch.float64, copy=True)
    assert seen == [torch.ops.aten._to_copy.default]
    assert torch.equal(result, torch.ones(2, dtype=torch.float64))


@pytest.mark.private(
    "torch.utils._python_dispatch.TorchDispatchMode",
    need="the operators of a forward and a backward, which the estimator counts",
    instead="torch.utils.flop_counter.FlopCounterMode, which counts work by module, but no bytes",
)
def test_a_mode_sees_the_operators_of_a_step() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[Any] = []

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.phase = "forward"

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append((self.phase, func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 2, requires_grad=True)
    counter = Counter()
    with counter:
        output = (x @ x).relu().sum()
    counter.phase = "backward"
    with counter:
        output.backward()
    aten = torch.ops.aten
    assert [func for phase, func in seen if phase == "forward"] == [
        aten.mm.default,
        aten.relu.default,
        aten.detach.default,
        aten.sum.default,
    ]
    assert [func for phase, func in seen if phase == "backward"].count(aten.mm.default) == 2
    assert torch.Tag.pointwise in aten.relu.default.tags
    assert torch.Tag.pointwise not in aten.mm.default.tags


@pytest.mark.private(
    "torch.utils.flop_counter.flop_registry",
    "torch.utils.flop_counter.sdpa_flop_count",
    need="formulas of the work of one operator; FlopCounterMode counts whole runs only",
    instead="formulas of our own for products, convolutions and attention",
)
def test_work_of_an_operator_has_a_formula() -> None:
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count

    def flops(operator: Any, *args: Any, **kwargs: Any) -> int:
        formula = flop_registry[operator.overloadpacket]
        return int(formula(*args, **kwargs, out_val=operator(*args, **kwargs)))

    aten = torch.ops.aten
    x, y = torch.ones(2, 3), torch.ones(3, 5)
    assert flops(aten.mm.default, x, y) == 2 * 2 * 3 * 5
    assert flops(aten.addmm.default, torch.ones(5), x, y, beta=1) == 2 * 2 * 3 * 5
    assert flop_registry.get(aten.sin) is None
    assert flop_registry.get(None) is None
    shape = torch.Size((2, 3, 4, 8))  # two products, 4 x 4 x 8 each, of 2 x 3 heads
    assert sdpa_flop_count(shape, shape, shape) == 2 * 3 * 2 * (2 * 4 * 4 * 8)


@pytest.mark.private(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    need="attention on a CPU, whose work torch's formulas leave out",
    instead="the name of the operator that is called then",
)
def test_attention_on_a_cpu_is_one_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: dict[str, Any] = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen[str(func.overloadpacket)] = args
            return func(*args, **(kwargs or {}))

    inputs = [torch.rand(1, 1, 4, size, requires_grad=True) for size in (8, 8, 8)]
    with Recorder():
        torch.nn.functional.scaled_dot_product_attention(*inputs).sum().backward()
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    shapes = [one.shape for one in inputs]
    assert [one.shape for one in seen[name][:3]] == shapes
    assert [one.shape for one in seen[f"{name}_backward"][1:4]] == shapes


@pytest.mark.private(
    "torch._higher_order_ops.triton_kernel_wrap.get_kernel",
    need="the Triton kernel that a graph calls by a number: its cost, where the user gives one",
    instead="no arithmetic of such kernels in plans, only the bytes that they read and write",
)
def test_a_graphs_kernel_is_found_by_its_number() -> None:
    from torch._higher_order_ops.triton_kernel_wrap import get_kernel, kernel_side_table

    def kernel() -> None: ...

    try:
        assert get_kernel(kernel_side_table.add_kernel(kernel)) is kernel  # type: ignore[arg-type]
    finally:
        kernel_side_table.reset_table()


# Nested values ---------------------------------------------------------------------------------


@pytest.mark.private(
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_unflatten",
    need="a nested state sent leaf by leaf, its structure pickled; torch has no public pytree",
    instead="a recursion of our own over dicts, lists and tuples, as fsdp_dynamo/pytree.py has",
)
def test_the_structure_of_a_value_can_be_sent() -> None:
    from torch.utils import _pytree as pytree

    value = {"b": [1, (2, None)], "a": {3: "x"}, "c": []}
    leaves, spec = pytree.tree_flatten(value)
    assert set(leaves) == {1, 2, None, "x"}
    again = pytree.tree_unflatten(leaves, pickle.loads(pickle.dumps(spec)))
    assert again == value
    assert list(again) == list(value)
    assert pytree.tree_unflatten(*pytree.tree_flatten(1)) == 1


@pytest.mark.private(
    "torch.utils._pytree.tree_is_leaf",
    need="containers of inputs and outputs, named tuples and users' classes; torch has no public "
    "pytree",
    instead="a recursion of our own over named tuples and torch's containers",
)
def test_a_container_is_opened_level_by_level() -> None:
    from torch.utils import _pytree as pytree

    pair = namedtuple("pair", "one two")
    value = OrderedDict(a=pair(1, [2]), b=None)
    assert not pytree.tree_is_leaf(value)
    assert not pytree.tree_is_leaf(value["a"])
    assert pytree.tree_is_leaf(object())
    items, spec = pytree.tree_flatten(value, is_leaf=lambda item: item is not value)
    assert items == [pair(1, [2]), None]
    again = pytree.tree_unflatten([3, 4], spec)
    assert (type(again), again) == (OrderedDict, {"a": 3, "b": 4})


@pytest.mark.private(
    "torch.utils._pytree.tree_leaves",
    need="the tensors of a node that returns several; torch has no public pytree",
    instead="a recursion of our own over dicts, lists and tuples, as fsdp_dynamo/pytree.py has",
)
def test_leaves_of_a_nodes_value() -> None:
    from torch.utils import _pytree as pytree

    value = torch.ones(2)
    assert pytree.tree_leaves(value) == [value]
    assert pytree.tree_leaves((1, [2, {"a": 3}])) == [1, 2, 3]
    assert pytree.tree_leaves(None) == [None]


@pytest.mark.private(
    "torch.utils._pytree.tree_map",
    need="a copy of a nested state, leaf by leaf; torch has no public pytree",
    instead="a recursion of our own over dicts, lists and tuples, as fsdp_dynamo/pytree.py has",
)
def test_every_leaf_is_mapped() -> None:
    from torch.utils import _pytree as pytree

    value = {"a": [1, (2,)], "b": 3}
    assert pytree.tree_map(lambda leaf: leaf + 1, value) == {"a": [2, (3,)], "b": 4}


@pytest.mark.private(
    "torch.utils._pytree.tree_map_only",
    need="tensors, or nodes of a graph, replaced in a nested value; torch has no public pytree",
    instead="torch.fx.map_arg for nodes; for tensors a recursion as fsdp_dynamo/pytree.py has",
)
def test_leaves_of_one_class_are_mapped() -> None:
    from torch.utils import _pytree as pytree

    class Marked(torch.Tensor):
        pass

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(torch.Tensor)

    value = {"a": torch.ones(2).as_subclass(Marked), "b": [1, torch.ones(2)]}
    result = pytree.tree_map_only(Marked, plain, value)
    assert type(result["a"]) is torch.Tensor
    assert result["b"][0] == 1
    assert result["b"][1] is value["b"][1]
    graph = fx.Graph()
    node = graph.placeholder("x")
    cat = graph.call_function(torch.cat, ([node, node],), {"dim": 0})
    args = pytree.tree_map_only(fx.Node, lambda one: one.name, (cat.args, cat.kwargs))
    assert args == ((["x", "x"],), {"dim": 0})
