"""`NearFarCache`: decoding from the newest keys and landmarks, in models, in one layer, and in its coreset."""

import copy
import csv
import itertools
import math

import pytest
import torch
import transformers
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from hf_efficient_attn.integration.near_far_cache import NearFarLayer
from hf_efficient_attn.io.reading import read_text
from hf_efficient_attn.ops import coreset as coreset_ops
from hf_efficient_attn.ops.coreset import GrowingCoreset, add_keys, empty_coreset
from instances import inputs
from recipes.benchmarks import cache as recipe
from tiny_models import DECODERS, tiny_batch, tiny_model

each_family = pytest.mark.parametrize("family", DECODERS)
# More columns than any test has tokens: a prompt is then exact, and only the cache approximates.
EXACT = hea.NearFarConfig(block_size=256, num_samples=256)


def exact_model(family: str, **changes):
    """A tiny decoder whose prompts are exact."""
    sizes = {"n_positions": 512} if family == "gpt2" else {"max_position_embeddings": 512}
    return hea.convert(tiny_model(family, head=True, **sizes, **changes), EXACT)


def decode(model, cache, ids, *, prompt: int = 1, step: int = 1, mask=None) -> torch.Tensor:
    """The logits of all tokens, `step` at a time after a prompt."""
    logits, start, end = [], 0, prompt
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        while start < ids.shape[1]:
            piece = slice(start, end)
            call = {"attention_mask": mask[:, :end], "position_ids": positions[:, piece], "past_key_values": cache}
            logits.append(model(ids[:, piece], **call).logits)
            start, end = end, min(end + step, ids.shape[1])
    return torch.cat(logits, 1)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model, inputs, new: int = 12, **options) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, **{"do_sample": False, **options})


@pytest.mark.parametrize("padding", ["none", "left"])
@each_family
def test_decoding_is_exact_up_to_the_budget(family, padding):
    model, batch = exact_model(family), tiny_batch(family, padding=padding)
    for options in ({}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True}):
        torch.manual_seed(1)
        expected = generate(model, batch, **options)
        torch.manual_seed(1)
        assert torch.equal(
            generate(model, batch, past_key_values=hea.NearFarCache(model.config, 82), **options), expected
        )
    ids, cache = tokens(2, 60), hea.NearFarCache(model.config, 60)
    exact = decode(model, None, ids, prompt=60)
    torch.testing.assert_close(decode(model, cache, ids, prompt=5), exact, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        last = model(tokens(2, 1), past_key_values=cache).logits
        whole = model(torch.cat((ids, tokens(2, 1)), 1)).logits[:, -1:]
    assert not torch.allclose(last, whole, atol=1e-4), "the cache never merges keys"


@each_family
def test_memory_is_bounded_and_steps_do_not_matter(family):
    model, ids = exact_model(family), tokens(2, 100)
    expected = decode(model, hea.NearFarCache(model.config, 40), ids, prompt=20)
    for step in (7, 80):
        out = decode(model, hea.NearFarCache(model.config, 40), ids, prompt=20, step=step)
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    ids = tokens(2, 240)
    cache, sizes = hea.NearFarCache(model.config, 32), []
    for start in range(0, 240, 40):
        with torch.no_grad():
            model(ids[:, start : start + 40], past_key_values=cache)
        assert cache.get_seq_length() == start + 40
        assert cache.get_mask_sizes(3, 0) == (start + 43, 0)
        sizes.append(cache.numel())
    layer = cache.layers[0]
    (batch, heads, _, dim), kept = layer.keys.shape, 32 - layer.num_landmarks
    per_head = kept * 2 * dim + layer.num_landmarks * (3 * dim + 2)
    assert max(sizes) <= len(cache.layers) * (batch * heads * per_head + batch * kept)
    assert layer.coreset is not None
    assert all(count + merged == 240 for count, merged in zip(layer.counts, layer.merged, strict=True))


@pytest.mark.parametrize("prompt", [10, 100])
@each_family
def test_rows_are_independent_of_padding_and_batch(family, prompt):
    model, ids, lengths = exact_model(family), tokens(3, 140), (140, 90, 44)
    mask = torch.arange(140) >= 140 - torch.tensor(lengths)[:, None]
    together = decode(model, hea.NearFarCache(model.config, 32), ids, prompt=prompt, step=9, mask=mask.long())
    for row, length in enumerate(lengths):
        # The first call is exact, so that it must have the same tokens.
        first = max(prompt - (140 - length), 1)
        alone = decode(model, hea.NearFarCache(model.config, 32), ids[row : row + 1, -length:], prompt=first, step=9)
        torch.testing.assert_close(together[row, -length:], alone[0], atol=2e-3, rtol=2e-3)


@each_family
def test_reordering_repeating_and_selecting_rows(family):
    model, ids, new = exact_model(family), tokens(3, 90), tokens(1, 6, seed=1)

    def after(change, rows):
        cache = hea.NearFarCache(model.config, 24)
        decode(model, cache, ids, prompt=50, step=20)
        change(cache)
        with torch.no_grad():
            out = model(new.expand(len(rows), -1), past_key_values=cache).logits
        for i, row in enumerate(rows):
            one = hea.NearFarCache(model.config, 24)
            decode(model, one, ids[row : row + 1], prompt=50, step=20)
            with torch.no_grad():
                expected = model(new, past_key_values=one).logits[0]
            torch.testing.assert_close(out[i], expected, atol=2e-3, rtol=2e-3)

    after(lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0])
    after(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])
    after(lambda cache: cache.batch_select_indices(torch.tensor([1])), [1])


def decode_on(model, cache, ids) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])], 1)


def test_reset_and_copies():
    model, ids = exact_model("gpt2"), tokens(2, 70)
    cache = hea.NearFarCache(model.config, 24)
    first = decode(model, cache, ids, prompt=30)
    cache.reset()
    assert (cache.get_seq_length(), cache.numel()) == (0, 0)
    assert torch.equal(decode(model, cache, ids[:, :50], prompt=30), first[:, :50])
    # A copy continues by itself, as when several texts begin with the same prompt.
    for one in (copy.deepcopy(cache), cache):
        assert torch.equal(decode_on(model, one, ids[:, 50:]), first[:, 50:])


def test_layers_that_stay_exact_keep_their_keys():
    model = hea.convert(tiny_model("gpt2", head=True), EXACT, layers=[1])
    cache = hea.NearFarCache(model.config, 16)
    decode(model, cache, tokens(1, 60), prompt=10)
    assert cache.layers[0].keys.shape[2] == 60
    assert cache.layers[1].keys.shape[2] <= 16


@pytest.mark.parametrize("method", [m for m in hea.available_methods() if hea.method_info(m).causal])
def test_methods_that_decode_exactly(method):
    model = tiny_model("gpt2", method, head=True)
    if hea.method_info(method).config_class.decodes_exactly:
        cache = hea.NearFarCache(model.config, 120)
        ids = tokens(2, 90)
        expected = decode(model, transformers.DynamicCache(config=model.config), ids, prompt=75)
        torch.testing.assert_close(decode(model, cache, ids, prompt=75), expected, atol=1e-3, rtol=1e-3)
    else:
        with pytest.raises(hea.UnsupportedAttentionError, match="does not attend to all cached keys"):
            hea.NearFarCache(model.config)


def test_refusals():
    model, ids = exact_model("gpt2"), tokens(2, 40)
    with pytest.raises(hea.UnsupportedAttentionError, match=r"'sdpa'.*hea.convert"):
        hea.NearFarCache(tiny_model("gpt2", head=True).config)
    with pytest.raises(hea.UnsupportedAttentionError, match="8 or more"):
        hea.NearFarCache(model.config, 7)
    cache = hea.NearFarCache(model.config, 16)
    decode(model, cache, ids, prompt=30)
    with pytest.raises(hea.UnsupportedAttentionError, match="cannot be taken back"):
        cache.crop(-1)
    mask = torch.ones(2, 41)
    mask[0, :5] = 0
    with pytest.raises(hea.UnsupportedAttentionError, match="mask of earlier tokens has changed"):
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)
    with pytest.raises(hea.UnsupportedAttentionError, match="no attention followed"):
        model(ids[:, :1], past_key_values=cache)
    exact = hea.convert(exact_model("gpt2"), "sdpa")
    with pytest.raises(hea.UnsupportedAttentionError, match="a state of the method that the model had"):
        exact(ids[:, :1], past_key_values=hea.NearFarCache(model.config, 16))


def layer_outputs(
    query, key, value, columns: int, prompt: int, mask=None, scale=None
) -> tuple[torch.Tensor, NearFarLayer]:
    """The outputs of a layer, a prompt first and then one token after the other."""
    layer, outs = NearFarLayer(EXACT, columns), []
    cuts = [0, prompt, *range(prompt + 1, query.shape[2] + 1)]
    for start, end in itertools.pairwise(cuts):
        own = [x[:, :, start:end] for x in (key, value)]
        seen = None if mask is None else mask[:, :end]
        call = {"scale": scale, "dropout_p": 0.0, "seed": 0}
        outs.append(layer.attention(query[:, :, start:end], *layer.update(*own), seen, **call))
    return torch.cat(outs, 2), layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Landmarks are made in float32, so that only products and the outputs are rounded."""
    half = [x.to(dtype) for x in inputs(2, 2, 100, 16)]
    out, layer = layer_outputs(*half, 24, 40)
    expected, _ = layer_outputs(*(x.float() for x in half), 24, 40)
    assert out.dtype == layer.keys.dtype == dtype
    assert layer.coreset.weights.dtype == torch.float32
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    model = exact_model("llama").to(dtype)
    assert torch.isfinite(decode(model, hea.NearFarCache(model.config, 24), tokens(2, 60), prompt=20)).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_layer_attends_to_its_keys_and_landmarks(groups):
    """The output is that of the sums over kept keys and landmarks, in float64, with the safer weights where asked."""
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
    expected = (total[..., :-1] / total[..., -1:]).flatten(1, 2)
    torch.testing.assert_close(out[:, :, -1], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", ["large", "same", "masked", "padding is nan"])
def test_extreme_inputs_give_finite_outputs(kind):
    query, key, value = inputs(2, 2, 120, 16, dtype=torch.float32)
    mask = torch.ones(2, 120, dtype=torch.bool)
    if kind == "large":
        query, key = query * 30.0, key * 30.0
        assert float((query @ key.mT / 4).abs().max()) > 1000
    elif kind == "same":
        key = key[:, :, :1].expand_as(key).contiguous()
    elif kind == "masked":
        mask[0] = False
    else:
        mask[1, ::3] = False
        key[1, :, ::3] = value[1, :, ::3] = torch.nan
    out, _ = layer_outputs(query, key, value, 16, 20, mask)
    assert torch.isfinite(out[mask[:, None].expand(out.shape[:3])]).all()
    if kind == "same":
        mean = value.cumsum(2) / torch.arange(1, 121)[:, None]
        torch.testing.assert_close(out, mean, atol=1e-4, rtol=1e-4)
    if kind == "masked":
        assert (out[0] == 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_masked_tokens_anywhere_change_nothing(seed):
    query, key, value = inputs(3, 2, 80, 8)
    mask = torch.rand(3, 80, generator=torch.Generator().manual_seed(seed)) > torch.tensor([[0.0], [0.3], [0.6]])
    out, layer = layer_outputs(query, key, value, 16, 12, mask)
    assert layer.keys.shape[2] <= 16
    for row in range(3):
        valid = [x[row : row + 1, :, mask[row]] for x in (query, key, value)]
        alone, _ = layer_outputs(*valid, 16, int(mask[row, :12].sum()))
        torch.testing.assert_close(out[row : row + 1, :, mask[row]], alone, atol=1e-4, rtol=1e-4)


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
    factor = coreset_ops._TEMPERATURE * max(abs(scale), coreset_ops._SMALLEST_SCALE) ** 0.5
    x, y = (points - center) * factor, (landmark.double() - center) * factor
    shrink = max(1.0, float(x.norm(dim=1).max()) / (2.0 * coreset_ops._LARGEST_EXPONENT) ** 0.5)
    x, y = x / shrink, y / shrink
    nearest = torch.cdist(x, y).argmin(1)
    cluster = torch.stack([clusters[nearest == i].sum(0) for i in range(len(y))])
    # exp(<y, .>) at every landmark, with and without the kernel's unit diagonal.
    half = y.square().sum(1, keepdim=True) / 2
    kernel = (y @ y.T - half - half.T).exp()
    missing = (y @ x.T - half).exp() @ weights - kernel @ (half.exp() * cluster)
    correction = torch.linalg.solve(kernel + coreset_ops._RIDGE * torch.eye(len(y), dtype=y.dtype), missing)
    nystrom = cluster + (-half).exp() * correction
    is_safe = nystrom.abs().max() <= coreset_ops._LARGEST_WEIGHT * cluster.abs().sum(0).max()
    return GrowingCoreset(landmark.double(), cluster, nystrom if is_safe else cluster)


@pytest.mark.parametrize("length", [1.0, 40.0])
def test_merging_is_that_of_the_readable_form(length):
    _, key, value = (x[0] for x in inputs(1, 3, 90, 8, value_dim=5, dtype=torch.float64))
    key = key * length
    first = add_keys(empty_coreset(key, value, 16), key[:, :50], value[:, :50], scale=0.3, seed=0, batch=1)
    mask = (torch.arange(40) % 5 > 0).expand(3, -1)
    both = add_keys(first, key[:, 50:], value[:, 50:], mask, scale=0.3, seed=1, batch=1)
    for head in range(3):
        alive = both.clusters[head, :, -1] > 0
        old = type(first)(*(x[head] for x in first))
        new = [x[head, 50:][mask[head]] for x in (key, value)]
        naive = add_keys_naive(old, *new, both.key[head, alive], scale=0.3)
        torch.testing.assert_close(both.clusters[head, alive], naive.clusters)
        torch.testing.assert_close(both.weights[head, alive], naive.weights, atol=1e-6, rtol=1e-6)
    assert (both.clusters[..., -1].sum(1) == 50 + 32).all()


def test_gpt2_books_decodes_nearly_the_same_tokens(data):
    """With 256 columns, trained attention to 1,024 tokens hardly changes; a window with the same memory does."""
    folder = data / "models" / "gpt2-books"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = read_text(sorted((data / "text" / "books").glob("*.txt.gz"))[0])[-8000:]
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=1024)["input_ids"]
    exact = decode(model, None, ids, prompt=1024)
    hea.convert(model, hea.NearFarConfig().with_budget(2048))
    cache = hea.NearFarCache(model.config, 256)
    out = decode(model, cache, ids, prompt=64, step=1024)
    hea.convert(model, "longformer", window_size=cache.numel() // (2 * 256 * 4))
    window = decode(model, None, ids, prompt=1024)
    same, same_window = ((x.argmax(2) == exact.argmax(2))[:, 400:].float().mean() for x in (out, window))
    assert same > 0.75
    assert same > same_window + 0.1


@pytest.mark.exhaustive
def test_the_recipe_compares_caches(data, tmp_path):
    file = tmp_path / "caches.csv"
    arguments = ("--data", data, "--budget", "256", "--inputs", "1", "--csv", file)
    assert cli.run(recipe.app, list(map(str, arguments)), "cache") == 0
    with file.open() as opened:
        exact, ours, window, _ = csv.DictReader(opened)
    assert (exact["cache"], ours["cache"], window["cache"]) == ("exact", "NearFarCache", "window")
    assert float(exact["same"]) == float(exact["generated"]) == 1
    assert float(exact["repeated"]) < float(ours["repeated"])
    assert abs(float(ours["numel"]) / float(window["numel"]) - 1) < 0.01
    assert float(ours["nats"]) + 0.1 < float(window["nats"])
    assert float(ours["nats"]) < float(exact["nats"]) + 0.05 and float(ours["same"]) > 0.75
