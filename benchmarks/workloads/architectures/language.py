"""Language models: causal, masked, and from sequence to sequence."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.architectures.base import Architecture
from benchmarks.workloads.architectures.hugging_face import (
    ATTENTION,
    COMMON_SETTINGS,
    GROUPED,
    SIZES,
    hugging_face,
)

FAMILY = "language"


def _model(name: str, class_name: str, sizes: dict[str, Any], **others: Any) -> Architecture:
    return hugging_face(name, FAMILY, class_name, sizes, **others)


ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
T5_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def architectures() -> list[Architecture]:
    """The family."""
    return [*_causal(), *_masked(), *_sequence_to_sequence()]


def _causal() -> list[Architecture]:
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    gpt2 |= {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    neo = {**SIZES, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    return [
        _model("llama", "LlamaForCausalLM", GROUPED, more=(*ATTENTION, "flex")),
        _model("gpt2", "GPT2LMHeadModel", gpt2, more=ATTENTION),
        _model("gpt_neo", "GPTNeoForCausalLM", neo),
        _model("gpt_neox", "GPTNeoXForCausalLM", SIZES),
        _model("gptj", "GPTJForCausalLM", {**gpt2, "rotary_dim": 4}),
        _model("bloom", "BloomForCausalLM", {**SIZES, "n_layer": 2, "n_head": 4}),
        _model("opt", "OPTForCausalLM", {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}),
        _model("falcon", "FalconForCausalLM", SIZES),
        _model(
            "mistral",
            "MistralForCausalLM",
            {**GROUPED, "sliding_window": 8},
            more=(*ATTENTION, "flex"),
        ),
        _model("qwen3", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
        _model("gemma2", "Gemma2ForCausalLM", {**GROUPED, "head_dim": 8}),
        _model("gemma3", "Gemma3ForCausalLM", {**GROUPED, "head_dim": 8}),
        _model("phi3", "Phi3ForCausalLM", GROUPED),
        _model("olmo2", "Olmo2ForCausalLM", GROUPED),
        _model("cohere2", "Cohere2ForCausalLM", GROUPED),
        _model("stablelm", "StableLmForCausalLM", {**SIZES, "num_key_value_heads": 4}),
        _model("granite", "GraniteForCausalLM", GROUPED),
        _model("smollm3", "SmolLM3ForCausalLM", GROUPED),
        _model("mpt", "MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2, **SIZES}),
        _model("xglm", "XGLMForCausalLM", {**ENCODER_DECODER, "num_layers": 2, "ffn_dim": 64}),
    ]


def _masked() -> list[Architecture]:
    no_switch = COMMON_SETTINGS
    funnel = {"block_sizes": [1, 1], "d_head": 8, "d_inner": 64, "d_model": 32, "n_head": 4}
    distil = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 64}
    xlnet = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "vocab_size": 64}
    bert_like = {**SIZES, "embedding_size": 32}
    mobile = {**bert_like, "intra_bottleneck_size": 32, "true_hidden_size": 32}
    return [
        _model("bert", "BertForMaskedLM", SIZES, more=ATTENTION),
        _model("roberta", "RobertaForMaskedLM", SIZES),
        _model(
            "albert", "AlbertForMaskedLM", bert_like, blocks=("AlbertLayer",), settings=no_switch
        ),
        _model("distilbert", "DistilBertForMaskedLM", distil, blocks=("TransformerBlock",)),
        _model(
            "deberta_v2",
            "DebertaV2ForMaskedLM",
            {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
            blocks=("DebertaV2Layer",),
        ),
        _model("electra", "ElectraForMaskedLM", bert_like, blocks=("ElectraLayer",)),
        _model("modernbert", "ModernBertForMaskedLM", SIZES),
        _model("xlnet", "XLNetLMHeadModel", xlnet, blocks=("XLNetLayer",), settings=no_switch),
        _model(
            "funnel",
            "FunnelForMaskedLM",
            {**funnel, "vocab_size": 64},
            blocks=("FunnelLayer",),
            settings=no_switch,
        ),
        _model(
            "longformer",
            "LongformerForMaskedLM",
            {**SIZES, "attention_window": 8},
            blocks=("LongformerLayer",),
        ),
        _model(
            "big_bird",
            "BigBirdForMaskedLM",
            {**SIZES, "block_size": 2, "num_random_blocks": 1},
            blocks=("BigBirdLayer",),
            # autocast: an error in eager mode
            settings=("defaults", "frozen", "inductor", "checkpointing"),
        ),
        _model("fnet", "FNetForMaskedLM", SIZES, blocks=("FNetLayer",)),
        _model("convbert", "ConvBertForMaskedLM", bert_like, blocks=("ConvBertLayer",)),
        _model(
            "mobilebert",
            "MobileBertForMaskedLM",
            mobile,
            blocks=("MobileBertLayer",),
            settings=no_switch,
        ),
        _model(
            "squeezebert",
            "SqueezeBertForMaskedLM",
            bert_like,
            blocks=("SqueezeBertModule",),
            settings=no_switch,
        ),
        _model("mpnet", "MPNetForMaskedLM", SIZES, blocks=("MPNetLayer",), settings=no_switch),
    ]


def _sequence_to_sequence() -> list[Architecture]:
    prophet = {k: v for k, v in ENCODER_DECODER.items() if not k.endswith("_layers")}
    prophet |= {"hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2}
    prophet |= {"num_encoder_attention_heads": 4}
    prophet |= {"num_decoder_attention_heads": 4, "ngram": 2}
    led = {**ENCODER_DECODER, "attention_window": 8, "max_encoder_position_embeddings": 64}
    side = {**GROUPED, "head_dim": 8}
    return [
        _model("t5", "T5ForConditionalGeneration", T5_SIZES),
        _model("longt5", "LongT5ForConditionalGeneration", {**T5_SIZES, "local_radius": 4}),
        _model("bart", "BartForConditionalGeneration", ENCODER_DECODER, more=ATTENTION),
        _model(
            "pegasus",
            "PegasusForConditionalGeneration",
            ENCODER_DECODER,
            blocks=("PegasusEncoderLayer", "PegasusDecoderLayer"),
        ),
        _model(
            "marian",
            "MarianMTModel",
            ENCODER_DECODER,
            blocks=("MarianEncoderLayer", "MarianDecoderLayer"),
        ),
        _model("m2m_100", "M2M100ForConditionalGeneration", ENCODER_DECODER),
        _model(
            "prophetnet",
            "ProphetNetForConditionalGeneration",
            prophet,
            blocks=("ProphetNetEncoderLayer", "ProphetNetDecoderLayer"),
        ),
        _model(
            "led",
            "LEDForConditionalGeneration",
            {**led, "max_decoder_position_embeddings": 64},
            blocks=("LEDEncoderLayer", "LEDDecoderLayer"),
        ),
        _model(
            "t5gemma",
            "T5GemmaForConditionalGeneration",
            {"encoder": side, "decoder": side, "vocab_size": 64},
        ),
    ]
