"""Denoisers and autoencoders of ``diffusers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.workloads.architectures.base import (
    COMMON_SETTINGS,
    Architecture,
    Batch,
    Generator,
    projection,
)

FAMILY = "diffusion"


def _enable_checkpointing(model: nn.Module) -> None:
    model.enable_gradient_checkpointing()


def _model(
    name: str,
    class_name: str,
    sizes: dict[str, Any],
    batch: Callable[[Generator], Batch],
    blocks: tuple[str, ...],
    more: tuple[str, ...] = ("checkpointing",),
    note: str = "",
) -> Architecture:
    def build(attention: str | None) -> nn.Module:
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
        model: nn.Module = getattr(diffusers, class_name)(**sizes)
        return model

    return Architecture(
        name=name,
        family=FAMILY,
        build=build,
        batch=batch,
        loss=projection,
        blocks=blocks,
        settings=(*COMMON_SETTINGS, *more),
        checkpoint=_enable_checkpointing,
        note=note,
        packages=("diffusers",),
    )


def _steps(generator: Generator) -> torch.Tensor:
    return torch.randint(0, 1000, (2,), generator=generator)


def _noisy(generator: Generator) -> Batch:
    sample = torch.randn(2, 3, 16, 16, generator=generator)
    return {"sample": sample, "timestep": _steps(generator)}


def _noisy_with_text(generator: Generator) -> Batch:
    text = torch.randn(2, 5, 16, generator=generator)
    return {**_noisy(generator), "encoder_hidden_states": text}


def _latents(generator: Generator) -> Batch:
    return {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=generator),
        "timestep": _steps(generator),
    }


def _labelled_latents(generator: Generator) -> Batch:
    labels = torch.randint(0, 4, (2,), generator=generator)
    return {**_latents(generator), "class_labels": labels}


def _pooled_latents(generator: Generator) -> Batch:
    return {
        **_latents(generator),
        "encoder_hidden_states": torch.randn(2, 5, 16, generator=generator),
        "pooled_projections": torch.randn(2, 16, generator=generator),
    }


def _packed_latents(generator: Generator) -> Batch:
    """Latents as a sequence, with the places of text and image."""
    return {
        "hidden_states": torch.randn(2, 16, 4, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 16, generator=generator),
        "pooled_projections": torch.randn(2, 16, generator=generator),
        "timestep": torch.rand(2, generator=generator),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def _images(generator: Generator) -> Batch:
    return {"sample": torch.rand(2, 3, 16, 16, generator=generator)}


def architectures() -> list[Architecture]:
    """The family."""
    unet = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1}
    unet |= {"norm_num_groups": 4, "attention_head_dim": 4}
    conditional = {**unet, "in_channels": 3, "out_channels": 3, "cross_attention_dim": 16}
    dit = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
    dit |= {"patch_size": 2, "in_channels": 4}
    sd3 = {**dit, "joint_attention_dim": 16, "caption_projection_dim": 16, "out_channels": 4}
    flux = {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1}
    flux |= {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 16}
    vae = {"block_out_channels": (8, 16), "norm_num_groups": 4, "sample_size": 16}
    sampling = {"down_block_types": ("DownEncoderBlock2D",) * 2}
    sampling |= {"up_block_types": ("UpDecoderBlock2D",) * 2}
    return [
        _model(
            "unet",
            "UNet2DModel",
            {
                **unet,
                "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            },
            _noisy,
            ("ResnetBlock2D",),
            ("checkpointing",),
        ),
        _model(
            "unet_conditional",
            "UNet2DConditionModel",
            {
                **conditional,
                "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            },
            _noisy_with_text,
            ("ResnetBlock2D", "BasicTransformerBlock"),
        ),
        _model(
            "dit",
            "DiTTransformer2DModel",
            {
                **dit,
                "num_embeds_ada_norm": 4,
                "norm_num_groups": 4,
            },
            _labelled_latents,
            ("BasicTransformerBlock",),
            note="the root calls a layer of a unit, transformer_blocks[0].norm1.emb, outside it",
        ),
        _model(
            "sd3",
            "SD3Transformer2DModel",
            {
                **sd3,
                "pooled_projection_dim": 16,
                "pos_embed_max_size": 8,
            },
            _pooled_latents,
            ("JointTransformerBlock",),
        ),
        _model(
            "flux",
            "FluxTransformer2DModel",
            {
                **flux,
                "pooled_projection_dim": 16,
                "axes_dims_rope": (2, 2, 4),
            },
            _packed_latents,
            ("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        ),
        _model("autoencoder_kl", "AutoencoderKL", {**vae, **sampling}, _images, ("ResnetBlock2D",)),
        _model(
            "vq_model",
            "VQModel",
            {**vae, **sampling, "num_vq_embeddings": 16},
            _images,
            ("ResnetBlock2D",),
            (),
        ),
    ]
