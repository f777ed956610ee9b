"""Files and other models: safetensors, pretrained weights into shards, weights for another model.

State dicts to and from plain models: test_state_dict.py; one form at a time, for other numbers of
ranks: test_sharded_state_dict.py, test_checkpoint.py; save_pretrained: test_huggingface.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from allocations import peak_bytes
from loops import different, make_classifier, shard
from models import Block, batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import on_ranks
from recipes import recipe
from torch import nn

from fsdp_dynamo import FSDP, ShardedStateDictConfig, StateDictType
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

# -- safetensors, and torch.save of a compiled model -----------------------------------------------


def _tied(fill: float | None = None) -> nn.Module:
    model = make_transformer(num_blocks=1, tied=True)
    if fill is not None:
        nn.init.constant_(model.embed.weight, fill)
    return model


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_files_in_both_directions(rank: int, tmp_path: Path, mode: str) -> None:
    """From shards into files, and from files into shards; embedding and head are tied."""
    from safetensors.torch import load_file, load_model, save_file, save_model

    folder = tmp_path
    model = in_mode(wrap(_tied()), mode)
    loss_of(model, batch(rank, 0)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    state = model.state_dict()  # all ranks
    if rank == 0:
        torch.save(state, folder / "model.pt")
        untied = {key: value for key, value in state.items() if key != "head.weight"}
        save_file(untied, folder / "model.safetensors")
    save_model(model, str(folder / f"whole-{rank}.safetensors"))  # calls state_dict(): all ranks
    dist.barrier()

    from_torch, from_file = _tied(0.0), _tied(0.0)
    from_torch.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    from_file.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    from_model = _tied(0.0)
    load_model(from_model, str(folder / "whole-0.safetensors"))
    into_shards, into_shards_too = wrap(_tied(0.0)), in_mode(wrap(_tied(0.0)), mode)
    into_shards.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    load_model(into_shards_too, str(folder / "whole-0.safetensors"))
    loaded = {
        "torch.load": from_torch,
        "load_file": from_file,
        "load_model": from_model,
        "load_file into shards": into_shards,
        "load_model into shards": into_shards_too,
    }
    for way, one in loaded.items():
        assert different(one.state_dict(), state) == [], way


@on_ranks(2)
def test_a_state_dict_of_a_compiled_plain_model(rank: int) -> None:
    """As scripts have in their files."""
    state = torch.compile(make_classifier()).state_dict()
    assert all(key.startswith("_orig_mod.") for key in state)
    model = in_mode(shard(make_classifier()), "graph")
    with torch.no_grad():
        next(model.parameters()).zero_()
    model.load_state_dict(state)
    assert different(model.state_dict(), make_classifier().state_dict()) == []


# -- pretrained weights into shards ----------------------------------------------------------------

NUM_LAYERS = 6


def _on_meta(folder: Path) -> FSDP:
    """The model of a folder, with random values."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    with torch.device("meta"):
        plain = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    return FSDP(plain, auto_wrap_policy=policy, param_init_fn=plain._init_weights)


def _by_slices(folder: Path) -> FSDP:
    """The recipe: each rank reads its part of every tensor."""
    names: dict[str, Any] = {"FSDP": FSDP, "ModuleWrapPolicy": ModuleWrapPolicy}
    names |= {"Path": Path, "torch": torch, "folder": folder}
    exec(recipe("Load pretrained weights into shards"), names)
    model: FSDP = names["model"]
    return model


def _by_dcp(folder: Path) -> FSDP:
    """torch.distributed.checkpoint reads the files of other libraries."""
    model = _on_meta(folder)
    shares = ShardedStateDictConfig(shares_memory=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, shares):
        state = model.state_dict()
        if model.config.tie_word_embeddings:
            del state["lm_head.weight"]
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    return model


READERS: dict[str, Callable[[Path], FSDP]] = {"slices": _by_slices, "DCP": _by_dcp}


@pytest.mark.parametrize(("how", "tied"), [("slices", False), ("DCP", False), ("slices", True)])
@on_ranks(2)
def test_from_pretrained_into_shards(rank: int, tmp_path: Path, how: str, tied: bool) -> None:
    """No rank holds the model: beside shards, the root's parameters and one unit at most."""
    from transformers import LlamaForCausalLM

    if rank == 0:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": NUM_LAYERS}
        saved, _ = hf_models.make("llama", **sizes, tie_word_embeddings=tied)
        # Small files: the profiler takes one that is mapped into memory for an allocation.
        saved.save_pretrained(tmp_path, max_shard_size="50KB")
    dist.barrier()
    with peak_bytes() as peak:
        model = READERS[how](tmp_path)
    plain = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    unit = sum(p.numel() for p in plain.model.layers[0].parameters()) * 4
    whole = sum(p.numel() for p in plain.parameters()) * 4
    root = whole - NUM_LAYERS * unit
    slack = 1000
    assert peak[0] <= whole // dist.get_world_size() + unit + root + slack
    assert different(model.state_dict(), plain.state_dict()) == []
    with torch.no_grad():
        losses = [one(**hf_models.inputs(rank)).loss.item() for one in (plain, model)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


# -- weights for a model elsewhere -----------------------------------------------------------------

DIM = 128


@on_ranks(2)
def test_weights_sent_unit_by_unit(rank: int) -> None:
    """The engine is on the last rank; beside the models, ranks hold one unit at a time."""
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    model = FSDP(
        make_transformer(num_blocks=6, dim=DIM), auto_wrap_policy=ModuleWrapPolicy({Block})
    )
    loss_of(model, batch(rank, 0)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    engine = make_transformer(num_blocks=6, dim=DIM) if rank == world_size - 1 else None
    own = dict(engine.named_parameters()) if engine is not None else {}
    sent: list[str] = []

    @torch.no_grad()
    def send(name: str, whole: torch.Tensor) -> None:
        sent.append(name)
        if own:
            own[name].copy_(whole)

    with peak_bytes() as peak:
        exec(recipe("Send weights to another model"), {"model": model, "FSDP": FSDP, "send": send})
    assert sorted(sent) == sorted(name for name, _ in model.named_parameters())
    numels = [param.numel() for param in Block(DIM).parameters()]
    packed = [numel for numel in numels if 4 * numel // world_size < 64 << 10]
    assert peak[0] <= 4 * sum(numels) + 4 * sum(packed) + 10_000
    with torch.no_grad():
        loss = loss_of(model, batch(9, 9)).item()
        if engine is not None:
            assert loss_of(engine, batch(9, 9)).item() == pytest.approx(loss, rel=1e-6)
