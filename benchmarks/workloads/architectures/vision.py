"""Models of images and videos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.workloads.architectures.base import (
    Architecture,
    Batch,
    Generator,
    classes_of,
    image,
    projection,
)
from benchmarks.workloads.architectures.hugging_face import (
    COMMON_SETTINGS,
    SIZES,
    hugging_face,
)

FAMILY = "vision"
PATCHES: dict[str, Any] = {**SIZES, "image_size": 32, "patch_size": 8}


def labelled(size: int = 32, batch: int = 2) -> Callable[[Generator], Batch]:
    """Images and their classes, two by default; batch norm needs more images."""

    def make(generator: Generator) -> Batch:
        labels = classes_of(generator, 2, batch)
        return {"pixel_values": image(generator, size, batch=batch), "labels": labels}

    return make


def pictures(size: int = 32) -> Callable[[Generator], Batch]:
    """Images alone."""

    def batch(generator: Generator) -> Batch:
        return {"pixel_values": image(generator, size)}

    return batch


def _segments(generator: Generator) -> Batch:
    labels = torch.randint(0, 2, (2, 32, 32), generator=generator)
    return {"pixel_values": image(generator), "labels": labels}


def _video(generator: Generator) -> Batch:
    frames = torch.rand(2, 4, 3, 32, 32, generator=generator)
    return {"pixel_values": frames, "labels": classes_of(generator, 2)}


def _noisy(generator: Generator) -> Batch:
    return {"pixel_values": image(generator), "noise": torch.rand(2, 16, generator=generator)}


def _model(name: str, class_name: str, sizes: dict[str, Any], **others: Any) -> Architecture:
    return hugging_face(name, FAMILY, class_name, sizes, **{"batch": labelled(), **others})


def architectures() -> list[Architecture]:
    """The family."""
    return [*_transformers(), *_convolutions(), *_dense()]


def _transformers() -> list[Architecture]:
    swin = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2]}
    swin |= {"num_heads": [2, 2], "window_size": 4}
    cvt = {"embed_dim": [16, 32], "num_heads": [2, 2], "depth": [1, 2], "num_stages": 2}
    mae = {**PATCHES, "decoder_num_hidden_layers": 2, "decoder_hidden_size": 32}
    mae |= {"decoder_num_attention_heads": 4, "decoder_intermediate_size": 64}
    return [
        _model("vit", "ViTForImageClassification", PATCHES, more=("sdpa", "eager")),
        _model("deit", "DeiTForImageClassification", PATCHES),
        _model("beit", "BeitForImageClassification", PATCHES),
        _model("swin", "SwinForImageClassification", swin),
        _model("swinv2", "Swinv2ForImageClassification", swin),
        _model("dinov2", "Dinov2ForImageClassification", PATCHES),
        _model("dinov3_vit", "DINOv3ViTModel", PATCHES, batch=pictures(), loss=projection),
        _model("vit_mae", "ViTMAEForPreTraining", mae, batch=_noisy),
        _model(
            "hiera",
            "HieraForImageClassification",
            {
                "image_size": [32, 32],
                "patch_size": [3, 3],
                "patch_stride": [2, 2],
                "patch_padding": [1, 1],
                "embed_dim": 16,
                "depths": [1, 1],
                "num_heads": [1, 2],
                "masked_unit_size": [4, 4],
                "num_query_pool": 1,
                "query_stride": [2, 2],
            },
            blocks=("HieraLayer",),
        ),
        _model(
            "cvt",
            "CvtForImageClassification",
            {
                **cvt,
                "patch_sizes": [7, 3],
                "patch_stride": [4, 2],
                "patch_padding": [2, 1],
                "mlp_ratio": [2.0, 2.0],
                "attention_drop_rate": [0.0, 0.0],
                "drop_rate": [0.0, 0.0],
                "drop_path_rate": [0.0, 0.1],
                "qkv_bias": [True, True],
                "cls_token": [False, True],
                "qkv_projection_method": ["dw_bn", "dw_bn"],
                "kernel_qkv": [3, 3],
                "padding_kv": [1, 1],
                "stride_kv": [2, 2],
                "padding_q": [1, 1],
                "stride_q": [1, 1],
            },
            settings=COMMON_SETTINGS,
            blocks=("CvtLayer",),
        ),
        _model(
            "pvt_v2",
            "PvtV2ForImageClassification",
            {
                "image_size": 32,
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 16, 16, 32],
                "num_attention_heads": [1, 2, 2, 4],
            },
            blocks=("PvtV2BlockLayer",),
        ),
        _model(
            "videomae",
            "VideoMAEForVideoClassification",
            {
                **PATCHES,
                "num_frames": 4,
                "tubelet_size": 2,
            },
            batch=_video,
        ),
    ]


def _convolutions() -> list[Architecture]:
    stages = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "image_size": 32}
    plain = COMMON_SETTINGS
    return [
        _model(
            "convnext",
            "ConvNextForImageClassification",
            stages,
            blocks=("ConvNextLayer",),
            settings=plain,
        ),
        _model(
            "resnet",
            "ResNetForImageClassification",
            {
                **stages,
                "embedding_size": 8,
                "layer_type": "basic",
            },
            blocks=("ResNetBasicLayer",),
            settings=plain,
        ),
        _model(
            "regnet",
            "RegNetForImageClassification",
            {
                **stages,
                "embedding_size": 8,
                "groups_width": 8,
            },
            blocks=("RegNetYLayer",),
            settings=plain,
        ),
        _model(
            "mobilenet_v2",
            "MobileNetV2ForImageClassification",
            {
                "image_size": 64,
                "depth_multiplier": 0.25,
            },
            batch=labelled(64, batch=8),
            blocks=("MobileNetV2InvertedResidual",),
            settings=plain,
        ),
        _model(
            "efficientnet",
            "EfficientNetForImageClassification",
            {
                "image_size": 64,
                "width_coefficient": 0.25,
                "depth_coefficient": 0.3,
                "hidden_dim": 320,
            },
            batch=labelled(64, batch=8),
            blocks=("EfficientNetBlock",),
            settings=plain,
        ),
        _model(
            "mobilevit",
            "MobileViTForImageClassification",
            {
                "image_size": 64,
                "hidden_sizes": [16, 24, 32],
                "num_attention_heads": 2,
                "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64],
            },
            batch=labelled(64),
            blocks=("MobileViTTransformerLayer",),
        ),
        _model(
            "poolformer",
            "PoolFormerForImageClassification",
            {
                "image_size": 32,
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 16, 16, 32],
            },
            blocks=("PoolFormerLayer",),
            settings=plain,
        ),
        _model(
            "focalnet",
            "FocalNetForImageClassification",
            {
                "image_size": 32,
                "embed_dim": 8,
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 16, 24, 32],
            },
            blocks=("FocalNetLayer",),
        ),
        _model(
            "levit",
            "LevitForImageClassification",
            {
                "image_size": 64,
                "hidden_sizes": [16, 24, 32],
                "num_attention_heads": [2, 2, 2],
                "depths": [1, 1, 1],
                "key_dim": [8, 8, 8],
            },
            batch=labelled(64, batch=8),
            blocks=("LevitResidualLayer",),
            settings=plain,
        ),
    ]


def _dense() -> list[Architecture]:
    """Segmentation, detection and depth."""
    return [
        _model(
            "segformer",
            "SegformerForSemanticSegmentation",
            {
                "image_size": 32,
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 16, 16, 32],
                "num_attention_heads": [1, 2, 2, 4],
                "decoder_hidden_size": 16,
            },
            batch=_segments,
            blocks=("SegformerLayer",),
            settings=COMMON_SETTINGS,
        ),
        _model(
            "upernet_beit",
            "BeitForSemanticSegmentation",
            {
                **PATCHES,
                "num_hidden_layers": 4,
                "out_indices": [1, 2, 3, 4],
            },
            batch=_segments,
        ),
        _model(
            "yolos",
            "YolosModel",
            {
                **PATCHES,
                "image_size": [32, 32],
                "num_detection_tokens": 4,
            },
            batch=pictures(),
            loss=projection,
        ),
    ]
