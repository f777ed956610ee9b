"""Models of research code: ``vit-pytorch`` and ``x-transformers``.

Their blocks are small modules in lists of lists, called by the model itself, and reshape by einops.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.workloads.architectures.base import (
    COMMON_SETTINGS,
    LENGTH,
    VOCABULARY,
    Architecture,
    Batch,
    Generator,
    image,
    projection,
    tokens,
)

VIT = "vit_pytorch"
X = "x_transformers"
PARTS = ("Attention", "FeedForward")
SIZES: dict[str, Any] = {"dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "num_classes": 4}
PATCHES: dict[str, Any] = {**SIZES, "image_size": 32, "patch_size": 8, "dim_head": 16}


def _images(argument: str, size: int = 32, batch: int = 2) -> Callable[[Generator], Batch]:
    return lambda generator: {argument: image(generator, size, batch=batch)}


def _videos(generator: Generator) -> Batch:
    return {"video": torch.rand(2, 3, 4, 32, 32, generator=generator)}


def _several_sizes(generator: Generator) -> Batch:
    sizes = ((32, 16), (16, 24), (32, 32))
    return {
        "batched_images": [
            [torch.rand(3, *size, generator=generator) for size in sizes[:2]],
            [torch.rand(3, *sizes[2], generator=generator)],
        ]
    }


def _vit(
    module: str,
    class_name: str,
    sizes: dict[str, Any] | None = None,
    blocks: tuple[str, ...] = PARTS,
    batch: Callable[[Generator], Batch] | None = None,
    **more: Any,
) -> Architecture:
    """A model of one file of ``vit_pytorch``; ``sizes`` in place of those of most."""

    def build(attention: str | None) -> nn.Module:
        file = importlib.import_module(f"vit_pytorch.{module}")
        return getattr(file, class_name)(**(PATCHES if sizes is None else sizes), **more)

    return Architecture(
        name=f"vitp_{module}",
        family=VIT,
        build=build,
        batch=batch or _images("img"),
        loss=projection,
        blocks=blocks,
        settings=COMMON_SETTINGS,
        packages=("vit_pytorch", "torchvision"),
    )


def _ids(generator: Generator) -> Batch:
    return {"x": tokens(generator)}


def _x(
    name: str,
    build: Callable[[Any], nn.Module],
    batch: Callable[[Generator], Batch] = _ids,
) -> Architecture:
    """``build`` gets the package."""
    return Architecture(
        name=f"xt_{name}",
        family=X,
        build=lambda attention: build(importlib.import_module(X)),
        batch=batch,
        loss=projection,
        blocks=PARTS,
        settings=COMMON_SETTINGS,
        packages=(X,),
    )


def _decoder(
    name: str,
    is_trained_by_wrapper: bool = False,
    around: Mapping[str, Any] | None = None,
    **options: Any,
) -> Architecture:
    """A decoder of tokens with options of the layers, and some of what is ``around`` them."""

    def build(package: Any) -> nn.Module:
        layers = package.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
        model = package.TransformerWrapper(
            num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers, **(around or {})
        )
        return package.AutoregressiveWrapper(model) if is_trained_by_wrapper else model

    return _x(name, build)


def architectures() -> list[Architecture]:
    """Both families."""
    return [*_of_vit_pytorch(), *_of_x_transformers()]


def _of_vit_pytorch() -> list[Architecture]:
    levit = {"image_size": 64, "num_classes": 4, "stages": 2, "dim": (16, 32), "depth": 2}
    levit |= {"heads": (2, 2), "mlp_mult": 2, "dim_key": 8, "dim_value": 8}
    nest = {"image_size": 32, "patch_size": 4, "num_classes": 4, "dim": 16, "heads": 2}
    nest |= {"num_hierarchies": 2, "block_repeats": (1, 1)}
    mobile = {"image_size": (64, 64), "dims": [16, 16, 16], "num_classes": 4}
    mobile |= {"channels": [8, 8, 16, 16, 16, 16, 16, 16, 16, 16, 32], "depths": (1, 1, 1)}
    twins = {"num_classes": 4, "s1_emb_dim": 8, "s1_depth": 1, "s2_emb_dim": 16}
    twins |= {"s2_depth": 1, "s3_emb_dim": 16, "s3_depth": 1}
    twins |= {"s4_emb_dim": 32, "s4_depth": 1, "s1_local_patch_size": 2}
    twins |= {"s2_local_patch_size": 1, "s3_local_patch_size": 1, "s4_local_patch_size": 1}
    twins |= {"s1_global_k": 2, "s2_global_k": 1, "s3_global_k": 1, "s4_global_k": 1}
    maxvit = {"num_classes": 4, "dim_conv_stem": 8, "dim": 16, "dim_head": 8, "depth": (1, 1)}
    maxvit |= {"window_size": 4, "mbconv_expansion_rate": 2, "mbconv_shrinkage_rate": 0.5}
    frames = {**PATCHES, "frames": 4, "frame_patch_size": 2}
    frames["image_patch_size"] = frames.pop("patch_size")
    spatial = {key: value for key, value in frames.items() if key != "depth"}

    return [
        _vit("vit", "ViT", dropout=0.1, emb_dropout=0.1),
        _vit("simple_vit", "SimpleViT"),
        _vit("deepvit", "DeepViT"),
        _vit("cait", "CaiT", cls_depth=1, layer_dropout=0.3),
        _vit("t2t", "T2TViT", {**SIZES, "image_size": 32}, t2t_layers=((7, 4), (3, 2))),
        _vit(
            "cct",
            "CCT",
            {"img_size": 32, "embedding_dim": 32, "num_layers": 2, "num_heads": 2, "mlp_ratio": 2},
            blocks=("TransformerEncoderLayer",),
            batch=_images("x"),
            num_classes=4,
        ),
        _vit(
            "cross_vit",
            "CrossViT",
            {"image_size": 32, "num_classes": 4, "depth": 1, "sm_dim": 16, "lg_dim": 32},
            sm_patch_size=8,
            lg_patch_size=16,
            sm_enc_heads=2,
            lg_enc_heads=2,
            lg_enc_depth=1,
            sm_enc_mlp_dim=32,
            lg_enc_mlp_dim=32,
        ),
        _vit("pit", "PiT", {**PATCHES, "depth": (1, 1)}),
        _vit("levit", "LeViT", levit, blocks=("Transformer",), batch=_images("img", 64, 8)),
        _vit("nest", "NesT", nest, blocks=("Transformer",)),
        _vit(
            "mobile_vit",
            "MobileViT",
            mobile,
            blocks=("MV2Block", "MobileViTBlock"),
            batch=_images("x", 64, 8),
        ),
        _vit(
            "twins_svt",
            "TwinsSVT",
            twins,
            blocks=("Transformer",),
            batch=_images("x"),
        ),
        _vit("max_vit", "MaxViT", maxvit, batch=_images("x", 64, 8)),
        _vit("rvt", "RvT"),
        _vit("xcit", "XCiT", cls_depth=1),
        _vit("parallel_vit", "ViT", num_parallel_branches=2),
        _vit("learnable_memory_vit", "ViT"),
        _vit("ats_vit", "ViT", max_tokens_per_depth=(12, 8)),
        _vit("normalized_vit", "nViT", batch=_images("images")),
        _vit(
            "look_vit",
            "LookViT",
            {"dim": 32, "image_size": 32, "num_classes": 4, "depth": 2},
            patch_size=8,
            highres_patch_size=4,
            heads=2,
            cross_attn_heads=2,
            dim_head=16,
        ),
        _vit("jumbo_vit", "JumboViT"),
        _vit("simple_uvit", "SimpleUViT"),
        _vit("simple_vit_with_fft", "SimpleViT", freq_patch_size=8),
        _vit("simple_vit_with_hyper_connections", "SimpleViT", num_residual_streams=2),
        _vit("simple_vit_with_value_residual", "SimpleViT"),
        _vit("simple_vit_with_qk_norm", "SimpleViT"),
        _vit("simple_vit_attn_residual", "SimpleViTAttnResidual"),
        _vit("vit_for_small_dataset", "ViT"),
        _vit("vit_with_patch_dropout", "ViT"),
        _vit("vit_with_patch_merger", "ViT"),
        _vit("vit_with_decorr", "ViT"),
        _vit("vit_5", "ViT"),
        _vit("vit_detpool", "ViTDetPool"),
        _vit("na_vit", "NaViT", batch=_several_sizes),
        _vit(
            "na_vit_nested_tensor",
            "NaViT",
            token_dropout_prob=0.1,
            batch=lambda g: {"images": [torch.rand(3, 32, 16, generator=g), image(g)[0]]},
        ),
        _vit("vit_3d", "ViT", frames, batch=_videos),
        _vit("vivit", "ViViT", spatial, batch=_videos, spatial_depth=1, temporal_depth=1),
    ]


def _of_x_transformers() -> list[Architecture]:
    def translator(package: Any) -> nn.Module:
        sizes = {
            f"{side}_{key}": value
            for side in ("enc", "dec")
            for key, value in {
                "num_tokens": VOCABULARY,
                "depth": 2,
                "heads": 2,
                "max_seq_len": LENGTH,
            }.items()
        }
        return package.XTransformer(dim=32, tie_token_emb=True, **sizes)

    def pairs(generator: Generator) -> Batch:
        return {"src": tokens(generator), "tgt": tokens(generator)}

    def continuous(package: Any) -> nn.Module:
        layers = package.Encoder(dim=32, depth=2, heads=2, attn_dim_head=16)
        return package.ContinuousTransformerWrapper(
            dim_in=8, dim_out=8, max_seq_len=LENGTH, attn_layers=layers
        )

    def waves(generator: Generator) -> Batch:
        return {"x": torch.rand(2, LENGTH, 8, generator=generator)}

    memories = {"max_mem_len": LENGTH, "num_memory_tokens": 3, "emb_dropout": 0.1}
    return [
        _decoder("decoder"),
        _decoder("autoregressive", is_trained_by_wrapper=True, rotary_pos_emb=True),
        _decoder("alibi", alibi_pos_bias=True, ff_glu=True, ff_swish=True),
        _decoder("rms_norm", use_rmsnorm=True, attn_qk_norm=True, ff_no_bias=True),
        _decoder("macaron", macaron=True, sandwich_norm=True),
        _decoder("residual_attention", residual_attn=True, attn_pre_talking_heads=True),
        _decoder("gated", gate_residual=True, attn_gate_values=True, shift_tokens=1),
        _decoder("sparse", attn_sparse_topk=4, attn_on_attn=True),
        _decoder("scale_norm", use_scalenorm=True, rel_pos_bias=True, zero_init_branch_output=True),
        _decoder("multi_query", attn_kv_heads=1, attn_flash=True, layer_dropout=0.2),
        _decoder("hyper_connections", num_residual_streams=2),
        _decoder("dynamic_positions", dynamic_pos_bias=True, dynamic_pos_bias_log_distance=False),
        _x("encoder_decoder", translator, pairs),
        _x("continuous", continuous, waves),
        _decoder("memory_tokens", around=memories, rel_pos_bias=True),
    ]
