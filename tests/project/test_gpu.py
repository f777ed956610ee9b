"""The same code on CUDA with NCCL; one rank, so the strategy is NO_SHARD."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import make_transformer, wrap
from modes import in_mode
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from benchmarks.gpu_checks import forced_sharding
from fsdp_dynamo import FSDP, CPUOffload, checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def nccl() -> Iterator[torch.device]:
    """A default NCCL group of one rank."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield device
    dist.destroy_process_group()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("mode", ["eager", "hooks", "graph", "graph-inductor"])
def test_one_gpu_equals_the_plain_model(nccl: torch.device, mode: str, offload: bool) -> None:
    tokens = torch.randint(31, (2, 8), device=nccl)
    plain = make_transformer(num_blocks=2).to(nccl)
    cpu_offload = CPUOffload(offload_params=offload)
    sharded = wrap(make_transformer(num_blocks=2), device_id=0, cpu_offload=cpu_offload)
    assert {p.device.type for p in sharded.parameters()} == {"cpu" if offload else "cuda"}
    model = in_mode(sharded, mode)
    losses = []
    for net in (plain, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(tokens).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("mode", ["eager", "hooks", "graph"])
def test_inputs_on_another_device_are_moved(nccl: torch.device, mode: str) -> None:
    """The root's, positional and by keyword, are moved to where its parameters are."""
    tokens = torch.randint(31, (2, 8))
    plain = make_transformer(num_blocks=2).to(nccl)
    model = in_mode(wrap(make_transformer(num_blocks=2), device_id=0), mode)
    expected = plain(tokens.to(nccl))
    for output in (model(tokens), model(tokens=tokens)):
        assert output.device == nccl
        torch.testing.assert_close(output, expected)
        output.square().mean().backward()


def test_a_checkpoint_is_as_it_was_when_saved(nccl: torch.device, tmp_path: Path) -> None:
    model = wrap(make_transformer(num_blocks=2), device_id=0)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(31, (2, 8), device=nccl)
    for step in range(2):
        model(tokens).square().mean().backward()
        optimizer.step()
        saving = checkpoint.async_save(tmp_path, model, optimizer, step=step)
    saved = [parameter.clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saving.result()
    checkpoint.load(tmp_path, model, optimizer)
    for parameter, value in zip(model.parameters(), saved, strict=True):
        assert torch.equal(parameter, value)
    assert saving.in_host_memory(saved)[-1].is_pinned()


def _trained(device: torch.device, offload: bool) -> tuple[FSDP, torch.optim.Optimizer]:
    """A model that gathers and reduces over its one rank, after a step of AdamW; with gradients."""
    cpu_offload = CPUOffload(offload_params=offload)
    model = wrap(make_transformer(num_blocks=2), device_id=0, cpu_offload=cpu_offload)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(16, device=device).view(2, 8)
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
    return model, optimizer


@pytest.mark.parametrize("offload", [False, True])
def test_parameters_are_summoned_and_written_back(nccl: torch.device, offload: bool) -> None:
    with forced_sharding():
        model, _ = _trained(nccl, offload)
        with FSDP.summon_full_params(model, with_grads=True), torch.no_grad():
            expected = {}
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                parameter += parameter.grad
                parameter.grad *= 2
                expected[name] = parameter.cpu(), parameter.grad.cpu()
        with FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=True):
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                assert torch.equal(parameter, expected[name][0])
                assert torch.equal(parameter.grad, expected[name][1])


@pytest.mark.parametrize("offload", [False, True])
def test_clipping(nccl: torch.device, offload: bool) -> None:
    with forced_sharding():
        model, _ = _trained(nccl, offload)
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            grads = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        expected = torch.cat([grad.flatten() for grad in grads]).norm()
        torch.testing.assert_close(model.clip_grad_norm_(1e-3).cpu(), expected)
        assert float(model.clip_grad_norm_(1.0)) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("offload", [False, True])
def test_state_dicts(nccl: torch.device, offload: bool, kind: str) -> None:
    """Those of DCP, of the model and the optimizer: another model that loads them is equal."""
    options = StateDictOptions(full_state_dict=kind == "full", cpu_offload=kind == "full")
    with forced_sharding():
        model, optimizer = _trained(nccl, offload)
        other, its_optimizer = _trained(nccl, offload)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        set_state_dict(
            other,
            its_optimizer,
            model_state_dict=states[0],
            optim_state_dict=states[1],
            options=options,
        )
        for net, its in ((model, optimizer), (other, its_optimizer)):
            its.zero_grad()
            net(torch.arange(16, device=nccl).view(2, 8)).square().mean().backward()
            its.step()
        for wanted, got in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(wanted, got)
