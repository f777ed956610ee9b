"""Hugging Face models of small sizes with random weights, and their inputs."""

from __future__ import annotations

from typing import Any

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


def _bert() -> tuple[nn.Module, type[nn.Module]]:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config), BertLayer


def _t5() -> tuple[nn.Module, type[nn.Module]]:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config), T5Block


def _gpt2() -> tuple[nn.Module, type[nn.Module]]:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    # Without it transformers logs a warning in the middle of the forward, which no whole graph
    # can hold (plain torch.compile(fullgraph=True) fails in the same mode).
    model.loss_type = "ForCausalLM"
    return model, GPT2Block


def _llama() -> tuple[nn.Module, type[nn.Module]]:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config), LlamaDecoderLayer


_MAKERS = {"bert": _bert, "t5": _t5, "gpt2": _gpt2, "llama": _llama}
NAMES = tuple(_MAKERS)


def make(name: str) -> tuple[nn.Module, type[nn.Module]]:
    """A model with equal weights on every rank, and its layer class."""
    torch.manual_seed(3)
    model, layer = _MAKERS[name]()
    return model.train(), layer


def inputs(rank: int) -> dict[str, Any]:
    """This rank's batch; labels are the inputs themselves."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(2, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}
