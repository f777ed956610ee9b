"""Complex parameters: mixed precision leaves them alone, norms are real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import gradients, whole, whole_gradients
from models import average_gradients
from modes import in_mode
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, MixedPrecision, MixedPrecisionPolicy, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

LOW = torch.bfloat16


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


@pytest.mark.parametrize(
    ("mode", "door", "precisions"),
    [
        ("eager", "FSDP", (None, LOW)),
        ("eager", "fully_shard", (None, LOW)),
        ("hooks", "fully_shard", (LOW,)),
        ("graph", "FSDP", (None,)),
    ],
)
@on_ranks(2)
def test_gradients_and_norms(
    rank: int, mode: str, door: str, precisions: tuple[torch.dtype | None, ...]
) -> None:
    """They are those of one process, with gradients that were accumulated and without."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
    plain = _net()
    plain(x).sum().backward()
    average_gradients(plain)
    for low in precisions:
        sharded: Any
        if door == "FSDP":
            policy, precision = ModuleWrapPolicy({_Spectral}), MixedPrecision(low)
            sharded = FSDP(_net(), auto_wrap_policy=policy, mixed_precision=precision)
        else:
            sharded = fully_shard(_net(), mp_policy=MixedPrecisionPolicy(low))
        model = in_mode(sharded, mode)
        with sharded.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        rtol, atol = (1e-5, 1e-5) if low is None else (0.05, 0.1)
        for order in (2.0, 3.0, float("inf")):
            norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()], order)
            found = [sharded.clip_grad_norm_(float("inf"), order)]
            if order < 4:  # torch's infinite norm has none of empty local tensors
                grads = [p.grad for p in sharded.parameters()]
                found.append(whole(nn.utils.get_total_norm(grads, order)))
            for got in found:
                torch.testing.assert_close(got, 2 * norm, rtol=rtol, atol=atol)
        got, expected = whole_gradients(sharded), gradients(plain)
        for name, grad in expected.items():
            torch.testing.assert_close(got[name], 2 * grad, rtol=rtol, atol=atol)
