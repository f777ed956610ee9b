"""Code of lightning and accelerate for FSDP1 and FSDP2, unchanged, with the import swapped.

Both import ``torch.distributed.fsdp`` where they use it, so the replacement holds while
``_swapped()`` is open.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loops import classification_loss, clip, examples, make_classifier
from pool import on_ranks
from torch import nn
from torch.distributed import fsdp as upstream
from torch.nn.parallel import DistributedDataParallel

import fsdp_dynamo
from fsdp_dynamo import FSDPModule, fully_shard

pytest.importorskip("lightning")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import hf_models  # noqa: E402
from accelerate import Accelerator, FullyShardedDataParallelPlugin  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DistributedType,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.accelerators import CPUAccelerator  # noqa: E402
from lightning.fabric.plugins.environments import LightningEnvironment  # noqa: E402
from lightning.fabric.strategies import FSDPStrategy  # noqa: E402

_UPSTREAM = "torch.distributed.fsdp"
_NAMES = ("api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap")
MAX_NORM = 0.3

Step = Callable[[int], float]
"""One batch of a number: its loss."""


@contextmanager
def _swapped() -> Iterator[None]:
    """Let imports of upstream's package give this one: what is missing is an ImportError."""
    modules = {f"{_UPSTREAM}.{name}": import_module(f"fsdp_dynamo.{name}") for name in _NAMES}
    with (
        mock.patch.dict(sys.modules, {_UPSTREAM: fsdp_dynamo, **modules}),
        mock.patch.object(dist, "fsdp", fsdp_dynamo),
    ):
        yield


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def _with_ddp(rank: int) -> list[float]:
    """Losses of six batches, two a step, clipped."""
    model = DistributedDataParallel(make_classifier())
    optimizer, losses = _sgd(model), []
    for number in range(6):
        with nullcontext() if number % 2 else model.no_sync():
            loss = classification_loss(model, examples(rank, number))
            (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            clip(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return losses


# -- lightning's Fabric ----------------------------------------------------------------------------


class _OnCPU(FSDPStrategy):  # type: ignore[misc]
    """Lightning's own; only the device is another one."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")


def _set_up(fabric: Any, rank: int) -> tuple[Any, Any, Step]:
    model = fabric.setup_module(make_classifier())
    assert isinstance(model._forward_module, fsdp_dynamo.FSDP)
    optimizer = fabric.setup_optimizers(_sgd(model))

    def step(number: int) -> float:
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            loss = classification_loss(model, examples(rank, number))
            fabric.backward(loss / 2)
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return model, optimizer, step


@pytest.mark.parametrize("options", [{"sharding_strategy": "SHARD_GRAD_OP"}, {"cpu_offload": True}])
@on_ranks(2)
def test_fabric_trains_as_ddp(rank: int, tmp_path: Path, options: dict[str, Any]) -> None:
    """The last two batches after everything was saved and loaded into a new model.

    Fabric loads whole files into DTensors only from tensors, and its FSDPStrategy gives others.
    """
    with _swapped(), mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank)}):
        strategy = _OnCPU(
            auto_wrap_policy={nn.Sequential, nn.Linear},
            cluster_environment=LightningEnvironment(),
            process_group_backend="gloo",
            state_dict_type="sharded",
            **options,
        )
        fabric = Fabric(
            accelerator=CPUAccelerator(), devices=dist.get_world_size(), strategy=strategy
        )
        fabric.launch()
        model, optimizer, step = _set_up(fabric, rank)
        losses = [step(number) for number in range(4)]
        fabric.save(tmp_path / "all", {"model": model, "optimizer": optimizer, "step": 4})
        model, optimizer, step = _set_up(fabric, rank)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(tmp_path / "all", state)
        assert state["step"] == 4
        losses += [step(number) for number in range(4, 6)]
    assert losses == pytest.approx(_with_ddp(rank), rel=1e-5)


# -- accelerate ------------------------------------------------------------------------------------


@contextmanager
def _accelerator(rank: int, version: int, layer: str, **options: Any) -> Iterator[Accelerator]:
    names = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": str(version)}
    names |= {"LOCAL_RANK": str(rank), "RANK": str(rank)}
    try:
        with mock.patch.dict(os.environ, names):
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=version,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=[layer],
                **options,
            )
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3 - version)
            # It asks for a device other than the CPU before it lets FSDP be used.
            for state in (AcceleratorState, PartialState):
                state._shared_state["distributed_type"] = DistributedType.FSDP
            accelerator.state.fsdp_plugin = plugin
            yield accelerator
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()


@pytest.mark.parametrize(
    "options",
    [
        {"state_dict_type": "SHARDED_STATE_DICT", "use_orig_params": True},
        {"state_dict_type": "FULL_STATE_DICT", "reshard_after_forward": "SHARD_GRAD_OP"},
    ],
    ids=["sharded", "full"],
)
@on_ranks(2)
def test_accelerate_trains_as_ddp(rank: int, tmp_path: Path, options: dict[str, Any]) -> None:
    """The same with an Accelerator, its plugin for FSDP1, and its functions for checkpoints."""
    with _swapped(), _accelerator(rank, 1, "Linear", **options) as accelerator:
        model = accelerator.prepare(make_classifier())
        optimizer = accelerator.prepare(_sgd(model))
        assert isinstance(model, fsdp_dynamo.FSDP)

        def step(number: int) -> float:
            with accelerator.accumulate(model):
                loss = classification_loss(model, examples(rank, number))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            return loss.item()

        losses = [step(number) for number in range(4)]
        plugin, folder = accelerator.state.fsdp_plugin, str(tmp_path)
        save_fsdp_model(plugin, accelerator, model, folder)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
        for number in range(2):  # to be undone
            step(number)
        load_fsdp_model(plugin, accelerator, model, folder)
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
        losses += [step(number) for number in range(4, 6)]
    assert losses == pytest.approx(_with_ddp(rank), rel=1e-5)


def _loss(model: nn.Module, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(**hf_models.inputs(rank)).loss
    return loss


def _trained_plain(tied: bool) -> nn.Module:
    """Three steps of one process on the batches of all ranks."""
    model = hf_models.make("llama", tie_word_embeddings=tied)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for rank in range(dist.get_world_size()):
            (_loss(model, rank) / dist.get_world_size()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _require_same(sharded: Any, plain: nn.Module) -> None:
    for param, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("tied", "from_rank_0"), [(False, False), (True, True)])
@on_ranks(2)
def test_accelerate_for_fsdp2(rank: int, tmp_path: Path, tied: bool, from_rank_0: bool) -> None:
    """Three steps, and what was saved, spoilt and loaded, beside one process.

    ``from_rank_0``: the model goes to the meta device, and gets rank 0's values sharded.
    """
    options = {"cpu_ram_efficient_loading": from_rank_0, "state_dict_type": "SHARDED_STATE_DICT"}
    plain, model = _trained_plain(tied), hf_models.make("llama", tie_word_embeddings=tied)[0]
    with (
        mock.patch.object(upstream, "fully_shard", fully_shard),
        _accelerator(rank, 2, "LlamaDecoderLayer", **options) as accelerator,
    ):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sharded, optimizer = accelerator.prepare(model, sgd)
        assert isinstance(sharded, FSDPModule)
        for _ in range(3):
            accelerator.backward(_loss(sharded, rank))
            accelerator.clip_grad_norm_(sharded.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        _require_same(sharded, plain)
        accelerator.save_state(str(tmp_path))
        with torch.no_grad():
            for param in sharded.parameters():
                param.zero_()
        accelerator.load_state(str(tmp_path))
        _require_same(sharded, plain)
