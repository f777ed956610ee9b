"""State dicts: plain keys and whole values in every order of wrap, compile and checkpoint."""

from __future__ import annotations

import re
from itertools import permutations
from typing import Any

import pytest
import torch
from models import VOCABULARY, Block, Transformer, batch, loss_of, make_transformer, train, wrap
from pool import RankFailedError, RankPool, on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fsdp_dynamo import (
    FSDP,
    FSDPValueError,
    FullStateDictConfig,
    MixedPrecision,
    StateDictType,
    fully_shard,
)
from fsdp_dynamo.wrap_policy import CustomPolicy, ModuleWrapPolicy

BLOCKS = ModuleWrapPolicy({Block})
ORDERS = [
    order
    for length in (1, 2, 3)
    for order in permutations(("wrap", "compile", "checkpoint"), length)
    if "wrap" in order
]


def _checkpoint(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    return model


def _build(order: tuple[str, ...], per_block_compile: bool = False) -> nn.Module:
    model: nn.Module = make_transformer(num_blocks=2, tied=True)
    model.register_buffer("table", torch.arange(3.0))
    for step in order:
        if step == "wrap":
            model = wrap(model)
        elif step == "checkpoint":
            model = _checkpoint(model)
        elif per_block_compile:
            for i, block in enumerate(model.blocks):
                model.blocks[i] = torch.compile(block, backend="aot_eager")
        else:
            model = torch.compile(model, backend="aot_eager")
    return model


def _plain() -> nn.Module:
    model = make_transformer(num_blocks=2, tied=True)
    model.register_buffer("table", torch.arange(3.0))
    return model


def _keys_and_losses(
    rank: int, world_size: int, order: tuple[str, ...], per_block: bool
) -> tuple[bool, list[str], list[str], list[float], list[float]]:
    plain = _plain()
    model = _build(order, per_block)
    state = model.state_dict()
    equal = all(torch.equal(value, state[key]) for key, value in plain.state_dict().items())
    plain.load_state_dict(state)
    names = sorted(name for name, _ in model.named_parameters())
    assert names == sorted(name for name, _ in plain.named_parameters())
    assert [n for n, _ in model.named_buffers()] == ["table"]
    reference, _ = train(wrap(_plain()), rank, steps=2)
    losses, _ = train(model, rank, steps=2)
    after = model.state_dict()
    model.load_state_dict(plain.state_dict())  # back to the start, through plain keys
    again, _ = train(model, rank, steps=1)
    assert again[0] == losses[0]
    assert not torch.equal(after["head.weight"], state["head.weight"])
    return equal, list(plain.state_dict()), list(state), reference, losses


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_order(ranks: RankPool, order: tuple[str, ...]) -> None:
    for equal, expected, got, reference, losses in ranks.run(_keys_and_losses, 2, order, False):
        assert equal
        assert got == expected
        assert losses == pytest.approx(reference, rel=1e-6)


@pytest.mark.parametrize("order", [("compile", "wrap"), ("compile", "checkpoint", "wrap")])
def test_blocks_compiled_one_by_one(ranks: RankPool, order: tuple[str, ...]) -> None:
    for equal, expected, got, reference, losses in ranks.run(_keys_and_losses, 2, order, True):
        assert equal
        assert got == expected
        assert losses == pytest.approx(reference, rel=1e-6)


def _round_trip(rank: int, world_size: int) -> tuple[float, float]:
    """A trained state goes through the plain model into a model wrapped in another way."""
    trained = wrap(make_transformer(num_blocks=2))
    train(trained, rank, steps=2)
    plain = make_transformer(num_blocks=2)
    plain.load_state_dict(trained.state_dict())
    whole = FSDP(make_transformer(num_blocks=2))
    whole.load_state_dict(trained.state_dict())
    tokens = batch(0, 9)
    with torch.no_grad():
        assert torch.equal(whole(tokens), trained(tokens))
        return loss_of(plain, tokens).item(), loss_of(trained, tokens).item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_round_trip(ranks: RankPool, world_size: int) -> None:
    for plain, trained in ranks.run(_round_trip, world_size):
        assert plain == trained


def _options_set_later(rank: int, world_size: int) -> tuple[list[str], bool, list[str]]:
    model = wrap(make_transformer(num_blocks=1))
    config, mine = FullStateDictConfig(), FullStateDictConfig(rank0_only=True)
    config.rank0_only = True  # upstream's classes can be written to, and integrations do so
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        config.rank0_only = False
        names = list(model.state_dict())
        same = FSDP.get_state_dict_type(model).state_dict_config == mine
    return names, same, list(model.state_dict())


def test_options_are_those_of_the_call(ranks: RankPool) -> None:
    (first, same, every), (second, *_) = ranks.run(_options_set_later, 2)
    assert (first, second, same) == (every, [], True)


class _InFile:
    """A value that loaders of others pass: it has a shape, and is read when a function needs it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self._value = value.shape, value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tree_map_only(cls, lambda one: one._value, args)
        return func(*args, **(kwargs or {}))


def _loaded_as_needed(rank: int, world_size: int) -> list[str]:
    model = wrap(make_transformer(num_blocks=2))
    plain = Transformer(num_blocks=2)  # other weights, the same on every rank
    model.load_state_dict({name: _InFile(value) for name, value in plain.state_dict().items()})
    whole = model.state_dict()
    return [
        name for name, value in plain.state_dict().items() if not torch.equal(whole[name], value)
    ]


def test_values_that_are_loaded_as_they_are_needed(ranks: RankPool) -> None:
    assert ranks.run(_loaded_as_needed, 2) == [[], []]


def _wrong_shape(rank: int, world_size: int) -> None:
    model = wrap(make_transformer())
    state = model.state_dict()
    state["head.weight"] = torch.zeros(VOCABULARY, 3)
    model.load_state_dict(state)


def test_wrong_shape_names_the_key(ranks: RankPool) -> None:
    with pytest.raises(RankFailedError, match=r"key 'head.weight': expected .*\(31, 16\), got"):
        ranks.run(_wrong_shape, 2)


class _Scaled(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4, dtype=dtype))


def _buffers(rank: int, world_size: int) -> tuple[list[torch.dtype], list[torch.dtype]]:
    """Dtypes while it runs, and in a checkpoint."""
    own = {"mixed_precision": MixedPrecision(buffer_dtype=torch.float16)}
    model = nn.Sequential(_Scaled(torch.float32), _Scaled(torch.float64), nn.BatchNorm1d(4))
    first = model[0]
    wrapped = FSDP(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: own if module is first else False),
        mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
    )
    state = wrapped.state_dict()
    names = ["0.scale", "1.scale", "2.running_mean"]
    live = dict(wrapped.named_buffers())
    return [live[name].dtype for name in names], [state[name].dtype for name in names]


def test_buffers_keep_their_dtype_in_checkpoints(ranks: RankPool) -> None:
    """Each module's are cast as its unit says; norms in their own precision keep theirs."""
    for live, saved in ranks.run(_buffers, 2):
        assert live == [torch.float16, torch.bfloat16, torch.float32]
        assert saved == [torch.float32, torch.float64, torch.float32]


class _Around(nn.Module):
    """A model beside a compiled module whose own keys, as in plain torch, keep its prefix."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.other = torch.compile(nn.Linear(2, 2), backend="aot_eager")


def _in_kind(kind: str) -> nn.Module:
    if kind == "fully_shard":
        return fully_shard(_checkpoint(_plain()), policy=BLOCKS)
    if kind == "compiled fully_shard":
        return torch.compile(fully_shard(_plain(), policy=BLOCKS), backend="aot_eager")
    if kind == "inside another module":
        return _Around(_build(("checkpoint", "wrap", "compile")))
    if kind == "the wrapped module":
        return _build(("wrap",))
    return _build(tuple(kind.split("-")))


def _reports(rank: int, world_size: int, kind: str) -> tuple[Any, ...]:
    """The report on keys that are missing, unexpected, or of another shape."""
    outermost = _in_kind(kind)
    model = outermost.module if kind == "the wrapped module" else outermost
    prefix = "net." if kind == "inside another module" else ""
    given = model.state_dict()
    missing = [f"{prefix}{name}" for name in ("table", "blocks.0.qkv.weight")]
    unexpected = [f"{prefix}{name}" for name in ("oops", "blocks.0.nope.weight")]
    if prefix:
        missing.append("other._orig_mod.weight")
    for name in missing:
        del given[name]
    given.update({name: torch.ones(2) for name in unexpected})
    report = model.load_state_dict(given, strict=False)
    said = []
    for name in ("table", "norm.weight"):
        try:
            model.load_state_dict({**given, f"{prefix}{name}": torch.ones(7)})
        except (RuntimeError, FSDPValueError) as error:
            said.append(str(error).replace("other._orig_mod.", ""))
    return report == (missing, unexpected), f"for {prefix}table:" in said[0], said


@pytest.mark.parametrize(
    "kind",
    [
        "wrap",
        "checkpoint-wrap",
        "wrap-compile",
        "fully_shard",
        "compiled fully_shard",
        "the wrapped module",
        "inside another module",
    ],
)
def test_reports_have_plain_names(ranks: RankPool, kind: str) -> None:
    """Result of ``strict=False`` and error of ``strict=True``, for parameters and buffers."""
    for is_plain, names_buffer, (of_buffer, of_parameter) in ranks.run(_reports, 2, kind):
        assert is_plain
        assert names_buffer
        assert "expected a tensor of shape (16,)" in of_parameter
        assert not re.search("_fsdp_wrapped|_checkpoint_wrapped|_orig_mod", of_buffer)
        assert not re.search("_fsdp_wrapped|_checkpoint_wrapped|_orig_mod", of_parameter)


def _nested_prefix(rank: int, world_size: int) -> list[str]:
    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = FSDP(make_transformer(num_blocks=1), auto_wrap_policy=ModuleWrapPolicy({Block}))
            self.net = torch.compile(inner, backend="aot_eager")

    trainer = Trainer()
    trainer.load_state_dict(trainer.state_dict())
    return list(trainer.state_dict())


def test_inside_another_module(ranks: RankPool) -> None:
    expected = [f"net.{key}" for key in make_transformer(num_blocks=1).state_dict()]
    for keys in ranks.run(_nested_prefix, 2):
        assert keys == expected


def _loaded_inside_summon(rank: int, world_size: int, rank0_only: bool) -> list[str]:
    """Names whose values are not those that were loaded."""
    wrapped = wrap(make_transformer(num_blocks=2))
    plain = make_transformer(num_blocks=2)
    wanted = {name: value + 1 for name, value in plain.state_dict().items()}
    with FSDP.summon_full_params(wrapped, rank0_only=rank0_only):
        wrapped.load_state_dict(wanted)
    got = wrapped.state_dict()
    return [name for name, value in wanted.items() if not torch.equal(got[name], value)]


@pytest.mark.parametrize("rank0_only", [False, True])
def test_loading_whole_parameters(ranks: RankPool, rank0_only: bool) -> None:
    assert ranks.run(_loaded_inside_summon, 2, rank0_only) == [[], []]


@pytest.mark.parametrize("composable", [False, True])
@on_ranks(2)
def test_under_inference_mode(rank: int, composable: bool) -> None:
    plain = make_transformer(num_blocks=1)
    model = fully_shard(plain, policy=BLOCKS) if composable else wrap(plain)
    expected = make_transformer(num_blocks=1).state_dict()
    with torch.inference_mode():
        model.load_state_dict({key: value + 1 for key, value in expected.items()})
        state = model.state_dict()
    for key, value in expected.items():
        assert not state[key].is_inference()
        whole = state[key].full_tensor() if isinstance(state[key], DTensor) else state[key]
        torch.testing.assert_close(whole, value + 1)
    loss_of(model, batch(rank, 0)).backward()


@on_ranks(2)
def test_of_a_module_inside_a_unit(rank: int) -> None:
    """Its values are DTensors; a module between units has none of its own."""
    model = wrap(make_transformer(num_blocks=1))
    inner, whole = model.module, model.state_dict()
    for module, fqn in ((inner.head, "head.weight"), (inner.blocks[0].up, "blocks.0.up.weight")):
        for prefix in ("", "head."):
            value = module.state_dict(prefix=prefix)[f"{prefix}weight"]
            torch.testing.assert_close(value.full_tensor(), whole[fqn])
    for state, prefix in ((inner.state_dict(), ""), (inner.blocks.state_dict(), "blocks.")):
        assert state
        for key, value in state.items():
            torch.testing.assert_close(value, whole[prefix + key])
    with FSDP.summon_full_params(model):
        torch.testing.assert_close(inner.head.state_dict()["weight"], whole["head.weight"])
