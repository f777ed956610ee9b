"""Catalogue of workloads: a model with random weights, its batches, its loss, its blocks.

Names:

- ``decoder``: the reference workload (29.1 M parameters), and Llama-style sizes for accelerators;
- ``toy``: the toy model of three ``MyModule``;
- ``hf_*``: models of ``transformers`` built from configurations at their real sizes, or small.

Nothing is downloaded: weights come from the seed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.command_line import BadInputError
from benchmarks.workloads.decoder import Block, Decoder, DecoderSizes
from benchmarks.workloads.toy import MyModule, ToyModel
from fsdp_dynamo.errors import how_to_install

Batch = dict[str, torch.Tensor]

SEED = 7

DECODER_SIZES = {
    "small": DecoderSizes(64, 4, 4, 256, 192),
    "29m": DecoderSizes(512, 8, 8, 4096, 1344),
    "1b": DecoderSizes(2048, 16, 32, 128256, 8192),
    "3b": DecoderSizes(3072, 28, 24, 128256, 8192),
    "8b": DecoderSizes(4096, 32, 32, 128256, 14336),
}


@dataclass(frozen=True)
class Workload:
    """A training task that every peer gets in the same form.

    Attributes:
        name: what it is called in reports.
        build: makes the model; the caller has set the seed.
        batch: one batch from a generator: keyword tensors, the first axis is the batch.
        loss: scalar loss of a model and a batch.
        block_classes: the classes of which each instance becomes a unit.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    block_classes: tuple[type[nn.Module], ...]

    def seeded_model(self) -> nn.Module:
        """The model, the same weights on every rank and for every peer."""
        torch.manual_seed(SEED)
        return self.build().train()

    def batch_of(self, rank: int, step: int, device: torch.device) -> Batch:
        """The batch of one rank and step, the same for every peer."""
        generator = torch.Generator().manual_seed(SEED + 100_003 * rank + step)
        return {name: tensor.to(device) for name, tensor in self.batch(generator).items()}


def next_token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the token after each token."""
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def decoder(
    size: str,
    batch_size: int = 4,
    length: int = 128,
    num_blocks: int | None = None,
    small: bool = False,
) -> Workload:
    """The reference decoder at one of ``DECODER_SIZES``.

    Args:
        size: a key of ``DECODER_SIZES``.
        batch_size: sequences per rank.
        length: predicted tokens per sequence.
        num_blocks: instead of the size's own number.
        small: refused, since the size is a name.

    Raises:
        BadInputError: unknown or refused size.
    """
    if small:
        raise BadInputError("--model_size small: a decoder has its size by name: --decoder small")
    if size not in DECODER_SIZES:
        raise BadInputError(f"decoder size: expected one of {list(DECODER_SIZES)}, got {size!r}")
    sizes = DECODER_SIZES[size]
    if num_blocks is not None:
        sizes = DecoderSizes(
            sizes.dim, num_blocks, sizes.num_heads, sizes.vocabulary, sizes.hidden_dim
        )

    def batch(generator: torch.Generator) -> Batch:
        shape = (batch_size, length + 1)
        return {"tokens": torch.randint(sizes.vocabulary, shape, generator=generator)}

    name = f"decoder {size}, {sizes.num_blocks} blocks, batch {batch_size} x {length}"
    return Workload(name, lambda: Decoder(sizes), batch, next_token_loss, (Block,))


def toy(batch_size: int = 20, small: bool = False) -> Workload:
    """The toy model, squared error against random targets."""
    widths = (10, 100, 100, 5) if small else ToyModel.WIDTHS

    def batch(generator: torch.Generator) -> Batch:
        return {
            "x": torch.randn(batch_size, widths[0], generator=generator),
            "y": torch.randn(batch_size, widths[-1], generator=generator),
        }

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    return Workload(f"toy, batch {batch_size}", lambda: ToyModel(widths), batch, loss, (MyModule,))


@dataclass(frozen=True)
class _HuggingFace:
    """Recipe of a model of ``transformers``.

    Attributes:
        config, model: class names in ``transformers``.
        blocks: ``module:class`` names of what becomes a unit.
        real: configuration arguments of the real size.
        small: configuration arguments of a size for laptops.
    """

    config: str
    model: str
    blocks: tuple[str, ...]
    real: dict[str, Any]
    small: dict[str, Any]


_BERT_BLOCK = ("transformers.models.bert.modeling_bert:BertLayer",)
_T5_BLOCK = ("transformers.models.t5.modeling_t5:T5Block",)
_GPT2_BLOCK = ("transformers.models.gpt2.modeling_gpt2:GPT2Block",)
_LLAMA_BLOCK = ("transformers.models.llama.modeling_llama:LlamaDecoderLayer",)
_NO_DROPOUT_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_DROPOUT_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
_PLAIN_T5 = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
_SMALL_BERT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_SMALL_T5 = {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2}
_SMALL_GPT2 = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_SMALL_LLAMA = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _bert(**real: Any) -> _HuggingFace:
    return _HuggingFace(
        "BertConfig",
        "BertForMaskedLM",
        _BERT_BLOCK,
        _NO_DROPOUT_BERT | real,
        _NO_DROPOUT_BERT | _SMALL_BERT,
    )


def _t5(**real: Any) -> _HuggingFace:
    return _HuggingFace(
        "T5Config",
        "T5ForConditionalGeneration",
        _T5_BLOCK,
        _PLAIN_T5 | real,
        _PLAIN_T5 | _SMALL_T5 | {"num_heads": 4},
    )


def _gpt2(**real: Any) -> _HuggingFace:
    return _HuggingFace(
        "GPT2Config",
        "GPT2LMHeadModel",
        _GPT2_BLOCK,
        _NO_DROPOUT_GPT2 | real,
        _NO_DROPOUT_GPT2 | _SMALL_GPT2,
    )


def _llama(hidden: int, mlp: int, layers: int, heads: int, tied: bool) -> _HuggingFace:
    """Llama 3's shapes: 8 key-value heads, vocabulary 128256."""
    real = {
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "tie_word_embeddings": tied,
        "use_cache": False,
    }
    small = {"use_cache": False} | _SMALL_LLAMA
    return _HuggingFace("LlamaConfig", "LlamaForCausalLM", _LLAMA_BLOCK, real, small)


HUGGING_FACE = {
    "hf_Bert": _bert(),
    "hf_Bert_large": _bert(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "hf_T5": _t5(),
    "hf_T5_base": _t5(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "hf_T5_large": _t5(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "hf_GPT2": _gpt2(),
    "hf_GPT2_large": _gpt2(n_embd=1280, n_layer=36, n_head=20),
    "hf_Llama": _llama(2048, 8192, 16, 32, tied=True),
    "hf_Llama_3b": _llama(3072, 8192, 28, 24, tied=True),
    "hf_Llama_8b": _llama(4096, 14336, 32, 32, tied=False),
}


def hugging_face(
    name: str, batch_size: int = 4, length: int = 128, small: bool = False
) -> Workload:
    """A model of ``transformers`` with random weights.

    Args:
        name: a key of ``HUGGING_FACE``.
        batch_size: sequences per rank.
        length: tokens per sequence.
        small: a size for laptops instead of the real one.

    Raises:
        BadInputError: unknown name, or ``transformers`` is not installed.
    """
    if name not in HUGGING_FACE:
        raise BadInputError(
            f"--torchbench_model: expected one of {', '.join(HUGGING_FACE)}, got {name!r}"
        )
    if importlib.util.find_spec("transformers") is None:
        raise BadInputError(
            f"--torchbench_model needs the package 'transformers': {how_to_install('benchmarks')}"
        )
    import transformers  # here and not above: it takes seconds and few workloads need it

    made = HUGGING_FACE[name]
    config = getattr(transformers, made.config)(**(made.small if small else made.real))

    def build() -> nn.Module:
        model = getattr(transformers, made.model)(config)
        # Without it transformers logs a warning in the middle of the forward, which no whole
        # graph can hold.
        model.loss_type = getattr(model, "loss_type", None) or "ForCausalLM"
        return model

    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(2, config.vocab_size, (batch_size, length), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(**batch).loss

    size = "small " if small else ""
    blocks = tuple(_import(where) for where in made.blocks)
    return Workload(f"{size}{name}, batch {batch_size} x {length}", build, batch, loss, blocks)


def _import(where: str) -> type[nn.Module]:
    module, _, name = where.partition(":")
    found: type[nn.Module] = getattr(importlib.import_module(module), name)
    return found
