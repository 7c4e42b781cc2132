"""Layers with a sliding window of the model's own: they stay exact with their window, or the model is refused."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.conversion.checkpoint import convert_checkpoint
from hf_efficient_attn.integration.exact import exact_layer
from hf_efficient_attn.integration.models import window_of
from promises import LargestTensor
from tiny_models import SMALL, output

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 1024, "pad_token_id": 1, "bos_token_id": 2,
    "eos_token_id": 3,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SEPARATORS = {"cls_token_id": 2, "sep_token_id": 3}
# Models with windows in layers 0 and 2.
MIXED = {
    "Qwen2": {"use_sliding_window": True, "sliding_window": 20},
    "Gemma3Text": {"sliding_window": 20},
    "Cohere2": {"sliding_window": 20},
    "Olmo3": {"sliding_window": 20},
    "Exaone4": {"sliding_window": 20},
    "ModernBertDecoder": {"local_attention": 40, **SEPARATORS},
    "ModernBert": {"local_attention": 40, **SEPARATORS},
}
DECODERS = [name for name in MIXED if name != "ModernBert"]
BUDGET = hea.NearFarConfig().with_budget(1024)
WARNING = "layers with a sliding window of the model's own stay exact"


def exact_model(name: str, head: str = "Model", **changes):
    kind = getattr(transformers, f"{name}Config", None)
    if kind is None:
        pytest.skip("this Transformers does not have the model")
    values = {key: value for key, value in SIZES.items() if hasattr(kind(), key)}
    config = kind(**{**values, "layer_types": KINDS, **MIXED[name], **changes})
    torch.manual_seed(0)
    model = getattr(transformers, {"Gemma3TextForCausalLM": "Gemma3ForCausalLM"}.get(name + head, name + head))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model.eval()


def converted(model, method=BUDGET, **options):
    with pytest.warns(UserWarning, match=WARNING):
        return hea.convert(copy.deepcopy(model), method, **options)


def batch(length: int, padding: str) -> dict:
    ids = torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padding != "none":
        third = length // 3
        mask[1, slice(0, third) if padding == "left" else slice(length - third, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", MIXED)
def test_the_output_and_gradients_are_those_of_sdpa(name, padding):
    """With a budget of the whole sequence in the full layers; lengths within and beyond the window and a block."""
    model = exact_model(name)
    other = converted(model)
    for length in (18, 21, 70, 300):
        inputs = batch(length, padding)
        valid, found = inputs["attention_mask"].bool(), []
        for one in (model, other):
            one.zero_grad()
            out = one(**inputs)[0][valid]
            (out * torch.linspace(-1, 1, out.shape[-1])).mean().backward()
            found.append(
                (out.detach(), {key: p.grad.clone() for key, p in one.named_parameters() if p.grad is not None})
            )
        torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-4)
        for key, gradient in found[0][1].items():
            torch.testing.assert_close(found[1][1][key], gradient, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize("method", ["nearfar", "longformer", "linear"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["Qwen2", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in DECODERS[1:])])
def test_generation(name, padding, method):
    """The windowed layers keep the keys of their window; the others what their method keeps."""
    model, inputs = exact_model(name, "ForCausalLM"), batch(70, padding)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    config = hea.method_info(method).config_class(**SMALL[method])
    if method != "linear":
        other = converted(model, config.with_budget(1024))
        assert torch.equal(other.generate(**inputs, **options), model.generate(**inputs, **options))
        return
    other = converted(model, config)
    tokens = other.generate(**inputs, **options)
    assert torch.equal(tokens, other.generate(**inputs, **options, use_cache=False))


@pytest.mark.parametrize("name", ["Qwen2", "ModernBert"])
def test_every_way_of_switching_warns_once(name, tmp_path):
    model, inputs = exact_model(name), batch(70, "right")
    expected = output(converted(model, "nearfar"), inputs)
    model.save_pretrained(tmp_path / "exact")
    with pytest.warns(UserWarning, match=WARNING) as found:
        loaded = type(model).from_pretrained(tmp_path / "exact", attn_implementation="nearfar")
    names = [x for x in ("layers.0", "layers.1", "layers.2") if x in str(found[0].message)]
    assert len([x for x in found if WARNING in str(x.message)]) == 1 and names == ["layers.0", "layers.2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(output(loaded, inputs), expected)
        loaded.set_attn_implementation("nearfar")
        assert torch.equal(output(hea.convert(copy.deepcopy(model), "nearfar", layers=[1]), inputs), expected)
    loaded.save_pretrained(tmp_path / "again")
    with pytest.warns(UserWarning, match=WARNING):
        again = type(model).from_pretrained(tmp_path / "again")
    assert torch.equal(output(again, inputs), expected)
    with pytest.warns(UserWarning, match=WARNING):
        model.set_attn_implementation("nearfar")
    assert torch.equal(output(model, inputs), expected)


def test_what_is_refused():
    model = exact_model("Qwen2")
    for layers in ([0], [0, 1], ["layers.2"]):
        with pytest.raises(hea.UnsupportedAttentionError, match=r"window of its own in layers\.[02].*layers\.1"):
            hea.convert(model, "nearfar", layers=layers)
        assert model.config._attn_implementation == "sdpa"
    values = {**SIZES, "sliding_window": 20}
    config = transformers.MistralConfig(**values)
    mistral = transformers.MistralForCausalLM(config)
    for call in (
        lambda: hea.convert(mistral, "linear"),
        lambda: mistral.set_attn_implementation("linear"),
        lambda: transformers.AutoModel.from_config(transformers.MistralConfig(**values), attn_implementation="linear"),
    ):
        with pytest.raises(hea.UnsupportedAttentionError, match=r"window of its own in .*2 more.*use attn_impl"):
            call()
        assert mistral.config._attn_implementation == "sdpa"
    # A window of all positions is none.
    for window in (1024, None):
        model = transformers.MistralModel(transformers.MistralConfig(**{**values, "sliding_window": window}))
        hea.convert(model, "linear")
    chunks = {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 48}
    kinds = ["chunked_attention", "full_attention", "chunked_attention"]
    llama = transformers.Llama4TextModel(transformers.Llama4TextConfig(**SIZES, **chunks, layer_types=kinds))
    for layers in (None, [1]):
        with pytest.raises(hea.UnsupportedAttentionError, match="within chunks of its own"):
            hea.convert(llama, "linear", layers=layers)
    values = {**SIZES, "layer_types": KINDS, "sliding_window": 20, "use_bidirectional_attention": True}
    embedding = transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**values))
    with pytest.raises(hea.UnsupportedAttentionError, match="composes its masks itself"):
        hea.convert(embedding, "linear")
    gemma = transformers.Gemma2Model(transformers.Gemma2Config(**SIZES, layer_types=KINDS, sliding_window=20))
    with pytest.raises(hea.UnsupportedAttentionError, match=r"adds a soft cap .*attn_implementation='(eager|sdpa)'"):
        hea.convert(gemma, "linear")


def test_an_input_beyond_the_positions_of_a_window_that_is_none():
    model = transformers.MistralModel(
        transformers.MistralConfig(**{**SIZES, "sliding_window": 64, "max_position_embeddings": 64})
    )
    hea.convert(model, "linear")
    output(model, batch(64, "none"))
    with pytest.raises(hea.UnsupportedAttentionError, match="window of 64 keys and the sequence has 70"):
        output(model, batch(70, "none"))


def test_the_sizes_of_windows():
    for name, size in (("Qwen2", 20), ("ModernBert", 21)):  # that of ModernBERT does not include the query
        model = exact_model(name)
        sizes = [window_of(x, model.config) for x in model.modules() if "Attention" in type(x).__name__]
        assert sizes == [size, None, size]


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_window_costs_what_it_is_long(is_causal):
    """No (Nq, Nk) tensor is made."""
    query, key, value = (torch.randn(1, 2, 5000, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = torch.ones(1, 5000, dtype=torch.bool)
    mask[:, 4000:] = False
    with LargestTensor() as largest:
        out = exact_layer(query, key, value, mask, is_causal=is_causal, scale=None, dropout_p=0.0, window=40)
    assert largest.numel <= 256 * 400 + query.numel()
    distance = torch.arange(5000)[:, None] - torch.arange(5000)
    pairs = (distance.abs() < 40) & mask & ((distance >= 0) if is_causal else True)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=pairs)
    rows = pairs.any(1)
    torch.testing.assert_close(out[:, :, rows], expected[:, :, rows])
    assert (out[:, :, ~rows] == 0).all()


def test_errors_and_calibration_are_of_the_other_layers():
    model, inputs = exact_model("ModernBert"), batch(300, "right")
    error = hea.attention_error(converted(model, "nearfar", **SMALL["nearfar"]), inputs)
    by_layer = {layer.layer: layer for layer in error.layers}
    assert by_layer[1].method == "nearfar" and by_layer[0].method == by_layer[2].method == "sdpa"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = hea.calibrate(model, [inputs], max_error=10.0, methods=["longformer"])
    assert settings.for_layer(0) is None


@pytest.mark.parametrize("name", ["Qwen2", "ModernBert"])
def test_a_converted_checkpoint_and_its_card(name, tmp_path):
    exact_model(name).save_pretrained(tmp_path / "exact")
    report = convert_checkpoint(tmp_path / "exact", tmp_path / "converted", "nearfar")
    assert report["layers"] == [1]
    assert (
        "Layers: 1 of 3, counted from zero; the other layers are exact."
        in (tmp_path / "converted" / "README.md").read_text()
    )


def test_sequence_parallel_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(hea.UnsupportedAttentionError, match=r"a sliding window in layers\.0\.self_attn"):
            hea.sequence_parallel(converted(exact_model("Qwen2"), "linear"), dist.group.WORLD)
    finally:
        dist.destroy_process_group()
