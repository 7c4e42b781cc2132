"""A sample of Transformers' model types with tiny configurations: what works with each method, and what is refused.

docs/compatibility.md lists all model types.
"""

import copy

import pytest
import torch
import transformers
from transformers import set_seed
from transformers.models.t5.modeling_t5 import T5Attention

from hf_efficient_attn.errors import UnsupportedAttentionError
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
    "Tapas": TEXT, "Lilt": TEXT, "Bloom": DECODER,
}  # fmt: skip
BIAS = "relative positions"
REFUSALS = {
    "T5": f"{BIAS}|does not compute its attention through",
    "MPNet": BIAS,
    "Bloom": BIAS,
    "ConvBert": "does not compute its attention through",
}
# Methods that add the bias. T5 does not ask Transformers' interface in all versions.
WORKS_AFTER_ALL = {("T5", "longformer")} if uses_interface(T5Attention) else set()
WORKS_AFTER_ALL |= {("MPNet", method) for method in ("kdeformer", "nearfar", "longformer")} | {("Bloom", "longformer")}
HEADS = {
    DECODER: ("ForCausalLM", "LMHeadModel"),
    PAIR: ("ForConditionalGeneration", "MTModel"),
    MEL: ("ForConditionalGeneration",),
}


def sizes(config_class: type, **changes) -> dict:
    """The values of `TINY` that a config has, and changes."""
    config = config_class()
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


def distance(found, expected, kept=None):
    """The largest difference at positions that are kept, relative to the largest expected value of its tensor."""
    pairs = [
        [x[kept] if kept is not None and x.shape[:2] == kept.shape else x for x in (found[key], expected[key])]
        for key in expected
    ]
    return max((float((one - two).abs().max() / two.abs().max().clamp(min=1e-6)) for one, two in pairs), default=0.0)


def without_influence(exact, inputs, expected):
    """Inputs with changed tokens, and the outputs and positions that do not change by them with exact attention."""
    ids, valid = inputs["input_ids"], inputs["attention_mask"].bool()
    last = torch.arange(ids.shape[1]) == ids.shape[1] - 1
    changes = {
        "padding": (ids.where(valid, ids.roll(1, 1)), valid),
        "future": (ids.where(~last, ids[:, :1]), valid & ~last),
    }
    for name, (changed, kept) in changes.items():
        changed = {**inputs, "input_ids": changed}
        found = outputs(exact, changed)
        same = [key for key, x in expected.items() if distance(found, {key: x}, kept) == 0]
        if same:
            yield name, changed, same, kept


@pytest.mark.filterwarnings("ignore:.*cross attention stays exact")
@pytest.mark.parametrize("method", ["kdeformer", "nearfar", "linear", "longformer"])
@pytest.mark.parametrize("name", SAMPLE)
def test_model_types(name, method, tmp_path, calls):
    """All methods but linear are within their budgets, and equal exact attention. For all, padding and future have no
    influence, a saved model uses the method again, and a cache generates what no cache generates."""
    kind, (model_class, config, inputs) = SAMPLE[name], case(name)
    set_seed(0)
    model_class(config).save_pretrained(tmp_path / "exact")
    if name in REFUSALS and (name, method) not in WORKS_AFTER_ALL:
        with pytest.raises(Exception, match=REFUSALS[name]) as refused:
            outputs(model_class.from_pretrained(tmp_path / "exact", attn_implementation=method), inputs)
        # Transformers turns some errors of loading into its own, with ours as the cause.
        chain = (refused.value, refused.value.__cause__, refused.value.__context__)
        assert any(isinstance(error, UnsupportedAttentionError) for error in chain)
        return
    exact = model_class.from_pretrained(tmp_path / "exact").eval()
    model = model_class.from_pretrained(tmp_path / "exact", attn_implementation=method).eval()
    valid = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
    expected = outputs(exact, inputs)
    assert not calls
    found = outputs(model, inputs)
    uses_state = method == "linear" and kind == DECODER  # whose cache computes the attention
    assert (calls or uses_state) and found.keys() == expected.keys()
    if method == "linear":
        assert all(x.isfinite().all() for x in found.values()) and distance(found, expected, valid) > 1e-5
    else:
        assert distance(found, expected, valid) <= 1e-4

    checked = set()
    for what, changed, same, kept in without_influence(exact, inputs, expected) if "input_ids" in inputs else ():
        assert distance(outputs(model, changed), {key: found[key] for key in same}, kept) <= 1e-4, what
        checked.add(what)
    assert ("padding" in checked) == (kind in (TEXT, DECODER, PAIR))
    assert ("future" in checked) >= (kind == DECODER)

    model.save_pretrained(tmp_path / "saved")
    loaded = model_class.from_pretrained(tmp_path / "saved").eval()
    calls.clear()
    assert distance(outputs(loaded, inputs), found, valid) <= 1e-6
    assert calls or uses_state
    if kind in HEADS:
        prompt = {key: x for key, x in inputs.items() if not key.startswith("decoder") and key != "attention_mask"}
        options = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
        one, more = (model, {"use_cache": False}) if method == "linear" else (exact, {})
        assert torch.equal(model.generate(**prompt, **options), one.generate(**prompt, **options, **more))
