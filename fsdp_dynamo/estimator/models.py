"""Models by name, from configurations of ``transformers``; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_dynamo.errors import FSDPError, FSDPValueError
from fsdp_dynamo.estimator.inventory import Build

_LLAMA3 = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}

CONFIGS: dict[str, tuple[str, dict[str, int]]] = {
    "llama3-8b": (
        "LlamaConfig",
        {
            **_LLAMA3,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 14336,
        },
    ),
    "llama3-70b": (
        "LlamaConfig",
        {
            **_LLAMA3,
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "intermediate_size": 28672,
        },
    ),
    "llama3-405b": (
        "LlamaConfig",
        {
            **_LLAMA3,
            "hidden_size": 16384,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "intermediate_size": 53248,
        },
    ),
    "gpt2": ("GPT2Config", {}),
    "gpt2-xl": ("GPT2Config", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
}
"""Configuration classes and non-default settings, by name. Source: the models' papers
(arXiv 2407.21783, table 3; Radford et al. 2019, table 2)."""


def build_of(name: str, batch: int, length: int) -> Build:
    """Function that builds a model of ``CONFIGS`` and a batch of tokens.

    Raises:
        FSDPValueError: there is no such name.
        FSDPError: transformers is not installed.
    """
    if name not in CONFIGS:
        raise FSDPValueError(
            expected=f"--model to be one of {', '.join(CONFIGS)}",
            got=repr(name),
            where="fsdp_dynamo.estimator",
            fix="For your own model: --module package.module:function.",
        )
    try:
        import transformers
    except ImportError as error:
        raise FSDPError(
            expected="transformers to be installed, for a model by name",
            got=str(error),
            where="fsdp_dynamo.estimator",
            fix="pip install transformers, or give your own model by --module.",
        ) from error
    kind, changes = CONFIGS[name]

    def build() -> tuple[nn.Module, Mapping[str, Any]]:
        config = getattr(transformers, kind)(**changes)
        if kind == "GPT2Config":
            config.n_positions = max(config.n_positions, length)
        model = transformers.AutoModelForCausalLM.from_config(config)
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        return model, {"input_ids": tokens, "labels": tokens, "use_cache": False}

    return build
