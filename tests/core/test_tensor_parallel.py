"""Tensor parallel inside, units outside: a 2 x 2 mesh trains like one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from loops import different, error_of, whole
from modes import in_mode
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
from torch.distributed.fsdp import fully_shard as fsdp2
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
    checkpoint,
    fully_shard,
)
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

DIM, HIDDEN, LENGTH = 8, 12, 6


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
        self.layers = nn.ModuleList([Layer()])
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


def _checkpointed_by_a_function(layer: Layer) -> None:
    run = layer.forward
    layer.forward = lambda x: torch_checkpoint(run, x, use_reentrant=False)  # type: ignore[method-assign]


CHECKPOINTING: dict[str, Callable[[Model], object]] = {
    "off": lambda _: None,
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
    ("mode", "door", "unit", "checkpointing"),
    [
        ("eager", "wrapper", Layer, "off"),
        ("eager", "fully_shard", Layer, "off"),
        ("eager", "wrapper, whole", Layer, "off"),
        ("eager", "wrapper", Layer, "around layers"),
        ("hooks", "fully_shard", CheckpointWrapper, "around layers"),
        ("graph", "wrapper", Layer, "around layers"),
        ("eager", "fully_shard", None, "around parts of layers"),
        ("eager", "wrapper", Layer, "composable"),
        ("hooks", "fully_shard", Layer, "by a function"),
    ],
)
@on_ranks(4)
def test_equals_one_process(
    rank: int, mode: str, door: str, unit: type[nn.Module] | None, checkpointing: str
) -> None:
    """Losses, norms by torch and by us, and state dicts, which load, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference, plain = _model(), _parallelize(_model(), mesh["tp"])
    CHECKPOINTING[checkpointing](plain)
    policy = None if unit is None else ModuleWrapPolicy({unit})
    sharded: Any
    if door == "fully_shard":
        sharded = fully_shard(plain, policy=policy, mesh=mesh["dp"])
    else:
        strategy = ShardingStrategy.NO_SHARD if "whole" in door else ShardingStrategy.FULL_SHARD
        sharded = FSDP(plain, None, strategy, auto_wrap_policy=policy, device_mesh=mesh["dp"])
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    model = in_mode(sharded, mode)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (reference, model)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [_loss(reference, _tokens(replica, step)) for replica in range(2)]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        loss = _loss(model, _tokens(rank // 2, step))
        loss.backward()
        assert loss.item() == pytest.approx(losses[rank // 2].item(), rel=1e-4)
        norm: Any = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        expected = float(nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
        assert float(whole(norm)) == pytest.approx(expected, rel=1e-4)
        assert float(sharded.clip_grad_norm_(0.5)) == pytest.approx(expected, rel=1e-4)
        for optimizer in optimizers:
            optimizer.step()
    assert different(_whole_state(sharded), dict(reference.state_dict()), rtol=1e-3) == []
    sharded.load_state_dict(_model().state_dict())
    assert different(_whole_state(sharded), dict(_model().state_dict())) == []


def _whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


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


@on_ranks(4)
def test_dtensors_of_two_dimensions(rank: int) -> None:
    """Mesh and placements are those of FSDP2 on the same model, split by rows, by columns or not; a
    unit that has only a process group is refused."""
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


@pytest.mark.parametrize("give_values", ["assign", "state dict"])
@on_ranks(4)
def test_meta_device(rank: int, give_values: str) -> None:
    """Split on the meta device, as large models are, with the values of a state dict."""
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


@on_ranks(4)
def test_checkpoints_of_fsdp2(rank: int, tmp_path: Path) -> None:
    """Both directions through torch.distributed.checkpoint. The vocabulary does not divide, so
    units of the two tensor-parallel ranks have other sizes, and cut what both hold elsewhere."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = fsdp2(_parallelize(_model(), mesh["tp"]), mesh=mesh["dp"])
    ours = FSDP(_parallelize(_model(), mesh["tp"]), device_mesh=mesh["dp"])
    full = StateDictOptions(full_state_dict=True)
    for number, (source, target) in enumerate([(ours, theirs), (theirs, ours)]):
        with torch.no_grad():
            for param in source.parameters():
                param.mul_(-1.5)
        where = f"{tmp_path}/{number}"
        dcp.save(get_model_state_dict(source), checkpoint_id=where)
        state = get_model_state_dict(target)
        dcp.load(state, checkpoint_id=where)
        set_model_state_dict(target, state)
        found, wanted = (get_model_state_dict(m, options=full) for m in (target, source))
        assert found.keys() == wanted.keys()
        assert all(found[fqn].equal(wanted[fqn]) for fqn in wanted)


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


@on_ranks(2)
def test_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        on_meta = _parallelize(Model(), mesh["tp"])
    plain = _parallelize(_model(), mesh["tp"])
    kinds = {type(p) for p in plain.parameters()}
    sharded = fully_shard(_parallelize(_model(), mesh["tp"]), mesh=mesh["dp"])
    calls: dict[str, Callable[[], object]] = {
        "parameter 'embed.weight': expected a DTensor whose mesh shares one rank": (
            lambda: FSDP(plain)
        ),
        "expected a DTensor with storage, got one on the meta device": (
            lambda: FSDP(on_meta, device_mesh=mesh["dp"])
        ),
        "update_whole(), parameter 'embed.weight': expected parameters that no tensor": (
            lambda: sharded.update_whole(dict(sharded.named_parameters()), lambda _, full: full)
        ),
        "summon_full_params(), parameter 'embed.weight'": lambda: sharded.apply(lambda _: None),
        "expected a tensor of shape (17,), got (9,)": (
            lambda: sharded.load_state_dict({**sharded.state_dict(), "head.bias": torch.ones(9)})
        ),
    }
    for message, call in calls.items():
        assert message in error_of(call)
    assert {type(p) for p in plain.parameters()} == kinds
