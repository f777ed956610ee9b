"""Complex parameters: mixed precision leaves them alone, norms are real."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import average_gradients
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, MixedPrecision, MixedPrecisionPolicy, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


class _Spectral(nn.Module):
    """A layer in the frequency domain, as Fourier operators have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft(x.float()) @ self.weight
        return self.linear(torch.fft.irfft(frequencies, 8).to(self.linear.weight.dtype))


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(_Spectral(), _Spectral(), nn.Linear(8, 1))


@pytest.mark.parametrize("door", ["FSDP", "fully_shard"])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_gradients_and_norms(rank: int, mode: str, door: str) -> None:
    """They are those of one process, with gradients that were accumulated and without."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
    plain = _net()
    plain(x).sum().backward()
    average_gradients(plain)
    for low in (None, torch.bfloat16):
        if door == "FSDP":
            policy, precision = ModuleWrapPolicy({_Spectral}), MixedPrecision(low)
            sharded = FSDP(_net(), auto_wrap_policy=policy, mixed_precision=precision)
            waits: Any = sharded.no_sync()
        else:
            sharded = fully_shard(_net(), mp_policy=MixedPrecisionPolicy(low))
            waits = nullcontext()
        model = in_mode(sharded, mode)
        with waits:
            model(x).sum().backward()
        model(x).sum().backward()
        close = {"rtol": 1e-5, "atol": 1e-5} if low is None else {"rtol": 0.05, "atol": 0.1}
        orders = (2.0, 3.0, float("inf"))  # torch's has none of empty local tensors
        for order in orders if door == "FSDP" else orders[:2]:
            norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()], order)
            if door == "FSDP":
                got = sharded.clip_grad_norm_(float("inf"), order)
            else:
                grads = [p.grad for p in sharded.parameters()]
                got = nn.utils.get_total_norm(grads, order).full_tensor()
            torch.testing.assert_close(got, 2 * norm, rtol=close["rtol"], atol=close["atol"])
        with FSDP.summon_full_params(sharded, with_grads=True):
            for got, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(got.grad, 2 * expected.grad, **close)
