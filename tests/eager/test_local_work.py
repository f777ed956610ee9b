"""What a rank does beside computing: casts that were asked for, and no needless one, fill or pad.

Operators are counted as they run, so what autograd and the collectives do is seen too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batch, make_transformer, wrap
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_dynamo import FSDP, MixedPrecision, record_events
from fsdp_dynamo.eager.hooks import prepare_inputs
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

FILLS = {"zeros", "zero_", "new_zeros", "zeros_like", "full", "fill_", "constant_pad_nd", "cat"}
Cast = tuple[torch.dtype, torch.dtype, int]


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


class LocalWork(TorchDispatchMode):
    """Casts as ``(from, to, elements)``, and what was filled with a value, as its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: list[Cast] = []
        self.filled: list[int] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name == "_to_copy":
            self._cast([args[0]], [result])
        elif name in ("copy_", "_foreach_copy_"):
            self._cast(_as_list(args[1]), _as_list(args[0]))
        elif name in FILLS:
            self.filled.append((args[0] if name.endswith("_") else result).numel())
        return result

    def _cast(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        numels: dict[tuple[torch.dtype, torch.dtype], int] = {}
        for source, target in zip(sources, targets, strict=True):
            if source.dtype != target.dtype:
                key = (source.dtype, target.dtype)
                numels[key] = numels.get(key, 0) + target.numel()
        self.casts += [(*key, numel) for key, numel in numels.items()]


# -- casts -----------------------------------------------------------------------------------------

LOW, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"), [(None, None), (FULL, FULL), (LOW, LOW), (LOW, FULL)]
)
@on_ranks(2)
def test_no_cast_that_changes_nothing(
    rank: int, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> None:
    """Eager: shards on their way to a gather, and gradients once, before or behind their sum."""
    precision = MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    model = wrap(make_transformer(num_blocks=2), mixed_precision=precision)
    model(batch(rank, 0)).sum().backward()
    model.zero_grad()
    with record_events() as log, LocalWork() as work:
        model(batch(rank, 1)).sum().backward()
    layouts = {unit.fqn: unit.flats[0].layout for unit in model._fsdp_root.units}
    gathered = [layouts[e.unit].shard_numel for e in log if e.kind == "all_gather"]
    expected = []
    if param_dtype is LOW:
        assert len(gathered) == 5  # two blocks twice, the root once
        expected = [(FULL, LOW, numel) for numel in gathered]
        for layout in layouts.values():
            whole = sum(slot.numel for slot in layout.slots)
            numel = whole if reduce_dtype is FULL else layout.shard_numel
            expected.append((LOW, FULL, numel))
    assert sorted(work.casts, key=str) == sorted(expected, key=str)


class _Inner(nn.Module):
    """Notes in which dtype its input comes, and computes in that of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.seen.append(x.dtype)
        if bias is not None:
            self.seen.append(bias.dtype)
        return F.linear(x.to(self.weight.dtype), self.weight)


class _Outer(_Inner):
    """Gives its inner unit float32, and float64 by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return self.inner(y.float(), bias=y.double())


@pytest.mark.parametrize(
    ("mode", "root", "inner"),
    [
        *(("eager", root, inner) for root in (False, True) for inner in (False, True)),
        ("hooks", True, True),
        ("graph", True, False),
        ("graph", False, True),
    ],
)
@on_ranks(2)
def test_inputs_are_cast_where_asked_for(rank: int, mode: str, root: bool, inner: bool) -> None:
    """The root's by either option, a nested unit's by ``cast_forward_inputs``."""
    precision = MixedPrecision(
        param_dtype=LOW, cast_forward_inputs=inner, cast_root_forward_inputs=root
    )
    policy = ModuleWrapPolicy({_Inner})
    model = FSDP(_Outer(), auto_wrap_policy=policy, mixed_precision=precision)
    run = in_mode(model, mode)
    for _ in range(2):  # the first call may trace, on tensors without values
        model.module.seen, model.inner.module.seen = [], []
        run(torch.ones(2, 6)).float().sum().backward()
    assert model.module.seen == [LOW if root or inner else FULL]
    assert model.inner.module.seen == ([LOW, LOW] if inner else [FULL, torch.float64])


def test_inputs_on_another_device_are_moved() -> None:
    """What both paths do with inputs; no second device is needed to see where they are sent."""
    here, there = torch.ones(2), torch.ones(2, device="meta")
    args, kwargs = prepare_inputs(
        torch.device("meta"), LOW, (here, {"a": [here, 3]}), {"there": there, "n": here.long()}
    )
    moved = [args[0], args[1]["a"][0], kwargs["there"], kwargs["n"]]
    assert [t.device.type for t in moved] == ["meta"] * 4
    assert [t.dtype for t in moved] == [LOW, LOW, LOW, torch.int64]
    assert args[1]["a"][1] == 3


# -- fills and padding -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_only_gaps_are_filled(rank: int, mode: str) -> None:
    """Nothing where sizes divide: neither outputs of reductions, nor what is gathered or reduced.

    Else room for 2 * 3 rows of 5 elements, behind which parameters begin at multiples of 4. Hooks
    write messages, in which a rank's missing row and the gap behind all ranks' rows are two.
    """
    for width, bias, gaps in ((8, False, []), (5, True, [7] if mode == "graph" else [5, 2])):
        layers = [nn.Sequential(nn.Linear(width, width, bias=bias), nn.Tanh()) for _ in range(2)]
        policy = ModuleWrapPolicy({nn.Sequential})
        wrapped = FSDP(nn.Sequential(*layers), auto_wrap_policy=policy)
        model = in_mode(wrapped, mode)
        for _ in range(2):
            model(torch.ones(2, width)).sum().backward()
            wrapped.zero_grad()
        with record_events() as log, LocalWork() as work:
            model(torch.ones(2, width)).sum().backward()
        assert [numel for numel in work.filled if numel > 1] == gaps * 2
        assert len(log.keys("reduce_scatter")) == 2
