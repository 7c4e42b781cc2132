"""A sample of Transformers' model types with configurations of our own, by the checks of `recipes.compatibility`.

All model types with Transformers' own testers are in docs/compatibility.md.
"""

import pytest
import torch
import transformers
from transformers.models.t5.modeling_t5 import T5Attention

from hf_efficient_attn.integration.models import uses_interface
from recipes.compatibility.checks import REFUSED, WORKS, check
from recipes.compatibility.testers import Case

# Values for all configs that have such an attribute.
TINY = {
    "vocab_size": 60, "hidden_size": 32, "d_model": 32, "dim": 32, "n_embd": 32, "embedding_size": 32,
    "word_embed_proj_dim": 32, "num_hidden_layers": 2, "n_layers": 2, "n_layer": 2, "num_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "n_heads": 4, "n_head": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "hidden_dim": 48,
    "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_ff": 48, "d_kv": 8, "max_position_embeddings": 80,
    "max_target_positions": 80, "max_source_positions": 40, "num_mel_bins": 8, "image_size": 32, "patch_size": 8,
    "attention_types": [[["global"], 2]], "mlp_ratio": 2, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
    "decoder_start_token_id": 2, "conv_dim": [16, 16], "conv_stride": [4, 2], "conv_kernel": [8, 4],
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "layer_types": None, "sliding_window": None,
}  # fmt: skip
TEXT, DECODER, PICTURE, PAIR, SOUND, MEL = "text", "decoder", "picture", "pair", "sound", "mel"
SAMPLE = {
    "Bert": TEXT, "Roberta": TEXT, "XLMRoberta": TEXT, "Electra": TEXT, "DistilBert": TEXT, "Albert": TEXT,
    "Camembert": TEXT, "Ernie": TEXT, "Esm": TEXT, "ConvBert": TEXT, "Aimv2Text": TEXT, "CLIPText": TEXT,
    "SiglipText": TEXT, "ViT": PICTURE, "DeiT": PICTURE, "Dinov2": PICTURE, "CLIPVision": PICTURE,
    "SiglipVision": PICTURE, "ViTMAE": PICTURE, "GPT2": DECODER, "GPTNeoX": DECODER, "Llama": DECODER,
    "Mistral": DECODER, "Qwen2": DECODER, "Qwen3": DECODER, "Gemma": DECODER, "Phi": DECODER, "OPT": DECODER,
    "Olmo2": DECODER, "Granite": DECODER, "Cohere": DECODER, "StableLm": DECODER, "Starcoder2": DECODER,
    "Bart": PAIR, "MBart": PAIR, "Marian": PAIR, "Pegasus": PAIR, "M2M100": PAIR, "T5": PAIR, "Whisper": MEL,
    "Wav2Vec2": SOUND, "Hubert": SOUND,
}  # fmt: skip
REFUSALS = {"T5": "relative positions", "ConvBert": "does not compute its attention through"}
# The window of longformer adds the bias of T5, where T5 asks Transformers' interface.
WORKS_AFTER_ALL = {("T5", "longformer")} if uses_interface(T5Attention) else set()
HEADS = {
    DECODER: ("ForCausalLM", "LMHeadModel"),
    PAIR: ("ForConditionalGeneration", "MTModel"),
    MEL: ("ForConditionalGeneration",),
}


def case(name: str) -> Case:
    """The tiny model of a type, with a head that generates if it has one."""
    kind = SAMPLE[name]
    config_class = getattr(transformers, f"{name}Config")
    config = config_class()
    config = config_class(**{key: value for key, value in TINY.items() if hasattr(config, key)})
    if kind == PAIR:  # T5's config has no such attribute by default
        config.decoder_start_token_id = TINY["decoder_start_token_id"]
    names = [name + head for head in (*HEADS.get(kind, ()), "Model")]
    model_class = next(getattr(transformers, found) for found in names if hasattr(transformers, found))
    ids = torch.randint(4, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    floats = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    inputs = {
        TEXT: {"input_ids": ids}, DECODER: {"input_ids": ids}, PICTURE: {"pixel_values": floats},
        PAIR: {"input_ids": ids, "decoder_input_ids": ids[:, :20]},
        SOUND: {"input_values": floats.view(2, -1)[:, :900]},
        MEL: {"input_features": floats.view(2, 8, -1)[:, :, :80], "decoder_input_ids": ids[:, :20]},
    }[kind]  # fmt: skip
    generation = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    return Case(model_class.__name__, model_class, config, inputs, generation if kind in HEADS else None)


@pytest.mark.parametrize("method", ["kdeformer", "nearfar", "linear", "longformer"])
@pytest.mark.parametrize("name", SAMPLE)
def test_model_types(name, method):
    (found,) = check(case(name), method)
    if name in REFUSALS and (name, method) not in WORKS_AFTER_ALL:
        assert found.status == REFUSED, found
        assert REFUSALS[name] in found.reason
        return
    assert found.status == WORKS, found
    kind = SAMPLE[name]
    assert {"forward", "save and load"} <= set(found.checks)
    assert ("padding" in found.checks) == (kind in (TEXT, DECODER, PAIR))
    assert ("future" in found.checks) >= (kind == DECODER)
    assert ("generate" in found.checks) == (kind in HEADS)
