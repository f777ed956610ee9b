"""State dicts: plain keys and whole values in every order of wrap, compile and checkpoint."""

from __future__ import annotations

import re
from itertools import permutations
from typing import Any

import pytest
import torch
from loops import error_of
from models import Block, Transformer, batch, loss_of, make_transformer, through, train, wrap
from pool import on_ranks
from shardings import assert_same, unsharded
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils._pytree import tree_map_only

from fsdp_dynamo import FSDP, MixedPrecision, StateDictType, fully_shard
from fsdp_dynamo.wrap_policy import CustomPolicy, ModuleWrapPolicy

BLOCKS = ModuleWrapPolicy({Block})
STEPS = ("wrap", "compile", "checkpoint")
ORDERS = ["-".join(order) for n in (1, 2, 3) for order in permutations(STEPS, n) if "wrap" in order]


def _plain() -> nn.Module:
    model = make_transformer(num_blocks=1, tied=True)
    model.register_buffer("table", torch.arange(3.0))
    return model


def _checkpoint(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    return model


def _build(order: str, door: str = "wrapper", per_block_compile: bool = False) -> nn.Module:
    model = _plain()
    for step in order.split("-"):
        if step == "wrap":
            model = through(door, model)
        elif step == "checkpoint":
            model = _checkpoint(model)
        elif per_block_compile:
            model.blocks[0] = torch.compile(model.blocks[0], backend="aot_eager")
        else:
            model = torch.compile(model, backend="aot_eager")
    return model


@pytest.mark.parametrize(
    ("order", "door", "per_block"),
    [
        ("checkpoint-wrap-compile", "wrapper", False),
        ("compile-wrap-checkpoint", "wrapper", False),
        ("wrap-checkpoint-compile", "fully_shard", False),
        ("compile-checkpoint-wrap", "fully_shard", False),
        ("compile-checkpoint-wrap", "wrapper", True),
    ],
)
@on_ranks(2)
def test_trains_in_this_order(rank: int, order: str, door: str, per_block: bool) -> None:
    """Each is before and after each other one. State dicts are a plain model's, back and forth."""
    plain, model = _plain(), _build(order, door, per_block)
    state = unsharded(model.state_dict())
    assert list(state) == list(plain.state_dict())
    assert_same(state, dict(plain.state_dict()))
    reference, _ = train(wrap(_plain()), rank, steps=2)
    losses, _ = train(model, rank, steps=2)
    assert losses == pytest.approx(reference, rel=1e-6)
    assert not torch.equal(unsharded(model.state_dict())["head.weight"], state["head.weight"])
    model.load_state_dict(plain.state_dict())
    assert train(model, rank, steps=1)[0][0] == losses[0]


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
        return _Around(_build("checkpoint-wrap-compile"))
    if kind == "the wrapped module":
        wrapper: Any = _build("wrap")
        return wrapper.module
    return _build(kind)


@on_ranks(2)
def test_every_order_has_plain_names(rank: int) -> None:
    """Of keys, result of ``strict=False`` and errors, for parameters and buffers."""
    plain = _plain()
    others = ("fully_shard", "compiled fully_shard", "the wrapped module", "inside another module")
    for kind in (*ORDERS, *others):
        model = _in_kind(kind)
        is_inside = kind == "inside another module"
        prefix = "net." if is_inside else ""
        own = [f"other._orig_mod.{name}" for name in ("weight", "bias")] if is_inside else []
        given = model.state_dict()
        assert list(given) == [f"{prefix}{key}" for key in plain.state_dict()] + own, kind
        if not is_inside:
            assert sorted(n for n, _ in model.named_parameters()) == sorted(
                n for n, _ in plain.named_parameters()
            ), kind
            assert [n for n, _ in model.named_buffers()] == ["table"], kind
        missing = [f"{prefix}{name}" for name in ("table", "blocks.0.qkv.weight")] + own[:1]
        unexpected = [f"{prefix}{name}" for name in ("oops", "blocks.0.nope.weight")]
        for name in missing:
            del given[name]
        given.update({name: torch.ones(2) for name in unexpected})
        assert model.load_state_dict(given, strict=False) == (missing, unexpected), kind
        for name, message in (
            ("table", f"for {prefix}table:"),
            ("norm.weight", "norm.weight': expected a tensor of shape (16,), got (7,)"),
        ):
            wrong = {**given, f"{prefix}{name}": torch.ones(7)}
            error = error_of(lambda model=model, wrong=wrong: model.load_state_dict(wrong))
            assert message in error, kind
            said = error.replace("other._orig_mod.", "")
            assert not re.search("_fsdp_wrapped|_checkpoint_wrapped|_orig_mod", said), kind


class _InFile:
    """A value that loaders of others pass: it has a shape, and is read when a function needs it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self._value = value.shape, value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tree_map_only(cls, lambda one: one._value, args)
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_values_that_are_loaded_as_they_are_needed(rank: int) -> None:
    model = wrap(make_transformer(num_blocks=2))
    plain = Transformer(num_blocks=2)  # other weights, the same on every rank
    model.load_state_dict({name: _InFile(value) for name, value in plain.state_dict().items()})
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))


class _Scaled(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4, dtype=dtype))


@on_ranks(2)
def test_buffers_keep_their_dtype_in_checkpoints(rank: int) -> None:
    """Each module's are cast as its unit says; norms in their own precision keep theirs."""
    own = {"mixed_precision": MixedPrecision(buffer_dtype=torch.float16)}
    model = nn.Sequential(_Scaled(torch.float32), _Scaled(torch.float64), nn.BatchNorm1d(4))
    first = model[0]
    wrapped = FSDP(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: own if module is first else False),
        mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
    )
    state, live = wrapped.state_dict(), dict(wrapped.named_buffers())
    names = ["0.scale", "1.scale", "2.running_mean"]
    assert [live[n].dtype for n in names] == [torch.float16, torch.bfloat16, torch.float32]
    assert [state[n].dtype for n in names] == [torch.float32, torch.float64, torch.float32]


@on_ranks(2)
def test_loading_whole_parameters(rank: int) -> None:
    model = wrap(make_transformer(num_blocks=2))
    for rank0_only in (False, True):
        wanted = {name: value + 1 for name, value in model.state_dict().items()}
        with FSDP.summon_full_params(model, rank0_only=rank0_only):
            model.load_state_dict(wanted)
        assert_same(dict(model.state_dict()), wanted)


@on_ranks(2)
def test_under_inference_mode(rank: int) -> None:
    for composable in (False, True):
        plain = make_transformer(num_blocks=1)
        expected = {key: value + 1 for key, value in plain.state_dict().items()}
        model = fully_shard(plain, policy=BLOCKS) if composable else wrap(plain)
        with torch.inference_mode():
            model.load_state_dict(expected)
            state = model.state_dict()
        assert not any(value.is_inference() for value in state.values())
        assert_same(unsharded(state), expected)
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


# -- load_state_dict(..., assign=True): values go into the shards, as beside one process ----------


def _with_more() -> nn.Module:
    """With a module in two places, and another one to be ignored."""
    model = _plain()
    model.again = model.norm
    model.beside = nn.Linear(2, 2)
    return model


def _values() -> dict[str, torch.Tensor]:
    """Other values than those of the model."""
    generator = torch.Generator().manual_seed(5)
    values: dict[str, torch.Tensor] = {}
    by_place: dict[int, torch.Tensor] = {}  # tied ones share a value
    for name, value in _with_more().state_dict().items():
        new = torch.rand(value.shape, generator=generator)
        values[name] = by_place.setdefault(value.data_ptr(), new)
    return values


def _to_assign(kind: str) -> tuple[nn.Module, nn.Module]:
    """A sharded model, and the module whose ``load_state_dict`` is called."""
    if kind == "fully_shard from meta":
        with torch.device("meta"):
            model = _with_more()
        model = fully_shard(model, policy=BLOCKS, param_init_fn=_zeros)
        return model, model
    model = _with_more()
    sharded = wrap(model, ignored_modules=[model.beside], ignored_states=[model.scale])
    if kind == "compiled":
        return sharded, torch.compile(sharded, backend="aot_eager")
    return sharded, sharded.module if kind == "the wrapped module" else sharded


def _zeros(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.zeros_(tensor)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("wrapper", "SHARDED_STATE_DICT"),
        ("wrapper", "LOCAL_STATE_DICT"),
        ("the wrapped module", "FULL_STATE_DICT"),
        ("compiled", "FULL_STATE_DICT"),
        ("fully_shard from meta", "FULL_STATE_DICT"),
        ("fully_shard from meta", "SHARDED_STATE_DICT"),
    ],
)
@on_ranks(2)
def test_assigned_values_are_taken_over(rank: int, kind: str, form: str) -> None:
    """Into the parameters that an optimizer has; trained with the same batches, losses agree."""
    model, target = _to_assign(kind)
    held = {name: p for name, p in model.named_parameters() if not name.startswith("beside.")}
    given: dict[str, Any] = _values()
    if form != "FULL_STATE_DICT":
        source, _ = _to_assign(kind)
        source.load_state_dict(given)
        with FSDP.state_dict_type(source, StateDictType[form]):
            given = source.state_dict()
    with FSDP.state_dict_type(model, StateDictType[form]):
        report = target.load_state_dict(given, assign=True)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    after = dict(model.named_parameters())
    assert [name for name, tensor in held.items() if after[name] is not tensor] == []
    assert_same(unsharded(model.state_dict()), _values())
    plain = _with_more()
    plain.load_state_dict(_values(), assign=True)
    # On the same batches on all ranks: means of gradients are those of one process.
    expected, _ = train(plain, 0, steps=2)
    assert train(model, 0, steps=2)[0] == pytest.approx(expected, rel=1e-6)


@on_ranks(2)
def test_assigned_values_of_other_dtypes_and_shapes(rank: int) -> None:
    model = wrap(make_transformer(num_blocks=1))
    before = dict(model.state_dict())
    key = "key 'head.weight': expected a"
    for value, *texts in (
        (before["head.weight"].bfloat16(), f"{key} value of torch.float32", "got torch.bfloat16"),
        (before["head.weight"].to("meta"), "on the meta device"),
        (torch.zeros(3, 3), f"{key} tensor of shape (31, 16), got (3, 3)"),
    ):
        wrong = {**before, "head.weight": value}
        error = error_of(lambda given=wrong: model.load_state_dict(given, assign=True))
        assert error.startswith("FSDPValueError")
        assert all(text in error for text in texts), error
    assert_same(dict(model.state_dict()), before)


@on_ranks(2)
def test_assigned_buffers_keep_their_precision(rank: int) -> None:
    model = wrap(_with_more(), mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    value = torch.tensor([4.0, 5.0, 6.0])
    model.load_state_dict({**_values(), "table": value}, assign=True)
    assert model.module.table.dtype is torch.bfloat16
    assert torch.equal(model.state_dict()["table"], value)
