"""Precision of inputs, parameters and buffers in training and evaluation, beside FSDP1 on CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as upstream
from modes import in_mode
from pool import on_ranks
from torch import nn

import fsdp_dynamo
from fsdp_dynamo import FSDP, MixedPrecision, UnsupportedError
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

Library = Any
LOW = torch.bfloat16


class _Recorded(nn.Linear):
    seen: tuple[Any, ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (x.dtype, self.weight.dtype)
        return super().forward(x)


class _Net(nn.Module):
    seen: tuple[Any, ...]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Recorded(4, 4), _Recorded(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (x.dtype, self.scale.dtype)
        out: torch.Tensor = self.second(self.first(x))
        return out


def _blocks(library: Library) -> dict[str, Any]:
    policies = upstream.wrap if library is upstream else fsdp_dynamo.wrap_policy
    return {"auto_wrap_policy": policies.ModuleWrapPolicy({_Recorded})}


def _one_unit(library: Library) -> dict[str, Any]:
    return {}


FULL = {"param_dtype": LOW, "buffer_dtype": LOW, "reduce_dtype": LOW}
PRECISIONS: tuple[dict[str, Any], ...] = (
    FULL,
    {"param_dtype": LOW, "cast_forward_inputs": True},
    {"param_dtype": LOW, "cast_forward_inputs": True, "cast_root_forward_inputs": False},
    {"param_dtype": LOW, "cast_root_forward_inputs": False},
    {"buffer_dtype": LOW},
    {"reduce_dtype": LOW},
)
CASES: tuple[tuple[Callable[[Library], dict[str, Any]], dict[str, Any]], ...] = tuple(
    (units, precision) for units in (_blocks, _one_unit) for precision in PRECISIONS
)


def _dtypes(library: Library, units: Any, precision: Any) -> Any:
    """What each module has seen, and the output: in training, twice in evaluation, in training."""
    net = _Net()
    model = library.FullyShardedDataParallel(
        net,
        mixed_precision=library.MixedPrecision(**precision),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        **units(library),
    )
    found: list[Any] = []
    for trains, with_grad in ((True, True), (False, False), (False, True), (True, True)):
        model.train(trains)
        try:
            with torch.set_grad_enabled(with_grad):
                out = model(torch.ones(2, 4))
            if with_grad:
                out.float().sum().backward()
            inner = [m.seen for m in nn.Module.modules(model) if isinstance(m, _Recorded)]
            found.append((net.seen, *inner, out.dtype))
        except RuntimeError as error:
            found.append(str(error).partition(",")[0])
            break
    return found


@on_ranks(2)
def test_dtypes_are_upstreams(rank: int) -> None:
    for case in CASES:
        theirs, ours = (_dtypes(library, *case) for library in (upstream, fsdp_dynamo))
        assert ours == theirs, case


@on_ranks(2)
def test_fsdp1s_environment_variable_is_refused(rank: int) -> None:
    with mock.patch.dict("os.environ", {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
        with pytest.raises(UnsupportedError, match="FSDP_USE_FULL_PREC_IN_EVAL: expected it to be"):
            FSDP(_Net(), mixed_precision=MixedPrecision(**FULL))
        FSDP(_Net())


@on_ranks(2)
def test_errors_of_nested_units_stay_as_they_are(rank: int) -> None:
    """They are not taken for uses of sharded parameters outside of their unit."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        FSDP(_Net(), **_blocks(fsdp_dynamo))(torch.ones(2, 5))


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)))
        return out


@pytest.mark.parametrize(
    ("mode", "units"),
    [("eager", "one unit"), ("hooks", "policy"), ("graph", "policy"), ("eager", "policy")],
)
@on_ranks(2)
def test_batch_norms(rank: int, mode: str, units: str) -> None:
    """They compute in float32, and return the dtype that they are given."""
    torch.manual_seed(0)
    plain, x = _Normed(), torch.randn(3, 4)
    policy = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})} if units == "policy" else {}
    wrapped = FSDP(copy.deepcopy(plain), mixed_precision=MixedPrecision(LOW), **policy)
    model = in_mode(wrapped, mode)
    trained = model.train()(x)
    assert trained.dtype == LOW
    trained.sum().backward()
    plain.train()(x)  # changes the running statistics
    evaluated = model.eval()(x)
    assert evaluated.dtype == LOW
    torch.testing.assert_close(evaluated.float(), plain.eval()(x), rtol=0.02, atol=0.02)
