"""Models in which a method would have no effect are refused at loading; models with some attention are not."""

import copy

import pytest
import torch
import transformers

import hf_efficient_attn as hea

TINY = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48}
STATE = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 2}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
WITHOUT = {
    "mamba": {**STATE, "state_size": 4},
    "mamba2": {**STATE, "state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 1},
    "falcon_mamba": {**STATE, "state_size": 4},
    "resnet": RESNET,
    "fnet": {**TINY, "num_hidden_layers": 2},
}
# The layers with attention.
HYBRID = {
    "jamba": ({**TINY, **HEADS, **MAMBA, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
               "num_experts": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False}, [1, 3]),
    "bamba": ({**TINY, **HEADS, **MAMBA, "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 4,
               "mamba_d_head": 16, "mamba_n_groups": 1}, [1]),
    "lfm2": ({**TINY, **HEADS, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, [1]),
}  # fmt: skip


def config_of(name: str, values: dict, **more):
    return transformers.AutoConfig.for_model(name, **copy.deepcopy(values), **more)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_model_without_attention_is_refused(name, tmp_path):
    config = config_of(name, WITHOUT[name])
    model = transformers.AutoModel.from_config(config)
    implementation = model.config._attn_implementation
    model.save_pretrained(tmp_path)
    before = config_of(name, WITHOUT[name])
    chosen = config_of(name, WITHOUT[name], efficient_attention={"method": "nearfar"})
    for call in (
        lambda: transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="nearfar"),
        lambda: transformers.AutoModel.from_config(before, attn_implementation="nearfar"),
        lambda: type(model)(chosen),
        lambda: model.set_attn_implementation("nearfar"),
        lambda: hea.convert(model, "nearfar"),
    ):
        with pytest.raises(hea.UnsupportedAttentionError, match="does not compute its attention through"):
            call()
        assert model.config._attn_implementation == implementation and model.config.efficient_attention is None
        assert before._attn_implementation is None


@pytest.mark.parametrize("name", HYBRID)
def test_a_model_with_some_attention_is_loaded(name, tmp_path):
    values, layers = HYBRID[name]
    model = transformers.AutoModel.from_config(config_of(name, values))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="nearfar")
    with_method = {found.layer for found in map(location, loaded.modules()) if found is not None}
    assert sorted(with_method) == layers
    assert hea.convert(model, "nearfar", layers=layers).config._attn_implementation == "nearfar"


def location(module):
    return getattr(module, "_efficient_attention", None)


def test_a_part_without_attention(tmp_path):
    """A backbone of convolutions gets the method's name with the rest of its model, and is no reason to refuse it."""
    backbone = transformers.ResNetConfig(**RESNET, out_features=["stage1", "stage2"])
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 4}
    own = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    config = transformers.DetrConfig(**own, backbone_config=backbone, **sizes, **heads)
    model = transformers.DetrForObjectDetection(config)
    model.save_pretrained(tmp_path)
    load = transformers.DetrForObjectDetection.from_pretrained
    loaded = load(tmp_path, attn_implementation="nearfar")
    assert loaded.config._attn_implementation == "nearfar"
    with torch.no_grad():
        loaded(torch.zeros(1, 3, 64, 64))
    with pytest.raises(hea.UnsupportedAttentionError, match="does not compute its attention through"):
        load(tmp_path, attn_implementation={"backbone_config": "nearfar"})


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

    sizes = {**TINY, "num_hidden_layers": 2, "num_attention_heads": 2}
    make = lambda layers: transformers.BertConfig(  # noqa: E731
        **sizes, efficient_attention={"method": "longformer", "layers": layers}
    )
    assert Whole(make(["text.encoder"])).config._attn_implementation == "longformer"
    with pytest.raises(hea.UnsupportedAttentionError, match="no attention in layers"):
        Whole(make(["decoder"]))
    with pytest.raises(hea.UnsupportedAttentionError, match="does not compute its attention through"):
        Base(make(["text.encoder"]))
