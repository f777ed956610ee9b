"""The same code on CUDA with NCCL; one rank, so the strategy is NO_SHARD."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from models import make_transformer, wrap
from ways import in_way

from fsdp_dynamo import CPUOffload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def nccl() -> Iterator[torch.device]:
    """A default NCCL group of one rank."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    device = torch.device("cuda", 0)
    dist.init_process_group(
        "nccl", init_method=f"tcp://localhost:{port}", rank=0, world_size=1, device_id=device
    )
    yield device
    dist.destroy_process_group()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("way", ["eager", "hooks", "graph", "graph-inductor"])
def test_one_gpu_equals_the_plain_model(nccl: torch.device, way: str, offload: bool) -> None:
    tokens = torch.randint(31, (2, 8), device=nccl)
    plain = make_transformer(num_blocks=2).to(nccl)
    cpu_offload = CPUOffload(offload_params=offload)
    sharded = wrap(make_transformer(num_blocks=2), device_id=0, cpu_offload=cpu_offload)
    assert {p.device.type for p in sharded.parameters()} == {"cpu" if offload else "cuda"}
    model = in_way(sharded, way)
    losses = []
    for net in (plain, model):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(tokens).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
