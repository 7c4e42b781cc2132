"""Models that a method cannot run are refused by every way of switching, and stay as they are; relatives are not."""

import copy
import inspect

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from each import refuses
from helpers.model_types import sizes
from hf_efficient_attn.conversion.checkpoint import convert_saved_model
from tiny_models import DECODERS, IMAGE, SIZES, output, tiny_batch, tiny_model

auto = transformers.AutoModel
NO_INTERFACE = "does not compute its attention through Transformers' attention interface"
BIAS = "a bias of relative positions .*{}.*such as BERT, GPT-2 or Llama"
PATCHES = {"patch_size": 4}
WINDOW = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
SWIN = {"patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_attention_heads": [2, 2], "window_size": 4}
SWIN["num_heads"] = SWIN["num_attention_heads"]
SAM = {**PATCHES, "mlp_dim": 48, "mlp_ratio": 2.0, "output_channels": 8, "num_pos_feats": 8}
SAM |= {"window_size": 4, "global_attn_indexes": [1]}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
# Model types with values of their config, and why they are refused; and the method, if it is not kdeformer.
MODELS = {
    "t5": ({}, BIAS.format("T5Attention")),
    "mt5": ({}, BIAS.format("MT5Attention")),
    "umt5": ({}, BIAS.format("UMT5Attention")),
    "udop": ({}, BIAS.format("relative_bias")),
    "wav2vec2-conformer": ({"position_embeddings_type": "relative"}, BIAS.format("pos_bias_u")),
    "wav2vec2-bert": ({"feature_projection_input_dim": 16}, BIAS.format("distance_embedding")),
    "swin": (SWIN, BIAS.format("relative_position_bias")),
    "beit": ({**PATCHES, "use_relative_position_bias": True}, BIAS.format("relative_position_bias.*BeitLayer")),
    # They know only Transformers' own implementations, or make a mask of their own.
    "data2vec-vision": (PATCHES, "DATA2VEC_VISION_SELF_ATTENTION_CLASSES"),
    "sam_vision_model": (SAM, "SAM_VISION_ATTENTION_CLASSES"),
    "sam_hq_vision_model": (SAM, "SAM_HQ_VISION_ATTENTION_CLASSES"),
    "sam": ({"vision_config": {"image_size": 32, **SAM}}, "SAM_VISION_ATTENTION_CLASSES"),
    "gpt_neo": ({"attention_types": [[["global", "local"], 1]]}, "GPT_NEO_ATTENTION_CLASSES"),
    "falcon": ({"head_dim": None}, "FALCON_ATTENTION_CLASSES"),
    # Its tower of vision asks the interface.
    "git": ({"vision_config": {**SIZES, **IMAGE}}, "GIT_SELF_ATTENTION_CLASSES"),
    "doge": ({}, "a mask of its own .*DogeAttention"),
    # The modules of this decoder say that they are not causal: only its masks know.
    "pegasus_x": ({}, f"does not support attn_implementation='sdpa'.*='eager'|{NO_INTERFACE}"),
    # A method would have no effect.
    "mamba": ({"state_size": 4, "conv_kernel": 4}, NO_INTERFACE),
    "mamba2": ({"state_size": 4, "conv_kernel": 4, "num_heads": 4, "head_dim": 16, "n_groups": 1}, NO_INTERFACE),
    "falcon_mamba": ({"state_size": 4, "conv_kernel": 4}, NO_INTERFACE),
    "resnet": (RESNET, NO_INTERFACE),
    "fnet": ({}, NO_INTERFACE),
    # A name that no method has, and methods without a causal form.
    "bert": ({}, r"Did you mean 'kdeformer'.*import that file first", "kdeformr"),
    **{name: ({}, r"reformer has no causal form\. Methods that have one: .*longformer", "reformer")
       for name in DECODERS},
    # Windows and chunks of the model's own in all layers, and other things that a method would lose.
    "mistral": ({"sliding_window": 20}, "window of its own in .*1 more.*use attn_impl"),
    "llama4_text": ({"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 48,
                     "layer_types": ["chunked_attention", "full_attention"]}, "within chunks of its own"),
    "gemma3_text": ({**WINDOW, "use_bidirectional_attention": True}, "composes its masks itself"),
    "diffusion_gemma": ({"text_config": {**SIZES, **WINDOW, "vocab_size": 60, "num_experts": 2, "top_k_experts": 1,
                                         "moe_intermediate_size": 8, "num_global_key_value_heads": 2},
                         "vision_config": {**SIZES, "head_dim": 16}, "canvas_length": 6}, "that only a mask knows"),
    "pixtral": ({}, "makes a mask of its own .*PixtralVisionModel"),
    "gemma2": (WINDOW, r"adds a soft cap .*attn_implementation='(eager|sdpa)'"),
    "lasr_encoder": ({"subsampling_conv_channels": 16, "num_mel_bins": 16, "conv_kernel_size": 4},
                     "finds the padding .*LasrEncoderConvolutionModule"),
}  # fmt: skip


def config_of(kind: str, **values):
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("this Transformers does not have the model")
    config_class = transformers.CONFIG_MAPPING[kind]
    # Some have no way to set None.
    return config_class(**{k: copy.deepcopy(v) for k, v in sizes(config_class, **values).items() if v is not None})


@pytest.mark.parametrize("kind", MODELS)
def test_every_way_of_switching_refuses_the_model(kind, tmp_path):
    values, words, *other = MODELS[kind]
    config, model = config_of(kind, **values), auto.from_config(config_of(kind, **values))
    method = (*other, "kdeformer")[0]
    model.save_pretrained(tmp_path / "source")
    before, state = model.config._attn_implementation, {name: x.clone() for name, x in model.state_dict().items()}
    ways = [
        lambda: auto.from_pretrained(tmp_path / "source", attn_implementation=method),
        lambda: auto.from_config(config, attn_implementation=method),
        lambda: hea.convert(model, method),
        lambda: model.set_attn_implementation(method),
    ]
    if kind in ("t5", "resnet", "llama4_text"):
        ways += [
            lambda: type(model)(config_of(kind, **values, efficient_attention={"method": method})),
            lambda: hea.convert(model, method, layers=[1]),
            lambda: convert_saved_model(tmp_path / "source", tmp_path / "out", method),
        ]
    # Older versions of Transformers compute the attention of some of these models by code of their own.
    if "CLASSES" in words or "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(inspect.getmodule(type(model))):
        words = f"{words}|{NO_INTERFACE}"
    for way in ways:
        refuses(words, way)
        assert model.config._attn_implementation == before and model.config.efficient_attention is None
        assert model.state_dict().keys() == state.keys() and config._attn_implementation is None
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_implementations_that_are_not_known_or_not_installed():
    switch = tiny_model("bert").set_attn_implementation
    # It can be the method of a file that has not been imported yet.
    refuses("nothing_like_it.* is not supported.*import that file first", switch, "nothing_like_it", error=ValueError)
    assert "import that file" not in refuses(None, switch, "flash_attention_2", error=(ValueError, ImportError))


def test_attention_sinks_and_soft_caps_are_refused():
    model = tiny_model("llama")
    for name, value, words in (
        ("sinks", torch.nn.Parameter(torch.zeros(4)), "attention sinks"),
        ("attn_logit_softcapping", 50.0, "a soft cap"),
        ("indexer", torch.nn.Identity(), "a mask of the keys that each query selects"),
    ):
        setattr(model.layers[1].self_attn, name, value)
        refuses(f"{words} .*in LlamaAttention at layers.1.self_attn", hea.convert, model, "linear")
        delattr(model.layers[1].self_attn, name)
    hea.convert(model, "linear")


MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 2}
IDS, SOUND = tiny_batch("bert", length=40), {"input_values": torch.ones(1, 400)}
# Relatives of models that are refused, and models with attention in some layers: config, input, layers.
CONVERTED = {
    "beit": ({**PATCHES, "use_relative_position_bias": False}, tiny_batch("vit"), [0, 1]),
    "wav2vec2-conformer": ({"position_embeddings_type": "rotary"}, SOUND, [0, 1]),
    "jamba": ({**MAMBA, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
               "num_experts": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False}, IDS, [1, 3]),
    "bamba": ({**MAMBA, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
              IDS, [1]),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, IDS, [1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERTED)
def test_models_that_are_converted(name, tmp_path, calls):
    values, inputs, layers = CONVERTED[name]
    model = auto.from_config(config_of(name, **values)).eval()
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(inspect.getmodule(type(model))):
        pytest.skip("this Transformers computes its attention by code of its own")
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path, attn_implementation="kdeformer")
    torch.testing.assert_close(output(loaded, inputs), output(model, inputs), atol=1e-4, rtol=1e-4)
    assert len(calls) == len(layers)
    locations = [getattr(module, "_efficient_attention", None) for module in loaded.modules()]
    assert sorted({found.layer for found in locations if found is not None}) == layers
    assert hea.convert(model, "nearfar", layers=layers).config._attn_implementation == "nearfar"


def test_a_part_without_attention(tmp_path):
    """A backbone of convolutions gets the method's name with the rest of its model, and is no reason to refuse it."""
    backbone = transformers.ResNetConfig(**RESNET, out_features=["stage1", "stage2"])
    own = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 4}
    transformers.DetrForObjectDetection(config_of("detr", **own, backbone_config=backbone)).save_pretrained(tmp_path)
    load = transformers.DetrForObjectDetection.from_pretrained
    loaded = load(tmp_path, attn_implementation="nearfar")
    assert loaded.config._attn_implementation == "nearfar"
    with torch.no_grad():
        loaded(torch.zeros(1, 3, 64, 64))
    refuses(NO_INTERFACE, load, tmp_path, attn_implementation={"backbone_config": "nearfar"})


def test_a_model_that_gets_attention_after_its_base_class_is_made():
    """Base classes call `post_init` too, at a time when the model has no attention yet."""

    class Base(transformers.BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.body = transformers.ResNetModel(transformers.ResNetConfig(**RESNET))
            self.post_init()

    class Whole(Base):
        def __init__(self, config):
            super().__init__(config)
            self.text = transformers.BertModel(config)
            self.post_init()

    def make(layers):
        return config_of("bert", efficient_attention={"method": "longformer", "layers": layers})

    assert Whole(make(["text.encoder"])).config._attn_implementation == "longformer"
    refuses("no attention in layers", Whole, make(["decoder"]))
    refuses(NO_INTERFACE, Base, make(["text.encoder"]))


@pytest.mark.parametrize(
    "changes",
    [{"num_probes": 8}, {"near_share": 0.5}, {"num_groups": 2}, {"num_candidates": 300}, {"num_refinements": 2}],
    ids=str,
)
def test_a_decoder_refuses_hyperparameters_that_its_form_does_not_use(changes):
    """An encoder uses them. A decoder, or a text model like CLIP's, also takes the values that `with_budget` sets."""
    for model in (tiny_model("gpt2", None), transformers.OwlViTTextModel(transformers.OwlViTTextConfig(**SIZES))):
        before = model.config._attn_implementation
        refuses(f"{next(iter(changes))}=.* has no effect in the causal form", hea.convert, model, "nearfar", **changes)
        assert model.config._attn_implementation == before
        hea.convert(model, hea.NearFarConfig().with_budget(12))
    hea.convert(tiny_model("bert", None), "nearfar", **changes)
