"""Parameters, gradients and optimizer states that are torch's own DTensors."""

from __future__ import annotations

import copy
import io
import zipfile
from typing import Any

import pytest
import torch
from loops import error_of
from models import batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import utils
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_dynamo import FSDP, MixedPrecision, StateDictType, fully_shard
from fsdp_dynamo.core.original_parameter import owner_of

Tensors = dict[str, torch.Tensor]


def _sharded(composable: bool, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """The model to call, and the module with its names."""
    plain = make_transformer(num_blocks=2)
    if not composable:
        return wrap(plain, **kwargs), plain
    for block in plain.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(plain, **kwargs), plain


def _whole(tensors: dict[str, Any]) -> Tensors:
    return {name: tensor.full_tensor() for name, tensor in tensors.items()}


def _max_difference(ours: Tensors, reference: Tensors) -> float:
    assert ours.keys() == reference.keys()
    return max(float((ours[name] - reference[name]).abs().max()) for name in reference)


# -- what they are -----------------------------------------------------------------------------


class _Odd(nn.Module):
    """Rows that do not divide, fewer rows than ranks, none, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.few, self.none = nn.Parameter(torch.ones(2, 7)), nn.Parameter(torch.ones(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + self.few.sum(0) + self.none.sum()


def _as_distributed(rank: int, world_size: int, mode: str, composable: bool) -> list[str]:
    """Parameters and gradients that differ from what ``distribute_tensor`` makes."""
    torch.manual_seed(0)
    reference = _Odd()
    plain = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (world_size,))
    model: Any = fully_shard(plain, mesh=mesh) if composable else FSDP(plain, device_mesh=mesh)
    inputs = [torch.linspace(-1, 1, 10).view(2, 5) * (r + 1) for r in range(world_size)]
    sum(reference(x).square().mean() / world_size for x in inputs).backward()  # type: ignore[union-attr]
    in_mode(model, mode)(inputs[rank]).square().mean().backward()
    wrong = []
    for (name, whole), own in zip(reference.named_parameters(), plain.parameters(), strict=True):
        placement = Shard(0) if whole.ndim else Replicate()
        for kind, of_one, ours in (("", whole.detach(), own), ("grad", whole.grad, own.grad)):
            expected: Any = distribute_tensor(of_one, mesh, [placement])
            got: Any = ours
            same = type(got.detach()) is DTensor and got.placements == expected.placements
            same = same and got.device_mesh == mesh and got.shape == expected.shape
            same = same and got.to_local().shape == expected.to_local().shape
            if not same or not torch.allclose(got.to_local(), expected.to_local()):
                wrong.append(f"{name} {kind}")
            elif not torch.allclose(got.full_tensor(), of_one):
                wrong.append(f"{name} {kind} whole")
    return wrong


@pytest.mark.parametrize("composable", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_as_torch_distributes(
    ranks: RankPool, world_size: int, mode: str, composable: bool
) -> None:
    assert ranks.run(_as_distributed, world_size, mode, composable) == [[]] * world_size


# -- training ----------------------------------------------------------------------------------


def _train_beside_one_process(
    rank: int, world_size: int, mode: str, composable: bool
) -> tuple[float, float, float]:
    """Largest differences of gradients, norms and parameters from one process's."""
    reference = make_transformer(num_blocks=2)
    model, plain = _sharded(composable)
    parameters = dict(plain.named_parameters())
    assert all(isinstance(p, DTensor) and p.is_leaf for p in parameters.values())
    shapes = {name: p.shape for name, p in reference.named_parameters()}
    assert {name: p.shape for name, p in parameters.items()} == shapes
    compiled = in_mode(model, mode)
    both = [
        torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9, foreach=True)
        for m in (reference, model)
    ]
    grads = norms = 0.0
    for step in range(3):
        for optimizer in both:
            optimizer.zero_grad()
        for other in range(world_size):
            (loss_of(reference, batch(other, step)) / world_size).backward()
        loss_of(compiled, batch(rank, step)).backward()
        expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        got = _whole({n: p.grad for n, p in plain.named_parameters()})
        grads = max(grads, _max_difference(got, expected))
        norm = clip_grad_norm_(model.parameters(), 0.5)
        assert isinstance(norm, DTensor)
        assert norm.placements == (Replicate(),)
        difference = norm.full_tensor() - clip_grad_norm_(reference.parameters(), 0.5)
        norms = max(norms, float(difference.abs()))
        for optimizer in both:
            optimizer.step()
    final = _max_difference(_whole(parameters), dict(reference.named_parameters()))
    return grads, norms, final


@pytest.mark.parametrize("composable", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_training(ranks: RankPool, mode: str, composable: bool) -> None:
    for differences in ranks.run(_train_beside_one_process, 3, mode, composable):
        assert max(differences) < 2e-5


OPTIMIZERS: dict[str, Any] = {
    "Adadelta": {"foreach": True},
    "Adagrad": {},
    "Adam": {"amsgrad": True, "foreach": True},
    "AdamW": {"fused": True},
    "Adamax": {},
    "ASGD": {},
    "Muon": {},
    "NAdam": {"foreach": True},
    "RAdam": {},
    "RMSprop": {"centered": True, "foreach": True},
    "SGD": {"momentum": 0.9},
}


def _optimizers(rank: int, world_size: int) -> dict[str, float]:
    """By name, the largest difference from one process after three steps."""

    def models() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(7, 11), nn.LayerNorm(11), nn.Tanh(), nn.Linear(11, 5))
        return copy.deepcopy(plain), fully_shard(plain)

    def step(name: str, reference: nn.Module, model: nn.Module, **kwargs: Any) -> float:
        matrices = name == "Muon"
        made = [
            getattr(torch.optim, name)(
                [p for p in m.parameters() if p.ndim > 1 or not matrices], **kwargs
            )
            for m in (reference, model)
        ]
        for index in range(3):
            inputs = [
                torch.linspace(-1, 2, 28).view(4, 7) * (r + index + 1) for r in range(world_size)
            ]
            for optimizer in made:
                optimizer.zero_grad()
            sum(reference(x).pow(2).mean() / world_size for x in inputs).backward()  # type: ignore[union-attr]
            model(inputs[rank]).pow(2).mean().backward()
            for optimizer in made:
                optimizer.step()
        return _max_difference(
            _whole(dict(model.named_parameters())), dict(reference.named_parameters())
        )

    return {name: step(name, *models(), **kwargs) for name, kwargs in OPTIMIZERS.items()}


def test_optimizers(ranks: RankPool) -> None:
    for differences in ranks.run(_optimizers, 3):
        of_muon = differences.pop("Muon")  # whose products are in bfloat16
        assert of_muon < 2e-3
        assert max(differences.values()) < 1e-5, differences


# -- operators ---------------------------------------------------------------------------------


def _operators(rank: int, world_size: int) -> list[str]:
    """What differs from the same operators on whole tensors."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 7)
    whole = layer.weight.detach().clone()
    fully_shard(layer)
    row: Any = layer.weight.detach()
    values = {
        "sum": lambda w: w.sum(),
        "mean": lambda w: w.mean(),
        "max": lambda w: w.max(),
        "min": lambda w: w.min(),
        "any": lambda w: (w > 0.4).any(),
        "all": lambda w: (w > 0.4).all(),
        "norm": lambda w: w.norm(),
        "norm of order 1": lambda w: torch.linalg.vector_norm(w, 1),
        "largest": lambda w: torch.linalg.vector_norm(w, float("inf")),
        "foreach norm": lambda w: torch._foreach_norm([w, w])[1],
        "total norm": lambda w: utils.get_total_norm([w, w * 2]),
        "arithmetic": lambda w: (w * 2 + w.abs().sqrt()).where(w > 0, w * 0),
        "in place": lambda w: w.clone().mul_(3).add_(w, alpha=2).clamp_(-1, 1),
        "lerp": lambda w: w.lerp(w * 2, 0.25),
        "masked": lambda w: w.masked_fill(w > 0, 0.5),
        "distributed": lambda w: w.clone().copy_(
            distribute_tensor(whole * 2, w.device_mesh, w.placements)
            if isinstance(w, DTensor)
            else whole * 2
        ),
        "bfloat16": lambda w: w.to(torch.bfloat16).float(),
        "foreach": lambda w: torch._foreach_add([w], [w], alpha=3)[0],
        "zeros": lambda w: torch.zeros_like(w) + w.new_ones(w.shape),
    }
    wrong = []
    for name, function in values.items():
        got, expected = function(row), function(whole)
        if not isinstance(got, DTensor) or not torch.allclose(got.full_tensor(), expected):
            wrong.append(name)
    if not torch.equal(row, row.clone()) or torch.equal(row, row + 1):
        wrong.append("equal")
    return wrong


def test_operators(ranks: RankPool) -> None:
    for wrong in ranks.run(_operators, 3):
        assert not wrong


def _penalty(rank: int, world_size: int) -> float:
    """Gradients of a loss with penalties on parameters, beside one process."""
    torch.manual_seed(0)
    plain = nn.Linear(5, 7)
    model = fully_shard(copy.deepcopy(plain))
    inputs = [torch.full((2, 5), float(r + 1)) for r in range(world_size)]

    def penalty(module: nn.Module) -> Any:
        weight: Any = module.weight
        terms = weight.pow(2).sum(), weight.norm(), (weight @ weight.t()).mean()
        # torch 2.11 adds no two kinds of partial values.
        return sum(one.full_tensor() if isinstance(one, DTensor) else one for one in terms)

    (sum(plain(x).pow(2).mean() / world_size for x in inputs) + penalty(plain)).backward()
    (model(inputs[rank]).pow(2).mean() + penalty(model)).backward()
    grads: Any = {name: p.grad for name, p in model.named_parameters()}
    assert plain.weight.grad is not None
    assert plain.bias.grad is not None
    return _max_difference(_whole(grads), {"weight": plain.weight.grad, "bias": plain.bias.grad})


def test_penalties_on_parameters(ranks: RankPool) -> None:
    assert max(ranks.run(_penalty, 3)) < 1e-5


# -- what users do to parameters and models -----------------------------------------------------


def _habits(rank: int, world_size: int) -> dict[str, bool]:
    model, plain = _sharded(composable=False)
    whole = dict(make_transformer(num_blocks=2).named_parameters())
    seen: dict[str, bool] = {}

    def holds(values: Any) -> bool:
        return _max_difference(_whole(dict(plain.named_parameters())), values) < 1e-6

    def forward_is_of(values: Any) -> bool:
        reference = make_transformer(num_blocks=2)
        reference.load_state_dict(values)
        with torch.no_grad():
            return torch.allclose(model(batch(0, 0)), reference(batch(0, 0)), atol=1e-5)

    with FSDP.summon_full_params(model):
        seen["summoned ones are plain"] = not any(
            isinstance(p, DTensor) for p in model.parameters()
        )
        with torch.no_grad():
            plain.head.weight.mul_(2)
    whole["head.weight"] = whole["head.weight"] * 2
    seen["written when summoned"] = holds(whole) and forward_is_of(whole)
    with torch.no_grad():
        plain.head.bias.add_(1)
        plain.norm.weight.data.mul_(3)
    whole["head.bias"], whole["norm.weight"] = whole["head.bias"] + 1, whole["norm.weight"] * 3
    seen["written by hand"] = holds(whole) and forward_is_of(whole)
    plain.head.bias = nn.Parameter(torch.zeros_like(whole["head.bias"]))
    whole["head.bias"] = torch.zeros_like(whole["head.bias"])
    seen["replaced"] = forward_is_of(whole) and holds(whole)
    seen["replaced one is a DTensor"] = isinstance(plain.head.bias, DTensor)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for p in clone.parameters():
            p.zero_()
    seen["copy is independent"] = holds(whole) and all(not p.any() for p in clone.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    average.update_parameters(clone)
    halves = {name: value / 2 for name, value in whole.items()}
    got = _whole({n.replace("module.", ""): p for n, p in average.named_parameters()})
    seen["averages"] = _max_difference(got, halves) < 1e-6
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    seen["a state dict has DTensors"] = all(isinstance(v, DTensor) for v in state.values())
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    clone.load_state_dict(torch.load(buffer))
    got = _whole(dict(clone.named_parameters()))
    seen["pickled"] = _max_difference(got, whole) == 0
    model.to(torch.float64)
    seen["converted"] = all(
        p.dtype == torch.float64 == p.to_local().dtype for p in plain.parameters()
    )
    loss_of(model, batch(rank, 0)).backward()
    seen["still known as a unit's"] = all(owner_of(p) is not None for p in plain.parameters())
    seen["gradients of the new dtype"] = all(
        p.grad is not None and p.grad.dtype == torch.float64 for p in plain.parameters()
    )
    with model.no_sync():  # type: ignore[operator]
        loss_of(model, batch(rank, 1)).backward()
    loss_of(model, batch(rank, 2)).backward()
    seen["accumulated"] = all(isinstance(p.grad, DTensor) for p in plain.parameters())
    plain.norm.requires_grad_(False)
    model.zero_grad()
    loss_of(model, batch(rank, 1)).backward()
    seen["frozen"] = plain.norm.weight.grad is None and plain.head.weight.grad is not None
    return seen


def test_habits(ranks: RankPool) -> None:
    for seen in ranks.run(_habits, 2):
        assert all(seen.values()), [name for name, right in seen.items() if not right]


def _no_sync(rank: int, world_size: int, is_low: bool) -> float:
    reference = make_transformer(num_blocks=2)
    precision = MixedPrecision(param_dtype=torch.bfloat16) if is_low else None
    model, plain = _sharded(composable=False, mixed_precision=precision)
    for other in range(world_size):
        for step in range(3):
            (loss_of(reference, batch(other, step)) / world_size).backward()
    for step in range(3):
        if step < 2:
            with model.no_sync():  # type: ignore[operator]
                loss_of(model, batch(rank, step)).backward()
        else:
            loss_of(model, batch(rank, step)).backward()
    expected: Any = {name: p.grad for name, p in reference.named_parameters()}
    return _max_difference(_whole({n: p.grad for n, p in plain.named_parameters()}), expected)


@pytest.mark.parametrize("is_low", [False, True])
def test_accumulation(ranks: RankPool, is_low: bool) -> None:
    assert max(ranks.run(_no_sync, 2, is_low)) < (0.05 if is_low else 2e-5)


def _scaled(rank: int, world_size: int) -> tuple[float, list[float], bool]:
    """An overflow in one rank's rows: torch's own scaler skips the step on all ranks alike."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 8))
    before = model.weight.full_tensor().detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scales = []
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if step == 0 and rank == 0:
            model.weight.grad.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step == 0:
            kept = torch.equal(model.weight.full_tensor(), before)
    moved = float((before - model.weight.full_tensor()).abs().max())
    return moved, scales, kept


def test_gradient_scaler(ranks: RankPool) -> None:
    for moved, scales, kept in ranks.run(_scaled, 2):
        assert scales == [4.0, 4.0]
        assert kept
        assert moved == pytest.approx(0.1 * 2)


# -- meshes ------------------------------------------------------------------------------------


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def _meshes(rank: int, world_size: int) -> dict[str, float]:
    """Differences from one process: replicas of shards, and tensor parallelism inside."""
    differences = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for kind in ("replicas", "tensor parallel"):
        torch.manual_seed(0)
        reference = _Pair()
        model = copy.deepcopy(reference)
        if kind == "replicas":
            fully_shard(model, mesh=mesh)
            index = rank
            assert model.up.weight.placements == (Replicate(), Shard(0))
            assert model.up.weight.device_mesh == mesh
        else:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["inner"], plan)
            fully_shard(model, mesh=mesh["outer"])
            index = mesh.get_local_rank("outer")
        count = 4 if kind == "replicas" else 2
        inputs = [torch.linspace(-1, 1, 12).view(2, 6) * (i + 1) for i in range(count)]
        sum(reference(x).pow(2).mean() / count for x in inputs).backward()  # type: ignore[union-attr]
        model(inputs[index]).pow(2).mean().backward()
        expected: Any = {name: p.grad for name, p in reference.named_parameters()}
        got = _whole({name: p.grad for name, p in model.named_parameters()})
        differences[f"{kind}, gradients"] = _max_difference(got, expected)
        norm: Any = utils.get_total_norm([p.grad for p in model.parameters()])
        exact = utils.get_total_norm([p.grad for p in reference.parameters()])  # type: ignore[misc]
        differences[f"{kind}, norm"] = float((norm.full_tensor() - exact).abs())
        values = _whole(dict(model.named_parameters()))
        differences[f"{kind}, values"] = _max_difference(values, dict(reference.named_parameters()))
    return differences


def test_meshes(ranks: RankPool) -> None:
    for differences in ranks.run(_meshes, 4):
        assert max(differences.values()) < 1e-5, differences


def test_a_group_is_no_mesh() -> None:
    error = error_of(lambda: fully_shard(_Pair(), mesh=object()))  # type: ignore[arg-type]
    assert "argument 'mesh': expected a DeviceMesh, got <object" in error


@on_ranks(2)
def test_files_name_torch_only(rank: int) -> None:
    """torch.load() needs torch.distributed.tensor to be imported, and nothing of ours."""
    buffer = io.BytesIO()
    torch.save(_sharded(composable=True)[0].state_dict(), buffer)
    with zipfile.ZipFile(buffer) as file:
        content = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    assert b"fsdp_dynamo" not in content
