"""Mixtures of experts."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.architectures.base import Architecture
from benchmarks.workloads.architectures.hugging_face import GROUPED, SIZES, hugging_face
from benchmarks.workloads.architectures.language import ENCODER_DECODER, T5_SIZES

FAMILY = "experts"


def _model(name: str, class_name: str, sizes: dict[str, Any], **others: Any) -> Architecture:
    return hugging_face(name, FAMILY, class_name, sizes, **others)


def architectures() -> list[Architecture]:
    """The family."""
    narrow = {**GROUPED, "moe_intermediate_size": 16, "head_dim": 8}
    few = {**narrow, "num_experts": 4, "num_experts_per_tok": 2}
    latent = {**SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_group": 1}
    latent |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1}
    latent |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    latent |= {"qk_nope_head_dim": 4, "first_k_dense_replace": 1}
    oss = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    llama4 = {**oss, "intermediate_size_mlp": 64, "moe_layers": [1], "num_experts_per_tok": 1}
    glm4 = {**narrow, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    ernie = {**few, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}
    switch = {**T5_SIZES, "num_experts": 4, "num_sparse_encoder_layers": 1}
    dbrx_attention = {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}
    dbrx_ffn = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
    return [
        _model(
            "mixtral",
            "MixtralForCausalLM",
            {**GROUPED, "num_local_experts": 4, "output_router_logits": True},
        ),
        _model("gpt_oss", "GptOssForCausalLM", oss),
        _model("qwen2_moe", "Qwen2MoeForCausalLM", few),
        _model("qwen3_moe", "Qwen3MoeForCausalLM", few),
        _model("olmoe", "OlmoeForCausalLM", few),
        _model("deepseek_v2", "DeepseekV2ForCausalLM", latent),
        _model("deepseek_v3", "DeepseekV3ForCausalLM", latent),
        _model(
            "dbrx",
            "DbrxForCausalLM",
            {
                "d_model": 32,
                "n_heads": 4,
                "n_layers": 2,
                "max_seq_len": 64,
                "vocab_size": 64,
                "attn_config": dbrx_attention,
                "ffn_config": dbrx_ffn,
            },
            # autocast: an error in eager mode
            settings=("defaults", "frozen", "inductor", "checkpointing"),
        ),
        _model("phimoe", "PhimoeForCausalLM", {**GROUPED, "num_local_experts": 4}),
        _model("granitemoe", "GraniteMoeForCausalLM", {**GROUPED, "num_local_experts": 4}),
        _model("llama4", "Llama4ForCausalLM", llama4),
        _model("glm4_moe", "Glm4MoeForCausalLM", glm4),
        _model("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", ernie),
        _model(
            "switch_transformers",
            "SwitchTransformersForConditionalGeneration",
            {
                **switch,
                "num_sparse_decoder_layers": 1,
                "expert_capacity": 8,
                "num_decoder_layers": 2,
            },
        ),
        _model(
            "nllb_moe",
            "NllbMoeForConditionalGeneration",
            {
                **ENCODER_DECODER,
                "num_experts": 4,
                "expert_capacity": 8,
                "encoder_sparse_step": 2,
                "decoder_sparse_step": 2,
            },
        ),
    ]
