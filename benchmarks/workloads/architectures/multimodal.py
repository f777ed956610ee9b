"""Models of text with images."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.workloads.architectures.base import (
    Architecture,
    Batch,
    Generator,
    image,
    projection,
    tokens,
)
from benchmarks.workloads.architectures.hugging_face import (
    COMMON_SETTINGS,
    GROUPED,
    SIZES,
    hugging_face,
)

FAMILY = "multimodal"
IMAGE_TOKEN = 63
TEXT = {**SIZES, "projection_dim": 16}
VISION = {**SIZES, "image_size": 32, "patch_size": 8, "projection_dim": 16}


def _model(name: str, class_name: str, sizes: dict[str, Any], **others: Any) -> Architecture:
    return hugging_face(name, FAMILY, class_name, sizes, **others)


def _pairs(generator: Generator) -> Batch:
    ids = tokens(generator)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": image(generator), "return_loss": True}


def _captioned(generator: Generator) -> Batch:
    ids = tokens(generator)
    return {"input_ids": ids, "pixel_values": image(generator), "labels": ids}


def _with_image_tokens(count: int, **others: Any) -> Any:
    def batch(generator: Generator) -> Batch:
        text = tokens(generator, 2, 8, vocabulary=60)
        places = torch.full((2, count), IMAGE_TOKEN)
        ids = torch.cat([text[:, :1], places, text[:, 1:]], 1)
        made: Batch = {"input_ids": ids, "pixel_values": image(generator), "labels": ids}
        made |= {"attention_mask": torch.ones_like(ids)}
        return {**made, **{name: make(ids) for name, make in others.items()}}

    return batch


def _qwen_batch(generator: Generator) -> Batch:
    """Two images of 4 x 4 patches, merged two by two."""
    batch = _with_image_tokens(4)(generator)
    ids = batch["input_ids"]
    ids[:, 0] = 62
    batch["pixel_values"] = torch.rand(32, 3 * 2 * 8 * 8, generator=generator)
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
    batch["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    return batch


def _boxes(generator: Generator) -> Batch:
    ids = tokens(generator)
    corner = torch.randint(0, 30, (2, 16, 2), generator=generator)
    box = torch.cat([corner, corner + 10], -1)
    return {"input_ids": ids, "bbox": box, "labels": ids}


def _captions(generator: Generator) -> Batch:
    return {"pixel_values": image(generator), "labels": tokens(generator)}


def architectures() -> list[Architecture]:
    """The family."""
    two_towers = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}
    clip_vision = {**VISION, "model_type": "clip_vision_model"}
    siglip_vision = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
    llama = {**GROUPED, "model_type": "llama"}
    gemma = {**GROUPED, "head_dim": 8, "model_type": "gemma"}
    qwen_vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8}
    qwen_text = {
        **GROUPED,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [1, 1, 2],
            "rope_theta": 10000.0,
        },
    }
    special = {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": 62}
    return [
        _model("clip", "CLIPModel", two_towers, batch=_pairs),
        _model("siglip", "SiglipModel", two_towers, batch=_pairs),
        _model("blip", "BlipForConditionalGeneration", two_towers, batch=_captioned),
        _model(
            "git",
            "GitForCausalLM",
            {**SIZES, "vision_config": VISION},
            batch=_captioned,
            blocks=("GitLayer", "GitVisionEncoderLayer"),
        ),
        _model(
            "vilt",
            "ViltModel",
            VISION,
            batch=lambda g: {
                "input_ids": tokens(g),
                "pixel_values": image(g),
            },
            loss=projection,
        ),
        _model(
            "layoutlm",
            "LayoutLMForMaskedLM",
            {**SIZES, "max_2d_position_embeddings": 64},
            batch=_boxes,
            blocks=("LayoutLMLayer",),
        ),
        _model(
            "llava",
            "LlavaForConditionalGeneration",
            {
                "text_config": llama,
                "vision_config": clip_vision,
                "image_token_id": IMAGE_TOKEN,
                "image_token_index": IMAGE_TOKEN,
                "vision_feature_layer": -1,
            },
            batch=_with_image_tokens(16),
        ),
        _model(
            "paligemma",
            "PaliGemmaForConditionalGeneration",
            {
                "text_config": gemma,
                "vision_config": siglip_vision,
                "projection_dim": 32,
                "image_token_id": IMAGE_TOKEN,
                "image_token_index": IMAGE_TOKEN,
                "hidden_size": 32,
            },
            batch=_with_image_tokens(16, token_type_ids=torch.ones_like),
        ),
        _model(
            "idefics3",
            "Idefics3ForConditionalGeneration",
            {
                "text_config": llama,
                "vision_config": VISION,
                "image_token_id": IMAGE_TOKEN,
                "scale_factor": 2,
            },
            batch=lambda g: {
                **(b := _with_image_tokens(4)(g)),
                "pixel_values": b["pixel_values"][:, None],
            },
        ),
        _model(
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            {
                "text_config": qwen_text,
                "vision_config": qwen_vision,
                **special,
            },
            batch=_qwen_batch,
        ),
        _model(
            "vision_encoder_decoder",
            "VisionEncoderDecoderModel",
            {
                "encoder": {**VISION, "model_type": "vit"},
                "decoder": {
                    **SIZES,
                    "model_type": "bert",
                    "is_decoder": True,
                    "add_cross_attention": True,
                },
                "decoder_start_token_id": 1,
                "pad_token_id": 0,
            },
            batch=_captions,
            blocks=("ViTLayer", "BertLayer"),
            settings=COMMON_SETTINGS,
        ),
    ]
