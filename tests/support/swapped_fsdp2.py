"""accelerate's FSDP2 code, unchanged, with torch's ``fully_shard`` replaced by ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed import fsdp
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_dynamo import FSDPModule, fully_shard

MAX_NORM = 0.5


def make_llama(tied: bool) -> Any:
    """Two layers, the same values on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=33,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    """Of this rank's batch."""
    ids = torch.randint(33, (2, 7), generator=torch.Generator().manual_seed(rank))
    loss: torch.Tensor = model(ids, labels=ids).loss
    return loss


def with_accelerate(rank: int, folder: Path, tied: bool, from_rank_0: bool) -> list[float]:
    """Largest differences of parameters from those of one process: after three steps, and after
    these were saved, spoilt and loaded.

    Args:
        rank: this one.
        folder: for the checkpoint.
        tied: whether embedding and head share a parameter.
        from_rank_0: whether the model goes to the meta device, and gets rank 0's values sharded.
    """
    environment = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
    }
    plain, model = make_llama(tied), make_llama(tied)
    try:
        with (
            mock.patch.object(fsdp, "fully_shard", fully_shard),
            mock.patch.dict(os.environ, environment),
        ):
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                cpu_ram_efficient_loading=from_rank_0,
                state_dict_type="SHARDED_STATE_DICT",
            )
            accelerator = Accelerator(cpu=True)
            # It asks for a device other than the CPU before it lets FSDP be used.
            for state in (AcceleratorState, PartialState):
                state._shared_state["distributed_type"] = DistributedType.FSDP
            accelerator.state.fsdp_plugin = plugin
            sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            sharded, optimizer = accelerator.prepare(model, sgd)
            assert isinstance(sharded, FSDPModule)
            _train(accelerator, sharded, optimizer, rank)
            _train_plain(plain)
            found = [_difference(sharded, plain)]
            accelerator.save_state(str(folder))
            with torch.no_grad():
                for param in sharded.parameters():
                    param.zero_()
            accelerator.load_state(str(folder))
            return [*found, _difference(sharded, plain)]
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()


def _train(accelerator: Accelerator, model: Any, optimizer: Any, rank: int) -> None:
    for _ in range(3):
        accelerator.backward(loss_of(model, rank))
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def _train_plain(plain: nn.Module) -> None:
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    world_size = dist.get_world_size()
    for _ in range(3):
        for rank in range(world_size):
            (loss_of(plain, rank) / world_size).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def _difference(sharded: Any, plain: nn.Module) -> float:
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return max(float((ours.full_tensor() - one).abs().max()) for ours, one in pairs)
