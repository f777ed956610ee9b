"""Parameters that are tensor subclasses: whole on every rank if ignored, refused otherwise."""

from __future__ import annotations

import pytest
import torch
from modes import MODES, in_mode
from pool import RankPool
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


def _train(rank: int, world_size: int) -> list[tuple[float, list[torch.Tensor]]]:
    """Loss and gradients without a wrapper and in each mode; ranks have equal batches."""
    with pytest.raises(FSDPValueError, match=r"'base': expected a plain tensor.*TwoTensor"):
        FSDP(_Based())
    found = []
    for mode in ("plain", *MODES):
        model = _Based()
        run = model
        if mode != "plain":
            run = in_mode(FSDP(model, ignored_states=[model.base]), mode)
        loss = run(torch.ones(2, 4)).sum()
        loss.backward()
        with FSDP.summon_full_params(run, with_grads=True):
            grads = [p.grad.clone() for p in model.layer.parameters() if p.grad is not None]
        found.append((loss.item(), grads))
    return found


def test_an_ignored_one_is_used_in_all_modes(ranks: RankPool) -> None:
    for expected, *others in ranks.run(_train, 2):
        assert len(others) == len(MODES)
        assert len(expected[1]) == 2
        for loss, grads in others:
            assert loss == pytest.approx(expected[0])
            torch.testing.assert_close(grads, expected[1])
