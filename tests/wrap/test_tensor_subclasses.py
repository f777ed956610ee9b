"""Parameters that are tensor subclasses: whole on every rank if ignored, refused otherwise."""

from __future__ import annotations

import pytest
import torch
from loops import different, gradients, whole_gradients
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_dynamo import FSDP, FSDPValueError


class _Based(nn.Module):
    """A layer above a frozen base whose weight has two parts, as a quantised one has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = TwoTensor(torch.rand(4, 4), torch.rand(4, 4))  # type: ignore[no-untyped-call]
        self.base = nn.Parameter(parts, requires_grad=False)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.base
        return self.layer(y.a + y.b)  # type: ignore[no-any-return,attr-defined]


@on_ranks(2)
def test_an_ignored_one_is_used_in_all_modes(rank: int) -> None:
    with pytest.raises(FSDPValueError, match=r"'base': expected a plain tensor.*TwoTensor"):
        FSDP(_Based())
    plain = _Based()
    expected = plain(torch.ones(2, 4)).sum()
    expected.backward()
    for mode in MODES:
        model = _Based()
        sharded = FSDP(model, ignored_states=[model.base])
        loss = in_mode(sharded, mode)(torch.ones(2, 4)).sum()
        loss.backward()
        torch.testing.assert_close(loss, expected)
        assert different(whole_gradients(sharded), gradients(plain)) == []
