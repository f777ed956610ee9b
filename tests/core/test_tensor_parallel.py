"""Tensor parallel inside, units outside: a 2 x 2 mesh trains like one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from modes import MODES, in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fsdp_dynamo import (
    FSDP,
    FSDPValueError,
    ShardingStrategy,
    StateDictType,
    checkpoint,
    fully_shard,
)
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
    wrong = [
        k for k, v in expected[2].items() if not torch.allclose(_plain(state[k]), v, 1e-3, 1e-5)
    ]
    sharded.load_state_dict(_model().state_dict())
    fresh = sharded.state_dict()
    wrong += [
        f"loaded {k}" for k, v in _model().state_dict().items() if not v.equal(_plain(fresh[k]))
    ]
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
        assert kinds == ["DTensor"]


def _checkpointed_by_a_function(layer: Layer) -> None:
    run = layer.forward
    layer.forward = lambda x: torch_checkpoint(run, x, use_reentrant=False)  # type: ignore[method-assign]


CHECKPOINTING: dict[str, Callable[[Model], object]] = {
    "around layers": lambda model: apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, Layer)
    ),
    "around parts of layers": lambda model: apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, nn.Linear) and module is not model.head
    ),
    "composable": lambda model: [*map(composable_checkpoint, model.layers)],
    "by a function": lambda model: [*map(_checkpointed_by_a_function, model.layers)],
}


@pytest.mark.parametrize(
    ("mode", "composable", "unit", "way"),
    [
        *((mode, False, Layer, "around layers") for mode in MODES),
        *((mode, True, CheckpointWrapper, "around layers") for mode in MODES),
        ("eager", True, None, "around parts of layers"),
        ("hooks", False, None, "around parts of layers"),
        ("eager", False, Layer, "composable"),
        *((mode, True, Layer, "by a function") for mode in MODES),
    ],
)
@on_ranks(4)
def test_activation_checkpointing(
    rank: int, mode: str, composable: bool, unit: type[nn.Module] | None, way: str
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _parallelize(_model(), mesh["tp"])
    CHECKPOINTING[way](model)
    policy = None if unit is None else ModuleWrapPolicy({unit})
    if composable:
        sharded = fully_shard(model, policy=policy, mesh=mesh["dp"])
    else:
        sharded = FSDP(model, auto_wrap_policy=policy, device_mesh=mesh["dp"])
    run = in_mode(sharded, mode)
    expected = _model()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (sharded, expected)]
    for step in range(2):
        _loss(run, _tokens(rank // 2, step)).backward()
        sum(_loss(expected, _tokens(replica, step)) / 2 for replica in range(2)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with FSDP.state_dict_type(sharded, StateDictType.FULL_STATE_DICT):
        torch.testing.assert_close(
            sharded.state_dict(), dict(expected.state_dict()), rtol=1e-4, atol=1e-5
        )


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


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _placed_like_fsdp2(rank: int, world_size: int) -> None:
    from torch.distributed.fsdp import fully_shard as fsdp2

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = fsdp2(_parallelize(_model(), mesh["tp"]), mesh=mesh["dp"])
    ours = fully_shard(_parallelize(_model(), mesh["tp"]), mesh=mesh["dp"])
    kinds, states = set(), ours.state_dict()
    for (fqn, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(mine, DTensor), fqn
        assert mine.device_mesh == other.device_mesh, (fqn, mine.device_mesh, other.device_mesh)
        assert mine.placements == other.placements, (fqn, mine.placements)
        assert (mine.shape, mine.stride()) == (other.shape, other.stride()), fqn
        kinds.add(tuple(map(type, mine.placements)))
        again = pickle.loads(pickle.dumps(states[fqn]))
        assert (again.device_mesh, again.placements) == (mine.device_mesh, mine.placements), fqn
        assert again.full_tensor().equal(other.full_tensor()), fqn
        with torch.no_grad():
            mine.copy_(2 * other)  # a DTensor of torch's, whose rows are divided evenly
        assert mine.full_tensor().equal(2 * other.full_tensor()), fqn
    assert len(kinds) == 3  # split by rows, by columns and not at all
    with pytest.raises(FSDPValueError, match=r"got a process_group.*mesh=mesh"):
        fully_shard(_parallelize(_model(), mesh["tp"]), process_group=mesh.get_group("dp"))


def test_dtensors_of_two_dimensions(ranks: RankPool) -> None:
    """Mesh and placements are those of FSDP2 on the same model, split by rows, by columns or not; a
    unit that has only a process group is refused."""
    ranks.run(_placed_like_fsdp2, 4)


def _on_meta(rank: int, world_size: int, give_values: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = _model()
    with torch.device("meta"):
        plain = _parallelize(Model(), mesh["tp"])
    model = fully_shard(plain, policy=ModuleWrapPolicy({Layer}), mesh=mesh["dp"])
    assert all(param.is_meta for param in model.parameters())
    with pytest.raises(RuntimeError, match=r"got none for .embed\.weight."):
        model(_tokens(0, 0))
    if give_values == "assign":
        model.load_state_dict(whole.state_dict(), assign=True)
    else:
        model.to_empty(device="cpu")
    if give_values == "state dict":
        full = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, whole.state_dict(), options=full)
    losses = [_loss(one, _tokens(0, 0)).item() for one in (model, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    state = model.state_dict()
    assert all(state[fqn].full_tensor().equal(p) for fqn, p in whole.named_parameters())


@pytest.mark.parametrize("give_values", ["assign", "state dict"])
def test_meta_device(ranks: RankPool, give_values: str) -> None:
    """Split on the meta device, as large models are, with the values of a state dict."""
    ranks.run(_on_meta, 4, give_values)


def _exchange(rank: int, world_size: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard as fsdp2

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = fsdp2(_parallelize(_model(), mesh["tp"]), mesh=mesh["dp"])
    ours = FSDP(_parallelize(_model(), mesh["tp"]), device_mesh=mesh["dp"])
    full = StateDictOptions(full_state_dict=True)
    for number, (source, target) in enumerate([(ours, theirs), (theirs, ours)]):
        with torch.no_grad():
            for param in source.parameters():
                param.mul_(-1.5)
        where = f"{folder}/{number}"
        dcp.save(get_model_state_dict(source), checkpoint_id=where)
        state = get_model_state_dict(target)
        dcp.load(state, checkpoint_id=where)
        set_model_state_dict(target, state)
        found, wanted = (get_model_state_dict(m, options=full) for m in (target, source))
        assert found.keys() == wanted.keys()
        assert all(found[fqn].equal(wanted[fqn]) for fqn in wanted)


def test_checkpoints_of_fsdp2(ranks: RankPool, tmp_path: Path) -> None:
    """Both directions through torch.distributed.checkpoint. The vocabulary does not divide, so
    units of the two tensor-parallel ranks have other sizes, and cut what both hold elsewhere."""
    ranks.run(_exchange, 4, str(tmp_path))


@on_ranks(2)
def test_the_first_rank_alone_has_whole_states(rank: int) -> None:
    """Of all ranks of the model; each is the first of its group of shards here."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(_parallelize(_model(), mesh["tp"]), mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    _loss(model, _tokens(0, 0)).backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_state_dict(model, optimizer, options=options)
    assert [bool(one) for one in found] == [rank == 0] * 2


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
        lambda: FSDP(on_meta, device_mesh=mesh["dp"]),
        lambda: sharded.update_whole(dict(sharded.named_parameters()), lambda _, whole: whole),
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
                "update_whole(), parameter 'embed.weight': expected parameters that no tensor",
                "summon_full_params(), parameter 'embed.weight'",
                "expected a tensor of shape (17,), got (9,)",
            ),
            strict=True,
        ):
            assert words in message
