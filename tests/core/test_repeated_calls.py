"""A unit that is called several times: its gradients are summed, and reduced once.

Called several times in a row, it is also gathered once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import different, gradients, whole, whole_gradients
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_dynamo import FSDP, ShardingStrategy, fully_shard, record_events
from fsdp_dynamo.events import Event

WIDTH = 6
CHUNKS = 4


class _Model(nn.Module):
    """A block that is called twice in a row, one that is not, and a head called for each chunk."""

    def __init__(self, uses_checkpoint: bool = False) -> None:
        super().__init__()
        self.uses_checkpoint = uses_checkpoint
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, chunks: int = CHUNKS) -> torch.Tensor:
        x = self.shared(self.shared(self.first(x)))
        x = self._shared(self.between(x))
        return torch.stack([self.head(c).square().mean() for c in x.chunk(chunks)]).sum()

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        if not self.uses_checkpoint:
            return self.shared(x)
        return checkpoint(self.shared, x, use_reentrant=False)


UNITS = ("first", "shared", "between", "head")


def _plain(uses_checkpoint: bool = False) -> _Model:
    torch.manual_seed(4)
    return _Model(uses_checkpoint)


def _sharded(model: nn.Module, **options: Any) -> nn.Module:
    for name in UNITS:
        fully_shard(model.get_submodule(name), **options)
    return fully_shard(model, **options)


def _batch(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, WIDTH, generator=generator)


def _mean_of_ranks(loss: Callable[[int], torch.Tensor], model: nn.Module) -> dict[str, Any]:
    """Gradients of a plain model; ``loss`` is that of a rank of two."""
    ((loss(0) + loss(1)) / 2).backward()
    return gradients(model)


# -- what is summed --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "uses_checkpoint"),
    [("eager", False), ("eager", True), ("hooks", True), ("graph", True)],
)
@on_ranks(2)
def test_an_optimizer_in_the_backward_steps_once(
    rank: int, mode: str, uses_checkpoint: bool
) -> None:
    """That of each parameter, beside one process with one for all."""
    plain, sharded = _plain(uses_checkpoint), _sharded(_plain(uses_checkpoint))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    calls: Counter[str] = Counter()
    for name, param in sharded.named_parameters():
        own = torch.optim.SGD([param], lr=0.1, momentum=0.9)

        def step(param: nn.Parameter, name: str = name, own: torch.optim.SGD = own) -> None:
            calls[name] += 1
            own.step()
            own.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    run = in_mode(sharded, mode)
    for number in range(3):
        _mean_of_ranks(lambda one, number=number: plain(_batch(one, number)), plain)
        reference.step()
        reference.zero_grad()
        run(_batch(rank, number)).backward()
    values = {name: whole(p.detach()) for name, p in sharded.named_parameters()}
    assert different(values, {name: p.detach() for name, p in plain.named_parameters()}) == []
    assert set(calls.values()) == {3}


@on_ranks(2)
def test_two_forwards_before_a_backward_are_reduced_once(rank: int) -> None:
    plain, sharded = _plain(), _sharded(_plain())
    expected = _mean_of_ranks(lambda r: plain(_batch(r)) * plain(_batch(r, 1)), plain)
    with record_events() as events:
        (sharded(_batch(rank)) * sharded(_batch(rank, 1))).backward()
    assert _count([*events], "reduce_scatter", "backward") == dict.fromkeys(UNITS, 1)
    assert different(whole_gradients(sharded), expected) == []


@pytest.mark.parametrize("mode", ["eager", "hooks-inductor"])
@on_ranks(2)
def test_backwards_of_other_calls(rank: int, mode: str) -> None:
    """Two backwards of one forward, which reach different calls."""
    plain, sharded = _plain(), _sharded(_plain())
    chunks = 2 if mode == "eager" else CHUNKS  # another number compiles everything once more

    def losses(one: int) -> torch.Tensor:
        first, second = plain(_batch(one)), plain(_batch(one, 1), chunks)
        return first + first * second

    expected = _mean_of_ranks(losses, plain)
    run = in_mode(sharded, mode)
    first, second = run(_batch(rank)), run(_batch(rank, 1), chunks)
    first.backward(retain_graph=True)
    (first * second).backward()
    assert different(whole_gradients(sharded), expected) == []


@on_ranks(2)
def test_after_a_backward_that_failed(rank: int) -> None:
    """Gradients that were there then are in no later one."""
    plain, sharded = _plain(), _sharded(_plain())
    expected = _mean_of_ranks(lambda r: plain(_batch(r)), plain)
    for where in ("first", "between", "head"):
        x = _batch(rank).requires_grad_()

        def fail(_grad: torch.Tensor, where: str = where) -> None:
            raise ValueError(where)

        module = sharded.get_submodule(where)
        handle = module.register_forward_hook(lambda *io, f=fail: io[-1].register_hook(f) and None)
        loss = sharded(x)
        handle.remove()
        with pytest.raises(ValueError, match=where):
            loss.backward()
        sharded.zero_grad()
    sharded(_batch(rank)).backward()
    assert different(whole_gradients(sharded), expected) == []


# -- what is gathered and reduced ------------------------------------------------------------------


def _count(events: list[Event], kind: str, phase: str) -> dict[str, int]:
    return Counter(e.unit for e in events if e.kind == kind and e.phase == phase)


def _most_unsharded(events: list[Event]) -> int:
    """Units that have whole parameters at one time, at most."""
    whole: set[str] = set()
    most = 0
    for event in events:
        if event.kind == "unshard":
            whole.add(event.unit)
        elif event.kind == "reshard":
            whole.discard(event.unit)
        most = max(most, len(whole))
    assert not whole
    return most


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_collectives_of_a_step(rank: int, mode: str) -> None:
    """One unit is gathered ahead, also behind many calls in a row, each of which could gather one
    more."""
    run = in_mode(_sharded(_plain()), mode)
    for number in range(3):
        with record_events() as log:
            run(_batch(rank, number)).backward()
    events = list(log)
    assert _count(events, "reduce_scatter", "backward") == dict.fromkeys(UNITS, 1)
    apart = 1 if mode == "graph" else 2  # calls of ``shared`` with another unit in between
    gathers = {**dict.fromkeys(UNITS, 1), "shared": apart}
    assert _count(events, "all_gather", "forward") == gathers
    if mode == "graph":
        del gathers["first"]  # nothing asks for the gradient of its input
    else:
        assert _most_unsharded(events) == 2
    assert _count(events, "all_gather", "backward") == gathers


# -- ranks that call a unit more often than others -------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "strategy"),
    [("eager", "SHARD_GRAD_OP"), ("eager", "NO_SHARD"), ("hooks", "SHARD_GRAD_OP")],
)
@on_ranks(2)
def test_ranks_call_a_unit_in_a_row_as_often_as_they_like(
    rank: int, mode: str, strategy: str
) -> None:
    """A head for chunks of another number on each rank, say, if it stays unsharded in between."""
    plain, wrapped = _plain(), _plain()
    options = {"sharding_strategy": ShardingStrategy[strategy]}
    for name in UNITS:
        wrapped.register_module(name, FSDP(wrapped.get_submodule(name), **options))
    sharded = FSDP(wrapped, **options)
    run = in_mode(sharded, mode)
    for number in range(3):
        chunks = (1 + number, 4 - number)
        plain.zero_grad()
        sharded.zero_grad()
        expected = _mean_of_ranks(lambda r, n=number, c=chunks: plain(_batch(r, n), c[r]), plain)
        run(_batch(rank, number), chunks[rank]).backward()
        assert different(whole_gradients(sharded), expected) == []
