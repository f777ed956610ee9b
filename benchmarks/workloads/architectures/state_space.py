"""State-space, linear-attention and other recurrent language models, and their hybrids."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.architectures.base import Architecture
from benchmarks.workloads.architectures.hugging_face import (
    GROUPED,
    SIZES,
    hugging_face,
)

FAMILY = "state_space"


def _model(name: str, class_name: str, sizes: dict[str, Any], **others: Any) -> Architecture:
    return hugging_face(name, FAMILY, class_name, sizes, **others)


def architectures() -> list[Architecture]:
    """The family."""
    mamba = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4}
    mamba2 = {**mamba, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
    wide = {"mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 8}
    jamba = {**GROUPED, "mamba_d_state": 4, "num_experts": 2, "attn_layer_period": 2}
    jamba |= {"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    next_ = {**GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    next_ |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    next_ |= {"linear_num_value_heads": 4, "moe_intermediate_size": 16}
    next_ |= {"shared_expert_intermediate_size": 16}
    next_ |= {"layer_types": ["linear_attention", "full_attention"]}
    zamba2 = {**SIZES, "mamba_d_state": 4, "n_mamba_heads": 8, "chunk_size": 8}
    zamba2 |= {"adapter_rank": 4, "layers_block_type": ["mamba", "hybrid"]}
    rwkv = {**SIZES, "context_length": 64, "attention_hidden_size": 32}
    griffin = {**GROUPED, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8}
    return [
        _model("mamba", "MambaForCausalLM", mamba),
        _model("mamba2", "Mamba2ForCausalLM", mamba2),
        _model("falcon_mamba", "FalconMambaForCausalLM", mamba),
        _model("jamba", "JambaForCausalLM", jamba),
        _model("zamba2", "Zamba2ForCausalLM", zamba2),
        _model("bamba", "BambaForCausalLM", {**GROUPED, **wide, "attn_layer_indices": [1]}),
        _model("falcon_h1", "FalconH1ForCausalLM", {**GROUPED, **wide, "mamba_d_ssm": 64}),
        _model("rwkv", "RwkvForCausalLM", rwkv),
        _model("recurrent_gemma", "RecurrentGemmaForCausalLM", griffin),
        _model("lfm2", "Lfm2ForCausalLM", {**GROUPED, "layer_types": ["conv", "full_attention"]}),
        _model("qwen3_next", "Qwen3NextForCausalLM", next_),
    ]
