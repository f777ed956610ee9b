"""A unit that is called several times: its gradients are summed, and reduced once.

Called several times in a row, it is also gathered once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import different, whole_gradients
from modes import MODES, in_mode
from pool import RankPool
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
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# -- what is summed --------------------------------------------------------------------------------


def _optimizers_in_backward(
    rank: int, world_size: int, mode: str, uses_checkpoint: bool
) -> tuple[list[str], set[int]]:
    """Steps of a parameter's own optimizer, beside one process with one for all."""
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
    with FSDP.summon_full_params(sharded):
        values = {name: p.detach().clone() for name, p in sharded.named_parameters()}
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    return different(values, expected), set(calls.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("uses_checkpoint", [False, True])
def test_an_optimizer_in_the_backward_steps_once(
    ranks: RankPool, mode: str, uses_checkpoint: bool
) -> None:
    for found in ranks.run(_optimizers_in_backward, 2, mode, uses_checkpoint):
        assert found == ([], {3})


def _one_backward_of_two_forwards(rank: int, world_size: int) -> Any:
    plain, sharded = _plain(), _sharded(_plain())
    expected = _mean_of_ranks(lambda r: plain(_batch(r)) * plain(_batch(r, 1)), plain)
    with record_events() as events:
        (sharded(_batch(rank)) * sharded(_batch(rank, 1))).backward()
    reductions = Counter(e.unit for e in events if e.kind == "reduce_scatter")
    return different(whole_gradients(sharded), expected), reductions


def test_two_forwards_before_a_backward_are_reduced_once(ranks: RankPool) -> None:
    for wrong, reductions in ranks.run(_one_backward_of_two_forwards, 2):
        assert wrong == []
        assert reductions == dict.fromkeys(UNITS, 1)


def _backwards_of_parts(rank: int, world_size: int, mode: str) -> list[str]:
    """Two backwards of one forward, which reach different calls."""
    plain, sharded = _plain(), _sharded(_plain())

    def parts(model: nn.Module, one: int, run: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        return run(_batch(one)), run(_batch(one, 1), 2)

    def losses(one: int) -> torch.Tensor:
        first, second = parts(plain, one, plain)
        return first + first * second

    expected = _mean_of_ranks(losses, plain)
    first, second = parts(sharded, rank, in_mode(sharded, mode))
    first.backward(retain_graph=True)
    (first * second).backward()
    return different(whole_gradients(sharded), expected)


@pytest.mark.parametrize("mode", ["eager", "hooks", "hooks-inductor"])
def test_backwards_of_other_calls(ranks: RankPool, mode: str) -> None:
    assert ranks.run(_backwards_of_parts, 2, mode) == [[], []]


def _after_an_error(rank: int, world_size: int) -> list[str]:
    """Gradients that were there when a backward failed are in no later one."""
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
    return different(whole_gradients(sharded), expected)


def test_after_a_backward_that_failed(ranks: RankPool) -> None:
    assert ranks.run(_after_an_error, 2) == [[], []]


# -- what is gathered and reduced ------------------------------------------------------------------


def _collectives(rank: int, world_size: int, mode: str) -> list[Event]:
    sharded = _sharded(_plain())
    run = in_mode(sharded, mode)
    for number in range(3):
        with record_events() as events:
            run(_batch(rank, number)).backward()
    return list(events)


def _count(events: list[Event], kind: str, phase: str) -> dict[str, int]:
    return Counter(e.unit for e in events if e.kind == kind and e.phase == phase)


@pytest.mark.parametrize("mode", MODES)
def test_collectives_of_a_step(ranks: RankPool, mode: str) -> None:
    apart = 1 if mode == "graph" else 2  # calls of ``shared`` with another unit in between
    for events in ranks.run(_collectives, 2, mode):
        assert _count(events, "reduce_scatter", "backward") == dict.fromkeys(UNITS, 1)
        gathers = {**dict.fromkeys(UNITS, 1), "shared": apart}
        assert _count(events, "all_gather", "forward") == gathers
        if mode == "graph":
            del gathers["first"]  # nothing asks for the gradient of its input
        assert _count(events, "all_gather", "backward") == gathers


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


@pytest.mark.parametrize("mode", ["eager", "hooks"])
def test_one_unit_is_gathered_ahead(ranks: RankPool, mode: str) -> None:
    """Also behind many calls in a row, each of which could gather one more."""
    for events in ranks.run(_collectives, 2, mode):
        assert _most_unsharded(events) == 2


# -- ranks that call a unit more often than others -------------------------------------------------


def _uneven(rank: int, world_size: int, mode: str, strategy: str) -> list[str]:
    plain = _plain()
    wrapped = _plain()
    for name in UNITS:
        options = {"sharding_strategy": ShardingStrategy[strategy]}
        wrapped.register_module(name, FSDP(wrapped.get_submodule(name), **options))
    sharded = FSDP(wrapped, **options)
    run = in_mode(sharded, mode)
    wrong = []
    for number in range(3):
        chunks = (1 + number, 4 - number)
        plain.zero_grad()
        sharded.zero_grad()
        expected = _mean_of_ranks(lambda r, n=number, c=chunks: plain(_batch(r, n), c[r]), plain)
        run(_batch(rank, number), chunks[rank]).backward()
        wrong += different(whole_gradients(sharded), expected)
    return wrong


@pytest.mark.parametrize("mode", ["eager", "hooks"])
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_ranks_call_a_unit_in_a_row_as_often_as_they_like(
    ranks: RankPool, mode: str, strategy: str
) -> None:
    """A head for chunks of another number on each rank, say, if it stays unsharded in between."""
    assert ranks.run(_uneven, 2, mode, strategy) == [[], []]
