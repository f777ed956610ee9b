"""Unusual models and wrappings, and habits of users: as with a plain model, or refused by name."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from loops import (
    classification_loss,
    different,
    examples,
    gradients,
    make_classifier,
    whole_gradients,
)
from models import (
    DOORS,
    Block,
    Transformer,
    average_gradients,
    batch,
    loss_of,
    make_transformer,
    through,
    wrap,
)
from pool import on_ranks
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP, FSDPError, FSDPStateError, FSDPValueError, fully_shard
from fsdp_dynamo.wrap_policy import CustomPolicy, ModuleWrapPolicy


def _sharded(door: str, model: nn.Module) -> Any:
    policy = ModuleWrapPolicy({nn.Sequential})
    if door == "wrapper":
        return FSDP(model, auto_wrap_policy=policy)
    return fully_shard(model, policy=policy)


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_copy_between_forward_and_backward(rank: int, door: str) -> None:
    """Both are trained: the backward is the original's."""
    plain, model = make_classifier(), _sharded(door, make_classifier())
    loss = classification_loss(model, examples(rank, 0))
    copied = copy.deepcopy(model)
    loss.backward()
    assert all(param.grad is None for param in copied.parameters())
    classification_loss(copied, examples(rank, 1)).backward()
    for step, trained in enumerate((model, copied)):
        plain.zero_grad()
        classification_loss(plain, examples(rank, step)).backward()
        average_gradients(plain)
        assert different(whole_gradients(trained), gradients(plain)) == []


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_module_attached_later(rank: int, door: str) -> None:
    """It is left alone while it is frozen."""
    model = _sharded(door, make_classifier())
    classification_loss(model, examples(rank)).backward()
    model.extra = nn.Linear(3, 3).requires_grad_(False)
    classification_loss(model, examples(rank)).backward()
    model.extra.requires_grad_(True)
    with pytest.raises(FSDPStateError, match=r"parameter 'extra\.weight'"):
        classification_loss(model, examples(rank))


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_what_is_wrapped_already(rank: int, door: str) -> None:
    """An error, whatever the two are, and nothing has changed."""
    model = _sharded(door, make_classifier())
    before = whole_gradients(model), [*map(id, model.parameters())]
    for again in (FSDP, fully_shard, DistributedDataParallel):
        with pytest.raises(FSDPError, match="unit"):
            again(model)
    for again in (FSDP, fully_shard):
        with pytest.raises(FSDPValueError, match="parameter 'weight'"):
            again(next(m for m in model.modules() if isinstance(m, nn.Linear)))
    assert before == (whole_gradients(model), [*map(id, model.parameters())])
    for torchs in (
        fsdp.fully_shard(make_classifier()),
        fsdp.FullyShardedDataParallel(make_classifier(), device_id=torch.device("cpu")),
    ):
        parent = nn.Sequential(torchs, nn.Linear(3, 3))
        with pytest.raises(FSDPValueError, match="module '0': expected modules that torch"):
            FSDP(parent) if door == "wrapper" else fully_shard(parent)


# -- habits ----------------------------------------------------------------------------------------


def test_checkpoints_by_a_wrap_policy() -> None:
    for policy in (ModuleWrapPolicy({Block}), CustomPolicy(lambda m: isinstance(m, Block))):
        model = make_transformer(num_blocks=1)
        apply_activation_checkpointing(model, auto_wrap_policy=policy)
        assert type(model.blocks[0]) is CheckpointWrapper


@on_ranks(2)
def test_saving_the_model_itself(rank: int) -> None:
    words = r"(?s)expected a model's values.*Save model.state_dict\(\)"
    for door in DOORS:
        with pytest.raises(FSDPError, match=words):
            torch.save(through(door, make_transformer(num_blocks=1)), io.BytesIO())


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_state_of_a_compiled_model(rank: int, door: str) -> None:
    state = torch.compile(make_transformer(num_blocks=1)).state_dict()
    assert all(key.startswith("_orig_mod.") for key in state)
    torch.manual_seed(rank)
    model = through(door, Transformer(num_blocks=1))
    report = model.load_state_dict(state)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    with FSDP.summon_full_params(model):
        for name, param in model.named_parameters():
            assert torch.equal(param, state[f"_orig_mod.{name}"]), name


@on_ranks(2)
def test_attributes_are_set_on_the_wrapped_module(rank: int) -> None:
    """Attributes that the module has, and parameters; a new attribute stays on the wrapper."""
    model = wrap(make_transformer(num_blocks=1))
    block = model.blocks[0]
    block.heads = 1
    block.not_there_before = 3
    assert block.module.heads == 1
    assert "heads" not in block.__dict__
    assert block.__dict__["not_there_before"] == 3
    model.scale = nn.Parameter(torch.full((model.scale.numel(),), 2.0))
    assert "scale" in model.module._parameters
    assert "scale" not in model._parameters
    assert model.module.scale.tolist() == [2.0] * model.scale.numel()
    assert loss_of(model, batch(rank, 0)).isfinite()


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class _Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layer = _Layer()
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(tokens)))

    def stream(self, tokens: torch.Tensor, steps: int) -> Any:
        for _ in range(steps):
            tokens = torch.cat([tokens, self.forward(tokens)[:, -1:].argmax(-1)], dim=1)
            yield tokens[:, -1].tolist()


@on_ranks(2)
def test_a_generator_is_a_forward_method(rank: int) -> None:
    """Between its steps the parameters are sharded."""
    torch.manual_seed(0)
    plain, tokens = _Speaker(), torch.zeros(2, 1, dtype=torch.int64)
    with torch.no_grad():
        expected = list(plain.stream(tokens, 5))
        model: Any = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({_Layer}))
        model.register_forward_method("stream")
        for got, wanted in zip(model.stream(tokens, 5), expected, strict=True):
            assert got == wanted
            assert not any(flat.is_allocated for flat in model._fsdp_unit.flats)
