"""A graph pass of one's own: one rank's NaN does not reach the others.

    torchrun --nproc-per-node 2 examples/custom_pass.py

A batch that gives NaN or infinity on one rank spoils the gradients of all: the reduce-scatter adds
them up. The pass replaces such values by zero before each unit's reduce-scatter, in the graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._ops import OpOverload

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.graph_utils import collectives
from graph_passes.markers import mark_of

aten = torch.ops.aten
GraphPass = Callable[[fx.Graph], None]
DIM = 16


def keep_nan_out(graph: fx.Graph) -> None:
    """Gradients that are not finite become zero before they are reduced.

    before:  gradient -> reduce_scatter -> wait
    after:   gradient -> where(|gradient| < inf, gradient, 0) -> reduce_scatter -> wait
    """
    for collective in list(collectives(graph)):  # a list: the graph changes meanwhile
        mark = mark_of(collective)
        if mark is None or mark.kind != "reduce_scatter":
            continue
        gradient = collective.args[0]
        assert isinstance(gradient, fx.Node)
        with graph.inserting_before(collective):
            size = _call(graph, aten.abs.default, gradient)
            is_finite = _call(graph, aten.lt.Scalar, size, float("inf"))  # not so for NaN
            finite = _call(graph, aten.where.ScalarOther, is_finite, gradient, 0.0)
        collective.replace_input_with(gradient, finite)


def _call(graph: fx.Graph, operator: OpOverload, source: fx.Node, *others: Any) -> fx.Node:
    """A new node. Its value without data says shape and dtype, which later passes read."""
    node = graph.call_function(operator, (source, *others))
    with source.meta["val"].fake_mode:
        node.meta["val"] = operator(*fx.map_arg(node.args, lambda arg: arg.meta["val"]))
    return node


def make_model() -> nn.Module:
    """Three equal units, with the same values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3)])


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Random numbers; rank 1's second batch has a NaN."""
    batch = torch.randn(8, DIM, generator=torch.Generator().manual_seed(1000 * step + rank))
    if (step, rank) == (1, 1):
        batch[0, 0] = float("nan")
    return batch


def train(
    passes: Sequence[GraphPass],
    backend: str = "fsdp_dynamo",
    steps: int = 4,
    device: torch.device | None = None,
) -> nn.Module:
    """A model after some steps, in which the passes ran over its graphs."""
    rank = dist.get_rank()
    model = FSDP(make_model().to(device), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(
        model, fullgraph=True, backend=backend, options={"passes": list(passes)}
    )
    for step in range(steps):
        compiled(batch_of(step, rank).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def start() -> torch.device:
    """Start the process group; return a GPU if this machine has one for each of its ranks."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def main() -> None:
    """Train with and without the pass."""
    device = start()
    for name, passes in (("without", ()), ("with", (keep_nan_out,))):
        model = train(passes, device=device)
        spoilt = sum(int((~p.isfinite()).sum()) for p in model.parameters())
        print(f"rank {dist.get_rank()}, {name} the pass: {spoilt} elements are not finite")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
