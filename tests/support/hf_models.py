"""Hugging Face models of small sizes with random weights, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

VOCABULARY = 96

_DECODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "use_cache": False}
_SIZES: dict[str, dict[str, Any]] = {
    "llama": {**_DECODER, "intermediate_size": 48, "max_position_embeddings": 32},
    "gpt2": {
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
    },
    "t5": {
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "use_cache": False,
    },
}
_LAYERS = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "t5": "T5Block"}


def make(name: str, **changed: Any) -> tuple[Any, type[nn.Module]]:
    """A model with equal weights on every rank, and its layer class.

    Args:
        name: llama, gpt2 or t5.
        changed: entries of the configuration.
    """
    torch.manual_seed(3)
    kind = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    sizes = {"vocab_size": VOCABULARY, **_SIZES[name], **changed}
    model = kind.from_config(AutoConfig.for_model(name, **sizes))
    if name == "gpt2":
        # Without it transformers logs a warning in the middle of the forward, which no whole graph
        # can hold (plain torch.compile(fullgraph=True) fails in the same mode).
        model.loss_type = "ForCausalLM"
    layers = (type(module) for module in model.modules())
    return model.train(), next(one for one in layers if one.__name__ == _LAYERS[name])


def inputs(rank: int) -> dict[str, Any]:
    """This rank's batch; labels are the inputs themselves."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(2, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}
