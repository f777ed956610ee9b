"""AOTAutograd and Inductor."""

from __future__ import annotations

import ast
import importlib
import logging
import pickle
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

pytestmark = pytest.mark.usefixtures("fresh", "cache")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inductor's caches are empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


class Listener(logging.Handler):
    """Keeps what torch's trace log is told."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of_kind(self, kind: str) -> list[Any]:
        """Records whose metadata begin with this key."""
        return [one for one in self.records if next(iter(one.metadata)) == kind]

    def code(self) -> str:
        """The one piece of code that Inductor has generated."""
        (record,) = self.of_kind("inductor_output_code")
        return str(record.payload)


@contextmanager
def listening() -> Iterator[Listener]:
    """Listens to torch's trace log."""
    log = logging.getLogger("torch.__trace")
    listener = Listener()
    log.addHandler(listener)
    try:
        yield listener
    finally:
        log.removeHandler(listener)


_library = torch.library.Library("private_api", "DEF")
_library.define("issue(Tensor x, str text) -> Tensor")
_library.define("add_one_(Tensor(a!) output, Tensor source, str text) -> ()")


def _issue(x: torch.Tensor, text: str) -> torch.Tensor:
    return x.clone()


def _add_one_(output: torch.Tensor, source: torch.Tensor, text: str) -> None:
    output.add_(1)


for _key in ("CPU", "Meta"):
    _library.impl("issue", _issue, _key)
    _library.impl("add_one_", _add_one_, _key)
OURS: Any = torch.ops.private_api


def partition(
    gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph."""
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)  # type: ignore[no-any-return]


def boxed(gm: fx.GraphModule) -> Callable[..., Any]:
    """A graph that takes its inputs in a list."""
    from functorch.compile import make_boxed_func

    return make_boxed_func(gm.forward)  # type: ignore[no-any-return]


def graphs_of(function: Callable[..., Any], *inputs: torch.Tensor) -> list[fx.Graph]:
    """AOTAutograd's graphs of a function, and of its backward if an input requires a gradient."""
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[fx.Graph] = []

    def compile_(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(gm.graph)
        return boxed(gm)

    backend = aot_autograd(fw_compiler=compile_, partition_fn=partition)
    output = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    if output.requires_grad:
        output.sum().backward()
    return graphs


def with_settings(settings: dict[str, Any], inner: Callable[..., Any] | None = None) -> Any:
    """A backend: Inductor with settings, and with another inner compiler."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(gm, inputs, inner or compile_fx_inner, config_patches=settings)

    return backend


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Nothing that takes a C++ compiler, neither here nor in the gradient of ``y``."""
    return x @ y


def compile_product(settings: dict[str, Any], inner: Callable[..., Any] | None = None) -> None:
    """Compile ``product`` and its backward as if for the first time."""
    torch.compiler.reset()
    x, y = torch.rand(4, 4), torch.rand(4, 4, requires_grad=True)
    torch.compile(product, backend=with_settings(settings, inner))(x, y).sum().backward()


# AOTAutograd -----------------------------------------------------------------------------------


@pytest.mark.private(
    "torch._dynamo.backends.common.aot_autograd",
    need="a backend of our own partition and compilers; torch.compile takes a backend as a whole",
    instead="functorch.compile.aot_module_simplified, which takes the same arguments",
)
def test_partition_and_compilers_are_those_given() -> None:
    from torch._dynamo.backends.common import aot_autograd

    called: list[str] = []

    def cut(gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        called.append("partition")
        return partition(gm, joint_inputs, **kwargs)

    def compiler(name: str) -> Callable[..., Any]:
        def compile_(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            called.append(name)
            return boxed(gm)

        return compile_

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        compile_ = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=cut,
        )
        return compile_(gm, inputs)

    x = torch.ones(2, requires_grad=True)
    compiled = torch.compile(torch.sin, backend=backend)
    compiled(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(2).cos())
    assert called == ["partition", "forward", "backward"]
    with torch.no_grad():
        compiled(x)
    assert called[3:] == ["inference"]


@pytest.mark.private(
    "tangents",
    need="the names of a backward graph's inputs; nothing else says that it is one",
    instead="note in GraphModule.meta, where the partition is made, which graph is the backward",
)
def test_inputs_of_a_backward_graph_are_tangents() -> None:
    forward, backward = graphs_of(torch.sin, torch.ones(2, requires_grad=True))
    assert not any("tangents" in node.name for node in forward.find_nodes(op="placeholder"))
    assert any("tangents" in node.name for node in backward.find_nodes(op="placeholder"))


@pytest.mark.private(
    "torch._dynamo.register_backend",
    need="the backends by name, also in a checkout that is not installed",
    instead="the entry points torch_dynamo_backends of pyproject.toml alone",
)
def test_a_registered_backend_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = importlib.import_module(torch._dynamo.register_backend.__module__)
    for name, value in list(vars(registry).items()):
        if isinstance(value, dict) and not name.startswith("__"):
            monkeypatch.setattr(registry, name, dict(value))
    seen: list[dict[str, Any]] = []

    def ours(gm: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        seen.append(kwargs)
        return gm

    torch._dynamo.register_backend(ours, name="private_api_backend")
    mode = "max-autotune-no-cudagraphs"
    for kwargs in ({"options": {"bucket": True}}, {"mode": mode}):
        torch.compile(torch.sin, backend="private_api_backend", **kwargs)(torch.ones(2))
    assert seen == [{"options": {"bucket": True}}, {"mode": mode}]


@pytest.mark.private(
    "torch.fx.graph._BoxedCodeGen",
    need="a graph that is run node by node frees its inputs early; fx's public calls keep them",
    instead="a subclass of torch.fx.graph.CodeGen that takes a list and empties it",
)
def test_an_input_is_freed_after_its_last_use() -> None:
    from torch.fx.graph import _BoxedCodeGen

    args = [torch.ones(2)]
    reference = weakref.ref(args[0])
    alive: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append(reference() is not None)
        return x

    graph = fx.Graph()
    sine = graph.call_function(torch.sin, (graph.placeholder("x"),))
    graph.output((graph.call_function(look, (sine,)),))
    gm = fx.GraphModule({}, graph)
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    (result,) = gm.forward(args)
    assert torch.equal(result, torch.ones(2).sin())
    assert args == []
    assert alive == [False]


@pytest.mark.private(
    "_boxed_call",
    need="a compiled graph gets its inputs in a list that it empties: saved tensors die early",
    instead="functorch.compile.make_boxed_func, which keeps the inputs until the graph has run",
)
def test_a_backward_may_free_what_was_saved() -> None:
    from torch._dynamo.backends.common import aot_autograd

    alive: list[bool] = []

    def compile_(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def run(inputs: list[Any]) -> Any:
            results = gm.forward(*inputs)
            saved = [weakref.ref(tensor) for tensor in inputs if {*tensor.shape} == {2, 4}]
            for empty in (False, True):
                if empty:
                    inputs.clear()
                alive.extend(one() is not None for one in saved)
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(fw_compiler=compile_, partition_fn=partition)
    compiled = torch.compile(lambda x, y, z: (x @ y) @ z, backend=backend)
    x, y, z = torch.rand(2, 3), torch.rand(3, 4), torch.rand(4, 5, requires_grad=True)
    compiled(x, y, z).sum().backward()
    assert alive == [True, False]


# Regions ---------------------------------------------------------------------------------------


@pytest.mark.private(
    "torch.ops.higher_order.invoke_subgraph.gen_schema",
    need="replaced while compiling: torch traces a region's body again at each of its calls",
    instead="compile without the replacement, which takes longer for a model of many equal units",
)
def test_a_regions_schema_may_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = torch.ops.higher_order.invoke_subgraph
    find = operator.gen_schema
    asked: list[Any] = []
    known: dict[Any, Any] = {}

    def find_once(subgraph: Any, identifier: Any, *operands: Any) -> Any:
        key = (id(subgraph), identifier, *map(type, operands))
        asked.append(key)
        if key not in known:
            known[key] = (find(subgraph, identifier, *operands), subgraph)
        return known[key][0]

    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    with monkeypatch.context() as replaced:
        replaced.setitem(vars(operator), "gen_schema", find_once)
        graphs_of(lambda x: region(region(region(x))), x)
    assert "gen_schema" not in vars(operator)
    other = torch.ones(2, requires_grad=True)
    other.sin().sin().sin().sum().backward()
    assert x.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(x.grad, other.grad)
    assert len(asked) > len(known) > 0  # else the replacement is not needed any more


@pytest.mark.private(
    "torch.ops.higher_order.invoke_subgraph",
    need="a region's call in a graph: its body is the first argument, its identifier the second",
    instead="read the body and the identifier where the operator has them then",
)
def test_a_regions_call_names_its_body() -> None:
    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    is_backward = []
    for graph in graphs_of(lambda x: region(region(x)), x):
        called = torch.ops.higher_order.invoke_subgraph
        calls = [node for node in graph.nodes if node.target is called]
        owner = graph.owning_module
        assert owner is not None
        assert len(calls) == 2
        for call in calls:
            assert isinstance(owner.get_submodule(call.args[0].target), fx.GraphModule)
        names = [str(call.args[1]).removeprefix("partitioned_") for call in calls]
        is_backward.append([name.startswith("bw_") for name in names])
    assert is_backward == [[False, False], [True, True]]


# Inductor --------------------------------------------------------------------------------------


class Counted:
    """What Inductor calls, and a key of it."""

    def __init__(self, key: str, action: Callable[..., Any] = lambda graph: None) -> None:
        self.key = key
        self.calls = 0
        self._action = action

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._action(*args, **kwargs)

    def uuid(self) -> str:
        """The part of the cache key."""
        return self.key


def graph_pass(*args: Any) -> Any:
    """A pass on graphs."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return type("Pass", (Counted, CustomGraphPass), {})(*args)


def scheduler_pass(*args: Any) -> Any:
    """A pass on nodes of Inductor's scheduler."""
    from torch._inductor import custom_graph_pass

    older = custom_graph_pass.CustomGraphPass
    base = getattr(custom_graph_pass, "CustomSchedulerPass", older)
    return type("Pass", (Counted, base), {})(*args)


@pytest.mark.private(
    "torch._inductor.compile_fx.compile_fx",
    need="a backend of ours hands its graph to Inductor, with settings made for that graph",
    instead="torch._inductor.standalone_compile for each graph, below an aot_autograd of our own",
)
def test_settings_hold_in_forward_and_backward() -> None:
    from torch._inductor.compile_fx import compile_fx_inner

    assert torch._inductor.config.reorder_for_peak_memory
    seen: list[tuple[bool, bool]] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        holds = not torch._inductor.config.reorder_for_peak_memory
        seen.append((holds, bool(kwargs.get("is_backward"))))
        return compile_fx_inner(*args, **kwargs)

    compile_product({"reorder_for_peak_memory": False}, inner)
    assert seen == [(True, False), (True, True)]


@pytest.mark.private(
    "torch._inductor.compile_fx.compile_fx_inner",
    need="the code of each graph, to check the order of its collectives before it runs",
    instead="listen to torch's trace log while a graph is compiled: it has the code too",
)
def test_code_of_a_graph_is_known_also_from_the_cache() -> None:
    from torch._inductor.compile_fx import compile_fx_inner

    codes: list[str] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_fx_inner(*args, **kwargs)
        codes.append(compiled.source_code)
        return compiled

    last = graph_pass("a")
    with torch._functorch.config.patch(enable_autograd_cache=False):
        for _ in range(2):
            compile_product({"post_grad_custom_post_pass": last}, inner)
    assert last.calls == 2
    assert codes[:2] == codes[2:]
    assert all("extern_kernels.mm(" in code for code in codes)


@pytest.mark.private(
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    need="our passes as Inductor's last one, and as a part of the key of its caches",
    instead="a plain function in their place, with which Inductor caches nothing",
)
def test_a_pass_is_a_part_of_the_cache_key() -> None:
    passes = [graph_pass(key) for key in "aab"]
    for one in passes:
        compile_product({"post_grad_custom_post_pass": one})
    assert [one.calls for one in passes] == [2, 0, 2]


@pytest.mark.private(
    "torch._inductor.config.post_grad_custom_post_pass",
    need="after it nothing removes or moves an operator that writes to another one's output",
    instead="our passes in the inner compiler, with operators that Inductor's passes leave alone",
)
def test_a_write_that_the_last_pass_adds_stays_where_it_is() -> None:
    def add(graph: fx.Graph) -> None:
        (issue,) = graph.find_nodes(op="call_function", target=OURS.issue.default)
        with graph.inserting_after(issue):
            arguments = (issue, issue.args[0], "label")
            graph.call_function(OURS.add_one_.default, arguments).meta["val"] = None

    settings = {"post_grad_custom_post_pass": graph_pass("a", add)}
    compiled = torch.compile(
        lambda x, y: OURS.issue(x, "label") @ y, backend=with_settings(settings)
    )
    result = compiled(torch.ones(2, 2), torch.eye(2))
    assert torch.equal(result, torch.full((2, 2), 2.0))


@pytest.mark.private(
    "extern_kernels",
    need="calls of operators and of matrix products are found in the generated code by their names",
    instead="write the prefixes in fsdp_dynamo/graph_path/generated_code.py as they are then",
)
def test_calls_stand_in_the_code_by_name() -> None:
    function = torch.compile(lambda x, y: OURS.issue(x, "label") @ y)
    with listening() as listener:
        function(torch.ones(2, 2), torch.eye(2))
    calls = [node for node in ast.walk(ast.parse(listener.code())) if isinstance(node, ast.Call)]
    by_name = {ast.unparse(call.func): call for call in calls}
    issue = by_name["torch.ops.private_api.issue.default"]
    assert "label" in [one.value for one in issue.args if isinstance(one, ast.Constant)]
    assert by_name["extern_kernels.mm"].lineno > issue.lineno


@pytest.mark.private(
    "torch._inductor.custom_graph_pass.CustomPartitionerFn",
    "torch._inductor.config.custom_partitioner_fn",
    need="our partition below Inductor, as a part of the key of AOTAutograd's cache",
    instead="an aot_autograd(partition_fn=...) of our own, with compile_fx_inner as its compiler",
)
def test_a_partition_is_a_part_of_the_cache_key() -> None:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Cut(Counted, CustomPartitionerFn):
        def __reduce__(self) -> tuple[Any, ...]:  # torch pickles it for the key, beside its uuid
            return (str, ())

    partitions = [Cut(key, partition) for key in "aab"]
    for one in partitions:
        compile_product({"custom_partitioner_fn": one})
    assert [one.calls for one in partitions] == [1, 0, 1]


@pytest.mark.private(
    "torch._inductor.custom_graph_pass",
    need="CustomSchedulerPass (CustomGraphPass before torch 2.13): the pinned order is cached",
    instead="a plain function in its place, with which Inductor caches nothing",
)
def test_a_scheduler_pass_is_a_part_of_the_cache_key() -> None:
    passes = [scheduler_pass(key, lambda nodes: nodes) for key in "aab"]
    for one in passes:
        compile_product({"_pre_fusion_custom_pass": one})
    assert [one.calls for one in passes] == [2, 0, 2]


@pytest.mark.private(
    "torch._inductor.dependencies.WeakDep",
    "torch._inductor.scheduler.ExternKernelSchedulerNode",
    "torch._inductor.config._pre_fusion_custom_pass",
    need="order between nodes between which no data flows; without it a fusion moves a wait",
    instead="an argument of each collective and wait that is the output of the one before it",
)
def test_a_fusion_does_not_change_a_pinned_order() -> None:
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    def pin(nodes: list[Any]) -> list[Any]:
        foreign = [node for node in nodes if isinstance(node, ExternKernelSchedulerNode)]
        for before, node in pairwise(foreign):
            buffer = before.get_outputs()[0].get_name()
            node.add_fake_dep(WeakDep(buffer, mutating_buf=node.get_name(), is_fake=True))
        nodes[0].scheduler.compute_ancestors()
        return nodes

    def fusible(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        early = x.sin()  # fused with the last line, it pulls the second product up
        first = y @ y
        second = z @ z
        return early, first, early * second

    def order_with(pass_: Any) -> list[str]:
        order: list[str] = []

        def look_and_stop(nodes: list[Any]) -> None:
            for node in nodes:
                is_foreign = isinstance(node, ExternKernelSchedulerNode)
                order.append(node.get_name() if is_foreign else "fused")
            raise InterruptedError  # before a C++ compiler is asked for

        settings = {
            "_pre_fusion_custom_pass": pass_,
            "_post_fusion_custom_pass": look_and_stop,
            "reorder_for_peak_memory": False,
            "reorder_for_locality": False,
            "fx_graph_cache": False,
        }
        compiled = torch.compile(fusible, backend=with_settings(settings))
        no_cache = torch._functorch.config.patch(enable_autograd_cache=False)
        with no_cache, suppress(Exception):
            compiled(*(torch.rand(4, 4) for _ in range(3)))
        torch.compiler.reset()
        return order

    first, second, fused = order_with(scheduler_pass("a", pin))
    assert fused == "fused"
    assert order_with(None) == [second, fused, first]  # else the pass is not needed any more


@pytest.mark.private(
    "torch._inductor.config.reorder_for_peak_memory",
    "torch._inductor.config.reorder_for_compute_comm_overlap",
    "torch._inductor.config.triton.reorder_for_reducing_graph_partitions",
    need="Inductor's own reordering is off, since it knows nothing of our plan",
    instead="remove the setting if its pass is gone; else find the new one",
)
def test_reordering_can_be_switched_off() -> None:
    settings = {
        "reorder_for_peak_memory": False,
        "reorder_for_compute_comm_overlap": False,
        "triton.reorder_for_reducing_graph_partitions": False,
    }
    with torch._inductor.config.patch(settings):
        assert not torch._inductor.config.reorder_for_peak_memory
        assert not torch._inductor.config.reorder_for_compute_comm_overlap
        assert not torch._inductor.config.triton.reorder_for_reducing_graph_partitions


@pytest.mark.private(
    "torch._inductor.list_mode_options",
    need="what torch.compile(mode=...) means to Inductor; torch hands a mode over as its name",
    instead="a dict of our own with the settings of the one mode that we take",
)
def test_a_mode_is_settings() -> None:
    settings = dict(torch._inductor.list_mode_options("max-autotune-no-cudagraphs"))
    assert settings["max_autotune"]
    assert not settings.get("triton.cudagraphs")
    with torch._inductor.config.patch(settings):
        assert torch._inductor.config.max_autotune


@pytest.mark.private(
    "torch._inductor.runtime.cache_dir_utils.cache_dir",
    need="measured rates are kept beside the compile cache that depends on them",
    instead="TORCHINDUCTOR_CACHE_DIR where it is set, else a folder of our own for each user",
)
def test_the_compile_cache_has_a_folder(cache: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert Path(cache_dir()) == cache
    compile_product({})
    assert any(cache.rglob("*"))


@pytest.mark.private(
    "torch._inductor.config.patch",
    "torch._functorch.config.patch",
    need="no graph comes from a cache while graphs are shown",
    instead="torch.compiler.config.force_disable_caches, which also compiles C++ headers anew",
)
def test_caches_can_be_left_out() -> None:
    ours = graph_pass("a")
    settings = {"post_grad_custom_post_pass": ours}
    compile_product(settings)
    no_graphs = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    with (
        torch._inductor.config.patch(no_graphs),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        compile_product(settings)
    assert ours.calls == 4
    compile_product(settings)
    assert ours.calls == 4


# The trace log ---------------------------------------------------------------------------------


@pytest.mark.private(
    "torch._logging._internal.trace_structured",
    need="our graphs beside torch's own in the log that tlparse reads; nothing public adds to it",
    instead="a file of our own for inspect_graphs(), without tlparse",
)
def test_an_artifact_reaches_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._logging._internal import trace_structured

    made: list[str] = []

    def payload() -> str:
        made.append("text")
        return "text"

    def emit() -> None:
        metadata = {"name": "ours", "encoding": "string"}
        trace_structured("artifact", lambda: metadata, payload_fn=payload, expect_trace_id=False)

    with monkeypatch.context() as nobody_listens:
        nobody_listens.setattr(logging.getLogger("torch.__trace"), "handlers", [])
        emit()
    assert made == []
    with listening() as listener:
        emit()
    (record,) = listener.of_kind("artifact")
    assert record.metadata["artifact"]["name"] == "ours"
    assert record.payload == "text"


@pytest.mark.private(
    "torch.__trace",
    need="torch's own graphs by kind, each with the number of its compilation, as tlparse has them",
    instead="TORCH_TRACE and the files that it writes",
)
def test_graphs_of_one_compilation_have_its_number() -> None:
    with listening() as listener:
        compile_product({})
    kinds = ["dynamo_output_graph", "aot_joint_graph", "aot_forward_graph", "aot_backward_graph"]
    records = [record for kind in kinds for record in listener.of_kind(kind)]
    assert len(records) == len(kinds)
    assert all("x @ y" in one.payload or "mm" in one.payload for one in records)
    records += listener.of_kind("inductor_output_code")
    assert len(records) == len(kinds) + 2
    frames = {(one.metadata["frame_id"], one.metadata["frame_compile_id"]) for one in records}
    assert len(frames) == 1


@pytest.mark.private(
    "aot_inference_graph",
    need="the graph of a forward without gradients, as torch's trace log has it",
    instead="the kind of record that has the graph then",
)
def test_a_graph_without_a_backward_has_a_kind_of_its_own() -> None:
    with listening() as listener:
        torch.compile(product)(torch.ones(2, 2), torch.ones(2, 2))
    (record,) = listener.of_kind("aot_inference_graph")
    assert "mm" in record.payload


@pytest.mark.private(
    "inductor_output_code",
    need="its line AOT ID says which graph the code was generated from: number and phase",
    instead="number the segments in the order in which they are compiled",
)
def test_code_has_the_number_of_its_graph() -> None:
    with listening() as listener:
        compile_product({})
    pattern = re.compile(r"AOT ID: \['(\d+)_(forward|backward|inference)'\]")
    found = [pattern.findall(one.payload) for one in listener.of_kind("inductor_output_code")]
    ((number, _),) = found[0]
    assert found == [[(number, "forward")], [(number, "backward")]]


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
    need="what .to() is to a tensor subclass: dtype and device of a shard in a sharded state dict",
    instead="__torch_function__ for torch.Tensor.to, beside __torch_dispatch__",
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
