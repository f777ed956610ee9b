"""Golden graphs: what the pipeline makes of a small model, line by line.

After a change that is meant: ``make golden``, then read what has changed.
"""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from pool import RankPool
from torch import nn

from fsdp_dynamo import FSDP
from fsdp_dynamo.dynamo.artifacts import record_artifacts
from fsdp_dynamo.observe.inspection.listings import listings_of
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def _stages(rank: int, world_size: int) -> dict[str, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
    wrapped = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    step = torch.compile(wrapped, backend="fsdp_dynamo_aot_eager", fullgraph=True)
    with record_artifacts() as artifacts:
        step(torch.ones(2, 8)).sum().backward()
    return {found.file_name: found.text for found in listings_of(artifacts)}


def test_a_small_model(ranks: RankPool) -> None:
    texts = ranks.run(_stages, 2)[0]
    assert_expected_inline(
        texts["_whole.forward.after_planner.py"],
        """\
def forward(
    primals_1: "f32[32]",
    primals_2: "f32[2, 8]",
    primals_3: "f32[16]",
):
    all_gather_into_tensor: "f32[64]" = fsdp_dynamo_collectives.all_gather_into_tensor.default(primals_1, 2, '0', [1, 32, 0, 32])  # all_gather 0
    all_gather_into_tensor_1: "f32[32]" = fsdp_dynamo_collectives.all_gather_into_tensor.default(primals_3, 2, '0', [1, 16, 0, 16])  # all_gather 2
    wait_tensor: "f32[64]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)  # all_gather wait 0
    as_strided_default: "f32[8, 8]" = aten.as_strided.default(wait_tensor, [8, 8], [1, 8], 0)  # 0
    mm: "f32[2, 8]" = aten.mm.default(primals_2, as_strided_default)  # 0
    relu: "f32[2, 8]" = aten.relu.default(mm)  # (root)
    wait_tensor_1: "f32[32]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)  # all_gather wait 2
    as_strided_default_1: "f32[8, 4]" = aten.as_strided.default(wait_tensor_1, [8, 4], [1, 8], 0)  # 2
    mm_1: "f32[2, 4]" = aten.mm.default(relu, as_strided_default_1)  # 2
    return (mm_1, primals_1, primals_2, primals_3, relu)
""",
    )
    assert_expected_inline(
        texts["_whole.backward.after_planner.py"],
        """\
def backward(
    primals_1: "f32[32]",
    primals_2: "f32[2, 8]",
    primals_3: "f32[16]",
    relu: "f32[2, 8]",
    tangents_1: "f32[2, 4]",
):
    all_gather_into_tensor_1: "f32[32]" = fsdp_dynamo_collectives.all_gather_into_tensor.default(primals_3, 2, '0', [1, 16, 0, 16])  # all_gather 2
    t_2: "f32[4, 2]" = aten.t.default(tangents_1)  # 2
    new_flat_default: "f32[32]" = fsdp_dynamo_grad.new_flat.default(t_2, 32, [], torch.float32)  # 2
    mm_into_default: "f32[32]" = fsdp_dynamo_grad.mm_into.default(new_flat_default, 0, [8, 1], t_2, relu, False)  # 2
    wait_tensor_1: "f32[32]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)  # all_gather wait 2
    as_strided_default: "f32[4, 8]" = aten.as_strided.default(wait_tensor_1, [4, 8], [8, 1], 0)  # 2
    mm_3: "f32[2, 8]" = aten.mm.default(tangents_1, as_strided_default)  # 2
    threshold_backward: "f32[2, 8]" = aten.threshold_backward.default(mm_3, relu, 0)  # (root)
    t_6: "f32[8, 2]" = aten.t.default(threshold_backward)  # 0
    new_flat_default_1: "f32[64]" = fsdp_dynamo_grad.new_flat.default(t_6, 64, [], torch.float32)  # 0
    mm_into_default_1: "f32[64]" = fsdp_dynamo_grad.mm_into.default(new_flat_default_1, 0, [8, 1], t_6, primals_2, False)  # 0
    reduce_scatter_tensor: "f32[16]" = fsdp_dynamo_collectives.reduce_scatter_tensor.default(mm_into_default, 'avg', 2, '0', [1, 16, 0, 16])  # reduce_scatter 2
    reduce_scatter_tensor_1: "f32[32]" = fsdp_dynamo_collectives.reduce_scatter_tensor.default(mm_into_default_1, 'avg', 2, '0', [1, 32, 0, 32])  # reduce_scatter 0
    wait_tensor_2: "f32[16]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)  # reduce_scatter wait 2
    wait_tensor_3: "f32[32]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_1)  # reduce_scatter wait 0
    return (wait_tensor_3, None, wait_tensor_2)
""",
    )
