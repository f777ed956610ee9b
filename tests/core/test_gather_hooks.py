"""Parameters of classes that decide what is gathered, as torchao's float8 weights are."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import different, error_of, fit_squares, gradients
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import (
    FSDP,
    CPUOffload,
    FSDPStateError,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)

KEEP_THE_CLASS = (
    *("detach", "clone", "view", "slice", "as_strided", "split", "new_zeros", "copy_"),
    *("t", "alias"),  # of whole values
)


class _Wrapped(torch.Tensor):
    """What the classes below have in common: one tensor, and operators on it."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, *_: object) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.shape,
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=tensor.device,
        )

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.tensor})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["tensor"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, _: None, size: Any, stride: Any) -> Any:
        return cls(inner["tensor"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.tensor if isinstance(value, _Wrapped) else value

        out = func(*torch.utils._pytree.tree_map(plain, args), **(kwargs or {}))
        if func.overloadpacket.__name__ not in KEEP_THE_CLASS:
            return out
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, out)


def _padded(rows: torch.Tensor, outer_size: torch.Size, mesh: Any) -> torch.Tensor:
    """With as many rows as the first rank has: torch's units require it."""
    missing = -(-outer_size[0] // mesh.size()) - len(rows)
    return nn.functional.pad(rows, (0, 0, 0, missing))


class _Scaled(_Wrapped):
    """Gathered as a byte per element, and the largest one of all ranks.

    Attributes:
        log: what was called.
    """

    log: list[str] = []  # noqa: RUF012

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        assert outer_size == module.weight.shape
        assert outer_stride == (math.prod(outer_size[1:]), *module.weight.stride()[1:])
        assert isinstance(mp_policy, MixedPrecisionPolicy)
        self.log.append("before")
        amax = self.tensor.abs().max() if self.tensor.numel() else torch.zeros(())
        dist.all_reduce(amax, dist.ReduceOp.MAX, mesh.get_group())
        sent = (self.tensor / amax * 127).round().to(torch.int8)
        return (_padded(sent, outer_size, mesh),), amax

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        self.log.append("into" if out is not None else "made")
        value = outputs[0].to(param_dtype) * (metadata / 127).to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(value[: len(out)])
            return None
        return value, (value,)


class _Whole(_Wrapped):
    """An unsharded value of a class of its own."""


class _Kept(_Wrapped):
    """Gathered as it is; unsharded, another class around what was gathered."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        return (_padded(self.tensor, outer_size, mesh),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return None if out is not None else (_Whole(*outputs), outputs)


KINDS = {"scaled": _Scaled, "kept": _Kept}


def _model(kind: str, rows: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, rows), nn.ReLU(), nn.Linear(rows, 6), nn.Linear(6, 2))
    for linear in (model[0], model[2]) if kind != "plain" else ():
        linear.weight = nn.Parameter(KINDS[kind](linear.weight.detach()))
    return model


def _train(model: Any, rank: int, optimizer: Any, steps: int = 3) -> list[float]:
    return fit_squares(model, optimizer, (4, 6), [10 * step + rank for step in range(steps)])


@pytest.mark.parametrize(
    ("kind", "mode", "rows"),
    [
        ("scaled", "eager", 8),
        ("kept", "eager", 7),
        ("scaled", "hooks", 7),
        ("kept", "hooks", 8),
    ],
)
@on_ranks(2)
def test_trains_as_with_torch(rank: int, kind: str, mode: str, rows: int) -> None:
    models: list[Any] = [_model(kind, rows), _model(kind, rows)]
    for model, shard in zip(models, (fully_shard, torch_fully_shard), strict=True):
        for unit in (*model, model):
            shard(unit)
    found, expected = (
        _train(run, rank, torch.optim.AdamW(model.parameters(), 0.02))
        for model, run in zip(models, (in_mode(models[0], mode), models[1]), strict=True)
    )
    assert found == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert type(mine.to_local()) is type(theirs.to_local())
        assert mine.placements == theirs.placements
        torch.testing.assert_close(_plain(mine), _plain(theirs))


def _plain(param: Any) -> torch.Tensor:
    local = param.to_local().detach()
    plain: torch.Tensor = local.tensor if isinstance(local, _Wrapped) else local
    return plain


# -- with other features ---------------------------------------------------------------------------


def _units(kind: str, **kwargs: Any) -> Any:
    model = _model(kind)
    for unit in (*model, model):
        fully_shard(unit, **kwargs)
    return model


@pytest.mark.parametrize(
    ("mode", "kwargs"),
    [
        ("eager", {"cpu_offload": CPUOffload(True)}),
        ("eager", {"reshard_after_forward": False}),
        ("hooks", {}),
    ],
)
@on_ranks(2)
def test_hooks_are_called(rank: int, mode: str, kwargs: dict[str, Any]) -> None:
    """Once per gather; in a backward, values are put where the forward has saved them."""
    model = _units("scaled", **kwargs)
    run = in_mode(model, mode)
    _train(run, rank, torch.optim.SGD(model.parameters(), 0.1), steps=1)
    _Scaled.log.clear()
    _train(run, rank, torch.optim.SGD(model.parameters(), 0.1), steps=1)
    gathers = 2 if kwargs.get("reshard_after_forward", True) else 1
    assert _Scaled.log.count("before") == _Scaled.log.count("into") == 2 * gathers
    freed = [flat for unit in (model[0], model[2]) for flat in unit._fsdp_unit.flats]
    if gathers == 2:
        assert not any(s.nbytes() for flat in freed for s in flat.storages_to_free())


@on_ranks(2)
def test_steps_without_synchronisation(rank: int) -> None:
    plain, model = _model("plain"), _units("kept")
    for step in range(4):
        for each in range(2):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + each))
            (plain(x).square().mean() / 2).backward()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + rank))
        model.set_requires_gradient_sync(step % 2 == 1)
        model(x).square().mean().backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (plain, model)]
    torch.testing.assert_close(norms[1].full_tensor(), norms[0], rtol=1e-4, atol=0)
    assert different(gradients(model), gradients(plain)) == []


@on_ranks(2)
def test_values_are_whole_and_plain(rank: int) -> None:
    """In contexts, state dicts and copies; what is loaded arrives."""
    plain, model = _model("plain"), _units("kept")
    copied = copy.deepcopy(model)
    assert type(copied[0].weight.to_local()) is _Kept
    for one in (model, copied):
        with FSDP.summon_full_params(one):
            torch.testing.assert_close(one[0].weight, plain[0].weight, rtol=0, atol=0)
            with torch.no_grad():
                one[0].weight.mul_(2)
        twice = one.state_dict()["0.weight"]
        assert type(twice.to_local()) is torch.Tensor
        torch.testing.assert_close(twice.full_tensor(), 2 * plain[0].weight)
        with FSDP.state_dict_type(one, StateDictType.FULL_STATE_DICT):
            one.load_state_dict(plain.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(one(torch.ones(2, 6)), plain(torch.ones(2, 6)))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    _train(model, rank, optimizer)
    states = FSDP.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
    x = torch.ones(2, 6)
    with torch.no_grad():
        assert not torch.allclose(model(x), copied(x))
        expected = model[0].weight.full_tensor()
        model[0].unshard()
        torch.testing.assert_close(model[0].weight + 0, expected)
        model[0].reshard()


@on_ranks(2)
def test_meta_device_and_mixed_precision(rank: int) -> None:
    plain = _model("plain")
    model: Any = _model("scaled").to("meta")
    for linear in (model[0], model[2]):
        linear.weight = nn.Parameter(_Scaled(torch.empty_like(linear.weight)))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in (*model, model):
        fully_shard(unit, mp_policy=policy)
    model.to_empty(device="cpu")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(plain.state_dict())
    assert type(model[0].weight.to_local()) is _Scaled
    found = model(torch.ones(2, 6))
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), plain(torch.ones(2, 6)), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_backward_that_comes_too_early(rank: int, kind: str) -> None:
    """A loss on a tensor within the unit: what is freed is not read."""
    model = _units(kind)
    early: list[torch.Tensor] = []
    x = torch.ones(2, 6, requires_grad=True)
    model[0].forward = lambda x: early.append(x @ model[0].weight.t()) or early[0] * 1
    model(x)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|storage of size 0"):
        early[0].square().sum().backward()


class _Returning(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight[:2], x


@on_ranks(2)
def test_a_forward_that_returns_a_part_of_its_weight(rank: int) -> None:
    """It is copied: the hooks' own memory is freed behind the forward."""
    plain = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    model: Any = nn.Sequential(_Returning(nn.Parameter(_Scaled(plain))))
    for unit in (model[0], model):
        fully_shard(unit)
    part, _ = model(torch.ones(2, 6))
    torch.testing.assert_close(part.detach(), plain[:2], rtol=0.05, atol=0.05)


@on_ranks(2)
def test_inference_first(rank: int) -> None:
    model, expected = _units("scaled"), _units("scaled")
    with torch.inference_mode():
        model(torch.ones(2, 6))
    losses = [
        _train(one, rank, torch.optim.SGD(one.parameters(), 0.1)) for one in (model, expected)
    ]
    assert losses[0] == losses[1]


class _Packed(_Wrapped):
    """Sends its elements in a row, and two numbers of each rank; gives back rows of padding."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        self.calls = getattr(self, "calls", 0) + 1
        amax = self.tensor.abs().amax()
        return (self.tensor.reshape(-1), amax, amax.bfloat16().expand(len(self.tensor))), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        elements, largest, each = outputs
        assert len(largest) == 2
        assert len(each) == 2 * -(-7 // 2)
        value = elements.view(8, -1).clone()
        torch.testing.assert_close(largest.max(), value.abs().max())
        if out is None:
            return value, (value,)
        with torch.no_grad():
            return out.copy_(value[:7])


class _Wrong(_Packed):
    def fsdp_post_all_gather(self, outputs: Any, *args: Any, out: Any = None) -> Any:
        return outputs[0], outputs


@on_ranks(2)
def test_what_hooks_may_give(rank: int) -> None:
    """Scalars, anything as long as rows are, attributes, rows beyond those of the parameter."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 7)
    linear: Any = copy.deepcopy(plain)
    linear.weight = nn.Parameter(_Packed(linear.weight.detach()))
    model = fully_shard(nn.Sequential(fully_shard(linear)))
    x = torch.ones(2, 4)
    for one in (plain, model):
        one(x).square().sum().backward()
    torch.testing.assert_close(linear.weight.grad.full_tensor(), plain.weight.grad)
    assert linear.weight._local_tensor.calls == 2
    linear.double()
    assert type(linear.weight.to_local()) is _Packed
    wrong: Any = copy.deepcopy(plain)
    wrong.weight = nn.Parameter(_Wrong(wrong.weight.detach()))
    fully_shard(wrong)
    of_shape = "fsdp_post_all_gather of parameter 'weight': expected a tensor of shape (7, 4)"
    assert of_shape in error_of(lambda: wrong(x))


@pytest.mark.parametrize("way", ["replicas", "fewer ranks"])
@on_ranks(4)
def test_on_four_ranks(rank: int, way: str) -> None:
    """Where ranks have uneven rows; one of the parameters is frozen."""
    kwargs: dict[str, Any] = {"reshard_after_forward": 2}
    if way == "replicas":
        kwargs = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))}
    plain = _model("plain", 7)
    model = _model("kept", 7)
    for one in (plain, model):
        one[2].weight.requires_grad_(False)
    for unit in (*model, model):
        fully_shard(unit, **kwargs)
    expected = _train(
        DistributedDataParallel(plain), rank, torch.optim.SGD(plain.parameters(), 0.1)
    )
    found = _train(model, rank, torch.optim.SGD(model.parameters(), 0.1))
    assert found == pytest.approx(expected, rel=1e-5)


class _Two(_Wrapped):
    """Wraps two tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.other = tensor, tensor.clone()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["tensor", "other"], None

    fsdp_pre_all_gather = fsdp_post_all_gather = _Scaled.fsdp_pre_all_gather


class _Half(_Wrapped):
    fsdp_pre_all_gather = _Scaled.fsdp_pre_all_gather


REFUSED: dict[str, tuple[type, dict[str, Any], str]] = {
    "one hook": (_Half, {}, "expected both fsdp_pre_all_gather and fsdp_post_all_gather"),
    "two tensors": (_Two, {}, "a class that wraps one tensor of its own shape"),
    "not sharded": (_Scaled, {"strategy": ShardingStrategy.NO_SHARD}, "with shards of rows"),
    "columns": (_Scaled, {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}, "shards of rows"),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_refused(rank: int, case: str) -> None:
    kind, kwargs, expected = REFUSED[case]
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(kind(linear.weight.detach()))
    message = error_of(lambda: fully_shard(linear, **kwargs))
    assert expected in message
    assert f"got test_gather_hooks.{kind.__name__}" in message
    assert "parameter 'weight'" in message
    assert not isinstance(linear.weight, DTensor)


@on_ranks(2)
def test_graph_mode_refuses(rank: int) -> None:
    model = _units("kept")
    with pytest.raises(FSDPStateError) as caught:
        in_mode(model, "graph")(torch.ones(2, 6))
    message = str(caught.value)
    assert "expected plain parameters in graph mode" in message
    assert 'CollectivePrecision(all_gather="float8")' in message
