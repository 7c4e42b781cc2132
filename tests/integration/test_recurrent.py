"""Decoding from a state: the recurrence of methods against their causal form, and the cache layer of models."""

import copy
import io
import itertools

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import hf_efficient_attn as hea
from hf_efficient_attn.integration.cache import NewKeys, StateLayer
from hf_efficient_attn.methods import attention_with_state, naive_attention
from instances import INSTANCES, inputs, numbers, padding_mask, relative_error
from test_generation import generate
from tiny_models import DECODERS, METHODS, SMALL, output, tiny_batch, tiny_model

RECURRENT = [name for name in METHODS if hea.method_info(name).recurrent]
each_method = pytest.mark.parametrize("method", RECURRENT)
each_family = pytest.mark.parametrize("family", DECODERS)
each_recurrent = pytest.mark.parametrize("instance", [i for i in INSTANCES if i.info.recurrent], ids=str)


def in_chunks(config, query, key, value, cuts, mask=None, seed=0, **options):
    """Causal attention of one chunk of tokens after the other, each from the state before it: (output, state)."""
    state, outs = None, []
    for start, end in itertools.pairwise(sorted({0, query.shape[2], *cuts})):
        chunk_mask = None if mask is None else mask[:, start:end]
        tokens = (x[:, :, start:end] for x in (query, key, value))
        out, state = attention_with_state(config, state, *tokens, attention_mask=chunk_mask, seed=seed, **options)
        assert state[0].shape[:2] == key.shape[:2]
        outs.append(out)
    return torch.cat(outs, 2), state


@each_recurrent
def test_token_by_token_over_long_sequences(instance):
    """The state sums up 400 tokens in float32, one at a time, and ignores what masked keys contain."""
    query, key, value = inputs(1, 2, 400, 16)
    out, state = in_chunks(instance.config(), query, key, value, range(400), seed=3, scale=0.1)
    expected = naive_attention(instance.config(), query, key, value, is_causal=True, seed=3, scale=0.1)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    few, mask = [x[:, :, :40] for x in (query, key, value)], padding_mask("holes", 1, 40)
    outs = []
    for content in (0.0, torch.nan):
        key_and_value = (x.masked_fill(~mask[:, None, :, None], content) for x in few[1:])
        out, short = in_chunks(instance.config(), few[0], *key_and_value, [13, 14, 15], mask)
        outs.append((out, *short))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    assert [x.shape for x in state] == [x.shape for x in short]
    assert all(x.dtype == torch.float32 for x in state)


@each_recurrent
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(instance, dtype):
    query, key, value = inputs(1, 2, 60, 8, dtype=dtype)
    out, state = in_chunks(instance.config(), query, key, value, [30, 31, 32])
    assert out.dtype == dtype and all(x.dtype == torch.float32 for x in state)
    whole = hea.attention(instance.config(), query, key, value, is_causal=True)
    assert relative_error(out, whole) < 0.01
    out, _ = in_chunks(instance.config(), 60 * query, 60 * key, value, range(60))  # logits of 1e4
    assert out.isfinite().all()
    with torch.autocast("cpu", dtype):
        out, state = in_chunks(instance.config(), *inputs(1, 2, 60, 8), [30, 31])
    assert out.dtype == dtype and all(x.dtype == torch.float32 for x in state)


@each_recurrent
def test_gradients_through_a_state(instance):
    """Gradients through the states of several chunks are those of the whole sequence."""
    tensors = [x.requires_grad_() for x in inputs(1, 2, 12, 4, dtype=torch.float64)]
    weight = numbers(1, 2, 12, 4, seed=5)
    config = instance.reduced.config()
    out, _ = in_chunks(config, *tensors, [5, 6, 7, 10])
    got = torch.autograd.grad((out * weight).sum(), tensors)
    whole = hea.attention(config, *tensors, is_causal=True)
    expected = torch.autograd.grad((whole * weight).sum(), tensors)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


# --- models ---


def tensors_in(value) -> list:
    """All tensors in a cache, a layer, a list or a tuple."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in tensors_in(item)]
    if isinstance(value, (transformers.Cache, StateLayer)):
        return tensors_in(list(vars(value).values()))
    return []


def cache_after(model, length: int, new: int = 0, **options):
    ids = tiny_batch("gpt2", length=length)["input_ids"]
    with torch.no_grad():
        cache = model(ids, use_cache=True, **options).past_key_values
        for token in range(new):
            cache = model(ids[:, [token % length]], past_key_values=cache, use_cache=True).past_key_values
    return cache


class Numbers(TorchDispatchMode):
    """Counts the numbers that operators return."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.count += sum(x.numel() for x in tensors_in(result))
        return result


@each_method
@each_family
def test_neither_the_cache_nor_the_cost_of_a_token_grows(family, method):
    model = tiny_model(family, method, head=True, max_position_embeddings=256)
    caches = [cache_after(model, 10), cache_after(model, 200), cache_after(model, 10, 12)]
    assert all(type(layer) is StateLayer and layer.keys is None for layer in caches[1].layers)
    assert len({sum(x.numel() for x in tensors_in(cache.layers)) for cache in caches} - {0}) == 1
    assert [c.get_seq_length() for c in caches] == [10, 200, 22]
    num_kv_heads, head_dim = (2, 16) if family == "gpt2" else (2, 8)
    assert caches[0].layers[0].state[0].shape[:2] == (2, num_kv_heads)
    assert caches[0].layers[0].state[0].shape[-1] == head_dim + 8  # sums of values, and those of weights
    counts = []
    for cache in (cache_after(model, 10, 1), cache_after(model, 200, 1)):
        with torch.no_grad(), Numbers() as numbers_made:
            model(torch.full((2, 1), 7), past_key_values=cache, use_cache=True)
        counts.append(numbers_made.count)
    assert counts[0] == counts[1]


@each_method
@each_family
def test_a_saved_model_decodes_from_states_and_an_exact_one_does_not(family, method, tmp_path):
    batch, model = tiny_batch(family), tiny_model(family, method, head=True)
    model.save_pretrained(tmp_path)
    expected = generate(model, batch, use_cache=False)
    for one in (model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert isinstance(cache_after(one, 10).layers[1], StateLayer)
        assert torch.equal(generate(one, batch), expected)
    back = hea.convert(model, "sdpa")
    assert not any(isinstance(layer, StateLayer) for layer in cache_after(back, 10).layers)
    assert torch.equal(generate(back, batch), generate(tiny_model(family, head=True), batch))


@each_method
@each_family
def test_exact_and_recurrent_layers_in_one_model(family, method):
    model = hea.convert(tiny_model(family, head=True), method, layers=[1], **SMALL[method])
    batch = tiny_batch(family, padding="left")
    cache = cache_after(model, 10)
    assert [isinstance(layer, StateLayer) for layer in cache.layers] == [False, True]
    assert torch.equal(generate(model, batch), generate(model, batch, use_cache=False))
    mix = [{"layers": [0], "method": method, **SMALL[method]}, {"layers": [1], "method": "longformer"}]
    model = hea.convert(tiny_model(family, head=True), method, layers=mix)
    assert [isinstance(layer, StateLayer) for layer in cache_after(model, 10).layers] == [True, False]
    assert torch.equal(generate(model, batch), generate(model, batch, use_cache=False))


@each_method
@each_family
def test_generation_continues_from_a_cache(family, method):
    """A second call of `generate` uses the cache of the first, a copy of it, or one that was saved and loaded."""
    model, batch = tiny_model(family, method, head=True), tiny_batch(family, length=30)
    first = model.generate(**batch, max_new_tokens=5, return_dict_in_generate=True, do_sample=False)
    more = torch.cat((first.sequences, tiny_batch(family, length=9, seed=1)["input_ids"]), 1)
    # Without a mask, `generate` treats tokens that equal the padding token as padding.
    more = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    expected = generate(model, more, use_cache=False)
    file = io.BytesIO()
    torch.save(first.past_key_values, file)
    file.seek(0)
    caches = [copy.deepcopy(first.past_key_values), torch.load(file, weights_only=False), first.past_key_values]
    for cache in caches:
        assert torch.equal(generate(model, more, past_key_values=cache), expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, more, past_key_values=cache), expected)


@each_method
@each_family
def test_batch_rows_of_a_cache(family, method):
    """Repeated, selected and reordered batch rows continue like the rows they are copies of."""
    model, ids = tiny_model(family, method, head=True), tiny_batch(family, batch=3, length=20)["input_ids"]
    with torch.no_grad():
        whole = output(model, {"input_ids": ids}, use_cache=False)[:, -1:]

        def after(change):
            cache = model(ids[:, :-1], use_cache=True).past_key_values
            change(cache)
            return cache

        for change, rows in (
            (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
            (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
            (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
        ):
            last = model(ids[rows, -1:], past_key_values=after(change), use_cache=True).logits
            torch.testing.assert_close(last, whole[rows], atol=1e-5, rtol=1e-4)


@each_method
def test_tokens_cannot_be_removed(method):
    cache = cache_after(tiny_model("gpt2", method, head=True), 20)
    cache.crop(0 if hasattr(cache.layers[0], "get_max_length") else 20)
    for call in (lambda: cache.crop(-1), cache.layers[0].activate_past_recording):
        with pytest.raises(hea.UnsupportedAttentionError, match="cannot be taken back"):
            call()


@each_family
def test_other_caches_store_keys(family):
    """A cache from keys and values, and that of another method. test_ways_of_generating.py has more of them."""
    model = tiny_model(family, "linear", head=True)
    filled = transformers.DynamicCache([(torch.zeros(2, 2, 3, 8),) * 2] * 2, config=model.config)
    other = cache_after(tiny_model(family, "kdeformer", head=True), 10)
    assert not any(isinstance(layer, StateLayer) for layer in (*filled.layers, *other.layers))


@each_method
@each_family
def test_a_state_that_does_not_fit_is_refused(family, method):
    """After a switch, a model does not continue from the cache of the old method, which would drop the past."""
    token = torch.full((2, 1), 7)
    hyperparameters = {"feature_map": "exp"} if method == "linear" else {"num_features": 8}
    for other, options in (("sdpa", {}), ("eager", {}), ("longformer", {}), (method, hyperparameters)):
        model = tiny_model(family, method, head=True)
        cache = cache_after(model, 10)
        hea.convert(model, other, **options)
        with pytest.raises(hea.UnsupportedAttentionError, match="start with a new cache"):
            model(token, past_key_values=cache, use_cache=True)
    model = tiny_model(family, method, head=True)
    cache = cache_after(model, 10)
    cache.layers[0].update(*(torch.zeros(2, 2, 1, 8),) * 2)
    with pytest.raises(hea.UnsupportedAttentionError, match="no attention followed"):
        model(token, past_key_values=cache, use_cache=True)


@each_method
@each_family
def test_a_changed_mask_of_earlier_tokens_is_refused(family, method):
    model, batch = tiny_model(family, method, head=True), tiny_batch(family, padding="left")
    mask = torch.cat((batch["attention_mask"], torch.ones(2, 1, dtype=torch.int64)), 1)
    changed = mask.clone()
    changed[0, :5] = 0
    for wrong in (changed, torch.ones_like(mask)):
        with torch.no_grad():
            cache = model(**batch, use_cache=True).past_key_values
            with pytest.raises(hea.UnsupportedAttentionError, match="attention_mask of earlier tokens"):
                model(torch.full((2, 1), 7), attention_mask=wrong, past_key_values=cache, use_cache=True)
    with torch.no_grad():
        cache = model(**batch, use_cache=True).past_key_values
        model(torch.full((2, 1), 7), attention_mask=mask, past_key_values=cache, use_cache=True)


@each_method
def test_models_that_modify_cached_keys(method):
    """A model that modifies the keys it gets from the cache continues with all keys, and with the right output."""
    model, ids = tiny_model("gpt2", method, head=True), tiny_batch("gpt2")["input_ids"]
    update = transformers.DynamicCache.update

    class Copying(transformers.DynamicCache):
        def update(self, *args, **kwargs):
            return tuple(x.clone() for x in update(self, *args, **kwargs))

    cache = transformers.DynamicCache(config=model.config)
    assert isinstance(cache.layers[0], StateLayer)
    cache.__class__ = Copying
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        model(ids[:, :-2], past_key_values=cache, use_cache=True)
        for i in (-2, -1):
            last = model(ids[:, i : (i + 1) or None], past_key_values=cache, use_cache=True).logits
    assert cache.layers[0].keys.shape[2] == cache.get_seq_length() == 70
    torch.testing.assert_close(last, whole[:, -1:], atol=1e-4, rtol=1e-4)
    kept = cache_after(model, 10)
    kept.__class__ = Copying
    with pytest.raises(hea.UnsupportedAttentionError, match="clone"):
        model(ids[:, :1], past_key_values=kept, use_cache=True)


def test_new_keys_show_their_shape_but_cannot_be_used():
    keys = numbers(1, 2, 3, 4).as_subclass(NewKeys)
    assert keys.shape == (1, 2, 3, 4) and keys.dtype == torch.float64 and keys.size(1) == 2 and keys.ndim == 4
    assert keys.grad is None and keys.is_contiguous() and not keys.requires_grad
    for use in (lambda: keys.mT, lambda: keys + 1, lambda: torch.cat([keys, keys], 2), lambda: keys[0]):
        with pytest.raises(hea.UnsupportedAttentionError, match="start with a new cache"):
            use()


def test_a_compiled_forward_stores_keys():
    """It is one graph."""
    model, ids = tiny_model("gpt2", "linear", head=True, n_layer=1), tiny_batch("gpt2", length=20)["input_ids"]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        out = compiled(ids, past_key_values=transformers.DynamicCache(config=model.config), use_cache=True)
        torch.testing.assert_close(out.logits, model(ids, use_cache=False).logits, atol=1e-5, rtol=1e-5)
    assert out.past_key_values.layers[0].keys.shape[2] == 20
    torch.compiler.reset()


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@each_method
@each_family
def test_gradients_with_a_cache(family, method):
    """The state is not computed until a next token follows. Loss and gradients are those without a cache."""
    model, ids = tiny_model(family, method, head=True).train(), tiny_batch(family)["input_ids"]
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        out = model(ids, labels=ids, use_cache=use_cache)
        found.append(gradients_of(model, out.loss))
        if use_cache:
            assert all(layer.state is None and layer.seen == 70 for layer in out.past_key_values.layers)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    model.eval()
    first = model(ids[:, :40], use_cache=True)
    second = model(ids[:, 40:], past_key_values=first.past_key_values, use_cache=True)
    both = torch.cat((first.logits, second.logits), 1), model(ids, use_cache=False).logits
    found = [gradients_of(model, logits.log_softmax(-1)[..., 5].mean()) for logits in both]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@each_family
def test_a_sequence_keeps_its_features_in_training(family):
    """In training, random features are drawn once per sequence."""
    without_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if family == "gpt2" else {}
    model = tiny_model(family, "performer", head=True, **without_dropout).train()
    ids = tiny_batch(family)["input_ids"]
    torch.manual_seed(1)
    whole = model(ids, use_cache=False).logits
    torch.manual_seed(1)
    cache = model(ids[:, :-2], use_cache=True).past_key_values
    last = model(ids[:, -2:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(last, whole[:, -2:], atol=1e-4, rtol=1e-3)
