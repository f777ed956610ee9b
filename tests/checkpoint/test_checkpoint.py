"""checkpoint.save and load: runs resume bitwise, also on another number of ranks."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from loops import error_of
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool, on_ranks
from shardings import assert_same, sharded, whole_run
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from fsdp_dynamo import (
    FSDP,
    FSDPTypeError,
    FSDPValueError,
    ShardedGradScaler,
    UnsupportedError,
    checkpoint,
    record_events,
)
from fsdp_dynamo.checkpoint import saving, storage


class Loader:
    """Batches of one rank; its state is how many it has given."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 0

    def __next__(self) -> torch.Tensor:
        self.position += 1
        return batch(self.rank, self.position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Run:
    """A training run with schedulers, scalers, loaders and random numbers."""

    def __init__(self, rank: int, how: str) -> None:
        plain = make_transformer(num_blocks=2, tied=True)
        plain.blocks[0].norm1.requires_grad_(False)
        self.model = sharded(plain, how)
        matrices = [p for n, p in self.model.named_parameters() if n.endswith("weight")]
        others = [p for n, p in self.model.named_parameters() if not n.endswith("weight")]
        self.optimizers = [
            torch.optim.AdamW(matrices, lr=1e-2),
            torch.optim.SGD(others, lr=1e-2, momentum=0.9),
        ]
        self.noise = torch.Generator().manual_seed(rank)
        self.shared = {
            "scheduler": torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2),
            "scaler": ShardedGradScaler("cpu", init_scale=4.0, growth_interval=2),
        }
        self.loader = Loader(rank)
        self.per_rank = {"data": self.loader, "noise": self.noise}

    def step(self) -> float:
        """One step; draws from every random number generator."""
        tokens = next(self.loader)
        tokens[0, 0] = random.randrange(3) + np.random.randint(3)  # noqa: NPY002
        tokens[0, 1] = torch.randint(3, (1,), generator=self.noise)
        loss = F.dropout(loss_of(self.model, tokens) + torch.zeros(8), 0.5).mean()
        scaler = self.shared["scaler"]
        scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        self.shared["scheduler"].step()
        return loss.item()

    def states(self) -> dict[str, Any]:
        """Keyword arguments of ``save`` and ``load``."""
        return {"shared": self.shared, "per_rank": self.per_rank}

    def save(self, folder: Path, step: int, save: Callable[..., Any] = checkpoint.save) -> Any:
        return save(folder, self.model, self.optimizers, step=step, **self.states())

    def load(self, folder: Path, **arguments: Any) -> checkpoint.Loaded | None:
        arguments = {"missing_ok": True, **self.states(), **arguments}
        return checkpoint.load(folder, self.model, self.optimizers, **arguments)


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


def _goes_on(rank: int, world_size: int, how: str, folder: Path) -> None:
    """Dropout, random data, a scheduler, a scaler, two optimizers."""
    _seed(rank)
    first = Run(rank, how)
    assert first.load(folder) is None
    for _ in range(3):
        first.step()
    with record_events() as log:
        path = first.save(folder, 3)
    assert not any(event.kind == "all_gather" for event in log)
    assert path == folder / "000001-step-3"
    assert {p.name for p in folder.iterdir()} == {path.name, "owner.json"}
    losses = [first.step() for _ in range(3)]
    _seed(99)
    second = Run(rank, how)
    assert second.load(folder) == checkpoint.Loaded(3, path, world_size, True)
    assert [second.step() for _ in range(3)] == losses
    scales = [run.shared["scaler"].get_scale() for run in (first, second)]
    assert scales[0] == scales[1] > 4


@pytest.mark.parametrize(("how", "world_size"), [("blocks", 2), ("plain", 1)])
def test_goes_on_as_if_nothing_had_been(
    ranks: RankPool, tmp_path: Path, how: str, world_size: int
) -> None:
    """Losses are bitwise those of the run that goes on."""
    ranks.run(_goes_on, world_size, how, tmp_path)


def _pass_on(
    rank: int, world_size: int, how: str, folder: Path, step: int
) -> dict[str, torch.Tensor]:
    """Load the newest one (at first: train), and save it as the next step; returns whole values."""
    run = Run(rank, how)
    loaded = run.load(folder, per_rank={})
    if step == 0:
        run.step()
    else:
        assert loaded is not None
        assert not loaded.is_exact
    run.save(folder, step)
    return whole_run(run.model, run.optimizers)


def test_passed_on_from_one_sharding_to_another(ranks: RankPool, tmp_path: Path) -> None:
    """4, 3, 1, 2, 4, 2, 1, 2 ranks, other units, strategies, modes, formats: bitwise equal."""
    hands = [
        ("hierarchy", 4),
        ("one unit", 3),
        ("composable", 1),
        ("compiled", 2),
        ("replicas", 4),
        ("in int8", 2),
        ("plain", 1),
        ("around a compiled one", 2),
    ]
    first: dict[str, torch.Tensor] = {}
    for step, (how, world_size) in enumerate(hands):
        for whole in ranks.run(_pass_on, world_size, how, tmp_path, step):
            first = first or whole
            assert_same(whole, first)
    assert [step for step, _ in checkpoint.complete(tmp_path)] == [*range(8)]


# -- which are kept ------------------------------------------------------------------------------


def _small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(15.0).view(5, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    model, optimizer = _small()
    (tmp_path / "000007-step-1.part").mkdir()
    (tmp_path / "000006-step-1.gone").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for step in (5, 10, 20, 15):  # after 20, the run went back
        checkpoint.save(tmp_path, model, optimizer, step=step, keep_last=3)
    assert [step for step, _ in checkpoint.complete(tmp_path)] == [10, 20, 15]
    newest = checkpoint.load(tmp_path, model)
    assert newest is not None
    assert newest.step == 15
    with torch.no_grad():
        model[0].bias.fill_(3.0)
    checkpoint.save(tmp_path, model, step=20, keep_last=2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"000011-step-15", "000012-step-20", "notes.txt", "owner.json"}
    other, _ = _small()
    checkpoint.load(tmp_path, other, step=20)
    assert torch.equal(other[0].bias, model[0].bias)
    checkpoint.load(tmp_path, other, step=15)
    assert not torch.equal(other[0].bias, model[0].bias)


class _WithExtraState(nn.Linear):
    """A module with a state beside its parameters, nested and with a tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: dict[str, Any] = {"count": 0, "deep": {"tensor": torch.zeros(3)}}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def test_extra_state(tmp_path: Path) -> None:
    """As it was when it was saved, whatever the new model has: more keys, odd keys, none."""
    states: list[dict[Any, Any]] = [
        {"count": 4, "deep": {"tensor": torch.arange(3.0)}, "more": [1]},
        {0: 5, (1, 2): "pair"},
        {},
    ]
    for step, state in enumerate(states):
        model = nn.Sequential(_WithExtraState())
        model[0].extra = {**state}
        saving = checkpoint.async_save(tmp_path, model, step=step)
        model[0].extra.clear()
        saving.result()
        other = nn.Sequential(_WithExtraState())
        checkpoint.load(tmp_path, other)
        found = other[0].extra.pop("deep", {}).get("tensor")
        expected = state.pop("deep", {}).get("tensor")
        assert other[0].extra == state
        assert expected is None or torch.equal(found, expected)


@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)], ids=["number", "tensor"])
def test_a_learning_rate_and_an_empty_group(tmp_path: Path, lr: Any) -> None:
    runs = []
    for factor in (3, 1):
        model, _ = _small()
        groups = [{"params": list(model.parameters())}, {"params": [], "weight_decay": 0.1}]
        runs.append((model, torch.optim.Adam(groups, lr=lr * factor)))
    (model, optimizer), (other, fresh) = runs
    _step(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    checkpoint.load(tmp_path, other, fresh)
    assert float(fresh.param_groups[0]["lr"]) == pytest.approx(3e-3)
    assert fresh.param_groups[1]["weight_decay"] == 0.1
    _step(other, fresh)


class _Scaled(nn.Linear):
    """Has a scalar parameter."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


@on_ranks(2)
def test_parameters_that_are_numbers(rank: int, tmp_path: Path) -> None:
    """NAdam's products and ASGD's rates are numbers, its moments are as large as the parameter."""
    for number, kind in enumerate((torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW)):
        runs = []
        for _ in range(2):
            torch.manual_seed(2)
            model = FSDP(_Scaled())
            runs.append((model, kind(model.parameters(), lr=0.1)))
        (model, optimizer), (other, fresh) = runs
        for _ in range(2):
            _step(model, optimizer)
        checkpoint.save(tmp_path, model, optimizer, step=number)
        checkpoint.load(tmp_path, other, fresh)
        for run in runs:
            _step(*run)
        assert_same(dict(other.state_dict()), dict(model.state_dict()))


@on_ranks(2)
def test_special_models(rank: int, tmp_path: Path) -> None:
    """The wrapped module itself, a part of a unit, compiled around units, a copy of the inside."""
    run, other = Run(rank, "blocks"), Run(rank, "one unit")
    run.step()
    checkpoint.save(tmp_path / "inner", run.model.module, run.optimizers, step=1, **run.states())
    other.load(tmp_path / "inner")
    assert_same(whole_run(other.model, other.optimizers), whole_run(run.model, run.optimizers))
    with pytest.raises(FSDPValueError, match="expected a model with all units"):
        checkpoint.save(tmp_path / "part", run.model.module.norm, step=1)

    inner_copy = copy.deepcopy(FSDP(nn.Linear(4, 4, bias=False)).module)
    nn.init.constant_(inner_copy.weight, 2.0)
    assert bool((inner_copy.state_dict()["weight"] == 2.0).all())

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 4), FSDP(nn.Linear(4, 3)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    (outer, optimizer), fresh = parts(), parts()
    _step(outer, optimizer)
    compiled = torch.compile(outer, backend="eager")
    checkpoint.save(tmp_path / "compiled", compiled, optimizer, step=1)
    checkpoint.load(tmp_path / "compiled", *fresh)
    assert_same(dict(fresh[0].state_dict()), dict(outer.state_dict()))
    full = FSDP.full_optim_state_dict(outer, optimizer, rank0_only=False)["state"]
    own = optimizer.state[outer[0].weight]["exp_avg"]
    assert full["0.weight"]["exp_avg"].data_ptr() != own.data_ptr()


class _Lists(torch.optim.SGD):
    """Keeps lists of values that depend on this rank's part."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["sums"] = [torch.full((2,), float(dist.get_rank()))]


@on_ranks(2)
def test_one_rank_that_fails_alone(rank: int, tmp_path: Path) -> None:
    """An error of one rank is raised on all, and the next save works."""
    model = wrap(make_transformer(num_blocks=2))
    optimizer, lists = torch.optim.AdamW(model.parameters()), _Lists(model.parameters())
    loss_of(model, batch(rank, 0)).backward()
    lists.step()
    optimizer.step()
    is_first, good = rank == 0, Loader(rank)
    others = torch.optim.SGD(nn.Linear(1, 1).parameters())
    unreadable, number = {"data": _Unreadable()}, {"data": 5}
    calls: list[tuple[dict[str, Any], str, str]] = [
        ({"per_rank": {"data": good} if is_first else number}, "CheckpointError", "FSDPTypeError"),
        (
            {"per_rank": unreadable if is_first else {"data": good}},
            "UnsupportedError",
            "CheckpointError",
        ),
        ({"optimizers": optimizer if is_first else others}, "CheckpointError", "FSDPValueError"),
        ({"optimizers": lists}, "DivergenceError", "DivergenceError"),
        ({"step": rank}, "DivergenceError", "DivergenceError"),
    ]
    for arguments, *errors in calls:
        given = {"optimizers": optimizer, "step": 1, **arguments}
        error = error_of(lambda given=given: checkpoint.save(tmp_path, model, **given))
        assert error.startswith(errors[rank]), error
    checkpoint.save(tmp_path, model, optimizer, step=1)
    checkpoint.load(tmp_path, model, optimizer)
    assert len(checkpoint.complete(tmp_path)) == 1


# -- in the background ---------------------------------------------------------------------------


@contextmanager
def _as_if_on_a_device() -> Iterator[None]:
    """All tensors are taken for a device's, and copied by torch's stager."""
    stager = StateDictStager()
    with (
        mock.patch.object(saving, "_is_on_device", lambda leaf: isinstance(leaf, torch.Tensor)),
        mock.patch.object(saving, "_stager", return_value=stager),
        mock.patch.object(torch.accelerator, "synchronize"),
    ):
        yield


@pytest.mark.parametrize("staged", [False, True])
@on_ranks(2)
def test_saving_in_the_background(rank: int, tmp_path: Path, staged: bool) -> None:
    """Training goes on for two steps before the first byte is written."""
    may_write = threading.Event()
    write = storage.Writer.write_data

    def later(*args: Any) -> Any:
        assert may_write.wait(60)
        return write(*args)

    _seed(rank)
    run = Run(rank, "blocks")
    run.step()
    with (
        _as_if_on_a_device() if staged else nullcontext(),
        mock.patch.object(storage.Writer, "write_data", later),
    ):
        saving = run.save(tmp_path, 1, checkpoint.async_save)
        losses = [run.step(), run.step()]
        assert not saving.done()
        assert not saving.cancel()
        assert checkpoint.complete(tmp_path) == []
        may_write.set()
        second = run.save(tmp_path, 3, checkpoint.async_save)
        assert saving.done()  # one at a time
        assert saving.result() == tmp_path / "000001-step-1"
        second.result()
    assert [step for step, _ in checkpoint.complete(tmp_path)] == [1, 3]
    other = Run(rank, "blocks")
    other.load(tmp_path, step=1, missing_ok=False)
    assert [other.step(), other.step()] == losses


@on_ranks(1)
def test_copies_of_a_devices_tensors(rank: int) -> None:
    """Of two parts in one memory; theirs is used again, and goes with what was copied."""
    flat, mesh = torch.arange(6.0), init_device_mesh("cpu", (1,))

    def copied(flat: torch.Tensor) -> Any:
        halves = (flat[:4].view(2, 2), flat[4:].view(1, 2))
        return saving.in_host_memory([DTensor.from_local(one, mesh, [Shard(0)]) for one in halves])

    with _as_if_on_a_device():
        first = copied(flat)
        flat.add_(1)
        assert [one.to_local().tolist() for one in first] == [[[0, 1], [2, 3]], [[4, 5]]]
        second = copied(flat)
        parts = [one[1].to_local() for one in (first, second)]
        assert parts[0].data_ptr() == parts[1].data_ptr()
        assert parts[1].tolist() == [[5, 6]]
        kept = weakref.ref(parts[1].untyped_storage())
        del first, second, parts
        gc.collect()
        assert kept() is not None
        del flat
        gc.collect()
        assert kept() is None


# -- wrong arguments -----------------------------------------------------------------------------


class _Unreadable:
    def state_dict(self) -> dict[str, Any]:
        return {"fine": 1, "not": _Unreadable()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step": -1}, FSDPValueError, "step: expected an integer of at least 0, got -1"),
        ({"keep_last": 0}, FSDPValueError, "keep_last: expected an integer of at least 1, got 0"),
        ({"shared": {"a": 3}}, FSDPTypeError, r"shared\['a'\]: expected state_dict"),
        ({"per_rank": {"b": object()}}, FSDPTypeError, r"per_rank\['b'\]"),
        ({"optimizers": [3]}, FSDPTypeError, "an optimizer or a list of optimizers, got int"),
        ({"shared": {"u": _Unreadable()}}, UnsupportedError, r"shared\['u'\]: expected a state of"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, optimizer = _small()
    with pytest.raises(error, match=message):
        checkpoint.save(tmp_path, model, **{"optimizers": optimizer, "step": 1, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_in_two_optimizers(tmp_path: Path) -> None:
    model, optimizer = _small()
    with pytest.raises(
        FSDPValueError, match=r"each parameter in one optimizer, got '0\.bias' in two"
    ):
        checkpoint.save(tmp_path, model, [optimizer, optimizer], step=1)
