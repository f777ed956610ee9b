"""Models of ``transformers`` from small configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.workloads.architectures.base import (
    COMMON_SETTINGS,
    VOCABULARY,
    Architecture,
    Batch,
    Generator,
    own_loss,
    tokens,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes that most configurations know by these names; all else is the configuration's default."""

GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
SWITCHED = ("checkpointing",)
ATTENTION = ("sdpa", "eager")


def enable_checkpointing(model: nn.Module) -> None:
    """Turn on activation checkpointing with the model's own switch."""
    model.gradient_checkpointing_enable()


def language_batch(generator: Generator) -> Batch:
    """Tokens that are also the labels."""
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def hugging_face(
    name: str,
    family: str,
    class_name: str,
    sizes: Mapping[str, Any],
    *,
    batch: Callable[[Generator], Batch] = language_batch,
    loss: Callable[[Any], torch.Tensor] = own_loss,
    blocks: tuple[str, ...] = (),
    settings: tuple[str, ...] = (*COMMON_SETTINGS, *SWITCHED),
    more: tuple[str, ...] = (),
    note: str = "",
) -> Architecture:
    """A model of ``transformers`` by its class.

    Args:
        name: what it is called in the campaign.
        family: the file it comes from.
        class_name: a class of ``transformers``.
        sizes: fields of its configuration; nested configurations are dicts.
        batch: keyword arguments of the forward.
        loss: scalar loss of an output.
        blocks: instead of the model's ``_no_split_modules``.
        settings: those that apply.
        more: settings in addition to these.
        note: what explains a difference that is not this project's.
    """

    def build(attention: str | None) -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        model_class: Any = getattr(transformers, class_name)
        config = model_class.config_class(**sizes)
        model = model_class(config)
        if attention is not None:
            model.set_attn_implementation(attention)
        return model

    return Architecture(
        name=name,
        family=family,
        build=build,
        batch=batch,
        loss=loss,
        blocks=blocks,
        settings=(*settings, *more),
        checkpoint=enable_checkpointing,
        packages=("transformers",),
        note=note,
    )
