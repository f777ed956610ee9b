"""Inductor and the trace log."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
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


@pytest.mark.private(
    "torch._inductor.compile_fx.compile_fx",
    need="a backend of ours hands its graph to Inductor, with settings made for that graph and "
    "with an inner compiler of its own, which plans forward and backward and cuts them",
    instead="compile_fx_inner for each stretch, below an aot_autograd of our own",
)
def test_settings_hold_in_forward_and_backward() -> None:
    from torch._inductor.compile_fx import compile_fx_inner

    assert torch._inductor.config.fx_graph_cache
    seen: list[tuple[bool, bool]] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        holds = not torch._inductor.config.fx_graph_cache
        seen.append((holds, bool(kwargs.get("is_backward"))))
        return compile_fx_inner(*args, **kwargs)

    compile_product({"fx_graph_cache": False}, inner)
    assert seen == [(True, False), (True, True)]


@pytest.mark.private(
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    need="Inductor's last pass on a stretch is ours, and so a part of the keys of Inductor's and "
    "AOTAutograd's caches; in the latter it has our code, the plan's options and the graph's marks",
    instead="a plain function in its place, with which Inductor caches nothing",
)
def test_a_pass_is_a_part_of_the_cache_key() -> None:
    passes = [graph_pass(key) for key in "aab"]
    for one in passes:
        compile_product({"post_grad_custom_post_pass": one})
    assert [one.calls for one in passes] == [2, 0, 2]


@pytest.mark.private(
    "torch._inductor.config.post_grad_custom_post_pass",
    need="writes into a flat gradient become mutations of what a stretch is given, after the last "
    "of Inductor's own passes, none of which would know them",
    instead="the lowering in our inner compiler, with operators that Inductor's passes leave alone",
)
def test_a_write_that_the_last_pass_adds_stays_where_it_is() -> None:
    def mutate(graph: fx.Graph) -> None:
        (write,) = graph.find_nodes(op="call_function", target=OURS.issue.default)
        flat, label = write.args
        with graph.inserting_before(write):
            mutation = graph.call_function(OURS.add_one_.default, (flat, flat, label))
        mutation.meta["val"] = None
        write.replace_all_uses_with(flat)
        graph.erase_node(write)

    settings = {"post_grad_custom_post_pass": graph_pass("a", mutate)}
    compiled = torch.compile(
        lambda x, y: OURS.issue(x, "label") @ y, backend=with_settings(settings)
    )
    flat = torch.ones(2, 2)
    assert torch.equal(compiled(flat, torch.eye(2)), torch.full((2, 2), 2.0))
    assert torch.equal(flat, torch.full((2, 2), 2.0))


@pytest.mark.private(
    "torch._inductor.async_compile.AsyncCompile",
    "torch._inductor.async_compile.AsyncCompile.wait",
    need="kernels of all stretches are built at the same time, and waited for at the end",
    instead="a wait for the kernels of each stretch, as Inductor does it: a third more seconds",
)
def test_kernels_can_be_waited_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx_inner

    wait = AsyncCompile.wait
    waiting: list[tuple[AsyncCompile, dict[str, Any]]] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        code = compile_fx_inner(*args, **kwargs)
        if kwargs.get("is_backward"):
            assert len(waiting) == 2
            for builds, scope in waiting:
                wait(builds, scope)
        return code

    monkeypatch.setattr(AsyncCompile, "wait", lambda *args: waiting.append(args))
    settings = {"fx_graph_cache": False}
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        compile_product(settings, inner)  # runs both, so their kernels are there


@pytest.mark.private(
    "torch._inductor.async_compile.AsyncCompile.submit",
    "torch._inductor.async_compile.get_compile_threads",
    "torch._inductor.codecache._worker_compile_cpp",
    "torch._inductor.cpp_builder.CppBuilder",
    "_build_option",
    need="kernels of all stretches are built in one file, and found under the names of their own",
    instead="a file and a compiler for each kernel, as Inductor does it: some 0.8 s more each",
)
def test_the_library_of_a_kernel_can_be_built_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import Future

    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import _worker_compile_cpp
    from torch._inductor.cpp_builder import CppBuilder
    from torch._inductor.utils import fresh_cache

    assert get_compile_threads() > 1
    libraries: list[Path] = []

    def build_elsewhere(task: Any) -> Any:
        assert task.func is _worker_compile_cpp
        (builder,) = task.args[1]
        target = Path(builder.get_target_file_path())
        source = target.with_suffix(".cpp")
        assert f"{target.with_suffix('')}.so" in builder.get_command_line()
        other = CppBuilder("other", str(source), builder._build_option, str(target.parent))
        other.build()
        Path(other.get_target_file_path()).rename(target)
        libraries.append(target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    monkeypatch.setattr(AsyncCompile, "submit", staticmethod(build_elsewhere))
    x = torch.rand(5)
    with fresh_cache():
        found = torch.compile(lambda x: x.sin() + 5, backend=with_settings({}))(x)
        (library,) = libraries
        assert f"{library.name.partition('.')[0]}.kernel" in sys.modules
    torch.testing.assert_close(found, x.sin() + 5)


@pytest.mark.private(
    "torch._inductor.cpu_vec_isa",
    "torch._inductor.cpu_vec_isa.supported_vec_isa_list",
    "torch._inductor.cpu_vec_isa.x86_isa_checker",
    "torch._inductor.config.cpp.vec_isa_ok",
    need="of a processor's instruction sets only the best is probed, and the others are taken for "
    "granted if it works",
    instead="probes of all, as Inductor does it: up to 6 s more with an empty cache",
)
def test_instruction_sets_can_be_taken_for_granted() -> None:
    from torch._inductor import cpu_vec_isa

    flags = cpu_vec_isa.x86_isa_checker()
    known = [one for one in cpu_vec_isa.supported_vec_isa_list if {*str(one).split()} <= {*flags}]
    if not known:
        pytest.skip("no instruction set of x86")
    if not known[0]:
        pytest.skip("the compiler does not support this processor")
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        assert cpu_vec_isa.valid_vec_isa_list() == known
        assert cpu_vec_isa.pick_vec_isa() is known[0]


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
    "torch._inductor.config.triton.cudagraphs",
    need="whether the user has CUDA graphs on for all, in which the bodies of units must not be",
    instead="what torch.compile was given alone: a mode, an option, a backend",
)
def test_a_mode_turns_cuda_graphs_on() -> None:
    from torch._inductor import config, list_mode_options

    assert config.triton.cudagraphs is False
    assert list_mode_options("reduce-overhead")["triton.cudagraphs"] is True


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
