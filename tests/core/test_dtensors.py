"""Parameters, gradients and optimizer states that are torch's own DTensors."""

from __future__ import annotations

import copy
import io
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import different, error_of, gradients, whole
from models import batch, loss_of, make_transformer, through, wrap
from modes import in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_dynamo import FSDP, StateDictType, fully_shard
from fsdp_dynamo.core.original_parameter import owner_of


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters by name."""
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


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


@pytest.mark.parametrize(
    ("world_size", "mode", "composable"),
    [
        (1, "eager", True),
        (2, "eager", False),
        (3, "eager", True),
        (1, "graph", True),
        (3, "graph", False),
        (3, "hooks", True),
    ],
)
def test_as_torch_distributes(
    ranks: RankPool, world_size: int, mode: str, composable: bool
) -> None:
    ranks.run(_as_distributed, world_size, mode, composable)


def _as_distributed(rank: int, world_size: int, mode: str, composable: bool) -> None:
    """Parameters and gradients are what ``distribute_tensor`` makes of one process's."""
    torch.manual_seed(0)
    reference = _Odd()
    plain = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (world_size,))
    model: Any = fully_shard(plain, mesh=mesh) if composable else FSDP(plain, device_mesh=mesh)
    inputs = [torch.linspace(-1, 1, 10).view(2, 5) * (r + 1) for r in range(world_size)]
    sum(reference(x).square().mean() / world_size for x in inputs).backward()  # type: ignore[union-attr]
    in_mode(model, mode)(inputs[rank]).square().mean().backward()
    for (name, of_one), own in zip(reference.named_parameters(), plain.parameters(), strict=True):
        placement = Shard(0) if of_one.ndim else Replicate()
        for value, got in ((of_one.detach(), own), (of_one.grad, own.grad)):
            expected: Any = distribute_tensor(value, mesh, [placement])
            assert type(got.detach()) is DTensor, name
            assert got.placements == expected.placements, name
            assert (got.device_mesh, got.dtype) == (mesh, value.dtype), name
            assert (got.shape, got.stride()) == (expected.shape, expected.stride()), name
            assert got.to_local().is_contiguous(), name
            torch.testing.assert_close(got.to_local(), expected.to_local(), msg=name)
            torch.testing.assert_close(got.full_tensor(), value, msg=name)


@on_ranks(3)
def test_penalties_on_parameters(rank: int) -> None:
    """Gradients of a loss with them, beside one process."""
    torch.manual_seed(0)
    plain = nn.Linear(5, 7)
    model = fully_shard(copy.deepcopy(plain))
    inputs = [torch.full((2, 5), float(r + 1)) for r in range(3)]

    def penalty(module: nn.Module) -> Any:
        weight: Any = module.weight
        terms = weight.pow(2).sum(), weight.norm(), (weight @ weight.t()).mean()
        return sum(map(whole, terms))  # torch 2.11 adds no two kinds of partial values

    (sum(plain(x).pow(2).mean() / 3 for x in inputs) + penalty(plain)).backward()
    (model(inputs[rank]).pow(2).mean() + penalty(model)).backward()
    assert different(gradients(model), gradients(plain)) == []


# -- what users do to parameters and models -----------------------------------------------------


@on_ranks(2)
def test_habits(rank: int) -> None:
    plain = make_transformer(num_blocks=1)
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model = wrap(plain)

    def holds_and_uses() -> None:
        assert different(_values(plain), expected) == []
        reference = make_transformer(num_blocks=1)
        reference.load_state_dict(expected)
        with torch.no_grad():
            torch.testing.assert_close(model(batch(0, 0)), reference(batch(0, 0)))

    with FSDP.summon_full_params(model):
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        with torch.no_grad():
            plain.head.weight.mul_(2)
    expected["head.weight"] *= 2
    holds_and_uses()
    with torch.no_grad():
        plain.head.bias.add_(1)
        plain.norm.weight.data.mul_(3)
    expected["head.bias"] += 1
    expected["norm.weight"] *= 3
    holds_and_uses()
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for p in clone.parameters():
            p.zero_()
    assert different(_values(plain), expected) == []
    assert not any(p.any() for p in clone.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    average.update_parameters(clone)
    got = {name.replace("module.", ""): value for name, value in _values(average).items()}
    assert different(got, {name: value / 2 for name, value in expected.items()}) == []
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    clone.load_state_dict(torch.load(buffer))
    assert different(_values(clone), expected) == []
    model.to(torch.float64)
    assert all(p.dtype == torch.float64 == p.to_local().dtype for p in plain.parameters())
    loss_of(model, batch(rank, 0)).backward()
    assert all(owner_of(p) is not None for p in plain.parameters())
    assert {p.grad.dtype for p in plain.parameters()} == {torch.float64}


@on_ranks(2)
def test_files_name_torch_only(rank: int) -> None:
    """torch.load() needs torch.distributed.tensor to be imported, and nothing of ours."""
    buffer = io.BytesIO()
    torch.save(through("fully_shard", make_transformer(num_blocks=1)).state_dict(), buffer)
    with zipfile.ZipFile(buffer) as file:
        content = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    assert b"fsdp_dynamo" not in content


# -- DTensor.from_local ----------------------------------------------------------------------------


def _layer() -> Any:
    torch.manual_seed(0)
    return fully_shard(nn.Linear(5, 7))


def _doubled(param: Any, **shape: Any) -> DTensor:
    local = param.to_local().detach() * 2
    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False, **shape)


@on_ranks(3)
def test_made_of_local_tensors(rank: int) -> None:
    layer = _layer()
    weight, value = layer.weight, layer.weight.full_tensor().detach()
    shape = {"shape": weight.shape, "stride": weight.stride()}
    with torch.no_grad():
        weight.copy_(_doubled(weight, **shape))
        assert torch.equal(weight.full_tensor(), value * 2)
        weight.copy_(_doubled(weight, **shape) * 2)
        assert torch.equal(weight.full_tensor(), value * 8)
        weight.copy_(distribute_tensor(value, weight.device_mesh, weight.placements))
        assert torch.equal(weight.full_tensor(), value)
    layer.load_state_dict({"weight": _doubled(weight, **shape)}, strict=False)
    assert torch.equal(layer.weight.full_tensor(), value * 2)
    doubled = nn.Parameter(_doubled(weight, **shape))
    layer.load_state_dict({"weight": doubled}, strict=False, assign=True)
    assert torch.equal(layer.weight.full_tensor(), value * 4)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    moment = state["state"][0]["exp_avg"]
    expected = moment.full_tensor() * 2
    state["state"][0]["exp_avg"] = _doubled(moment, **shape)
    optimizer.load_state_dict(state)
    with torch.no_grad():
        layer.weight.copy_(optimizer.state[weight]["exp_avg"])
    assert torch.equal(layer.weight.full_tensor(), expected)


# -- copies ----------------------------------------------------------------------------------------

Change = Callable[[], object]


def _async_save(state: dict[str, Any], folder: Path, change: Change) -> None:
    saving: Any = dcp.async_save(state, checkpoint_id=folder)
    change()
    saving.result()


def _shared_memory(state: dict[str, Any], folder: Path, change: Change) -> None:
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=True,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    saving: Any = dcp.async_save(state, checkpoint_id=folder, async_stager=DefaultStager(options))
    change()
    saving.result()


def _deep_copy(state: dict[str, Any], folder: Path, change: Change) -> None:
    copied = copy.deepcopy(state)
    change()
    dcp.save(copied, checkpoint_id=folder)


def _trained(seed: int, num_layers: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=num_layers > 1) for _ in range(num_layers)))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    own, states = get_state_dict(model, optimizer)
    return {"model": own, "optimizer": states}


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    return [value.full_tensor().clone() for value in (*model.parameters(), *moments)]


@pytest.mark.parametrize(
    ("save", "num_layers"),  # of one, a local tensor begins where its storage does
    [(_async_save, 2), (_shared_memory, 2), (_shared_memory, 1), (_deep_copy, 2)],
)
@on_ranks(2)
def test_copies(rank: int, save: Any, num_layers: int, tmp_path: Path) -> None:
    """A checkpoint has the values of before a change."""
    model, optimizer = _trained(0, num_layers)
    expected = _whole(model, optimizer)

    def change() -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3)

    save(_states(model, optimizer), tmp_path, change)
    dist.barrier()
    again, its_optimizer = _trained(1, num_layers)
    states = _states(again, its_optimizer)
    dcp.load(states, checkpoint_id=tmp_path)
    set_state_dict(
        again,
        its_optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    assert all(map(torch.equal, _whole(again, its_optimizer), expected))


# -- one rank ------------------------------------------------------------------------------------


WHOLE_MATRIX_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Muon": partial(torch.optim.Muon, lr=0.1),
    "LBFGS": partial(torch.optim.LBFGS, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("name", WHOLE_MATRIX_OPTIMIZERS)
@on_ranks(1)
def test_one_rank_takes_any_operator(rank: int, name: str) -> None:
    """Parameters are DTensors there, too, and whole, so torch's own operators are right."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))
    models = fully_shard(copy.deepcopy(plain)), plain
    for model in models:
        optimizer = WHOLE_MATRIX_OPTIMIZERS[name](list(model.parameters()))

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.eye(6)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    for ours, value in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours.full_tensor(), value)  # type: ignore[operator]


@on_ranks(1)
def test_a_scalar_on_one_rank(rank: int) -> None:
    layer: Any = nn.Linear(2, 2)
    layer.scale = nn.Parameter(torch.tensor(2.0))
    fully_shard(layer)
    scale = layer.scale.detach()
    layer.load_state_dict({"scale": torch.tensor(5.0)}, strict=False)
    assert torch.equal(scale, torch.tensor(5.0))
    assert scale.to_local().shape == ()
    assert float(scale) == 5


@on_ranks(2)
def test_norms_where_only_tensor_parallelism_splits(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Linear(8, 32)
    sharded = parallelize_module(copy.deepcopy(plain), mesh["tp"], ColwiseParallel())
    fully_shard(sharded, mesh=mesh["dp"])
    for layer in (plain, sharded):
        layer(torch.ones(2, 8)).sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    norm: Any = nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    torch.testing.assert_close(norm.full_tensor(), expected)


class _Scaled(nn.Linear):
    """With a scalar, beside which torch takes a plain gradient without a word."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def _stepped(model: Any, optimizer: torch.optim.Optimizer, around: Any) -> None:
    """A backward that is not reduced, and a step whose closure runs the next one."""
    x = torch.arange(8.0).view(2, 4)

    @torch.enable_grad()
    def closure() -> torch.Tensor:
        with around():
            loss = model(x + 1).square().mean()
            loss.backward()
        return loss  # type: ignore[no-any-return]

    with model.no_sync():
        model(x).square().mean().backward()
    optimizer.step(closure)


@on_ranks(2)
def test_a_closure_may_end_a_sum(rank: int) -> None:
    torch.manual_seed(0)
    plain = _Scaled()
    models = DistributedDataParallel(copy.deepcopy(plain)), fully_shard(plain)
    for model in models:
        _stepped(model, torch.optim.SGD(model.parameters(), lr=0.01), nullcontext)
    expected, got = (model.parameters() for model in models)
    for value, one in zip(expected, got, strict=True):
        torch.testing.assert_close(one.full_tensor(), value)  # type: ignore[operator]


@on_ranks(2)
def test_a_closure_that_does_not_end_the_sum(rank: int) -> None:
    """Whether torch refuses the plain gradient (of rows) or does not (of a scalar)."""
    model: Any = fully_shard(_Scaled())
    for params, expected in (
        (model.parameters(), "mixed torch.Tensor and DTensor"),
        ([model.scale], "Run the last backward outside of no_sync()"),
    ):
        optimizer = torch.optim.SGD(params, lr=0.01)
        assert expected in error_of(partial(_stepped, model, optimizer, model.no_sync))
