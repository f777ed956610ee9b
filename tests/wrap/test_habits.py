"""What users do to models out of habit: it works as with a plain model, or says what to do."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from loops import error_of
from models import Block, batch, loss_of, make_transformer, train, wrap
from modes import MODES, in_mode
from pool import RankPool
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.nn import functional as F

from fsdp_dynamo import FSDP, fully_shard
from fsdp_dynamo.wrap_policy import CustomPolicy, ModuleWrapPolicy


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


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


def _pickled(rank: int, world_size: int, composable: bool) -> str:
    model = make_transformer(num_blocks=1)
    sharded = fully_shard(model) if composable else FSDP(model)
    return error_of(lambda: torch.save(sharded, io.BytesIO()))


@pytest.mark.parametrize("composable", [False, True])
def test_saving_the_model_itself(ranks: RankPool, composable: bool) -> None:
    for message in ranks.run(_pickled, 2, composable):
        assert "the root unit: expected a model's values to be saved" in message
        assert "Save model.state_dict()" in message


def _root_only(rank: int, world_size: int, mode: str) -> tuple[Any, Any]:
    policy = ModuleWrapPolicy(set())
    model = wrap(make_transformer(num_blocks=1), auto_wrap_policy=policy)
    expected = train(FSDP(make_transformer(num_blocks=1)), rank)[0]
    return expected, train(in_mode(model, mode), rank)[0]


@pytest.mark.parametrize("mode", MODES)
def test_no_units_below_the_root(ranks: RankPool, mode: str) -> None:
    for expected, got in ranks.run(_root_only, 2, mode):
        assert got == pytest.approx(expected, rel=1e-6)


def _checkpointed_later(rank: int, world_size: int, mode: str) -> tuple[Any, Any]:
    expected = train(wrap(make_transformer(num_blocks=2)), rank)[0]
    model = wrap(make_transformer(num_blocks=2))
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return expected, train(in_mode(model, mode), rank)[0]


@pytest.mark.parametrize("mode", MODES)
def test_activation_checkpointing_after_wrapping(ranks: RankPool, mode: str) -> None:
    for expected, got in ranks.run(_checkpointed_later, 2, mode):
        assert got == pytest.approx(expected, rel=1e-6)


def _state_of_a_compiled_model(rank: int, world_size: int, composable: bool) -> dict[str, bool]:
    plain = make_transformer(num_blocks=1)
    state = copy.deepcopy(torch.compile(plain).state_dict())
    policy = ModuleWrapPolicy({Block})
    torch.manual_seed(rank)
    other = type(plain)(num_blocks=1)
    model: Any = (
        fully_shard(other, policy=policy) if composable else FSDP(other, auto_wrap_policy=policy)
    )
    report = model.load_state_dict(state)
    loaded = model.state_dict()
    return {
        "has the prefix": all(key.startswith("_orig_mod.") for key in state),
        "no reports": not report.missing_keys and not report.unexpected_keys,
        "values": all(
            torch.equal(_whole(loaded[k.removeprefix("_orig_mod.")]), _whole(v))
            for k, v in state.items()
        ),
    }


@pytest.mark.parametrize("composable", [False, True])
def test_state_of_a_compiled_model(ranks: RankPool, composable: bool) -> None:
    for found in ranks.run(_state_of_a_compiled_model, 2, composable):
        assert [what for what, holds in found.items() if not holds] == []


def _attributes(rank: int, world_size: int) -> dict[str, bool]:
    model = wrap(make_transformer(num_blocks=1))
    block = model.blocks[0]
    block.heads = 1
    block.not_there_before = 3
    model.scale = nn.Parameter(torch.full((model.scale.numel(),), 2.0))
    return {
        "set on the module": block.module.heads == 1 and "heads" not in block.__dict__,
        "new ones stay": block.__dict__["not_there_before"] == 3,
        "parameters": "scale" in model.module._parameters and "scale" not in model._parameters,
        "used": model.module.scale.tolist() == [2.0] * model.scale.numel(),
        "runs": bool(loss_of(model, batch(rank, 0)).isfinite()),
    }


def test_attributes_are_set_on_the_wrapped_module(ranks: RankPool) -> None:
    for found in ranks.run(_attributes, 2):
        assert [what for what, holds in found.items() if not holds] == []


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


def _quantised(rank: int, world_size: int, kind: str, mode: str) -> tuple[str, float]:
    torch.manual_seed(0)
    model = _Adapted(_weight(kind))
    message = error_of(lambda: FSDP(model))
    sharded = FSDP(model, ignored_states=[model.base.weight])
    loss = in_mode(sharded, mode)(torch.ones(2, 4)).square().sum()
    loss.backward()
    return message, loss.item()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["tensor", "parameter"])
def test_quantised_parameters(ranks: RankPool, kind: str, mode: str) -> None:
    torch.manual_seed(0)
    expected = _Adapted(_weight(kind))(torch.ones(2, 4)).square().sum().item()
    for message, loss in ranks.run(_quantised, 2, kind, mode):
        assert "parameter 'base.weight': expected a plain tensor" in message
        assert "test_habits." in message
        assert "ignored_states=" in message
        assert loss == pytest.approx(expected)


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


def _borrowed(rank: int, world_size: int, mode: str) -> tuple[str, float, float]:
    torch.manual_seed(0)
    plain = _Borrowing()
    expected = plain(torch.ones(2, 4)).item()
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({_Layer}))
    run = model if mode == "graph" else in_mode(model, mode)  # there the whole call is Dynamo's
    message = error_of(lambda: run(torch.ones(2, 4)))
    advised = in_mode(FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({_Layer, nn.Linear})), mode)
    return message, expected, advised(torch.ones(2, 4)).item()


@pytest.mark.parametrize("mode", MODES)
def test_a_module_of_another_unit(ranks: RankPool, mode: str) -> None:
    for message, expected, got in ranks.run(_borrowed, 2, mode):
        assert "got mixed torch.Tensor and DTensor" in message  # torch's words, as with FSDP2
        assert got == pytest.approx(expected, rel=1e-6)


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


@torch.no_grad()
def _streamed(rank: int, world_size: int) -> tuple[list[Any], list[Any], bool]:
    torch.manual_seed(0)
    plain = _Speaker()
    expected = list(plain.stream(torch.zeros(2, 1, dtype=torch.int64), 5))
    model: Any = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({_Layer}))
    model.register_forward_method("stream")
    got, is_sharded = [], True
    for tokens in model.stream(torch.zeros(2, 1, dtype=torch.int64), 5):
        got.append(tokens)
        is_sharded &= not any(flat.is_allocated for flat in model._fsdp_unit.flats)
    return expected, got, is_sharded


def test_a_generator_is_a_forward_method(ranks: RankPool) -> None:
    for expected, got, is_sharded in ranks.run(_streamed, 2):
        assert got == expected
        assert is_sharded


_log = logging.getLogger(__name__)


class _Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _log.warning("training with a cache")
        return self.layer(x).sum()


def _logged(rank: int, world_size: int) -> tuple[str, bool]:
    model = FSDP(_Logging(), auto_wrap_policy=ModuleWrapPolicy({_Layer}))
    compiled = in_mode(model, "graph")
    message = ""
    try:
        compiled(torch.ones(2, 4))
    except Unsupported as error:
        message = str(error)
    ignored = torch._dynamo.config.ignore_logging_functions
    with torch._dynamo.config.patch(ignore_logging_functions={*ignored, logging.Logger.warning}):
        compiled(torch.ones(2, 4)).backward()
    return message, all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_logging_calls_can_be_left_out_of_whole_graphs(ranks: RankPool) -> None:
    """As docs/troubleshooting.md says."""
    for message, is_trained in ranks.run(_logged, 2):
        assert "logging.Logger method not supported" in message
        assert is_trained
