"""Adapters of other libraries on frozen models: PEFT's LoRA, and a base that torchao has quantised.

Adapters by hand: test_user_methods.py and examples/lora.py.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import torch.distributed as dist
from loops import different, error_of, whole_gradients
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")

# -- PEFT ------------------------------------------------------------------------------------------


def _with_lora() -> tuple[Any, type[nn.Module]]:
    import peft

    base, layer = hf_models.make("llama")
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.get_peft_model(base, peft.LoraConfig(**lora)), layer


def _fine_tune(model: nn.Module, rank: int) -> list[float]:
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.5)
    losses = []
    for _ in range(3):
        loss = model(**hf_models.inputs(rank)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _save(model: FSDP, folder: Path, rank: int) -> None:
    """In the ways that are found in scripts."""
    model.save_pretrained(folder / "own", is_main_process=rank == 0)
    whole = model.state_dict()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    adapter = get_model_state_dict(model, options=options)
    if rank == 0:
        model.save_pretrained(folder / "state dict", state_dict=whole)
        model.module.save_pretrained(folder / "adapter", state_dict=adapter)
    with FSDP.summon_full_params(model, writeback=False):
        if rank == 0:
            model.module.save_pretrained(folder / "summoned")
    dist.barrier()


@needs_peft
@on_ranks(2)
def test_peft_trains_and_saves_as_with_ddp(rank: int, tmp_path: Path) -> None:
    """The adapter's files have whole values, in whatever way they were written.

    The base is the reference model when the adapter is disabled, as in preference training.
    """
    import peft
    from safetensors.torch import load_file

    reference, layer = _with_lora()
    expected = _fine_tune(DistributedDataParallel(reference), rank)
    model = FSDP(_with_lora()[0], auto_wrap_policy=ModuleWrapPolicy({layer}))
    assert _fine_tune(model, rank) == pytest.approx(expected, rel=1e-5)
    _save(model, tmp_path, rank)

    adapter = peft.get_peft_model_state_dict(reference)
    for way in ("own", "state dict", "adapter", "summoned"):
        saved = load_file(tmp_path / way / "adapter_model.safetensors")
        assert different(saved, adapter) == [], way
    loaded = peft.PeftModel.from_pretrained(hf_models.make("llama")[0], tmp_path / "own")
    with torch.no_grad():
        losses = [one(**hf_models.inputs(rank)).loss.item() for one in (loaded, model)]
        for one in (reference, model):
            with one.disable_adapter():
                losses.append(one(**hf_models.inputs(rank)).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[2] == pytest.approx(losses[3], rel=1e-5)
    assert losses[2] != pytest.approx(losses[0], rel=1e-3)


# -- a quantised base ------------------------------------------------------------------------------


class _Adapted(nn.Module):
    """A frozen layer and a product of two narrow ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def _quantised() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    bases = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    quantize_(bases, Int8WeightOnlyConfig())
    return nn.Sequential(*map(_Adapted, bases), nn.Linear(64, 3))


def _input(rank: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))


def _mean_gradients(world_size: int) -> dict[str, torch.Tensor]:
    plain = _quantised()
    for rank in range(world_size):
        (plain(_input(rank)).square().sum() / world_size).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def _over_quantised(rank: int, mode: str, ignored: bool) -> list[str]:
    """Names of wrong gradients."""
    model = _quantised()
    frozen = [p for p in model.parameters() if not p.requires_grad] if ignored else None
    policy = ModuleWrapPolicy({_Adapted})
    wrapped = FSDP(model, auto_wrap_policy=policy, ignored_states=frozen)
    in_mode(wrapped, mode)(_input(rank)).square().sum().backward()
    assert len(wrapped.state_dict()) == len(_quantised().state_dict())
    return different(whole_gradients(wrapped), _mean_gradients(dist.get_world_size()))


@needs_torchao
@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_a_quantised_base_that_is_ignored(rank: int, mode: str) -> None:
    assert _over_quantised(rank, mode, True) == []


@needs_torchao
@on_ranks(2)
def test_a_quantised_base_works_or_is_refused_by_name(rank: int) -> None:
    wrong: list[str] = []
    message = error_of(lambda: wrong.extend(_over_quantised(rank, "eager", False)))
    if not message:
        assert wrong == []
    else:
        assert message.startswith(("UnsupportedError", "FSDPValueError")), message
        name = type(_quantised()[0].base.weight).__name__
        assert [w for w in ("0.base.weight", name, "ignored_states") if w not in message] == []
