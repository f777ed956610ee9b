"""Models of sound, and of time series."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.workloads.architectures.base import (
    Architecture,
    Batch,
    Generator,
    classes_of,
    projection,
    tokens,
)
from benchmarks.workloads.architectures.hugging_face import (
    COMMON_SETTINGS,
    SIZES,
    hugging_face,
)
from benchmarks.workloads.architectures.language import ENCODER_DECODER

FAMILY = "audio"
NUMPY = "in compiled code Dynamo draws numpy's random numbers from torch's generator"


def _waves(generator: Generator) -> Batch:
    labels = tokens(generator, 2, 4)
    return {"input_values": torch.randn(2, 2000, generator=generator), "labels": labels}


def _spectra(generator: Generator) -> Batch:
    return {
        "input_features": torch.rand(2, 16, 32, generator=generator),
        "labels": tokens(generator),
    }


def _frames(generator: Generator) -> Batch:
    features = torch.rand(2, 32, 16, generator=generator)
    return {"input_features": features, "labels": tokens(generator)}


def _spectrogram(generator: Generator) -> Batch:
    values = torch.rand(2, 64, 16, generator=generator)
    return {"input_values": values, "labels": classes_of(generator, 2)}


def _sound(generator: Generator) -> Batch:
    return {"input_values": torch.randn(2, 1, 640, generator=generator)}


def _past(generator: Generator) -> Batch:
    past = torch.rand(2, 32, 3, generator=generator)
    return {"past_values": past, "future_values": torch.rand(2, 4, 3, generator=generator)}


def _dated(generator: Generator) -> Batch:
    """A series with its dates: 16 values and 7 lags before them."""
    return {
        "past_values": torch.rand(2, 23, generator=generator),
        "past_time_features": torch.rand(2, 23, 2, generator=generator),
        "past_observed_mask": torch.ones(2, 23),
        "future_values": torch.rand(2, 4, generator=generator),
        "future_time_features": torch.rand(2, 4, 2, generator=generator),
    }


def _model(name: str, class_name: str, sizes: dict[str, Any], **others: Any) -> Architecture:
    return hugging_face(name, FAMILY, class_name, sizes, **others)


def architectures() -> list[Architecture]:
    """The family."""
    waves = {**SIZES, "conv_dim": [16, 16, 16], "conv_stride": [5, 4, 4], "conv_kernel": [10, 8, 4]}
    waves |= {"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 8, "mask_time_length": 2}
    waves |= {"num_conv_pos_embedding_groups": 2, "ctc_zero_infinity": True}
    whisper = {**ENCODER_DECODER, "num_mel_bins": 16, "max_source_positions": 16}
    whisper |= {"max_target_positions": 32, "decoder_start_token_id": 1}
    speech = {**ENCODER_DECODER, "input_feat_per_channel": 16, "conv_channels": 16}
    speech |= {"max_source_positions": 64, "max_target_positions": 64}
    dated = {"prediction_length": 4, "context_length": 16, "num_time_features": 2}
    dated |= {"lags_sequence": [1, 2, 7], "d_model": 16, "encoder_layers": 2, "decoder_layers": 2}
    patches = {"num_input_channels": 3, "context_length": 32, "patch_length": 8}
    patches |= {"patch_stride": 8, "d_model": 32, "num_attention_heads": 4, "ffn_dim": 64}
    return [
        _model("whisper", "WhisperForConditionalGeneration", whisper, batch=_spectra),
        _model(
            "wav2vec2",
            "Wav2Vec2ForCTC",
            waves,
            batch=_waves,
            blocks=("Wav2Vec2EncoderLayer",),
            note=NUMPY,
        ),
        _model(
            "hubert",
            "HubertForCTC",
            waves,
            batch=_waves,
            blocks=("HubertEncoderLayer",),
            note=NUMPY,
        ),
        _model(
            "wavlm",
            "WavLMForCTC",
            waves,
            batch=_waves,
            blocks=("WavLMEncoderLayer",),
            note="under FSDP transformers itself runs the layers that LayerDrop would skip",
        ),
        _model(
            "speech_to_text",
            "Speech2TextForConditionalGeneration",
            speech,
            batch=_frames,
            blocks=("Speech2TextEncoderLayer", "Speech2TextDecoderLayer"),
        ),
        _model(
            "ast",
            "ASTForAudioClassification",
            {
                **SIZES,
                "max_length": 64,
                "num_mel_bins": 16,
                "patch_size": 8,
                "frequency_stride": 8,
                "time_stride": 8,
            },
            batch=_spectrogram,
            blocks=("ASTLayer",),
            settings=COMMON_SETTINGS,
        ),
        _model(
            "encodec",
            "EncodecModel",
            {
                "num_filters": 4,
                "upsampling_ratios": [4, 2],
                "codebook_size": 16,
                "codebook_dim": 16,
                "hidden_size": 16,
                "num_lstm_layers": 1,
            },
            batch=_sound,
            loss=projection,
            settings=COMMON_SETTINGS,
            blocks=("EncodecResnetBlock", "EncodecLSTM"),
        ),
        _model(
            "patchtst",
            "PatchTSTForPrediction",
            {
                **patches,
                "prediction_length": 4,
                "num_hidden_layers": 2,
            },
            batch=_past,
            blocks=("PatchTSTEncoderLayer",),
            settings=COMMON_SETTINGS,
        ),
        _model(
            "time_series_transformer",
            "TimeSeriesTransformerForPrediction",
            {
                **dated,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
            },
            batch=_dated,
            blocks=(
                "TimeSeriesTransformerEncoderLayer",
                "TimeSeriesTransformerDecoderLayer",
            ),
        ),
    ]
