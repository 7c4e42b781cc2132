"""Tiny models of an encoder and a decoder."""

import inspect

import pytest
import torch
import transformers

from helpers.model_types import case, sizes
from tiny_models import enlarged, tiny_config

FAMILIES = {"bart": "Bart", "marian": "Marian", "m2m100": "M2M100", "whisper": "Whisper"}


def tiny(family: str, **changes):
    """A tiny random model with large weights, so that attention is not uniform."""
    model_class, config, _ = case(FAMILIES.get(family, family), **{"max_position_embeddings": 128, **changes})
    torch.manual_seed(0)
    model = enlarged(model_class(config), 5.0)
    model.generation_config.max_length = model.generation_config.forced_eos_token_id = None
    return model


def inputs_of(family: str, length: int = 70) -> dict:
    """Inputs of the encoder, with padding if they are texts."""
    return {key: x for key, x in case(FAMILIES[family], length)[2].items() if not key.startswith("decoder")}


def composite():
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        tiny_config("bert"), tiny_config("bert", is_decoder=True, add_cross_attention=True)
    )
    return transformers.EncoderDecoderModel(config).eval()


def t5(kind: str = "T5"):
    """A tiny T5, or a relative, with a large bias, so that the output depends on it."""
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(transformers.models.t5.modeling_t5):
        pytest.skip("T5 of this version does not use the interface")
    torch.manual_seed(0)
    config_class, buckets = getattr(transformers, f"{kind}Config"), "relative_attention_num_buckets"
    changes = {buckets: 8, "relative_attention_max_distance": 20, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    config = config_class(**sizes(config_class, pad_token_id=0, **changes))
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:
            parameter.data.normal_(std=2.0)
    model.generation_config.max_length = None
    return model


def musicgen():
    """A model with three parts. A T5 reads texts, and the decoder writes codes of sound."""
    parts = {"text_encoder": transformers.T5Config, "decoder": transformers.MusicgenDecoderConfig}
    values = {name: kind(**sizes(kind)).to_dict() for name, kind in parts.items()}
    sound = {"num_filters": 4, "codebook_size": 16, "codebook_dim": 8, "hidden_size": 8, "upsampling_ratios": [2, 2]}
    values["audio_encoder"] = transformers.EncodecConfig(**sound, target_bandwidths=[1.0]).to_dict()
    return transformers.MusicgenForConditionalGeneration(transformers.MusicgenConfig(**values)).eval()
