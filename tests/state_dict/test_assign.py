"""``load_state_dict(..., assign=True)``: values go into the shards, as beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Block, batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_dynamo import FSDP, FSDPValueError, MixedPrecision, StateDictType, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

BLOCKS = ModuleWrapPolicy({Block})


def _whole_value(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _plain() -> nn.Module:
    """With a tied weight, a buffer, a module in two places, and another one to be ignored."""
    model: nn.Module = make_transformer(num_blocks=2, tied=True)
    model.register_buffer("table", torch.arange(3.0))
    model.again = model.norm
    model.beside = nn.Linear(2, 2)
    return model


def _values() -> dict[str, torch.Tensor]:
    """Other values than those of the model."""
    generator = torch.Generator().manual_seed(5)
    values: dict[str, torch.Tensor] = {}
    by_place: dict[int, torch.Tensor] = {}  # tied ones share a value
    for name, value in _plain().state_dict().items():
        new = torch.rand(value.shape, generator=generator)
        values[name] = by_place.setdefault(value.data_ptr(), new)
    return values


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, batch(0, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _in_kind(kind: str) -> tuple[nn.Module, nn.Module]:
    """A sharded model, and the module whose ``load_state_dict`` is called."""
    if kind == "fully_shard from meta":
        with torch.device("meta"):
            model = _plain()
        model = fully_shard(model, policy=BLOCKS, param_init_fn=_zeros)
        return model, model
    model = _plain()
    if kind == "fully_shard":
        model = fully_shard(model, policy=BLOCKS)
        return model, model
    sharded = wrap(model, ignored_modules=[model.beside], ignored_states=[model.scale])
    if kind == "compiled":
        return sharded, torch.compile(sharded, backend="aot_eager")
    return sharded, sharded.module if kind == "the wrapped module" else sharded


def _zeros(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.zeros_(tensor)


def _assigned(
    rank: int, world_size: int, kind: str, form: str
) -> tuple[list[str], list[str], list[float], list[float]]:
    """Wrong values, parameters that are other objects, and losses of one process and here."""
    plain = _plain()
    plain.load_state_dict(_values(), assign=True)
    expected = _losses(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    model, target = _in_kind(kind)
    held = {name: p for name, p in model.named_parameters() if not name.startswith("beside.")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given: dict[str, Any] = _values()
    with FSDP.state_dict_type(model, StateDictType[form]):
        if form != "FULL_STATE_DICT":
            source, _ = _in_kind(kind)
            with FSDP.state_dict_type(source, StateDictType.FULL_STATE_DICT):
                source.load_state_dict(given)
            with FSDP.state_dict_type(source, StateDictType[form]):
                given = source.state_dict()
        report = target.load_state_dict(given, assign=True)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    after = dict(model.named_parameters())
    others = [name for name, tensor in held.items() if after[name] is not tensor]
    state = model.state_dict()
    wrong = [
        name
        for name, value in _values().items()
        if not torch.equal(_whole_value(state[name]), value)
    ]
    return wrong, others, expected, _losses(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("wrapper", "FULL_STATE_DICT"),
        ("wrapper", "SHARDED_STATE_DICT"),
        ("wrapper", "LOCAL_STATE_DICT"),
        ("the wrapped module", "FULL_STATE_DICT"),
        ("compiled", "FULL_STATE_DICT"),
        ("fully_shard", "FULL_STATE_DICT"),
        ("fully_shard", "SHARDED_STATE_DICT"),
        ("fully_shard from meta", "FULL_STATE_DICT"),
    ],
)
def test_values_are_taken_over(ranks: RankPool, kind: str, form: str) -> None:
    for wrong, others, expected, losses in ranks.run(_assigned, 2, kind, form):
        assert (wrong, others) == ([], [])
        assert losses == pytest.approx(expected, rel=1e-6)


def _refused(rank: int, world_size: int) -> tuple[list[str], bool]:
    """Errors of values of another dtype, without values, and of another shape."""
    model = wrap(make_transformer(num_blocks=1))
    before = model.state_dict()
    messages = []
    for value in (
        before["head.weight"].to(torch.bfloat16),
        before["head.weight"].to("meta"),
        torch.zeros(3, 3),
    ):
        try:
            model.load_state_dict({**before, "head.weight": value}, assign=True)
        except FSDPValueError as error:
            messages.append(str(error))
    after = model.state_dict()
    return messages, all(torch.equal(after[name], value) for name, value in before.items())


def test_other_dtypes_and_shapes_are_refused(ranks: RankPool) -> None:
    for (dtype, meta, shape), same in ranks.run(_refused, 2):
        assert "key 'head.weight': expected a value of torch.float32" in dtype
        assert "got torch.bfloat16 on the cpu device" in dtype
        assert "on the meta device" in meta
        assert "key 'head.weight': expected a tensor of shape (31, 16), got (3, 3)" in shape
        assert same


def _low_buffers(rank: int, world_size: int) -> tuple[torch.dtype, bool]:
    low = MixedPrecision(buffer_dtype=torch.bfloat16)
    model = wrap(_plain(), mixed_precision=low)
    value = torch.tensor([4.0, 5.0, 6.0])
    model.load_state_dict({**_values(), "table": value}, assign=True)
    return model.module.table.dtype, torch.equal(model.state_dict()["table"], value)


def test_buffers_keep_their_precision(ranks: RankPool) -> None:
    assert ranks.run(_low_buffers, 2) == [(torch.bfloat16, True)] * 2
