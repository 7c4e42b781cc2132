"""A sample of Transformers' model types: tiny configurations, inputs and outputs.

docs/compatibility.md lists all model types.
"""

import copy

import torch
import transformers
from transformers import set_seed
from transformers.models.t5.modeling_t5 import T5Attention

from hf_efficient_attn.integration.models import uses_interface

# Values for all configs that have such an attribute.
TINY = {
    "vocab_size": 60, "hidden_size": 32, "d_model": 32, "dim": 32, "n_embd": 32, "embedding_size": 32,
    "word_embed_proj_dim": 32, "num_hidden_layers": 2, "n_layers": 2, "n_layer": 2, "num_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "n_heads": 4, "n_head": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "hidden_dim": 48,
    "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_ff": 48, "d_kv": 8, "max_position_embeddings": 80,
    "max_target_positions": 80, "max_source_positions": 100, "num_mel_bins": 8, "image_size": 32, "patch_size": 8,
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
    "Wav2Vec2": SOUND, "Hubert": SOUND, "MPNet": TEXT, "RoFormer": TEXT, "MegatronBert": TEXT, "RemBert": TEXT,
    "Tapas": TEXT, "Lilt": TEXT, "Bloom": DECODER, "DiffLlama": DECODER,
}  # fmt: skip
BIAS = "relative positions"
NO_INTERFACE = "does not compute its attention through"
REFUSALS = {"T5": f"{BIAS}|{NO_INTERFACE}", "MPNet": BIAS, "Bloom": BIAS, "ConvBert": NO_INTERFACE}
if hasattr(transformers.models.diffllama.modeling_diffllama, "DIFFLLAMA_ATTENTION_CLASSES"):  # Transformers 5.12
    REFUSALS["DiffLlama"] = "chooses its attention from a table"
# Methods that add the bias. T5 does not ask Transformers' interface in all versions.
WORKS_AFTER_ALL = {("T5", "longformer")} if uses_interface(T5Attention) else set()
WORKS_AFTER_ALL |= {("MPNet", method) for method in ("kdeformer", "nearfar", "longformer")} | {("Bloom", "longformer")}
HEADS = {DECODER: ("ForCausalLM", "LMHeadModel"), **dict.fromkeys((MEL, PAIR), ("ForConditionalGeneration", "MTModel"))}


def sizes(config_class: type, **changes) -> dict:
    """The values of `TINY` that a config has, and changes."""
    config = config_class()
    config.allow_global_per_layer_attribute_access = True  # Transformers 5.24
    return {**{key: value for key, value in TINY.items() if hasattr(config, key)}, **changes}


def case(name: str, length: int = 40, **changes):
    """The class of a type, with a head that generates if it has one, a tiny config, and inputs with padding."""
    kind, config_class = SAMPLE[name], getattr(transformers, f"{name}Config")
    changes |= {"hidden_size": 48} if name == "Lilt" else {}  # a multiple of 24
    config = config_class(**sizes(config_class, **changes))
    if kind == PAIR:  # T5's config has no such attribute by default
        config.decoder_start_token_id = TINY["decoder_start_token_id"]
    names = [name + head for head in (*HEADS.get(kind, ()), "Model")]
    model_class = next(getattr(transformers, found) for found in names if hasattr(transformers, found))
    ids = torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(0))
    floats = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    sound = floats.view(2, -1)[:, :900]
    inputs = {
        TEXT: {"input_ids": ids, "attention_mask": mask_of(ids)},
        DECODER: {"input_ids": ids, "attention_mask": mask_of(ids)},
        PICTURE: {"pixel_values": floats},
        PAIR: {"input_ids": ids, "attention_mask": mask_of(ids), "decoder_input_ids": ids[:, :20]},
        SOUND: {"input_values": sound, "attention_mask": mask_of(sound)},
        MEL: {"input_features": floats.view(2, 8, -1)[:, :, :200], "decoder_input_ids": ids[:, :20]},
    }[kind]  # fmt: skip
    return model_class, config, inputs


def mask_of(x):
    mask = torch.ones(x.shape, dtype=torch.long)
    mask[0, -x.shape[1] // 4 :] = 0
    return mask


def outputs(model, inputs):
    set_seed(0)
    with torch.no_grad():
        found = model(**copy.deepcopy(inputs))
    return {key: x for key, x in found.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
