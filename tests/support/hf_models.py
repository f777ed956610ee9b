"""Hugging Face models of small sizes with random weights, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

VOCABULARY = 96


class _Kind(NamedTuple):
    """Classes of an architecture, and its configuration beside the vocabulary."""

    config: Callable[..., Any]
    model: Callable[..., Any]
    layer: type[nn.Module]
    sizes: dict[str, Any]


_KINDS = {
    "bert": _Kind(
        BertConfig,
        BertForMaskedLM,
        BertLayer,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 32,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "t5": _Kind(
        T5Config,
        T5ForConditionalGeneration,
        T5Block,
        {
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
    ),
    "gpt2": _Kind(
        GPT2Config,
        GPT2LMHeadModel,
        GPT2Block,
        {
            "n_positions": 32,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "use_cache": False,
        },
    ),
    "llama": _Kind(
        LlamaConfig,
        LlamaForCausalLM,
        LlamaDecoderLayer,
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "use_cache": False,
        },
    ),
}
NAMES = tuple(_KINDS)


def make(name: str, **changed: Any) -> tuple[Any, type[nn.Module]]:
    """A model with equal weights on every rank, and its layer class.

    Args:
        name: one of ``NAMES``.
        changed: entries of the configuration.
    """
    kind = _KINDS[name]
    torch.manual_seed(3)
    model = kind.model(kind.config(**{"vocab_size": VOCABULARY, **kind.sizes, **changed}))
    if name == "gpt2":
        # Without it transformers logs a warning in the middle of the forward, which no whole graph
        # can hold (plain torch.compile(fullgraph=True) fails in the same mode).
        model.loss_type = "ForCausalLM"
    return model.train(), kind.layer


def inputs(rank: int) -> dict[str, Any]:
    """This rank's batch; labels are the inputs themselves."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(2, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}
