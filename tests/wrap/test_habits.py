"""What users do to models out of habit: it works as with a plain model, or says what to do."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from loops import error_of, whole_gradients
from models import (
    DOORS,
    Block,
    Transformer,
    batch,
    loss_of,
    make_transformer,
    through,
    train,
    wrap,
)
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.nn import functional as F

from fsdp_dynamo import FSDP, FSDPError
from fsdp_dynamo.wrap_policy import CustomPolicy, ModuleWrapPolicy


@pytest.mark.parametrize(
    "policy",
    [ModuleWrapPolicy({Block}), CustomPolicy(lambda module: isinstance(module, Block))],
    ids=["classes", "function"],
)
def test_checkpoints_by_a_wrap_policy(policy: Any) -> None:
    model = make_transformer(num_blocks=2)
    apply_activation_checkpointing(model, auto_wrap_policy=policy)
    inside = [m._checkpoint_wrapped_module for m in model.modules() if type(m) is CheckpointWrapper]
    assert [type(module) for module in inside] == [Block, Block]


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_saving_the_model_itself(rank: int, door: str) -> None:
    model = through(door, make_transformer(num_blocks=1))
    with pytest.raises(
        FSDPError, match=r"(?s)expected a model's values.*Save model.state_dict\(\)"
    ):
        torch.save(model, io.BytesIO())


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_no_units_below_the_root(rank: int, mode: str) -> None:
    expected = train(FSDP(make_transformer(num_blocks=1)), rank)[0]
    model = wrap(make_transformer(num_blocks=1), auto_wrap_policy=ModuleWrapPolicy(set()))
    assert train(in_mode(model, mode), rank)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_activation_checkpointing_after_wrapping(rank: int, mode: str) -> None:
    expected = train(wrap(make_transformer(num_blocks=2)), rank)[0]
    model = wrap(make_transformer(num_blocks=2))
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    assert train(in_mode(model, mode), rank)[0] == pytest.approx(expected, rel=1e-6)


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


class _Scaled(torch.Tensor):
    """Eight-bit numbers and their scale, as quantised weights are."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> _Scaled:
        made: _Scaled = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=scale.dtype, device=values.device
        )
        return made

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> _Scaled:
        return _Scaled(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return _Scaled(args[0].values, args[0].scale)
        full = [a.values * a.scale if isinstance(a, _Scaled) else a for a in args]
        return func(*full, **(kwargs or {}))


class _Own(nn.Parameter):
    """A parameter with behaviour of its own, as another library's quantised weights are."""


class _Adapted(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.base = nn.Module()
        self.base.weight = weight
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.base.weight) + self.up(x)


def _weight(kind: str) -> nn.Parameter:
    values = torch.arange(16, dtype=torch.int8).view(4, 4)
    if kind == "tensor":
        return nn.Parameter(_Scaled(values, torch.tensor(0.5)), requires_grad=False)
    return _Own(values * 0.5, requires_grad=False)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("tensor", "eager"), ("tensor", "hooks"), ("parameter", "eager"), ("parameter", "graph")],
)
@on_ranks(2)
def test_quantised_parameters(rank: int, kind: str, mode: str) -> None:
    torch.manual_seed(0)
    model = _Adapted(_weight(kind))
    expected = model(torch.ones(2, 4)).square().sum().item()
    words = r"'base.weight': expected a plain tensor.*test_habits\..*ignored_states="
    with pytest.raises(FSDPError, match=words):
        FSDP(model)
    sharded = FSDP(model, ignored_states=[model.base.weight])
    loss = in_mode(sharded, mode)(torch.ones(2, 4)).square().sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class _Borrowing(nn.Module):
    """Uses a module of its first layer by hand, as a diffusion transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0].embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_module_of_another_unit(rank: int, mode: str) -> None:
    torch.manual_seed(0)
    plain, x = _Borrowing(), torch.ones(2, 4)
    expected = plain(x).item()
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({_Layer}))
    run = model if mode == "graph" else in_mode(model, mode)  # there the whole call is Dynamo's
    # torch's words, as with FSDP2
    assert "got mixed torch.Tensor and DTensor" in error_of(lambda: run(x))
    advised = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({_Layer, nn.Linear}))
    assert in_mode(advised, mode)(x).item() == pytest.approx(expected, rel=1e-6)


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


_log = logging.getLogger(__name__)


class _Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _log.warning("training with a cache")
        return self.layer(x).sum()


@on_ranks(2)
def test_logging_calls_can_be_left_out_of_whole_graphs(rank: int) -> None:
    """As docs/troubleshooting.md says."""
    model = FSDP(_Logging(), auto_wrap_policy=ModuleWrapPolicy({_Layer}))
    compiled = in_mode(model, "graph")
    with pytest.raises(Unsupported, match=r"logging\.Logger method not supported"):
        compiled(torch.ones(2, 4))
    ignored = {*torch._dynamo.config.ignore_logging_functions, logging.Logger.warning}
    with torch._dynamo.config.patch(ignore_logging_functions=ignored):
        compiled(torch.ones(2, 4)).backward()
    assert all(grad.isfinite().all() for grad in whole_gradients(model).values())
