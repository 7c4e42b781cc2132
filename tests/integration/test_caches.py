"""Caches whose layers compute attention: states of recurrent methods, and landmarks and look-ups in `NearFarCache`."""

import copy
import dataclasses
import functools
import io
import itertools
import math
import warnings

import pytest
import torch
import transformers
from torch import Tensor

import hf_efficient_attn as hea
from each import refuses
from helpers.commands import read_csv, run
from helpers.encoder_decoders import composite, musicgen
from helpers.learned import shake
from helpers.model_types import sizes
from hf_efficient_attn.integration.cache import NewKeys, StateLayer, cache_argument
from hf_efficient_attn.integration.nearfar_cache import LookUpLayer, NearFarLayer
from hf_efficient_attn.io.reading import read_text
from hf_efficient_attn.methods import attention_with_state, naive_attention
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.nearfar import growing
from hf_efficient_attn.ops.nearfar.growing import GrowingCoreset, add_keys, empty_coreset
from instances import INSTANCES, inputs, numbers, padding_mask, relative_error
from promises import Memory
from recipes.benchmarks import cache as recipe
from tiny_models import CAUSAL, DECODERS, SMALL, decode, generate, output, tiny_batch, tiny_model

STATES = {
    "linear": hea.LinearConfig(),
    "performer": hea.PerformerConfig(num_features=32),
    "hedgehog with a window": hea.LinearConfig(feature_map="hedgehog", num_features=9, window_size=6),
    "exp with a window": hea.LinearConfig(feature_map="exp", num_features=9, window_size=6),
    "t2r": hea.PerformerConfig(feature_map="t2r", num_features=12),
}
FEW = list(STATES)[:3]
# More columns than any test has tokens: a prompt is then exact, and only the cache approximates.
NEARFAR = hea.NearFarConfig(block_size=256, num_samples=256)
each_state = pytest.mark.parametrize("name", FEW)
each_cache = pytest.mark.parametrize("name", [*FEW, "nearfar", "look-ups"])
each_kind = pytest.mark.parametrize("kind", ["landmarks", "look-ups"])
each_family = pytest.mark.parametrize("family", DECODERS)
each_instance = pytest.mark.parametrize("instance", [i for i in INSTANCES if i.info.recurrent], ids=str)


def decoder(family: str, name: str, layers=None, **changes):
    """A tiny decoder whose learned parameters are not those that a conversion starts from."""
    model = tiny_model(family, head=True, max_position_embeddings=256, **changes)
    return shake(hea.convert(model, STATES.get(name, NEARFAR), layers=layers))


def new_cache(model, columns: int = 24, name: str = ""):
    if model.config._attn_implementation == "nearfar":
        return hea.NearFarCache(model.config, columns, look_up=name == "look-ups")
    return transformers.DynamicCache(config=model.config)


def cache_after(model, ids, cuts=(), name: str = ""):
    """The cache after tokens, which come in calls that end at `cuts`."""
    cache = new_cache(model, name=name)
    decode(model, ids, cuts, cache)
    return cache


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(5, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


# All kinds of caches


@each_cache
@each_family
def test_batch_rows(family, name):
    """Repeated, selected and reordered batch rows continue like the rows they are copies of."""
    model, ids, new = decoder(family, name), tokens(3, 70), tokens(1, 6, seed=1)

    def continued(ids, cache):
        return decode(model, torch.cat((ids, new.expand(len(ids), -1)), 1), [], cache)

    alone = [continued(x, cache_after(model, x, [50], name)) for x in ids.split(1)]
    for change, rows in (
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    ):
        cache = cache_after(model, ids, [50], name)
        change(cache)
        expected = torch.cat([alone[row] for row in rows])
        torch.testing.assert_close(continued(ids[rows], cache), expected, atol=2e-3, rtol=2e-3)


@each_cache
@each_family
def test_a_cache_can_be_copied_saved_and_reset(family, name):
    """Each copy continues by itself, as when several texts begin with the same prompt, also in `generate`."""
    model, ids, file = decoder(family, name), tokens(2, 45), io.BytesIO()
    expected = decode(model, ids, range(25, 45, 5), new_cache(model, name=name))[:, 35:]
    cache = cache_after(model, ids[:, :35], [25, 30], name)
    torch.save(cache, file)
    file.seek(0)
    for one in (copy.deepcopy(cache), torch.load(file, weights_only=False), cache):
        assert torch.equal(decode(model, ids, [40], one), expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(decode(model, ids, range(25, 45, 5), cache)[:, 35:], expected)
    if name in STATES:
        # Without a mask, `generate` treats tokens that equal the padding token as padding.
        more = {"input_ids": torch.cat((ids, tokens(2, 9, 1)), 1), "attention_mask": torch.ones(2, 54)}
        assert torch.equal(generate(model, more, **{cache_argument(): cache}), generate(model, more, use_cache=False))


@each_cache
@each_family
def test_what_a_cache_refuses(family, name):
    """Nothing drops the past silently: a switch of the method, a changed mask, keys that are taken back or not used."""
    batch, token = tiny_batch(family, padding="left"), torch.full((2, 1), 7)
    mask = torch.cat((batch["attention_mask"], torch.ones(2, 1, dtype=torch.int64)), 1)
    changed = mask.clone()
    changed[0, :5] = 0
    others = ("sdpa", "eager", "longformer", dataclasses.replace(STATES.get(name, NEARFAR), seed=3))

    def filled():
        model = decoder(family, name)
        cache = new_cache(model, name=name)
        decode(model, batch["input_ids"], [], cache, batch["attention_mask"])
        return model, cache

    for wrong in (changed, torch.ones_like(mask)):
        model, cache = filled()
        refuses("mask of earlier tokens has changed", model, token, attention_mask=wrong, **{cache_argument(): cache})
    model, cache = filled()
    refuses("cannot be taken back", cache.crop, -1)
    refuses("cannot be taken back", cache.layers[0].activate_past_recording)
    model(token, attention_mask=mask, **{cache_argument(): cache})
    cache.layers[0].update(*(torch.zeros(2, 2, 1, 8),) * 2)
    refuses("no attention followed", model, token, **{cache_argument(): cache})
    for other in others:
        model, cache = filled()
        hea.convert(model, other)
        refuses("start with a new cache", model, token, attention_mask=mask, **{cache_argument(): cache})


@pytest.mark.parametrize("layers", [None, [0]])
def test_layers_of_unequal_length(layers):
    """As after a call that failed in a later layer. Without padding each layer attends to what it holds."""
    model, ids = hea.convert(decoder("llama", "nearfar"), NEARFAR, layers=layers), tiny_batch("llama")["input_ids"]
    cache = transformers.DynamicCache()
    decode(model, ids, [], cache)
    cache.layers[0].update(cache.layers[0].keys[:, :, :5], cache.layers[0].values[:, :, :5])
    mask = torch.ones(len(ids), 76)
    mask[0, 0] = 0
    words = r"the mask is for 76 keys, and .*layers\.1\..* has 71: the layers of the cache have different lengths"
    refuses(words, model, ids[:, :1], attention_mask=mask, **{cache_argument(): cache})


# States


@each_instance
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_token_by_token(instance, dtype):
    """The state sums up in float32, and ignores what masked keys contain."""
    query, key, value = inputs(1, 2, 90, 8, dtype=dtype)

    def in_chunks(query, key, value, mask=None, **options):
        state, outs = None, []
        for start, end in itertools.pairwise([0, 30, *range(31, 91)]):
            tokens = (x[:, :, start:end] for x in (query, key, value))
            options["attention_mask"] = None if mask is None else mask[:, start:end]
            out, state = attention_with_state(instance.config(), state, *tokens, **options)
            assert out.dtype == dtype and all(x.dtype == torch.float32 and len(x) == 1 for x in state)
            outs.append(out)
        return torch.cat(outs, 2), state

    options = {"seed": 3, "scale": 0.1}
    out, state = in_chunks(query, key, value, **options)
    whole = naive_attention(instance.config(), query, key, value, is_causal=True, **options)
    assert relative_error(out, whole) < (1e-5 if dtype == torch.float32 else 0.01)
    mask, found = padding_mask("holes", 1, 90), []
    for content in (0.0, torch.nan):
        key_and_value = (x.masked_fill(~mask[:, None, :, None], content) for x in (key, value))
        out, masked_state = in_chunks(query, *key_and_value, mask)
        found.append((out, *masked_state))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert [x.shape for x in state] == [x.shape for x in masked_state]
    assert in_chunks(60 * query, 60 * key, value)[0].isfinite().all()  # logits of 1e4
    if dtype != torch.float32:
        with torch.autocast("cpu", dtype):
            in_chunks(query.float(), key.float(), value.float())


@each_state
@each_family
def test_neither_the_state_nor_the_cost_of_a_token_grows(family, name):
    model, ids, found = decoder(family, name), tokens(2, 222), set()
    for length, cuts in ((30, []), (200, []), (222, range(200, 222))):
        cache = cache_after(model, ids[:, :length], cuts)
        layers = cache.layers
        assert all(type(layer) is StateLayer and layer.keys is layer.pending is None for layer in layers)
        assert cache.get_seq_length() == length
        (batch, num_kv_heads), head_dim = layers[0].state[0].shape[:2], 16 if family == "gpt2" else 8
        assert (batch, num_kv_heads) == (2, 2)
        assert "window" in name or layers[0].state[0].shape[-1] == head_dim + 8  # sums of values, and those of weights
        # Views of a prompt would keep all of it in memory.
        numel = sum(x.untyped_storage().nbytes() for layer in layers for x in layer.state)
        with torch.no_grad(), Memory() as largest:
            model(torch.full((2, 1), 7), **{cache_argument(): cache}, use_cache=True)
        found.add((numel, largest.numel))
    assert len(found) == 1


@each_state
@each_family
def test_layers_with_a_state(family, name, tmp_path):
    """All or some of them have one; generation is that without a cache, and so it is in a model from a folder."""
    model, batch, mix = decoder(family, name), tiny_batch(family, padding="left"), STATES[name].to_dict()
    model.save_pretrained(tmp_path)
    mix = {"method": mix["method"], "layers": [{**mix, "layers": [0]}, {"layers": [1], "method": "longformer"}]}
    models = [
        (model, [True, True]),
        (transformers.AutoModelForCausalLM.from_pretrained(tmp_path), [True, True]),
        (decoder(family, name, layers=[1]), [False, True]),
        (hea.convert(tiny_model(family, head=True), mix), [True, False]),
        (hea.convert(copy.deepcopy(model), "kdeformer"), [False, False]),
        (hea.convert(copy.deepcopy(model), "sdpa"), [False, False]),
    ]
    found = [generate(one, batch, 5) for one, _ in models]
    for (one, expected), out in zip(models, found, strict=True):
        assert [isinstance(layer, StateLayer) for layer in cache_after(one, batch["input_ids"]).layers] == expected
        is_same = torch.equal(out, generate(one, batch, 5, use_cache=False))
        assert is_same or one.config._attn_implementation == "kdeformer"
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[-1], generate(tiny_model(family, head=True, max_position_embeddings=256), batch, 5))
    filled = transformers.DynamicCache([(torch.zeros(2, 2, 3, 8),) * 2] * 2, config=model.config)
    assert not any(isinstance(layer, StateLayer) for layer in filled.layers)


@pytest.mark.filterwarnings("ignore:.*cross attention stays exact")
@pytest.mark.parametrize("make", [composite, musicgen])
def test_the_cache_of_a_model_of_several_parts_is_that_of_its_decoder(make):
    """Also if a part is an encoder of texts, with a config of its own."""
    model = make()
    kinds = (("linear", transformers.DynamicCache, StateLayer), (NEARFAR, hea.NearFarCache, NearFarLayer))
    for method, kind, layer in kinds:
        hea.convert(model.decoder, method)
        assert [type(x) for x in kind(config=model.config).layers] == [layer] * 2


@each_state
def test_models_that_modify_cached_keys(name):
    """A model that modifies the keys it gets from the cache continues with all keys, and with the right output."""
    model, ids = decoder("gpt2", name), tokens(2, 70)
    update = transformers.DynamicCache.update

    class Copying(transformers.DynamicCache):
        def update(self, *args, **kwargs):
            return tuple(x.clone() for x in update(self, *args, **kwargs))

    whole, cache, kept = output(model, {"input_ids": ids}, use_cache=False), new_cache(model), cache_after(model, ids)
    cache.__class__ = kept.__class__ = Copying
    torch.testing.assert_close(decode(model, ids, [68, 69], cache), whole, atol=1e-4, rtol=1e-4)
    assert cache.layers[0].keys.shape[2] == cache.get_seq_length() == 70
    refuses("clone", model, ids[:, :1], **{cache_argument(): kept}, use_cache=True)


@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
def test_a_model_that_reads_cached_keys(mode):
    """Each loop of Dory has keys of its own, or all but the last read the cached keys of the last one."""
    if not hasattr(transformers, "DoryConfig"):
        pytest.skip("this Transformers does not have the model")
    loops = {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "recurrent_kv_cache_mode": mode}
    more = {**loops, "layer_types": ["full_attention"] * 4, "sliding_window": 80}
    config = transformers.DoryConfig(**sizes(transformers.DoryConfig, **more))
    model, ids = hea.convert(transformers.DoryForCausalLM(config).eval(), "linear"), tokens(2, 30)
    expected = decode(model, ids, [20, 25], transformers.DynamicCache())
    torch.testing.assert_close(decode(model, ids, [20, 25]), expected, atol=1e-5, rtol=1e-5)
    cache = hea.NearFarCache(hea.convert(model, NEARFAR).config, 64)
    if mode == "last_loop":
        refuses("layers.0.* needs the keys of all tokens: .* ordinary cache", decode, model, ids, [20], cache)
        return
    expected = decode(model, ids, [20, 25])
    torch.testing.assert_close(decode(model, ids, [20, 25], cache), expected, atol=1e-5, rtol=1e-5)


def test_new_keys_show_their_shape_but_cannot_be_used():
    keys = numbers(1, 2, 3, 4).as_subclass(NewKeys)
    assert keys.shape == (1, 2, 3, 4) and keys.dtype == torch.float64 and keys.size(1) == 2 and keys.ndim == 4
    assert keys.grad is None and keys.is_contiguous() and not keys.requires_grad
    for use in (lambda: keys.mT, lambda: keys + 1, lambda: torch.cat([keys, keys], 2), lambda: keys[0]):
        refuses("start with a new cache .* keeps all, .*=DynamicCache", use)


def test_transformers_takes_the_name_of_a_cache_without_a_warning():
    model, ids = decoder("llama", "nearfar"), tiny_batch("llama", length=20)["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (model, functools.partial(model.generate, max_new_tokens=2)):
            cache = hea.NearFarCache(model.config, 8)
            call(ids, **{cache_argument(): cache})
            assert cache.get_seq_length() >= 20


def test_a_compiled_forward_stores_keys():
    model, ids = tiny_model("gpt2", "linear", head=True, n_layer=1), tiny_batch("gpt2", length=20)["input_ids"]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        out = compiled(ids, **{cache_argument(): transformers.DynamicCache(config=model.config)}, use_cache=True)
        torch.testing.assert_close(out.logits, model(ids, use_cache=False).logits, atol=1e-5, rtol=1e-5)
    assert out.past_key_values.layers[0].keys.shape[2] == 20


@pytest.mark.parametrize("name", STATES)
@each_family
def test_gradients_with_a_cache(family, name):
    """The state is not computed until a next token follows. Loss and gradients are those without a cache."""
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if family == "gpt2" else {}
    model, ids, found = decoder(family, name).train(), tokens(2, 40), []

    def gradients_of(model, loss):
        model.zero_grad()
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})

    for use_cache in (True, False):
        torch.manual_seed(0)
        out = model(ids, labels=ids, use_cache=use_cache)
        gradients_of(model, out.loss)
        assert not use_cache or all(layer.state is None and layer.seen == 40 for layer in out.past_key_values.layers)
    assert all(torch.equal(x, found[1][key]) for key, x in found[0].items())
    assert all(x.abs().max() > 0 for key, x in found[0].items() if "learned_parameters" in key)
    # In training, a sequence keeps the random features that it has drawn.
    model, both = decoder(family, name, **dropout).train(), []
    for cuts in ([], [20, 25, 26]):
        torch.manual_seed(1)
        both.append(decode(model, ids, cuts, grad=True))
    torch.testing.assert_close(both[1], both[0], atol=1e-3, rtol=1e-3)
    for logits in both:
        gradients_of(model, logits.log_softmax(-1)[..., 5].mean())
    for key, x in found[2].items():
        torch.testing.assert_close(found[3][key], x, atol=1e-4, rtol=1e-3)


# Landmarks, and look-ups


@each_family
def test_decoding_is_exact_up_to_the_budget(family):
    model, ids = decoder(family, "nearfar"), tokens(2, 61)
    cache, exact = new_cache(model, 60), output(model, {"input_ids": ids})
    torch.testing.assert_close(decode(model, ids[:, :60], range(5, 60), cache), exact[:, :60], atol=1e-4, rtol=1e-4)
    last = decode(model, ids, [], cache)
    assert not torch.allclose(last, exact[:, 60:], atol=1e-4), "the cache never merges keys"


@each_family
def test_memory_is_bounded_and_steps_do_not_matter(family):
    model, ids = decoder(family, "nearfar"), tokens(2, 240)
    expected = decode(model, ids[:, :70], range(20, 70), new_cache(model, 40))
    for step in (7, 50):
        out = decode(model, ids[:, :70], range(20, 70, step), new_cache(model, 40))
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    cache, sizes = new_cache(model, 32), []
    for end in range(40, 241, 40):
        decode(model, ids[:, :end], [], cache)
        assert cache.get_seq_length() == end
        assert cache.get_mask_sizes(3, 0) == (end + 3, 0)
        sizes.append(cache.numel())
    layer = cache.layers[0]
    (batch, heads, _, dim), kept = layer.keys.shape, 32 - layer.num_landmarks
    per_head = kept * 2 * dim + layer.num_landmarks * (3 * dim + 2)
    assert max(sizes) <= len(cache.layers) * (batch * heads * per_head + batch * kept)
    assert layer.coreset is not None
    assert all(count + merged == 240 for count, merged in zip(layer.counts, layer.merged, strict=True))
    cache.reset()
    assert cache.numel() == 0


@pytest.mark.parametrize("method", CAUSAL)
def test_methods_that_decode_exactly(method):
    model, ids = tiny_model("gpt2", method, head=True), tokens(2, 90)
    if not hea.method_info(method).config_class.decodes_exactly:
        refuses("does not attend to all cached keys", hea.NearFarCache, model.config)
        return
    for config, columns, words in (
        (tiny_model("gpt2", head=True).config, 256, r"'sdpa'.*hea.convert"), (model.config, 7, "8 or more"),
        (transformers.FalconH1Config(efficient_attention={"method": method}), 16, "no effect"),
    ):  # fmt: skip
        refuses(words, hea.NearFarCache, config, columns)
    found = [decode(model, ids, range(75, 90), cache) for cache in (hea.NearFarCache(model.config, 120), None)]
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)
    # Layers that stay exact keep their keys.
    cache = hea.NearFarCache(hea.convert(model, method, layers=[1], **SMALL[method]).config, 16)
    decode(model, ids, range(75, 90), cache)
    assert cache.layers[0].keys.shape[2] == 90
    assert cache.layers[1].keys.shape[2] <= 16


def layer_outputs(query, key, value, columns, prompt, mask=None, kind="landmarks") -> tuple[Tensor, NearFarLayer]:
    """The outputs of a layer, a prompt first and then one token after the other."""
    layer = (LookUpLayer if kind == "look-ups" else NearFarLayer)(NEARFAR, columns)
    return in_calls(layer, (query, key, value), range(prompt, query.shape[2]), mask), layer


def in_calls(layer, tensors, cuts, mask=None, **options) -> torch.Tensor:
    """The outputs of a layer for its next tokens, in calls that end at `cuts` and at the last token."""
    outs, options = [], {"scale": None, "dropout_p": 0.0, "seed": 0, **options}
    for start, end in itertools.pairwise([layer.seen, *cuts, tensors[0].shape[2]]):
        query, key, value = (x[:, :, start:end] for x in tensors)
        seen = None if mask is None else mask[:, :end]
        outs.append(layer.attention(query, *layer.update(key, value), seen, **options))
    return torch.cat(outs, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_landmarks(dtype):
    """Landmarks are made in float32, so that only products and the outputs are rounded."""
    half = [x.to(dtype) for x in inputs(2, 2, 100, 16)]
    out, layer = layer_outputs(*half, 24, 40)
    expected, _ = layer_outputs(*(x.float() for x in half), 24, 40)
    assert out.dtype == layer.keys.dtype == dtype
    assert layer.coreset.weights.dtype == torch.float32
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    model = decoder("llama", "nearfar").to(dtype)
    for name in ("nearfar", "look-ups"):
        assert torch.isfinite(decode(model, tokens(2, 60), range(20, 60), new_cache(model, name=name))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_look_ups_round_no_more_than_one_call(dtype):
    tensors = [x.to(dtype) for x in inputs(2, 2, 100, 16)]
    call = functools.partial(hea.attention, hea.NearFarConfig().with_budget(24), is_causal=True)
    expected = call(*(x.double() for x in tensors))
    out, _ = layer_outputs(*tensors, 24, 40, kind="look-ups")
    assert out.dtype == dtype
    assert relative_error(out, expected) < 1.5 * relative_error(call(*tensors), expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_layer_attends_to_its_keys_and_landmarks(groups):
    """The output equals float64 sums over kept keys and landmarks, with the safer weights where a query needs them."""
    query, key, value = inputs(2, 2 * groups, 90, 8, num_kv_heads=2, value_dim=5, dtype=torch.float64)
    out, layer = layer_outputs(query, key, value, 24, 40)
    assert layer.coreset is not None
    last = query[:, :, -1].unflatten(1, (2, groups))
    scores = torch.cat((layer.coreset.key, layer.keys), 2) @ last.mT / math.sqrt(8)
    new = torch.cat((layer.values, torch.ones_like(layer.values[..., :1])), 3)
    near = scores[:, :, layer.num_landmarks :].exp().mT @ new
    basis = scores[:, :, : layer.num_landmarks].exp().masked_fill(layer.coreset.clusters[..., -1:] == 0, 0.0).mT
    far, safe = basis @ layer.coreset.weights, basis @ layer.coreset.clusters
    ratio = far[..., -1:] / safe[..., -1:]
    total = near + torch.where((ratio > 0.5) & (ratio < 2.0), far, safe)
    torch.testing.assert_close(out[:, :, -1], (total[..., :-1] / total[..., -1:]).flatten(1, 2), atol=1e-9, rtol=1e-9)


@each_kind
@pytest.mark.parametrize("content", ["large", "same", "masked", "padding is nan"])
def test_extreme_inputs_give_finite_outputs(content, kind):
    query, key, value = inputs(2, 2, 120, 16, dtype=torch.float32)
    mask = torch.ones(2, 120, dtype=torch.bool)
    if content == "large":
        query, key = query * 30.0, key * 30.0
        assert float((query @ key.mT / 4).abs().max()) > 1000
    elif content == "same":
        key = key[:, :, :1].expand_as(key).contiguous()
    elif content == "masked":
        mask[0] = False
    else:
        mask[1, ::3] = False
        query[1, :, ::3] = key[1, :, ::3] = value[1, :, ::3] = torch.nan
    out, _ = layer_outputs(query, key, value, 16, 20, mask, kind=kind)
    assert torch.isfinite(out[mask[:, None].expand(out.shape[:3])]).all()
    if content == "same":
        torch.testing.assert_close(out, value.cumsum(2) / torch.arange(1, 121)[:, None], atol=1e-4, rtol=1e-4)
    if content == "masked":
        assert (out[0] == 0).all()


@pytest.mark.parametrize("seed", range(2))
def test_masked_tokens_anywhere_change_nothing(seed):
    query, key, value = inputs(3, 2, 80, 8)
    mask = torch.rand(3, 80, generator=torch.Generator().manual_seed(seed)) > torch.tensor([[0.0], [0.3], [0.6]])
    out, layer = layer_outputs(query, key, value, 16, 12, mask)
    assert layer.keys.shape[2] <= 16
    for row in range(3):
        valid = [x[row : row + 1, :, mask[row]] for x in (query, key, value)]
        alone, _ = layer_outputs(*valid, 16, int(mask[row, :12].sum()))
        torch.testing.assert_close(out[row : row + 1, :, mask[row]], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("columns", "length", "padding"),
    [(16, 300, "none"), (16, 300, "left"), (16, 300, "holes"), (41, 450, "left"), (8, 1300, "left")],
)
def test_look_ups_have_the_outputs_and_gradients_of_one_call(columns, length, padding):
    """Token by token and in pieces, across boundaries of chunks of all levels, with grouped queries and sinks."""
    tensors = [x.requires_grad_() for x in inputs(2, 4, length, num_kv_heads=2, value_dim=5, dtype=torch.float64)]
    config, mask, sinks = hea.NearFarConfig().with_budget(columns), padding_mask(padding, 2, length), numbers(4)
    if padding == "left":
        mask = torch.arange(length) >= torch.tensor([[37], [0]])
    options = {"attention_mask": mask, "is_causal": True, "sinks": sinks}
    valid = 1.0 if mask is None else mask[:, None, :, None]
    expected = valid * hea.attention(config, *tensors, **options)
    exact = valid * hea.attention("longformer", *tensors, window_size=length, **options)
    assert not torch.allclose(expected, exact, atol=1e-5)
    gradients = torch.autograd.grad(expected.square().sum(), tensors)
    pieces = torch.randperm(length - 1, generator=torch.Generator().manual_seed(columns))[:9].add(1).sort()[0].tolist()

    def in_pieces(*cuts):
        return valid * in_calls(LookUpLayer(config, columns), tensors, cuts, mask, sinks=sinks)

    with torch.no_grad():
        for cuts in (range(1 if length < 500 else 1000, length), pieces, [1, length // 2]):
            torch.testing.assert_close(in_pieces(*cuts), expected, atol=1e-9, rtol=1e-9)
    found = torch.autograd.grad(in_pieces(*pieces, length - 1).square().sum(), tensors)
    torch.testing.assert_close(found, gradients, atol=1e-9, rtol=1e-9)


def test_look_ups_continue_after_inference_mode():
    tensors, layer = inputs(1, 2, 90, 8), LookUpLayer(NEARFAR, 16)
    with torch.inference_mode():
        in_calls(layer, [x[:, :, :60] for x in tensors], [40, 41])
    with torch.no_grad():
        out = in_calls(layer, tensors, range(61, 90))
    expected = in_calls(LookUpLayer(NEARFAR, 16), tensors, [40])[:, :, 60:]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_look_ups_keep_little_besides_the_keys():
    tensors, layer = inputs(1, 2, 8000, 64, value_dim=64), LookUpLayer(NEARFAR, 128)
    with torch.no_grad():
        in_calls(layer, tensors, [2000])
    assert 0 < layer.numel() - 2 * tensors[1].numel() < 0.1 * 2 * tensors[1].numel()


def add_keys_naive(
    coreset: GrowingCoreset, key: Tensor, value: Tensor, landmark: Tensor, *, scale: float
) -> GrowingCoreset:
    """The readable form of `add_keys` for one head, in float64: the weights at the landmarks that it has chosen.

    The coreset has tensors (m, .), the new keys are (N, D), their values (N, Dv), and the landmarks (m', D).
    """
    new = torch.cat((value, value.new_ones(len(value), 1)), 1).double()
    old = coreset.clusters[:, -1] > 0
    points = torch.cat((coreset.key[old], key)).double()
    clusters = torch.cat((coreset.clusters[old].double(), new))
    weights = torch.cat((coreset.weights[old].double(), new))
    center = (points * clusters[:, -1:]).sum(0) / clusters[:, -1].sum()
    factor = growing._TEMPERATURE * max(abs(scale), growing._SMALLEST_SCALE) ** 0.5
    x, y = (points - center) * factor, (landmark.double() - center) * factor
    shrink = max(1.0, float(x.norm(dim=1).max()) / (2.0 * growing._LARGEST_EXPONENT) ** 0.5)
    x, y = x / shrink, y / shrink
    nearest = torch.cdist(x, y).argmin(1)
    cluster = torch.stack([clusters[nearest == i].sum(0) for i in range(len(y))])
    # exp(<y, .>) at every landmark, with and without the kernel's unit diagonal.
    half = y.square().sum(1, keepdim=True) / 2
    kernel = (y @ y.T - half - half.T).exp()
    missing = (y @ x.T - half).exp() @ weights - kernel @ (half.exp() * cluster)
    correction = torch.linalg.solve(kernel + growing._RIDGE * torch.eye(len(y), dtype=y.dtype), missing)
    nystrom = cluster + (-half).exp() * correction
    is_safe = nystrom.abs().max() <= growing._LARGEST_WEIGHT * cluster.abs().sum(0).max()
    return GrowingCoreset(landmark.double(), cluster, nystrom if is_safe else cluster)


@pytest.mark.parametrize("length", [1.0, 40.0])
def test_merging_is_that_of_the_readable_form(length):
    _, key, value = (x[0] for x in inputs(1, 3, 90, 8, value_dim=5, dtype=torch.float64))
    key = key * length
    first = empty_coreset(key, value, 16)
    first = add_keys(first, key[:, :50], value[:, :50], scale=0.3, draws=Draws(0, key.device), batch=1)
    mask = (torch.arange(40) % 5 > 0).expand(3, -1)
    both = add_keys(first, key[:, 50:], value[:, 50:], mask, scale=0.3, draws=Draws(1, key.device), batch=1)
    for head in range(3):
        alive = both.clusters[head, :, -1] > 0
        old = type(first)(*(x[head] for x in first))
        new = [x[head, 50:][mask[head]] for x in (key, value)]
        naive = add_keys_naive(old, *new, both.key[head, alive], scale=0.3)
        torch.testing.assert_close(both.clusters[head, alive], naive.clusters)
        torch.testing.assert_close(both.weights[head, alive], naive.weights, atol=1e-6, rtol=1e-6)
    assert (both.clusters[..., -1].sum(1) == 50 + 32).all()


def gpt2_books(data):
    """The model, and 1,024 tokens."""
    folder = data / "models" / "gpt2-books"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = read_text(sorted((data / "text" / "books").glob("*.txt.gz"))[0])[-8000:]
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=1024)["input_ids"]
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), ids


def test_gpt2_books_decodes_nearly_the_same_tokens(data):
    """With 256 columns, trained attention to 1,024 tokens hardly changes; a window with the same memory does."""
    model, ids = gpt2_books(data)
    exact = output(model, {"input_ids": ids})
    hea.convert(model, hea.NearFarConfig().with_budget(2048))
    cache = hea.NearFarCache(model.config, 256)
    out = decode(model, ids, [64], cache)
    hea.convert(model, "longformer", window_size=cache.numel() // (2 * 256 * 4))
    window = output(model, {"input_ids": ids})
    same, same_window = ((x.argmax(2) == exact.argmax(2))[:, 400:].float().mean() for x in (out, window))
    assert same > 0.75
    assert same > same_window + 0.1


def test_look_ups_find_a_repeated_passage(data):
    """GPT-2 copies it from 800 tokens before, as with all keys. Landmarks lose it."""
    model, ids = gpt2_books(data)
    ids[:, 864:] = ids[:, 64:224]
    hea.convert(model, hea.NearFarConfig().with_budget(2048))
    losses = []
    for cache in (None, hea.NearFarCache(model.config, 256, look_up=True), hea.NearFarCache(model.config, 256)):
        logits = decode(model, ids, [64], cache)[:, 864:-1]
        losses.append(float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[0, 865:])))
    exact, found, forgotten = losses
    assert found < exact + 0.15 < forgotten - 0.5


@pytest.mark.exhaustive
def test_the_recipe_compares_caches(data, tmp_path):
    file = tmp_path / "caches.csv"
    assert run(recipe, "--budget 256 --inputs 1 --data", data, "--csv", file) == 0
    exact, ours, look_ups, window, _ = read_csv(file)
    assert (exact["cache"], ours["cache"], window["cache"]) == ("exact", "NearFarCache", "window")
    assert float(look_ups["repeated"]) < float(exact["repeated"]) + 0.1 < float(ours["repeated"]) - 1.0
    assert float(look_ups["nats"]) < float(exact["nats"]) + 0.02
    assert float(exact["same"]) == float(exact["generated"]) == 1
    assert float(exact["repeated"]) < float(ours["repeated"])
    assert abs(float(ours["numel"]) / float(window["numel"]) - 1) < 0.01
    assert float(ours["nats"]) + 0.1 < float(window["nats"])
    assert float(ours["nats"]) < float(exact["nats"]) + 0.05 and float(ours["same"]) > 0.75
