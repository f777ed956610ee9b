"""DTensors that user code makes of a parameter's local tensor, and copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import error_of
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import fully_shard

# -- DTensor.from_local ----------------------------------------------------------------------------


def _layer() -> Any:
    torch.manual_seed(0)
    return fully_shard(nn.Linear(5, 7))


def _doubled(param: Any, **shape: Any) -> DTensor:
    local = param.to_local().detach() * 2
    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False, **shape)


def _from_local(rank: int, world_size: int) -> dict[str, bool | str]:
    layer = _layer()
    weight, whole = layer.weight, layer.weight.full_tensor().detach()
    seen: dict[str, bool | str] = {}

    def expects(name: str, value: torch.Tensor) -> None:
        seen[name] = torch.equal(layer.weight.full_tensor(), value)

    with torch.no_grad():
        weight.copy_(_doubled(weight, shape=weight.shape, stride=weight.stride()))
        expects("with a shape", whole * 2)
        weight.copy_(_doubled(weight, shape=weight.shape, stride=weight.stride()) * 2)
        expects("computed with", whole * 8)
        weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements))
        expects("torch's division", whole)
    shape = {"shape": weight.shape, "stride": weight.stride()}
    layer.load_state_dict({"weight": _doubled(weight, **shape)}, strict=False)
    expects("loaded", whole * 2)
    doubled = nn.Parameter(_doubled(weight, **shape))
    layer.load_state_dict({"weight": doubled}, strict=False, assign=True)
    expects("assigned", whole * 4)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    moment = state["state"][0]["exp_avg"]
    expected = moment.full_tensor() * 2
    state["state"][0]["exp_avg"] = _doubled(moment, shape=moment.shape, stride=moment.stride())
    optimizer.load_state_dict(state)
    seen["an optimizer's"] = torch.equal(
        _by_rows(layer, optimizer.state[weight]["exp_avg"]), expected
    )
    return seen


def _by_rows(layer: Any, value: Any) -> torch.Tensor:
    with torch.no_grad():
        layer.weight.copy_(value)
    whole: torch.Tensor = layer.weight.full_tensor()
    return whole


def test_made_of_local_tensors(ranks: RankPool) -> None:
    for seen in ranks.run(_from_local, 3):
        assert all(seen.values()), seen


# -- copies ----------------------------------------------------------------------------------------

Change = Callable[[], object]


def _saved(state: dict[str, Any], folder: Path, change: Change) -> None:
    change()
    dcp.save(state, checkpoint_id=folder)


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


def _cpu_copy(state: dict[str, Any], folder: Path, change: Change) -> None:
    copied = _state_dict_utils._create_cpu_state_dict(state)
    _state_dict_utils._copy_state_dict(state, copied)
    _saved(copied, folder, change)


def _deep_copy(state: dict[str, Any], folder: Path, change: Change) -> None:
    _saved(copy.deepcopy(state), folder, change)


COPIES = {
    "async_save": _async_save,
    "shared memory": _shared_memory,
    "CPU copy": _cpu_copy,
    "deep copy": _deep_copy,
}


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


def _copied(rank: int, world_size: int, way: str, num_layers: int, folder: Path) -> bool:
    """Whether a checkpoint has the values of before a change."""
    model, optimizer = _trained(0, num_layers)
    expected = _whole(model, optimizer)

    def change() -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3)

    COPIES[way](_states(model, optimizer), folder, change)
    dist.barrier()
    model, optimizer = _trained(1, num_layers)
    states = _states(model, optimizer)
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    pairs = zip(_whole(model, optimizer), expected, strict=True)
    return all(torch.equal(got, value) for got, value in pairs)


@pytest.mark.parametrize("num_layers", [1, 2])  # one: a local tensor begins where its storage does
@pytest.mark.parametrize("way", COPIES)
def test_copies(ranks: RankPool, tmp_path: Path, way: str, num_layers: int) -> None:
    assert ranks.run(_copied, 2, way, num_layers, tmp_path) == [True, True]


# -- one rank ------------------------------------------------------------------------------------


def _alone(rank: int, world_size: int, name: str) -> float:
    """The difference to a plain model after three steps of an optimizer of whole matrices."""
    kinds: dict[str, Any] = {
        "Muon": lambda params: torch.optim.Muon(params, lr=0.1),
        "LBFGS": lambda params: torch.optim.LBFGS(params, line_search_fn="strong_wolfe"),
    }
    models = []
    for shard in (fully_shard, lambda model: model):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))
        shard(model)
        models.append(model)
        optimizer = kinds[name](list(model.parameters()))

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.eye(6)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return max(float((ours.full_tensor() - plain).abs().max()) for ours, plain in pairs)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["Muon", "LBFGS"])
def test_one_rank_takes_any_operator(ranks: RankPool, name: str) -> None:
    """Parameters are DTensors there, too, and whole, so torch's own operators are right."""
    assert ranks.run(_alone, 1, name) == [0.0]


def _scalar_alone(rank: int, world_size: int) -> list[bool]:
    layer: Any = nn.Linear(2, 2)
    layer.scale = nn.Parameter(torch.tensor(2.0))
    fully_shard(layer)
    scale = layer.scale.detach()
    layer.load_state_dict({"scale": torch.tensor(5.0)}, strict=False)
    return [torch.equal(scale, torch.tensor(5.0)), scale.to_local().shape == (), float(scale) == 5]


def test_a_scalar_on_one_rank(ranks: RankPool) -> None:
    assert ranks.run(_scalar_alone, 1) == [[True, True, True]]


def _split_by_tensor_parallelism_only(rank: int, world_size: int) -> list[float]:
    """Norms of a model, and of the same by its DTensors."""
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    norms = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        layer: Any = nn.Linear(8, 32)
        if is_sharded:
            parallelize_module(layer, mesh["tp"], ColwiseParallel())
            fully_shard(layer, mesh=mesh["dp"])
        layer(torch.ones(2, 8)).sum().backward()
        norm: Any = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
    return norms


def test_norms_where_only_tensor_parallelism_splits(ranks: RankPool) -> None:
    for norms in ranks.run(_split_by_tensor_parallelism_only, 2):
        expected, got = norms
        assert got == pytest.approx(expected)


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
