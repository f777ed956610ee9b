"""checkpoint.save and load: runs resume bitwise, also on another number of ranks."""

from __future__ import annotations

import copy
import random
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import Block, batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import RankPool
from staged_copies import as_if_on_a_device
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from fsdp_dynamo import (
    FSDP,
    CollectivePrecision,
    FSDPError,
    FSDPTypeError,
    FSDPValueError,
    ShardedGradScaler,
    ShardingStrategy,
    UnsupportedError,
    checkpoint,
    fully_shard,
    record_events,
)
from fsdp_dynamo.checkpoint import storage
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


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

    def states(self, step: int) -> dict[str, Any]:
        """Keyword arguments of ``save``."""
        return {"step": step, "shared": self.shared, "per_rank": self.per_rank}

    def load(self, folder: str) -> checkpoint.Loaded | None:
        states = {"shared": self.shared, "per_rank": self.per_rank}
        return checkpoint.load(folder, self.model, self.optimizers, missing_ok=True, **states)


def sharded(plain: nn.Module, how: str) -> nn.Module:
    if how == "plain":
        return plain
    if how == "one unit":
        return FSDP(plain)
    if how == "composable":
        return fully_shard(plain, policy=ModuleWrapPolicy({Block}))
    if how == "replicas":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        return wrap(plain, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    if how.startswith("hierarchy"):
        strategy = ShardingStrategy.HIERARCHICAL_SHARD
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        model = wrap(plain, sharding_strategy=strategy, device_mesh=mesh)
        return in_mode(model, "graph") if how == "hierarchy in a graph" else model
    if how == "in int8":
        return wrap(plain, collective_precision=CollectivePrecision("int8", "int4"))
    if how == "around a compiled one":
        return FSDP(torch.compile(plain, backend="eager"))  # type: ignore[arg-type]
    if how == "compiled":
        return torch.compile(wrap(plain), backend="fsdp_dynamo_aot_eager")  # type: ignore[return-value]
    return wrap(plain)


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


def _goes_on(rank: int, world_size: int, how: str, folder: str) -> dict[str, Any]:
    _seed(rank)
    first = Run(rank, how)
    nothing_yet = first.load(folder)
    for _ in range(3):
        first.step()
    with record_events() as log:
        path = checkpoint.save(folder, first.model, first.optimizers, **first.states(3))
    gathered = sum(event.kind == "all_gather" for event in log)
    losses = [first.step() for _ in range(3)]
    _seed(99)
    second = Run(rank, how)
    loaded = second.load(folder)
    again = [second.step() for _ in range(3)]
    return {
        "nothing yet": nothing_yet is None,
        "path": path == Path(folder) / "000001-step-3",
        "what was loaded": loaded == checkpoint.Loaded(3, path, world_size, True),
        "losses": losses == again,
        "scale": first.shared["scaler"].get_scale() == second.shared["scaler"].get_scale() > 4,
        "nothing is gathered to save": gathered == 0,
        "nothing is left": {p.name for p in Path(folder).iterdir()} == {path.name, "owner.json"},
    }


@pytest.mark.parametrize(("how", "world_size"), [("blocks", 2), ("composable", 3), ("plain", 1)])
def test_goes_on_as_if_nothing_had_been(
    ranks: RankPool, tmp_path: Path, how: str, world_size: int
) -> None:
    """With dropout, random data, a scheduler, a scaler, two optimizers; losses bitwise."""
    for found in ranks.run(_goes_on, world_size, how, str(tmp_path)):
        assert [what for what, holds in found.items() if not holds] == []


def _whole(run: Run) -> dict[str, torch.Tensor]:
    """Whole tensors of the model and of both optimizers."""
    whole = StateDictOptions(full_state_dict=True)
    model, optim = get_state_dict(run.model, run.optimizers, options=whole)
    state = {f"model.{k}": v.detach() for k, v in model.items()}
    for fqn, values in optim["state"].items():
        state.update({f"{fqn}.{name}": torch.as_tensor(v) for name, v in values.items()})
    return state


def _pass_on(
    rank: int, world_size: int, how: str, folder: str, step: int
) -> tuple[dict[str, torch.Tensor], bool | None]:
    """Load the newest one (at first: train), and save it as the next step."""
    run = Run(rank, how)
    states = {"shared": run.shared}
    loaded = checkpoint.load(folder, run.model, run.optimizers, missing_ok=True, **states)
    if loaded is None:
        run.step()
    checkpoint.save(folder, run.model, run.optimizers, **run.states(step))
    return _whole(run), None if loaded is None else loaded.is_exact


def test_passed_on_from_one_sharding_to_another(ranks: RankPool, tmp_path: Path) -> None:
    """4, 3, 1, 2, 4, 1, 2, 4, 2 ranks, other units, strategies, modes, formats: bitwise equal."""
    hands = [
        ("hierarchy in a graph", 4),
        ("one unit", 3),
        ("composable", 1),
        ("compiled", 2),
        ("replicas", 4),
    ]
    hands += [("plain", 1), ("around a compiled one", 2), ("hierarchy", 4), ("in int8", 2)]
    first: dict[str, torch.Tensor] = {}
    for step, (how, world_size) in enumerate(hands):
        for whole, is_exact in ranks.run(_pass_on, world_size, how, str(tmp_path), step):
            first = first or whole
            assert is_exact is (None if step == 0 else False)
            assert whole.keys() == first.keys()
            assert all(torch.equal(value, first[name]) for name, value in whole.items())
    assert [step for step, _ in checkpoint.complete(tmp_path)] == [*range(9)]


# -- which are kept ------------------------------------------------------------------------------


def _small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


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


def _special_groups(tensor_lr: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = _small()
    lr: Any = torch.tensor(1e-3) if tensor_lr else 1e-3
    groups = [{"params": list(model.parameters())}, {"params": [], "weight_decay": 0.1}]
    optimizer = torch.optim.Adam(groups, lr=lr)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_tensor_for_a_learning_rate_and_an_empty_group(tmp_path: Path, tensor_lr: bool) -> None:
    model, optimizer = _special_groups(tensor_lr)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 3
    checkpoint.save(tmp_path, model, optimizer, step=1)
    other, fresh = _special_groups(tensor_lr)
    checkpoint.load(tmp_path, other, fresh)
    assert float(fresh.param_groups[0]["lr"]) == pytest.approx(3e-3)
    assert fresh.param_groups[1]["weight_decay"] == 0.1
    fresh.step()


class _Scaled(nn.Linear):
    """Has a scalar parameter."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def _parameters_that_are_numbers(rank: int, world_size: int, folder: str) -> list[bool]:
    """NAdam's products and ASGD's rates are numbers, its moments are as large as the parameter."""
    same = []
    for number, kind in enumerate((torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW)):
        runs = []
        for _ in range(2):
            torch.manual_seed(2)
            model = FSDP(_Scaled())
            runs.append((model, kind(model.parameters(), lr=0.1)))
        (model, optimizer), (other, fresh) = runs
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        checkpoint.save(folder, model, optimizer, step=number)
        checkpoint.load(folder, other, fresh)
        for one, its in runs:
            its.zero_grad()
            one(torch.ones(1, 3)).sum().backward()
            its.step()
        whole = other.state_dict()
        same.append(all(torch.equal(v, whole[k]) for k, v in model.state_dict().items()))
    return same


def test_parameters_that_are_numbers(ranks: RankPool, tmp_path: Path) -> None:
    for same in ranks.run(_parameters_that_are_numbers, 2, str(tmp_path)):
        assert same == [True] * 3


def _special_models(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    """The wrapped module itself, a part of a unit, compiled around units, a copy of the inside."""

    def parts() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 4), FSDP(nn.Linear(4, 3)))

    run = Run(rank, "blocks")
    run.step()
    whole = _whole(run)
    checkpoint.save(f"{folder}/inner", run.model.module, run.optimizers, **run.states(1))
    other = Run(rank, "one unit")
    other.load(f"{folder}/inner")
    try:
        checkpoint.save(f"{folder}/part", run.model.module.norm, step=1)
        refused = False
    except FSDPValueError:
        refused = True
    inner_copy = copy.deepcopy(FSDP(nn.Linear(4, 4, bias=False)).module)
    with torch.no_grad():
        inner_copy.weight.fill_(2.0)
    outer = parts()
    optimizer = torch.optim.AdamW(outer.parameters(), lr=0.1)
    outer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    compiled = torch.compile(outer, backend="eager")
    checkpoint.save(f"{folder}/compiled", compiled, optimizer, step=1)
    fresh = parts()
    checkpoint.load(f"{folder}/compiled", fresh, torch.optim.AdamW(fresh.parameters()))
    full = FSDP.full_optim_state_dict(outer, optimizer, rank0_only=False)["state"]
    own = optimizer.state[outer[0].weight]["exp_avg"]
    return {
        "the inner module": all(torch.equal(v, whole[k]) for k, v in _whole(other).items()),
        "a part of a unit": refused,
        "a copy of the inside": bool((inner_copy.state_dict()["weight"] == 2.0).all()),
        "compiled": all(map(torch.equal, fresh.state_dict().values(), outer.state_dict().values())),
        "own memory": full["0.weight"]["exp_avg"].data_ptr() != own.data_ptr(),
    }


def test_special_models(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(_special_models, 2, str(tmp_path)):
        assert [what for what, holds in found.items() if not holds] == []


class _Lists(torch.optim.SGD):
    """Keeps lists of values that depend on this rank's part."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["sums"] = [torch.full((2,), float(dist.get_rank()))]


def _one_fails_alone(rank: int, world_size: int, folder: str) -> list[str]:
    """An error of one rank is raised on all, and the next save works."""
    model = wrap(make_transformer(num_blocks=2))
    optimizer = torch.optim.AdamW(model.parameters())
    lists = _Lists(model.parameters())
    loss_of(model, batch(rank, 0)).backward()
    lists.step()
    optimizer.step()
    bad: Any = {"data": 5 if rank == 1 else Loader(rank)}
    unreadable: Any = {"data": _Unreadable() if rank == 0 else Loader(rank)}
    calls: list[dict[str, Any]] = [
        {"per_rank": bad},
        {"per_rank": unreadable},
        {"optimizers": [optimizer] if rank else [optimizer, 5]},
        {"optimizers": torch.optim.SGD(nn.Linear(1, 1).parameters()) if rank else optimizer},
        {"optimizers": lists},
        {"step": rank},
    ]
    errors = []
    for arguments in calls:
        try:
            checkpoint.save(folder, model, **{"optimizers": optimizer, "step": 1, **arguments})
            errors.append("")
        except FSDPError as error:
            errors.append(type(error).__name__)
    checkpoint.save(folder, model, optimizer, step=1)
    checkpoint.load(folder, model, optimizer)
    return errors


def test_one_rank_that_fails_alone(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(_one_fails_alone, 2, str(tmp_path))
    alone = "CheckpointError"
    both = ["DivergenceError"] * 2
    assert first == [alone, "UnsupportedError", "FSDPTypeError", alone, *both]
    assert second == ["FSDPTypeError", alone, alone, "FSDPValueError", *both]
    assert len(checkpoint.complete(tmp_path)) == 1


# -- in the background ---------------------------------------------------------------------------


def _in_the_background(rank: int, world_size: int, folder: str, staged: bool) -> dict[str, bool]:
    with as_if_on_a_device() if staged else nullcontext():
        return _saved_in_the_background(rank, folder)


def _saved_in_the_background(rank: int, folder: str) -> dict[str, bool]:
    """Training goes on for two steps before the first byte is written."""
    may_write = threading.Event()
    write = storage.Writer.write_data

    def later(self: Any, plan: Any, planner: Any) -> Any:
        assert may_write.wait(60)
        return write(self, plan, planner)

    _seed(rank)
    run = Run(rank, "blocks")
    run.step()
    storage.Writer.write_data = later  # type: ignore[method-assign]
    try:
        saving = checkpoint.async_save(folder, run.model, run.optimizers, **run.states(1))
        losses = [run.step(), run.step()]
        waits = (
            not saving.done() and not saving.cancel() and checkpoint.complete(Path(folder)) == []
        )
        may_write.set()
        second = checkpoint.async_save(folder, run.model, run.optimizers, **run.states(3))
        first_is_done = saving.done()
        path = saving.result()
        second.result()
    finally:
        storage.Writer.write_data = write  # type: ignore[method-assign]
    other = Run(rank, "blocks")
    checkpoint.load(
        folder, other.model, other.optimizers, step=1, shared=other.shared, per_rank=other.per_rank
    )
    return {
        "goes on meanwhile": waits,
        "one at a time": first_is_done,
        "path": path == Path(folder) / "000001-step-1",
        "as it was when saved": [other.step(), other.step()] == losses,
        "both": [step for step, _ in checkpoint.complete(Path(folder))] == [1, 3],
    }


@pytest.mark.parametrize("staged", [False, True])
def test_saving_in_the_background(ranks: RankPool, tmp_path: Path, staged: bool) -> None:
    for found in ranks.run(_in_the_background, 2, str(tmp_path), staged):
        assert [what for what, holds in found.items() if not holds] == []


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
    with pytest.raises(FSDPValueError, match="expected each parameter in one optimizer"):
        checkpoint.save(tmp_path, model, [optimizer, optimizer], step=1)
