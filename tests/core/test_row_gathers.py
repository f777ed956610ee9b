"""Operators that need whole tensors: gathered where nothing has a gradient, and written back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import error_of
from pool import RankPool
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fsdp_dynamo import checkpoint, fully_shard
from fsdp_dynamo.core.row_dtensor import has_own_operators

pytestmark = pytest.mark.skipif(
    not has_own_operators(), reason="torch 2.11 runs its own operators on any DTensor"
)


def _layer() -> tuple[Any, torch.Tensor]:
    """The weight of a sharded layer, with 7 rows, and the same of one process."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 7)
    whole = layer.weight.detach().clone()
    fully_shard(layer, use_dtensor=True)
    return layer.weight.detach(), whole


VALUES: dict[str, Callable[[Any], Any]] = {
    "matrix product": lambda w: w @ w.T,
    "product with a replicated tensor": lambda w: (w.T @ w) @ w.T,
    "sum of each column": lambda w: w.sum(0),
    "norm of each row": lambda w: torch.linalg.vector_norm(w, dim=1, keepdim=True),
    "element by element, broadcast": lambda w: w / w.norm(dim=1, keepdim=True),
    "rows": lambda w: w[2:5],
    "flat": lambda w: w.flatten(),
    "stacked": lambda w: torch.stack([w, w * 2]),
    "largest of each": lambda w: torch._foreach_max([w, w * 2])[1],
    "vector times matrix": lambda w: w[1] @ w.T,
    "another shape in place": lambda w: (w @ w.T).unsqueeze_(0).transpose_(0, 1) * 2,
    "another shape of a view in place": lambda w: w[1:].t_().sum(1),
    "singular values": lambda w: torch.linalg.svdvals(w),
    "a list of neither kind": lambda w: torch._foreach_mul([w @ w.T], (w * 2).sum())[0],
    "a list of both kinds": lambda w: torch._foreach_mul([w * 2, w @ w.T], 3.0)[1],
}


def _values(rank: int, world_size: int) -> list[str]:
    row, whole = _layer()
    wrong = []
    for name, function in VALUES.items():
        got, expected = function(row), function(whole)
        if not isinstance(got, DTensor) or not torch.allclose(got.full_tensor(), expected):
            wrong.append(name)
    made = row @ row.T
    if f"{row.norm():.3f}" != f"{whole.norm():.3f}":
        wrong.append("a number as text")
    torch.manual_seed(5)
    drawn = nn.functional.dropout(made, 0.5)
    torch.manual_seed(5)
    if not torch.equal(drawn.full_tensor(), nn.functional.dropout(made.full_tensor(), 0.5)):
        wrong.append("random values")
    if made.placements != (Replicate(),) or made.device_mesh != row.device_mesh:
        wrong.append("placements")
    with torch.inference_mode():
        if not torch.allclose((row.clone().T @ row).full_tensor(), whole.T @ whole):
            wrong.append("inference mode")
    return wrong


@pytest.mark.parametrize("world_size", [1, 3])
def test_values(ranks: RankPool, world_size: int) -> None:
    for wrong in ranks.run(_values, world_size):
        assert not wrong


def _of_torch(rank: int, world_size: int) -> tuple[list[str], set[str]]:
    """What differs with DTensors of torch's as operands; how the divisions of rows compare.

    They are made as in many optimizers: of rows of ours, or divided by torch.
    """
    wrong, divisions = [], set()
    for out in range(4, 13):
        layer = nn.Linear(5, out)
        fully_shard(layer, use_dtensor=True)
        row: Any = layer.weight.detach()
        whole, mesh, placements = row.full_tensor(), row.device_mesh, row.placements
        same = row._placing.rows.is_as_torchs
        divisions.add("same" if all(same) else "mixed" if any(same) else "other")
        of_rows = DTensor.from_local(
            row.to_local() * 2, mesh, placements, shape=row.shape, stride=row.stride()
        )
        by_torch = distribute_tensor(whole * 2, mesh, placements)
        back = DTensor.from_local(whole * 2, mesh, [Replicate()]).redistribute(mesh, placements)
        for name, operand in (("rows", of_rows), ("torch", by_torch), ("redistributed", back)):
            if not torch.equal((row + operand).full_tensor(), whole * 3):
                wrong.append(f"{out} rows, an operand: {name}")
        of_rows.copy_(row)
        by_torch.copy_(row)
        if not torch.equal(of_rows.to_local(), row.to_local()):
            wrong.append(f"{out} rows, into rows")
        if not torch.equal(by_torch.full_tensor(), whole):
            wrong.append(f"{out} rows, into torch's")
    return wrong, divisions


def test_dtensors_of_torchs(ranks: RankPool) -> None:
    for wrong, divisions in ranks.run(_of_torch, 3):
        assert not wrong
        assert divisions == {"same", "mixed", "other"}


def _written(w: Any) -> Any:
    w.T.mul_(2)
    w[0].zero_()
    w[1:6][:, 2:4].add_(1)
    w.tril_(2)
    for part in w.flatten().split(10):
        part.sub_(0.5)
    w.view(-1)[3] = 9.0
    w[2:].copy_(w[1].clone())
    w.T.copy_(w.T * 2 + 1)
    view = w.T
    view.div_(view.norm().clamp(min=1e-7))
    view.add_(1)
    return w


def _views(rank: int, world_size: int) -> dict[str, bool]:
    """Writing into views, and using them after other changes."""
    row, whole = _layer()
    is_written = torch.allclose(_written(row).full_tensor(), _written(whole))
    before = row.T
    row.add_(1)
    stale = "a view of 'weight': expected the values that the" in error_of(lambda: before.sum())
    has_copied_rows = world_size > 1 and row.to_local().numel() > 0
    layer = nn.Linear(5, 7)
    fully_shard(layer, use_dtensor=True)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    transposed = weight.T
    bias.add_(1)  # in the same memory
    of_other = torch.equal(transposed.T.full_tensor(), weight.full_tensor())  # type: ignore[attr-defined]
    kept = row.to_local().clone()
    row.clone().T.zero_()
    return {
        "what is written is in the rows": is_written,
        "a view of old values raises": stale == has_copied_rows,
        "a view holds while a neighbour changes": of_other,
        "a view of a copy is of the copy": torch.equal(kept, row.to_local()),
    }


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_written_into_views_goes_into_the_rows(ranks: RankPool, world_size: int) -> None:
    for seen in ranks.run(_views, world_size):
        assert all(seen.values()), seen


class Preconditioned(torch.optim.Optimizer):
    """As many are written: plain states, in-place sums of DTensors into them, both mixed."""

    def __init__(self, params: Any, fails: bool = False) -> None:
        super().__init__(params, {})
        self.fails = fails

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state, grad = self.state[param], param.grad
            if not state:
                state["left"] = torch.eye(len(grad))
                state["rows"] = grad.new_zeros(len(grad))
                state["norm"] = torch.zeros(())
                state["momentum"] = torch.zeros_like(param)
            state["left"].lerp_(grad @ grad.T, 0.1)
            state["rows"].lerp_(grad.square().mean(-1), 0.1)
            state["norm"].add_(grad.norm())
            update = torch.linalg.solve(state["left"], grad) / (state["norm"] + 1)
            state["momentum"].lerp_(update / (state["rows"].sqrt()[:, None] + 0.1), 0.5)
            param.sub_(state["momentum"], alpha=0.1)
            if self.fails:
                raise ValueError("as asked")


def _models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 7, bias=False))
    return copy.deepcopy(plain), fully_shard(plain, use_dtensor=True)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: list[torch.Tensor]) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        losses = [model(x).square().mean() for x in inputs]
        (torch.stack(losses).sum() / len(inputs)).backward()
        optimizer.step()


def _difference(model: nn.Module, reference: nn.Module) -> float:
    both = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((p.full_tensor() - q).detach().abs().max()) for p, q in both)  # type: ignore[attr-defined]


def _optimizer(rank: int, world_size: int, folder: str) -> dict[str, float]:
    """Differences from one process: after training, after loading, and after both."""
    reference, model = _models()
    inputs = [torch.linspace(-1, 2, 20).view(4, 5) * (r + 1) for r in range(world_size)]
    optimizers = [Preconditioned(m.parameters()) for m in (reference, model)]
    _train(reference, optimizers[0], inputs)
    _train(model, optimizers[1], inputs[rank : rank + 1])
    found = {"trained": _difference(model, reference)}
    checkpoint.save(folder, model, optimizers[1], step=1)
    states = get_optimizer_state_dict(model, optimizers[1])
    buffer = io.BytesIO()
    torch.save(optimizers[1].state_dict(), buffer)
    buffer.seek(0)
    pickled = torch.load(buffer)
    _train(reference, optimizers[0], inputs)
    for name in ("checkpoint", "get_optimizer_state_dict", "pickled"):
        _, other = _models()
        optimizer = Preconditioned(other.parameters())
        checkpoint.load(folder, other)
        if name == "checkpoint":
            checkpoint.load(folder, other, optimizer)
        elif name == "pickled":
            optimizer.load_state_dict(copy.deepcopy(pickled))
        else:
            set_optimizer_state_dict(other, optimizer, copy.deepcopy(states))
        _train(other, optimizer, inputs[rank : rank + 1])
        found[name] = _difference(other, reference)
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_optimizer_of_whole_matrices(ranks: RankPool, world_size: int, tmp_path: Any) -> None:
    for differences in ranks.run(_optimizer, world_size, str(tmp_path)):
        assert max(differences.values()) < 2e-6, differences


def _outside(rank: int, world_size: int) -> dict[str, str]:
    row, whole = _layer()
    _, model = _models()
    failing = Preconditioned(model.parameters(), fails=True)
    model(torch.ones(2, 5)).sum().backward()
    failed = error_of(failing.step)
    other = Preconditioned(model.parameters())
    other.step()
    x = torch.ones(2, 5)
    param = model[0].weight  # type: ignore[index]
    return {
        "failed": failed,
        "an activation": error_of(lambda: nn.functional.linear(x, row)),
        "a replicated one": error_of(lambda: whole @ (row.T @ row)),
        "another shape in place": error_of(lambda: row.clone().t_()),
        "into a plain one": error_of(lambda: torch.zeros(7, 7).add_(row @ row.T)),
        "with a gradient": error_of(lambda: param.T),
    }


def test_what_stays_an_error(ranks: RankPool) -> None:
    for errors in ranks.run(_outside, 2):
        assert errors["failed"] == "ValueError: as asked"
        assert "a plain tensor, which may be another one on each rank" in errors["an activation"]
        assert "got mixed torch.Tensor and DTensor" in errors["a replicated one"]
        assert "Use the operator that makes a view" in errors["another shape in place"]
        assert all(errors.values()), errors
