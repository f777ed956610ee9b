"""Tensor parallel inside, units outside: a 2 x 2 mesh trains like one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from modes import in_mode
from pool import RankPool
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from fsdp_dynamo import FSDP, ShardingStrategy, checkpoint, fully_shard
from fsdp_dynamo.core.row_dtensor import has_own_operators
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

DIM, HIDDEN, LENGTH, STEPS = 8, 12, 6, 3


class Layer(nn.Module):
    """A norm that sequence parallelism splits, and two matrices split by column and by row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(DIM, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _model() -> Model:
    torch.manual_seed(5)
    return Model()


def _parallelize(model: Model, mesh: Any) -> Model:
    for layer in model.layers:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    return model


def _tokens(replica: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randint(17, (2, LENGTH), generator=generator)


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def _one_process(steps: int = STEPS) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Both replicas' batches in turn, on one rank."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (_loss(model, _tokens(0, step)) + _loss(model, _tokens(1, step))) / 2
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def _two_dimensions(
    rank: int, world_size: int, mode: str, composable: bool, kwargs: dict[str, Any]
) -> tuple[Any, Any, list[str], list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected = _one_process()
    plain = _parallelize(_model(), mesh["tp"])
    policy = ModuleWrapPolicy({Layer})
    if composable:
        sharded = fully_shard(plain, policy=policy, mesh=mesh["dp"], **kwargs)
    else:
        sharded = FSDP(plain, auto_wrap_policy=policy, device_mesh=mesh["dp"], **kwargs)
    model = in_mode(sharded, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(model, _tokens(rank // 2, step))
        loss.backward()
        norms.append(float(sharded.clip_grad_norm_(0.5)))
        optimizer.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG, mesh.get_group("dp"))
        losses.append(mean.item())
    state = sharded.state_dict()
    wrong = [k for k, v in expected[2].items() if not torch.allclose(state[k], v, 1e-3, 1e-5)]
    sharded.load_state_dict(_model().state_dict())
    fresh = sharded.state_dict()
    wrong += [f"loaded {k}" for k, v in _model().state_dict().items() if not v.equal(fresh[k])]
    kinds = {type(p).__name__ for p in sharded.parameters()}
    return (losses, norms), expected[:2], wrong, sorted(kinds)


@pytest.mark.parametrize(
    ("mode", "composable", "kwargs"),
    [
        ("eager", False, {}),
        ("eager", True, {}),
        ("eager", False, {"sharding_strategy": ShardingStrategy.NO_SHARD}),
        ("hooks", False, {}),
        ("graph", False, {}),
        pytest.param("graph-inductor", True, {}, marks=pytest.mark.slow),
    ],
)
def test_equals_one_process(
    ranks: RankPool, mode: str, composable: bool, kwargs: dict[str, Any]
) -> None:
    for got, expected, wrong, kinds in ranks.run(_two_dimensions, 4, mode, composable, kwargs):
        for mine, theirs in zip(got, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
        assert wrong == []
        assert kinds == ["RowDTensor" if composable and has_own_operators() else "Parameter"]


def _save(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = _parallelize(_model(), mesh["tp"])
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({Layer}), device_mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    _loss(model, _tokens(rank // 2, 0)).backward()
    optimizer.step()
    whole = _whole(model, optimizer)
    checkpoint.save(folder, model, optimizer, step=1)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
            optimizer.state[param]["exp_avg"].zero_()
    checkpoint.load(folder, model, optimizer)
    again = _whole(model, optimizer)
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    return whole


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    options = StateDictOptions(full_state_dict=True)
    state, optim = get_state_dict(model, optimizer, options=options)
    moments = {f"{fqn}.exp_avg": one["exp_avg"] for fqn, one in optim["state"].items()}
    return {**{fqn: value.detach() for fqn, value in state.items()}, **moments}


def _load(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    model = _model() if world_size == 1 else FSDP(_model())
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.load(folder, model, optimizer)
    return _whole(model, optimizer)


def test_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    """Parts of parts: one process, and ranks without tensor parallelism, load what a mesh of 2 x 2
    wrote, model and optimizer."""
    folder = str(tmp_path / "checkpoint")
    whole = ranks.run(_save, 4, folder)[0]
    for world_size in (1, 2):
        for found in ranks.run(_load, world_size, folder):
            assert found.keys() == whole.keys()
            assert all(torch.equal(found[name], value) for name, value in whole.items())


def _refused(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        on_meta = _parallelize(Model(), mesh["tp"])
    plain = _parallelize(_model(), mesh["tp"])
    kinds = {type(p) for p in plain.parameters()}
    sharded = fully_shard(_parallelize(_model(), mesh["tp"]), mesh=mesh["dp"])
    messages = []
    for call in (
        lambda: FSDP(plain),
        lambda: fully_shard(on_meta, mesh=mesh["dp"]),
        lambda: sharded.parameter_shards(),
        lambda: sharded.update_whole({}, lambda _, whole: whole),
        lambda: sharded.apply(lambda _: None),
        lambda: sharded.load_state_dict({**sharded.state_dict(), "head.bias": torch.ones(9)}),
    ):
        try:
            call()
            messages.append("nothing")
        except (RuntimeError, ValueError, NotImplementedError) as error:
            messages.append(str(error))
    assert {type(p) for p in plain.parameters()} == kinds
    return messages


def test_refused(ranks: RankPool) -> None:
    for messages in ranks.run(_refused, 2):
        for message, words in zip(
            messages,
            (
                "parameter 'embed.weight': expected a DTensor whose mesh shares one rank",
                "expected a DTensor with storage, got one on the meta device",
                "parameter_shards(), parameter 'embed.weight': expected parameters that no tensor",
                "nothing",
                "summon_full_params(), parameter 'embed.weight'",
                "expected a tensor of shape (17,), got (9,)",
            ),
            strict=True,
        ):
            assert words in message
