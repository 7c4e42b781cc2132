"""`linear` with `window_size`: a window that is computed exactly, and features for all other keys."""

import dataclasses

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.integration.cache import StateLayer
from hf_efficient_attn.methods import get_method
from instances import inputs, numbers, padding_mask
from test_learned import learned_in, shake
from tiny_models import output, tiny_batch, tiny_class, tiny_model

FEATURES = ("elu", "hedgehog", "t2r", "exp")
LEARNED = FEATURES[1:]
each_map = pytest.mark.parametrize("feature_map", FEATURES)
each_learned = pytest.mark.parametrize("feature_map", LEARNED)
each_form = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
SHAPE = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "q_len": 90, "value_dim": 5, "dtype": torch.float64}


def config(feature_map: str = "hedgehog", window_size: int = 6, **options) -> hea.LinearConfig:
    return hea.LinearConfig(feature_map=feature_map, num_features=9, window_size=window_size, **options)


def parameters(method: hea.LinearConfig, num_kv_heads: int = 2, spread: float = 0.3) -> dict[str, Tensor]:
    """Parameters other than those that a conversion starts from."""
    initial = get_method("linear").initial_parameters
    start = initial(method, num_heads=4, num_kv_heads=num_kv_heads, head_dim=8, value_dim=5, max_length=90)
    return {name: x.double() + spread * numbers(*x.shape, seed=i) for i, (name, x) in enumerate(start.items())}


@each_form
@each_map
def test_tokens_of_zeros_count_the_same_in_both_fields(feature_map, is_causal):
    query, key, value = inputs(**SHAPE)
    ours = hea.attention(config(feature_map), 0.0 * query, 0.0 * key, value, is_causal=is_causal)
    count = torch.arange(1, 91).view(-1, 1) if is_causal else 90
    mean = value.cumsum(2) / count if is_causal else value.mean(2, keepdim=True).expand_as(value)
    torch.testing.assert_close(ours, mean.repeat_interleave(2, 1), rtol=1e-6, atol=1e-6)


@each_form
@each_learned
def test_the_log_weight_decides_between_the_fields(feature_map, is_causal):
    """Without weight on the features the output is that of the window, and with all weight that of the features."""
    tensors, method = inputs(**SHAPE), config(feature_map)
    learned = parameters(method)
    learned["far_log_weight"] = torch.full((2,), -1e4, dtype=torch.float64)
    ours = hea.attention(method, *tensors, is_causal=is_causal, parameters=learned)
    window = hea.attention("longformer", *tensors, is_causal=is_causal, window_size=6)
    torch.testing.assert_close(ours, window)
    learned["far_log_weight"] = torch.full((2,), 1e4, dtype=torch.float64)
    ours = hea.attention(method, *tensors, is_causal=is_causal, parameters=learned)
    # The first queries of the causal form have no key outside of the window.
    first = slice(0, 7 if is_causal else 0)
    torch.testing.assert_close(ours[:, :, first], window[:, :, first])
    if is_causal:
        # The last query: the features of the keys before its window.
        keys = (torch.cat((x[:, :, :83], x[:, :, 83:84]), 2) for x in tensors[1:])
        mask = (torch.arange(84) < 83).expand(2, -1)
        far = hea.attention(
            dataclasses.replace(method, window_size=0), tensors[0][:, :, -1:], *keys, attention_mask=mask,
            is_causal=True, parameters=learned,
        )  # fmt: skip
        torch.testing.assert_close(ours[:, :, -1:], far)


@each_form
@each_learned
def test_parameters(feature_map, is_causal):
    """Their gradients; what was learned with a window is used without it, where `far_log_weight` has no effect."""
    tensors, method = inputs(**SHAPE), config(feature_map)
    valid = padding_mask("right", 2, 90)
    learned = {name: x.requires_grad_() for name, x in parameters(method).items()}
    grads = []
    for form in (hea.attention, hea.naive_attention):
        out = form(method, *tensors, attention_mask=valid, is_causal=is_causal, parameters=learned)
        loss = (out * numbers(*out.shape, seed=9)).masked_fill(~valid[:, None, :, None], 0.0).sum()
        grads.append(torch.autograd.grad(loss, list(learned.values())))
    for name, ours, other in zip(learned, *grads, strict=True):
        assert ours.abs().max() > 0, name
        torch.testing.assert_close(ours, other, rtol=1e-8, atol=1e-8, msg=name)
    alone = dataclasses.replace(method, window_size=0)
    ours = hea.attention(alone, *tensors, is_causal=is_causal, parameters=learned)
    maps = {name: learned[name] for name in ("query_map", "key_map")}
    assert torch.equal(ours, hea.attention(alone, *tensors, is_causal=is_causal, parameters=maps))
    assert not torch.allclose(ours, hea.attention(method, *tensors, is_causal=is_causal, parameters=learned), rtol=0.1)


@each_form
@each_map
def test_features_that_underflow(feature_map, is_causal):
    """Queries and keys whose features are all tiny, or overflow without their bounds."""
    query, key, value = inputs(1, 2, 90, 8)
    for size in (-1e3, 1e3, 1e4):
        leaves = [x.requires_grad_() for x in (torch.full_like(query, size), torch.full_like(key, -size), value)]
        out = hea.attention(config(feature_map), *leaves, is_causal=is_causal, scale=1e-4)
        assert out.isfinite().all() and out.abs().max() <= value.abs().max() * 1.001
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


def test_parameters_that_are_refused_and_the_budget():
    assert set(parameters(config())) == {"query_map", "key_map", "far_log_weight"}
    assert set(parameters(config(window_size=0))) == {"query_map", "key_map"}
    assert parameters(config("elu")) == {} and parameters(config())["far_log_weight"].shape == (2,)
    tensors, learned = inputs(**SHAPE), parameters(config())
    maps = {name: learned[name] for name in ("query_map", "key_map")}
    message = r"far_log_weight .*window_size=.* 4 heads .*: give a tensor \(4,\)"
    for given in (
        maps,
        {**learned, "far_log_weight": torch.zeros(3)},
        {**learned, "far_log_weight": torch.zeros(2, 1)},
    ):
        with pytest.raises(hea.UnsupportedAttentionError, match=message):
            hea.attention(config(), *tensors, parameters={**maps, **given})
    message = r"far_log_weight .*feature_map='elu'.*: give no far_log_weight"
    with pytest.raises(hea.UnsupportedAttentionError, match=message):
        hea.attention(config("elu"), *tensors, far_log_weight=torch.zeros(2))
    assert config().with_budget(64) == config(window_size=15).with_budget(64)
    assert (config().with_budget(64).window_size, config().with_budget(64).num_features) == (15, 16)
    assert (config("elu").with_budget(64).window_size, config("elu").with_budget(64).num_features) == (31, 9)
    assert config(window_size=0).with_budget(64).window_size == 0
    assert all(config(f).with_budget(1).window_size == 1 for f in FEATURES)


# Models


def shaken(family: str, **options):
    """A converted model whose learned parameters do not have their start values."""
    model = hea.convert(tiny_model(family, head=True), config(**options))
    shake(model)
    return model


@each_map
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_decoding_from_the_state(family, feature_map):
    """The tokens are those without a cache, and the state does not grow."""
    torch.manual_seed(0)
    model = shaken(family, feature_map=feature_map)
    batch = tiny_batch(family, padding="left")
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    for more in ({}, {"num_beams": 2}):
        with torch.no_grad():
            tokens = [model.generate(**batch, **options, **more, use_cache=use_cache) for use_cache in (True, False)]
        assert torch.equal(*tokens)
    sizes = []
    for length in (3, 60):
        with torch.no_grad():
            cache = model(tiny_batch(family, length=length)["input_ids"], use_cache=True).past_key_values
        assert all(isinstance(layer, StateLayer) for layer in cache.layers)
        # Views of a prompt would keep all of it in memory.
        sizes.append(sum(x.untyped_storage().nbytes() for layer in cache.layers for x in layer.state))
    assert sizes[0] == sizes[1]


def test_a_saved_model_gives_the_far_part_alone(tmp_path):
    """Loaded without a window it has the same maps. Conversion to it would start with new ones."""
    torch.manual_seed(0)
    model, inputs = shaken("gpt2"), tiny_batch("gpt2", padding="left")
    model.save_pretrained(tmp_path)
    again = tiny_class("gpt2", head=True).from_pretrained(tmp_path)
    assert torch.equal(output(again, inputs), output(model, inputs))
    choice = config(window_size=0).to_dict()
    alone = tiny_class("gpt2", head=True).from_pretrained(tmp_path, efficient_attention=choice)
    for own, other in zip(*(learned_in(x).values() for x in (alone, model)), strict=True):
        assert set(own.tensors()) == {"query_map", "key_map"}
        assert all(torch.equal(x, other.tensors()[name]) for name, x in own.tensors().items())
    assert not torch.allclose(output(alone, inputs), output(model, inputs))


def test_cross_attention_stays_exact_with_a_window():
    sizes = {"is_decoder": True, "add_cross_attention": True}
    model = tiny_class("bert")(tiny_model("bert", **sizes).config).eval()
    batch = tiny_batch("bert")
    encoded = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="linear needs as many queries as keys: cross attention stays exact"):
        hea.convert(model, config())
    assert output(model, {**batch, "encoder_hidden_states": encoded}).isfinite().all()
