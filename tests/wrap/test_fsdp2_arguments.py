"""Arguments of fully_shard beside those of torch's own: outputs, and gradients of one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as upstream
from models import Transformer, batch, loss_of, make_transformer
from modes import in_mode
from pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp_dynamo
from fsdp_dynamo import FSDP

Arguments = Callable[[Any, Transformer], dict[str, Any]]
HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def _policy(library: Any, **fields: Any) -> Any:
    return library.MixedPrecisionPolicy(**fields)


CASES: dict[str, Arguments] = {
    "none": lambda library, model: {},
    "reshard True": lambda library, model: {"reshard_after_forward": True},
    "reshard False": lambda library, model: {"reshard_after_forward": False},
    "placement None": lambda library, model: {"shard_placement_fn": None},
    "placement Shard(0)": lambda library, model: {"shard_placement_fn": _rows_of_matrices},
    "no offload": lambda library, model: {"offload_policy": library.OffloadPolicy()},
    "ignored": lambda library, model: {"ignored_params": {model.scale, model.blocks[0].up.bias}},
    "2-D": lambda library, model: {
        "mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    },
    "list": lambda library, model: {"list": True},
    "precision": lambda library, model: {"mp_policy": _policy(library, **HALF)},
    "output": lambda library, model: {
        "mp_policy": _policy(library, **HALF, output_dtype=torch.float32)
    },
    "inputs as they are": lambda library, model: {
        "mp_policy": _policy(library, reduce_dtype=torch.bfloat16, cast_forward_inputs=False)
    },
}
LOW = ("precision", "output", "inputs as they are")
COMPILED = ("reshard False", "output")


def _rows_of_matrices(param: nn.Parameter) -> Shard | None:
    return Shard(0) if param.ndim == 2 else None


def _shard(library: Any, arguments: Arguments) -> Any:
    model = make_transformer(num_blocks=2)
    given = {"mesh": init_device_mesh("cpu", (2,)), **arguments(library, model)}
    if given.pop("list", False):
        listed = library.fully_shard([model.norm, model.head], **given)
        assert listed == [model.norm, model.head]
    inner = dict(given)
    if "mp_policy" in given:  # blocks give what the next block takes
        inner["mp_policy"] = dataclasses.replace(given["mp_policy"], output_dtype=None)
    for block in model.blocks:
        library.fully_shard(block, **inner)
    return library.fully_shard(model, **given)


def _whole(params: Iterable[tuple[str, nn.Parameter]]) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in params:
        grad = param.grad
        assert grad is not None, name
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
    return found


def _step(model: Any, run: nn.Module, rank: int) -> tuple[str, float, dict[str, torch.Tensor]]:
    """The dtype of the output, the loss, and whole gradients."""
    dtypes = []
    handle = model.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    with torch.no_grad():
        dtypes.append(model(batch(rank, 9)).dtype)
    handle.remove()
    loss = loss_of(run, batch(rank, 0))
    loss.backward()
    if isinstance(model, fsdp_dynamo.FSDPModule):
        with FSDP.summon_full_params(model, with_grads=True):
            return str(dtypes[-1]), loss.item(), _whole(model.named_parameters())
    return str(dtypes[-1]), loss.item(), _whole(model.named_parameters())


def _beside(rank: int, world_size: int, modes: dict[str, tuple[str, ...]]) -> list[str]:
    """What differs from torch's own, in any case and mode."""
    wrong = []
    for name, arguments in CASES.items():
        theirs = _shard(upstream, arguments)
        dtype, loss, grads = _step(theirs, theirs, rank)
        rtol, atol = (2e-2, 2e-3) if name in LOW else (1e-4, 1e-6)
        for mode in [mode for mode, cases in modes.items() if name in cases]:
            ours = _shard(fsdp_dynamo, arguments)
            own_dtype, own_loss, own = _step(ours, in_mode(ours, mode), rank)
            if own_dtype != dtype or own_loss != pytest.approx(loss, rel=rtol):
                wrong.append(f"{name} in {mode}: {own_dtype} {own_loss}, not {dtype} {loss}")
            if own.keys() != grads.keys():
                wrong.append(f"{name} in {mode}: {own.keys() ^ grads.keys()}")
            for key, grad in own.items():
                if not torch.allclose(grad, grads[key], rtol, atol):
                    wrong.append(f"{name} in {mode}: gradient of {key}")
    return wrong


def test_equals_torchs(ranks: RankPool) -> None:
    modes = {"eager": tuple(CASES), "hooks": COMPILED, "graph": COMPILED}
    for wrong in ranks.run(_beside, 2, modes):
        assert wrong == []
