"""Tensors in containers that units take and return: dataclasses, named tuples, torch's pytrees."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from models import average_gradients
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree

from fsdp_dynamo import FSDP, MixedPrecision
from fsdp_dynamo.eager.hooks import prepare_inputs
from fsdp_dynamo.pytree import map_tensors, tensors_of
from fsdp_dynamo.wrap_policy import CustomPolicy

LOW = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)


class Pair(NamedTuple):
    x: Any
    scale: Any


@dataclasses.dataclass
class Data:
    x: Any
    scale: Any
    late: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    scale: Any


class Dict(OrderedDict[str, Any]):
    """As outputs of models are that can be used as dict and by attribute."""

    @classmethod
    def of(cls, x: Any, scale: Any) -> Dict:
        made = cls(x=x)
        made.rest = scale
        return made


class Registered:
    def __init__(self, x: Any, scale: Any) -> None:
        self.x, self.scale = x, scale


pytree.register_pytree_node(
    Registered,
    lambda value: ([value.x, value.scale], None),
    lambda items, _: Registered(*items),
)

KINDS: list[Callable[..., Any]] = [
    Pair,
    Frozen,
    Data,
    lambda x, scale: OrderedDict([("x", x), ("scale", scale)]),
    Registered,
    Dict.of,
    lambda x, scale: [Frozen(x, (Pair(scale, None),))],
]


def _open(value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if type(value) is tuple:
        return value
    if isinstance(value, list):
        return value[0].x, value[0].scale[0].x
    if isinstance(value, Dict):
        return value["x"], value.rest
    return (value["x"], value["scale"]) if isinstance(value, dict) else (value.x, value.scale)


class _Block(nn.Module):
    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Any, *, again: Any) -> Any:
        (x, _), (_, scale) = _open(value), _open(again)
        return KINDS[self.kind](torch.tanh(self.linear(x)) * scale, scale)


class _Net(nn.Module):
    def __init__(self, given: str) -> None:
        super().__init__()
        self.given = given
        self.blocks = nn.ModuleList(_Block(kind) for kind in range(len(KINDS)))
        self.head = _Block(0)

    def forward(self, value: Any) -> Any:
        for block in self.blocks:
            if self.given == "tuples":
                value = _open(value)
            value = block(value, again=value)
        return self.head(value, again=value)


@pytest.mark.parametrize(
    ("mode", "given", "precision"),
    [
        ("eager", "containers", None),
        ("eager", "tuples", LOW),
        ("hooks", "containers", LOW),
        ("graph", "containers", LOW),
    ],
)
@on_ranks(2)
def test_units(rank: int, mode: str, given: str, precision: MixedPrecision | None) -> None:
    """Gradients are those of one process; what units return is what the next one is given."""
    torch.manual_seed(0)
    inputs = Pair(torch.randn(3, 4) + rank, torch.tensor(2.0))
    plain = _Net(given)
    plain(inputs).x.sum().backward()
    average_gradients(plain)
    net = _Net(given)
    net.load_state_dict(plain.state_dict())
    blocks = [*net.blocks]
    policy = CustomPolicy(lambda module, units=blocks: module in units)
    wrapped = FSDP(net, auto_wrap_policy=policy, mixed_precision=precision)
    model = in_mode(wrapped, mode)
    for _ in range(2):
        out = model(inputs)
        assert type(out) is Pair
        assert out.x.dtype == (torch.float32 if precision is None else torch.bfloat16)
        out.x.sum().backward()
    with FSDP.summon_full_params(wrapped, with_grads=True):
        for got, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
            tolerance = {} if precision is None else {"rtol": 0.1, "atol": 0.1}
            torch.testing.assert_close(got.grad, 2 * expected.grad, **tolerance)


def test_walker() -> None:
    """Every tensor is mapped once, kinds stay, and what does not change is the same object."""
    one, two = torch.ones(2), torch.ones(3)
    data = Data(one, [two])
    values = [
        *(kind(one, two) for kind in KINDS),
        data,
        defaultdict(list, x=[one], y=two),
        torch.max(torch.ones(2, 2), 0),
    ]
    for value in values:
        assert map_tensors(lambda tensor: tensor, value) == value
        mapped = map_tensors(torch.zeros_like, value)
        assert type(mapped) is type(value)
        assert [t.shape for t in tensors_of(mapped)] == [t.shape for t in tensors_of(value)]
        assert not any(t.any() for t in tensors_of(mapped))
    assert map_tensors(lambda tensor: tensor, data) is data
    data.late = one
    assert torch.equal(map_tensors(torch.zeros_like, data).late, torch.zeros(2))
    data.late = (data, one)  # as nodes of a tree refer to their parents
    assert [*tensors_of(data)] == [one, two, one]
    copy = map_tensors(torch.zeros_like, data)
    assert not copy.x.any()
    assert copy.late[0] is data


def test_packed_sequences_are_moved_but_for_their_sizes() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)], enforce_sorted=False)
    (moved,), _ = prepare_inputs(torch.device("meta"), torch.bfloat16, (packed,), {})
    assert type(moved) is PackedSequence
    assert (moved.data.device.type, moved.data.dtype) == ("meta", torch.bfloat16)
    assert (moved.sorted_indices.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
