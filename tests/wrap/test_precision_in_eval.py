"""Precision of inputs, parameters and buffers in training and evaluation, beside FSDP1 on CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as upstream
from loops import whole_gradients
from models import batch as tokens_of
from models import loss_of, make_transformer
from models import wrap as wrap_blocks
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn

import fsdp_dynamo
from fsdp_dynamo import FSDP, FSDPError, MixedPrecision
from fsdp_dynamo.wrap.construct import FULL_PRECISION_IN_EVAL
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
CASES: tuple[tuple[Callable[[Library], dict[str, Any]], dict[str, Any], bool], ...] = tuple(
    (units, precision, in_full)
    for units in (_blocks, _one_unit)
    for precision in PRECISIONS
    for in_full in (False, True)
)


def _dtypes(library: Library, units: Any, precision: Any, in_full: bool) -> Any:
    """What each module has seen, and the output: in training, twice in evaluation, in training."""
    net = _Net()
    with mock.patch.dict("os.environ", {FULL_PRECISION_IN_EVAL: str(int(in_full))}):
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


def _step(rank: int, mode: str, in_full: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of an evaluation between a forward and its backward; gradients of these."""
    low = MixedPrecision(param_dtype=LOW)
    with mock.patch.dict("os.environ", {FULL_PRECISION_IN_EVAL: in_full}):
        wrapped = wrap_blocks(make_transformer(num_blocks=1), mixed_precision=low)
    model = in_mode(wrapped, mode)
    loss = loss_of(model, tokens_of(rank, 0))
    wrapped.eval()
    with torch.no_grad():
        logits = model(tokens_of(rank, 1))
    wrapped.train()
    loss.backward()
    return logits, whole_gradients(wrapped)


@on_ranks(2)
def test_values(rank: int) -> None:
    """Evaluations equal the plain model's; gradients are those of the low-precision forward."""
    plain = make_transformer(num_blocks=1).eval()(tokens_of(rank, 1)).detach()
    _, expected = _step(rank, "eager", "0")
    for mode in MODES:
        logits, grads = _step(rank, mode, "1")
        torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads, expected, rtol=2e-2, atol=1e-3)


@on_ranks(2)
def test_buffers_in_graph_mode(rank: int) -> None:
    """They are cast between graphs, so not in graph mode, which says so."""
    with mock.patch.dict("os.environ", {FULL_PRECISION_IN_EVAL: "1"}):
        wrapped = FSDP(_Net(), mixed_precision=MixedPrecision(**FULL), **_blocks(fsdp_dynamo))
    with pytest.raises(FSDPError, match="FSDP_USE_FULL_PREC_IN_EVAL without buffer_dtype"):
        in_mode(wrapped.eval(), "graph")(torch.ones(2, 4))


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
    """They return the dtype that they are given, so an evaluation equals the plain model's."""
    torch.manual_seed(0)
    plain, x = _Normed(), torch.randn(3, 4)
    policy = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})} if units == "policy" else {}
    with mock.patch.dict("os.environ", {FULL_PRECISION_IN_EVAL: "1"}):
        wrapped = FSDP(copy.deepcopy(plain), mixed_precision=MixedPrecision(LOW), **policy)
    model = in_mode(wrapped, mode)
    expected = plain.eval()(x)
    torch.testing.assert_close(model.eval()(x), expected)
    trained = model.train()(x)
    assert trained.dtype == LOW
    trained.sum().backward()
    plain.train()(x)  # changes the running statistics
    torch.testing.assert_close(model.eval()(x), plain.eval()(x), rtol=0.02, atol=0.02)
