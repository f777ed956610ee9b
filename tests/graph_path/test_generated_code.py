"""The order in Inductor's code is the order of the graph: pinned, read back, refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch import fx
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.utils import run_and_get_code
from torch.nn.attention.flex_attention import flex_attention

from fsdp_dynamo.graph_path import generated_code, inductor
from fsdp_dynamo.graph_path.generated_code import OrderError, check_order, order_in_code
from graph_passes.text.boundary_labels import Label

_COMPUTE = {"mm", "addmm", "bmm", "mm_into_", "sum_into_", "embedding_into_"}
OURS = "torch.ops.fsdp_dynamo."
HAS_OVERLAP = hasattr(
    torch._inductor.config.aten_distributed_optimizations, "enable_simple_overlap"
)
SETTING = "aten_distributed_optimizations.enable_simple_overlap"
needs_overlap = pytest.mark.skipif(not HAS_OVERLAP, reason="Inductor has it since torch 2.14")


def _in_graph(graph: fx.Graph) -> list[str]:
    """Our operators, with the numbers in their labels, and products, in the order of a graph."""
    lines = []
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        name = target.name().split("::")[1].split(".")[0]
        if target.namespace == "fsdp_dynamo":
            texts = [a for arg in node.args for a in (arg if isinstance(arg, list) else [arg])]
            labels = [t for t in texts if isinstance(t, str) and t.count("|") > 2]
            lines.append(f"{name} {[Label.decode(label).number for label in labels]}")
        elif name in _COMPUTE:
            lines.append(name)
    return lines


def _in_code(source: str, others: set[str] = _COMPUTE) -> list[str]:
    return [
        f"{call.name} {[label.number for label in call.labels]}" if call.labels else call.name
        for call in order_in_code(source)
        if call.labels or call.name in others
    ]


@contextmanager
def _without_graph_caches(**settings: Any) -> Iterator[None]:
    """Graphs are compiled anew; kernels, which take a C++ compiler, may be known."""
    no_joint = torch._functorch.config.patch(enable_autograd_cache=False)
    with no_joint, torch._inductor.config.patch({"fx_graph_cache": False, **settings}):
        yield


def _orders(
    rank: int, world_size: int, bucket: bool, overlap: bool | None
) -> list[tuple[list[str], list[str]]]:
    """Of every graph, the order handed over and the order in the code.

    Inductor's own overlap pass is on or off; ``None`` leaves it as it is.
    """
    planned: list[list[str]] = []
    generated: list[list[str]] = []
    lower, check = inductor.lower_to_operators, generated_code.check_order

    def watch_lower(graph: fx.Graph) -> None:
        lower(graph)
        planned.append(_in_graph(graph))

    def watch_check(source: str) -> None:
        check(source)
        generated.append(_in_code(source))

    inductor.lower_to_operators, generated_code.check_order = watch_lower, watch_check
    options = {"bucket": bucket, "link": {"latency_ms": 5.0, "bytes_per_ms": 1e6}}
    options |= {"memory_budget_bytes": 10**9, "max_in_flight": 64}
    try:
        with _without_graph_caches(**({} if overlap is None else {SETTING: overlap})):
            wrapped = wrap(make_transformer(num_blocks=2))
            model = torch.compile(wrapped, fullgraph=True, backend="fsdp_dynamo", options=options)
            loss_of(model, batch(rank, 0)).backward()
    finally:
        inductor.lower_to_operators, generated_code.check_order = lower, check
    return list(zip(planned, generated, strict=True))


@pytest.mark.parametrize(
    ("bucket", "overlap"),
    [
        (False, None),
        pytest.param(True, None, marks=pytest.mark.slow),
        pytest.param(False, True, marks=needs_overlap),
        pytest.param(False, False, marks=needs_overlap),
    ],
)
def test_order_in_code_is_the_planned_one(
    ranks: RankPool, bucket: bool, overlap: bool | None
) -> None:
    """Forward and backward, collectives among the products around them."""
    for graphs in ranks.run(_orders, 2, bucket, overlap):
        assert len(graphs) == 2
        for planned, generated in graphs:
            assert planned == generated
            assert any(line in _COMPUTE for line in planned)
            assert any(line.startswith("wait_") for line in planned)
        gathers = [line for line in graphs[0][1] if line.startswith("all_gather")]
        assert len(gathers) == (1 if bucket else 3)


def _fusible(x: torch.Tensor, matrix: torch.Tensor, shard: torch.Tensor) -> Any:
    """Fused with the first line, the last one would pull the wait up before the product."""
    texts = [Label("u", "all_gather", "forward", (), (), i, 2).encode() for i in range(2)]
    name = dist.distributed_c10d._get_default_group().group_name
    early = torch.sin(x)
    gathered = torch.ops.fsdp_dynamo.all_gather(shard, 1, name, texts[0], "")
    product = matrix @ matrix
    torch.ops.fsdp_dynamo.wait_(gathered, shard, texts[1])
    return early, product, early + gathered


def _pinned(rank: int, world_size: int) -> list[list[str]]:
    orders = []
    inputs = (torch.rand(64), torch.rand(8, 8), torch.rand(64))
    for pass_ in (None, generated_code.PinOrder()):
        torch._dynamo.reset()
        settings = {
            **generated_code.SETTINGS,
            "_pre_fusion_custom_pass": pass_,
            "reorder_for_locality": False,
        }
        with _without_graph_caches():
            compiled = torch.compile(_fusible, options=settings)
            result, sources = run_and_get_code(compiled, *inputs)
        assert torch.allclose(result[2], inputs[0].sin() + inputs[2])
        orders.append(_in_code(sources[0]))
    return orders


def test_a_fusion_does_not_move_a_wait(ranks: RankPool) -> None:
    loose, pinned = ranks.run(_pinned, 1)[0]
    assert pinned == ["all_gather [0]", "mm", "wait_ [1]"]
    assert loose == ["all_gather [0]", "wait_ [1]", "mm"]  # else the pass is not needed any more


def _beside_another(x: torch.Tensor, matrix: torch.Tensor, shard: torch.Tensor) -> Any:
    """A collective of tensor parallelism behind one of ours, without data between them."""
    texts = [Label("u", "all_gather", "forward", (), (), i, 2).encode() for i in range(2)]
    name = dist.distributed_c10d._get_default_group().group_name
    product = matrix @ matrix
    gathered = torch.ops.fsdp_dynamo.all_gather(shard, 1, name, texts[0], "")
    other = torch.ops._c10d_functional.all_gather_into_tensor(x, 1, name)
    torch.ops.fsdp_dynamo.wait_(gathered, shard, texts[1])
    whole = torch.ops._c10d_functional.wait_tensor(other)
    return product @ product, gathered + whole


def _overlapped(rank: int, world_size: int) -> list[list[str]]:
    orders = []
    inputs = (torch.rand(64), torch.rand(64, 64), torch.rand(64))
    for pass_ in (None, generated_code.PinOrder()):
        torch._dynamo.reset()
        settings = {
            **generated_code.SETTINGS,
            "_pre_fusion_custom_pass": pass_,
            "reorder_for_locality": False,
            SETTING: True,
        }
        with _without_graph_caches():
            compiled = torch.compile(_beside_another, options=settings)
            _, sources = run_and_get_code(compiled, *inputs)
        orders.append(_in_code(sources[0], _COMPUTE | {"all_gather_into_tensor", "wait_tensor"}))
    return orders


@needs_overlap
def test_inductors_overlap_pass_moves_nothing_past_ours(ranks: RankPool) -> None:
    """It knows torch's collectives only; a graph's order of issue is that of all ranks."""
    loose, pinned = ranks.run(_overlapped, 1)[0]
    other = "all_gather_into_tensor"
    assert pinned == ["mm", "all_gather [0]", other, "wait_ [1]", "wait_tensor", "mm"]
    assert loose == [other, "mm", "all_gather [0]", "wait_ [1]", "mm", "wait_tensor"]


def _reordered(rank: int, world_size: int) -> str:
    """What torch.compile raises if a pass of Inductor's scheduler swaps two all-gathers."""

    def swap(nodes: list[Any]) -> list[Any]:
        issues = [i for i, n in enumerate(nodes) if "all_gather" in _operator(n)]
        if len(issues) > 1:
            first, second = issues[:2]
            nodes[first], nodes[second] = nodes[second], nodes[first]
        return nodes

    wrapped = wrap(make_transformer(num_blocks=2))
    options = {"bucket": False, "max_in_flight": 8, "memory_budget_bytes": 10**9}
    options["link"] = {"latency_ms": 5.0, "bytes_per_ms": 1e6}
    model = torch.compile(wrapped, fullgraph=True, backend="fsdp_dynamo", options=options)
    settings = {"_post_fusion_custom_pass": swap, "fx_graph_cache": False}
    with _without_graph_caches(), torch._inductor.config.patch(settings):
        try:
            loss_of(model, batch(rank, 0))
        except Exception as error:  # noqa: BLE001  # Dynamo wraps it
            return str(error)
    return ""


def _operator(node: Any) -> str:
    return str(getattr(getattr(node, "node", None), "op_overload", ""))


def test_what_inductor_reorders_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(_reordered, 2):
        assert "collective or wait 0 of the graph to be all_gather of unit ''" in message
        assert "got all_gather of unit 'blocks.0'" in message
        assert "Inductor has reordered the graph" in message


def _source(*numbers: int, count: int | None = None) -> str:
    """Code of waits with these numbers, behind a launch of numbers 0 and 1."""
    count = len(numbers) + 2 if count is None else count
    texts = [Label("u", "all_gather", "forward", ("a",), (), i, count).encode() for i in range(99)]
    lines = [f"    b = {OURS}all_gather_together.default([x, y], 2, '0', {texts[:2]}, 'f|g')"]
    lines.append("    extern_kernels.mm(x, y, out=b)")
    lines += [f"    {OURS}wait_.default(b, x, {texts[i]!r})" for i in numbers]
    return "\n".join(
        ["import torch", 'kernel = """torch.ops.fsdp_dynamo.f()"""', "def call():"]
    ) + ("\n" + "\n".join(lines) + "\n")


def test_reading_code() -> None:
    calls = order_in_code(_source(2, 3))
    assert [call.name for call in calls] == ["all_gather_together", "mm", "wait_", "wait_"]
    assert [[label.number for label in call.labels] for call in calls] == [[0, 1], [], [2], [3]]
    check_order(_source(2, 3))
    check_order("import torch")
    with pytest.raises(OrderError, match=r"wait 2 of .* \(number 2\), got .* \(number 3\)\."):
        check_order(_source(3, 2))
    with pytest.raises(OrderError, match="to be none, got"):
        check_order(_source(3))
    with pytest.raises(OrderError, match="to be 5 of them, got no further one"):
        check_order(_source(2, 3, count=5))


_KERNELS = """
import triton
import triton.language as tl
from torch._inductor.async_compile import AsyncCompile
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
aten = torch.ops.aten
async_compile = AsyncCompile()
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
"""


def _triton(name: str, heuristics: str, variable: str = "") -> str:
    return f"""
{variable or name} = async_compile.triton('{name}', '''
import triton
from torch._inductor.runtime import triton_helpers, triton_heuristics

@triton_heuristics.{heuristics}(
    filename=__file__,
    inductor_meta={{'kernel_name': '{name}'}},
)
@triton.jit
def {name}(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')
"""


def _on_cuda() -> str:
    """A forward as Inductor writes it for CUDA: a gather beside loops, templates and the user's."""
    gather, wait = [Label("u", "all_gather", "forward", (), (), i, 2).encode() for i in range(2)]
    kernels = [
        _triton("triton_poi_fused_add_0", "pointwise"),
        _triton("triton_tem_fused_mm_relu_1", "template"),
        _triton("triton_tem_fused_flex_attention_2", "template"),
        _triton("triton_add", "user_autotune", "triton_add_3"),
        _triton("triton_red_fused_sum_4", "reduction"),
        _triton("triton_per_fused_sum_5", "persistent_reduction"),
        _triton("triton_for_fused_6", "foreach"),
        _triton("triton_tem_fused_mm_7", "template"),
        _triton("triton_tem_fused_mm_8", "template"),
    ]
    return f"""{_KERNELS}{"".join(kernels)}
cuda_fused_9 = async_compile.cuda(r'''extern "C" int cuda_fused_9();''', 'so')
arg_index = {{0: [slice(0, 3)], 1: [slice(0, 3)]}}
multi_kernel_0 = async_compile.multi_kernel('multi_kernel_0', [
    triton_red_fused_sum_4,
    triton_per_fused_sum_5,
], arg_index=arg_index)
multi_kernel_1 = async_compile.size_hint_multi_kernel('multi_kernel_1', {{
    ((64, 64),): triton_tem_fused_mm_7,
    ((4096, 64),): triton_tem_fused_mm_8,
}}, arg_index=arg_index)

async_compile.wait(globals())
del async_compile

def partition_0(args):
    arg1_1, buf2 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf3 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
        stream0 = get_raw_stream(0)
        multi_kernel_0.run(buf2, buf3, 64, 64, stream=stream0)
        multi_kernel_1.run(buf2, arg1_1, buf3, 8, 1, 1, stream=stream0)
        cuda_fused_9.cuda_fused_9(buf2, buf3, c_void_p(stream0))
    return (buf3, )

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        assert_size_stride(arg0_1, (64, 64), (64, 1))
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            # Topologically Sorted Source Nodes: [], Original ATen: []
            buf0 = {OURS}all_gather.default(arg0_1, 2, '0', {gather!r}, 'a|b')
            buf1 = buf0
            assert_size_stride(buf1, (128, 64), (64, 1), '{OURS}all_gather.default')
            stream0 = get_raw_stream(0)
            triton_poi_fused_add_0.run(arg1_1, buf2, 4096, stream=stream0)
            triton_tem_fused_mm_relu_1.run(buf2, arg1_1, buf3, 8, 1, 1, stream=stream0)
            triton_for_fused_6.run(buf2, buf3, stream=stream0)
            with torch.cuda.stream(stream1):
                raw_stream = get_raw_stream(0)
                triton_tem_fused_flex_attention_2.run(buf2, buf3, buf4, 1, 4, 1, stream=raw_stream)
            partition0_args = [arg1_1, buf2]
            (buf3,) = self.partitions[0](partition0_args)
            {OURS}wait_.default(buf1, arg0_1, {wait!r})
            triton_add_3.run(buf1, buf3, buf5, 4096, stream=stream0)
            extern_kernels.mm(reinterpret_tensor(buf1, (64, 64), (64, 1), 0), buf3, out=buf6)
            buf7 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf6, buf6, buf6)
        return (buf7, )

runner = Runner(partitions=[partition_0,])
call = runner.call
recursively_apply_fns = runner.recursively_apply_fns
"""


def test_reading_code_that_launches_triton_kernels() -> None:
    """Loops are not in it; partitions are where they are called."""
    calls = order_in_code(_on_cuda())
    assert [call.name for call in calls] == [
        "all_gather",
        "triton_tem_fused_mm_relu_1",
        "triton_tem_fused_flex_attention_2",
        "multi_kernel_1",
        "cuda_fused_9",
        "wait_",
        "triton_add_3",
        "mm",
        "_scaled_dot_product_flash_attention",
    ]
    check_order(_on_cuda())
    wait = next(line for line in _on_cuda().splitlines() if "wait_.default" in line)
    swapped = (
        _on_cuda()
        .replace(f"{wait}\n", "")
        .replace("            buf0 =", f"{wait}\n            buf0 =")
    )
    with pytest.raises(OrderError, match=r"\(number 0\), got .* \(number 1\)\."):
        check_order(swapped)


def _beside_a_template(x: torch.Tensor, query: torch.Tensor, shard: torch.Tensor) -> Any:
    """As ``_fusible``, with FlexAttention, which comes from a template, in place of the product."""
    texts = [Label("u", "all_gather", "forward", (), (), i, 2).encode() for i in range(2)]
    name = dist.distributed_c10d._get_default_group().group_name
    early = torch.sin(x)
    gathered = torch.ops.fsdp_dynamo.all_gather(shard, 1, name, texts[0], "")
    attended = flex_attention(query, query, query)
    torch.ops.fsdp_dynamo.wait_(gathered, shard, texts[1])
    return early, attended, early + gathered


class _PinCallsOnly(generated_code.PinOrder):
    """Templates move as their data allows."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        with mock.patch.object(SchedulerNode, "is_template", return_value=False):
            return super().__call__(nodes)


def _templates(rank: int, world_size: int) -> list[bool]:
    """Whether the template's kernel, the last of FlexAttention's, runs before the wait."""
    before = []
    inputs = (torch.rand(64), torch.rand(1, 2, 64, 16), torch.rand(64))
    for pass_ in (_PinCallsOnly(), generated_code.PinOrder()):
        torch._dynamo.reset()
        settings = {
            **generated_code.SETTINGS,
            "_pre_fusion_custom_pass": pass_,
            "reorder_for_locality": False,
        }
        with _without_graph_caches(), torch.no_grad():
            compiled = torch.compile(_beside_a_template, options=settings)
            _, sources = run_and_get_code(compiled, *inputs)
        lines = [line.strip() for line in sources[0].splitlines()]
        wait = next(i for i, line in enumerate(lines) if line.startswith(f"{OURS}wait_"))
        kernels = [i for i, line in enumerate(lines) if re.match(r"cpp_fused\w*flex_\w*\(", line)]
        before.append(kernels[-1] < wait)
    return before


def test_a_template_keeps_its_place(ranks: RankPool) -> None:
    loose, pinned = ranks.run(_templates, 1)[0]
    assert pinned
    assert not loose  # else templates need not be pinned any more
