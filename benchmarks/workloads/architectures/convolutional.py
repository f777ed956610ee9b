"""Image models of ``timm`` and ``torchvision``, most with batch norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.workloads.architectures.base import (
    COMMON_SETTINGS,
    Architecture,
    Batch,
    Generator,
    image,
    projection,
)

TIMM = "timm"
TORCHVISION = "torchvision"


def _enable_checkpointing(model: nn.Module) -> None:
    model.set_grad_checkpointing()


def _images(size: int) -> Callable[[Generator], Batch]:
    def batch(generator: Generator) -> Batch:
        return {"x": image(generator, size, batch=8 if size > 32 else 2)}

    return batch


def _timm(
    name: str,
    blocks: tuple[str, ...],
    more: tuple[str, ...] = ("checkpointing",),
    size: int = 32,
    **sizes: Any,
) -> Architecture:
    def build(attention: str | None) -> nn.Module:
        from timm import models

        return getattr(models, name)(num_classes=4, **sizes)

    return Architecture(
        name=f"timm_{name}".lower(),
        family=TIMM,
        build=build,
        batch=_images(size),
        loss=projection,
        blocks=blocks,
        settings=(*COMMON_SETTINGS, *more),
        checkpoint=_enable_checkpointing,
        packages=("timm",),
    )


def _torchvision(
    name: str,
    build: Callable[[Any], nn.Module],
    blocks: tuple[str, ...],
    size: int = 32,
    more: tuple[str, ...] = (),
) -> Architecture:
    """``build`` gets the module ``torchvision.models``."""

    def make(attention: str | None) -> nn.Module:
        from torchvision import models

        return build(models)

    return Architecture(
        name=f"tv_{name}",
        family=TORCHVISION,
        build=make,
        batch=_images(size),
        loss=projection,
        blocks=blocks,
        settings=(*COMMON_SETTINGS, *more),
        packages=("torchvision",),
    )


def architectures() -> list[Architecture]:
    """Both families."""
    return [*_of_timm(), *_of_torchvision()]


def _of_timm() -> list[Architecture]:
    tiny = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    mixer = {"img_size": 64, "patch_size": 16, "embed_dim": 32, "num_blocks": 2}
    stages = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32), "drop_path_rate": 0.1}
    return [
        _timm("resnet18", ("BasicBlock",), ("checkpointing",), 64, layers=(1, 1, 1, 1)),
        _timm("efficientnet_b0", ("InvertedResidual",), size=64, drop_path_rate=0.2),
        _timm("mobilenetv3_small_050", ("InvertedResidual",), size=64),
        _timm("convnext_atto", ("ConvNeXtBlock",), **stages),
        _timm("densenet121", ("DenseBlock",), size=64, block_config=(1, 1, 1, 1), growth_rate=8),
        _timm("vit_tiny_patch16_224", ("Block",), **tiny, drop_path_rate=0.1),
        _timm("MlpMixer", ("MixerBlock",), size=64, **mixer),
        _timm(
            "swin_tiny_patch4_window7_224",
            ("SwinTransformerBlock",),
            img_size=32,
            window_size=4,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 2),
        ),
    ]


def _of_torchvision() -> list[Architecture]:
    def resnet(models: Any) -> nn.Module:
        block = models.resnet.BasicBlock
        return models.ResNet(block, [1, 1, 1, 1], num_classes=4)

    def mobilenet(models: Any) -> nn.Module:
        return models.mobilenet_v3_small(num_classes=4, width_mult=0.5)

    def shufflenet(models: Any) -> nn.Module:
        return models.ShuffleNetV2([1, 1, 1], [8, 16, 16, 32, 64], num_classes=4)

    def googlenet(models: Any) -> nn.Module:
        return models.GoogLeNet(num_classes=4, init_weights=False)

    def densenet(models: Any) -> nn.Module:
        sizes = {"growth_rate": 8, "block_config": (1, 1, 1, 1), "num_init_features": 16}
        return models.DenseNet(**sizes, num_classes=4, memory_efficient=True)

    def vit(models: Any) -> nn.Module:
        return models.VisionTransformer(32, 8, 2, 2, 32, 64, dropout=0.1, num_classes=4)

    def swin(models: Any) -> nn.Module:
        sizes = {"patch_size": [2, 2], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2]}
        return models.SwinTransformer(**sizes, window_size=[4, 4], num_classes=4)

    return [
        _torchvision("resnet", resnet, ("BasicBlock",), 64),
        _torchvision("mobilenet_v3", mobilenet, ("InvertedResidual",), 64),
        _torchvision("shufflenet_v2", shufflenet, ("InvertedResidual",), 64),
        _torchvision("googlenet", googlenet, ("Inception", "InceptionAux"), 64),
        _torchvision("densenet_checkpointed", densenet, ("_DenseBlock",), 64),
        _torchvision("vit", vit, ("EncoderBlock",)),
        _torchvision("swin", swin, ("SwinTransformerBlock",)),
    ]
