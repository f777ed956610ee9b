"""Inductor and the trace log."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import OURS, compile_product, listening, partition, product, with_settings
from torch import fx

pytestmark = pytest.mark.usefixtures("fresh", "cache")

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
    "torch._inductor.config.triton.cudagraphs",
    need="whether the user has CUDA graphs on for all, in which the bodies of units must not be",
    instead="what torch.compile was given alone: a mode, an option, a backend",
)
def test_a_mode_turns_cuda_graphs_on() -> None:
    from torch._inductor import config, list_mode_options

    assert config.triton.cudagraphs is False
    assert list_mode_options("reduce-overhead")["triton.cudagraphs"] is True


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
    "torch._inductor.config.get_config_copy",
    need="names of Inductor's settings, which options of torch.compile may hold beside ours",
    instead="options that are ours alone, and Inductor's set in torch._inductor.config",
)
def test_settings_have_names() -> None:
    known = torch._inductor.config.get_config_copy()
    assert known["max_autotune"] is torch._inductor.config.max_autotune
    assert known["triton.cudagraphs"] is False
    known["max_autotune"] = None
    assert torch._inductor.config.max_autotune is not None


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
    "torch._inductor.config.fx_graph_cache",
    "torch._functorch.config.enable_autograd_cache",
    need="no graph comes from a cache while graphs are shown, and no rank then waits for another",
    instead="torch.compiler.config.force_disable_caches, which also compiles C++ headers anew",
)
def test_caches_can_be_left_out() -> None:
    assert torch._inductor.config.fx_graph_cache
    assert torch._functorch.config.enable_autograd_cache
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


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad + grad


@pytest.mark.private(
    "torch._functorch.config",
    need="AOTAutograd keeps graphs with a traced autograd.Function, as ours, if it is told to "
    "(autograd_cache_allow_custom_autograd_functions)",
    instead="nothing: a later start then partitions anew, and only Inductor's code is kept",
)
def test_graphs_with_functions_are_cached_on_demand() -> None:
    from torch._dynamo.utils import counters

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        with torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=True):
            return with_settings({})(gm, inputs)

    def hits_and_misses() -> list[int]:
        torch.compiler.reset()
        counters.clear()
        x = torch.rand(4, 4, requires_grad=True)
        torch.compile(lambda x: _Twice.apply(x) @ x, backend=backend)(x).sum().backward()  # type: ignore[no-untyped-call]
        return [counters["aot_autograd"][f"autograd_cache_{one}"] for one in ("hit", "miss")]

    assert hits_and_misses() == [0, 1]
    assert hits_and_misses() == [1, 0]


@pytest.mark.private(
    "torch._inductor.utils.fresh_cache",
    need="a temporary folder in place of a compile cache that cannot be written or is damaged",
    instead="set TORCHINDUCTOR_CACHE_DIR, and let Inductor forget what it has loaded",
)
def test_a_temporary_cache(cache: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        folder = Path(cache_dir())
        assert folder != cache
        assert not any(folder.iterdir())
        compile_product({})
        assert any(folder.rglob("*"))
    assert Path(cache_dir()) == cache
    assert not folder.exists()
