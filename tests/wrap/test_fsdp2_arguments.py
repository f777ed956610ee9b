"""Arguments of fully_shard beside those of torch's own: outputs, and gradients of one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as upstream
from loops import gradients
from models import Transformer, batch, loss_of, make_transformer
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp_dynamo

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


def _step(model: Any, run: nn.Module, rank: int) -> tuple[torch.dtype, float, dict[str, Any]]:
    """The dtype of the output, the loss, and whole gradients."""
    with torch.no_grad():
        dtype = model(batch(rank, 9)).dtype
    loss = loss_of(run, batch(rank, 0))
    loss.backward()
    return dtype, loss.item(), gradients(model)


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *(("eager", name) for name in CASES),
        *(("hooks", name) for name in COMPILED),
        *(("graph", name) for name in COMPILED),
    ],
)
@on_ranks(2)
def test_equals_torchs(rank: int, mode: str, name: str) -> None:
    theirs, ours = _shard(upstream, CASES[name]), _shard(fsdp_dynamo, CASES[name])
    dtype, loss, expected = _step(theirs, theirs, rank)
    own_dtype, own_loss, got = _step(ours, in_mode(ours, mode), rank)
    rtol, atol = (2e-2, 2e-3) if name in LOW else (1e-4, 1e-6)
    assert own_dtype == dtype
    assert own_loss == pytest.approx(loss, rel=rtol)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
