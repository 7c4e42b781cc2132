"""Learned feature maps: their formulas, their start, their refusals, and models that decode with trained maps."""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import hf_efficient_attn as hea
from each import differs
from hf_efficient_attn.evaluation.capture import capture_attention, forward
from hf_efficient_attn.ops.features import LEARNED, count_features, start_map
from instances import inputs
from test_learned import learned_in, shake
from tiny_models import DECODERS, tiny_batch, tiny_model

METHODS = ("linear", "performer")
HEAD_DIM = 8


def tensors_of(num_kv_heads: int = 4) -> tuple[torch.Tensor, ...]:
    return inputs(2, 4, 45, HEAD_DIM, num_kv_heads=num_kv_heads)


def random_maps(feature_map: str, num_heads: int = 4, num_features: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (num_heads, HEAD_DIM + (feature_map == "t2r"), num_features)
    return {name: torch.randn(shape, generator=generator) for name in ("query_map", "key_map")}


def features(x: torch.Tensor, weight: torch.Tensor, feature_map: str) -> torch.Tensor:
    """The formulas of the papers, in float64."""
    x, weight = x.double(), weight.double()
    if feature_map == "t2r":
        return torch.relu(torch.cat((x, torch.ones_like(x[..., :1])), -1) @ weight)
    y = torch.cat((x @ weight, x @ -weight), -1)
    return y.softmax(-1) if feature_map == "hedgehog" else y.exp()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature_map", LEARNED)
@pytest.mark.parametrize("method", METHODS)
def test_attention_is_that_of_the_formulas(method, feature_map, is_causal):
    (query, key, value), maps = tensors_of(), random_maps(feature_map)
    weights = features(query, maps["query_map"], feature_map) @ features(key, maps["key_map"], feature_map).mT
    weights = weights.tril() if is_causal else weights
    if feature_map == "t2r":
        # A query and keys without a common feature have weights of 0, which the bounds of the features replace.
        weights = weights + 1e-12 * torch.ones_like(weights).tril() if is_causal else weights + 1e-12
    wanted = weights @ value.double() / weights.sum(-1, keepdim=True)
    found = hea.attention(
        method, query, key, value, is_causal=is_causal, feature_map=feature_map, num_features=12, **maps
    )
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("feature_map", LEARNED)
def test_key_heads_of_grouped_queries_have_one_map_each(feature_map):
    (query, key, value), maps = tensors_of(2), random_maps(feature_map, num_heads=2)
    options = {"feature_map": feature_map, "num_features": 12, "is_causal": True}
    found = hea.attention("linear", query, key, value, **options, **maps)
    repeated = {name: x.repeat_interleave(2, 0) for name, x in maps.items()}
    wanted = hea.attention("linear", query, *(x.repeat_interleave(2, 1) for x in (key, value)), **options, **repeated)
    torch.testing.assert_close(found, wanted)
    model = tiny_model("llama")
    hea.convert(model, "linear", feature_map=feature_map, num_features=12)
    shapes = {p.shape[0] for m in learned_in(model).values() for p in m.parameters()}
    assert shapes == {model.config.num_key_value_heads}


@pytest.mark.parametrize("feature_map", LEARNED)
def test_start(feature_map):
    factors = {"hedgehog": (1.5, 1.5), "exp": (2, 1), "t2r": (1, 1)}[feature_map]
    both = [start_map(feature_map, 3, 8, 20, seed=0, is_query=is_query) for is_query in (True, False)]
    start = both[1].clone()
    assert start.shape == (3, 8 + (feature_map == "t2r"), 20)
    for one, factor in zip(both, factors, strict=True):
        torch.testing.assert_close(one[:, :8] / factor, start[:, :8] / factors[1])
    start[:, :8] /= factors[1]
    assert torch.equal(start[0, :8, :8], torch.eye(8))
    columns = start[0, :8, 8:16]
    torch.testing.assert_close(columns.T @ columns, torch.eye(8), rtol=1e-5, atol=1e-5)
    assert not torch.equal(start, start_map(feature_map, 3, 8, 20, seed=1, is_query=False))
    assert count_features(feature_map, 20) == (20 if feature_map == "t2r" else 40)
    budget = hea.LinearConfig(feature_map=feature_map).with_budget(64)
    assert count_features(feature_map, budget.num_features) == 64
    narrow = start_map(feature_map, 1, 8, 4, seed=0, is_query=False)[0, :8] / factors[1]
    torch.testing.assert_close(narrow.T @ narrow, 2 * torch.eye(4), rtol=1e-5, atol=1e-5)
    with torch.device("meta"):
        assert start_map(feature_map, 1, 8, 12, seed=0, is_query=True).device.type == "cpu"


def test_refusals():
    query, key, value = tensors_of()
    maps = random_maps("hedgehog")
    with pytest.raises(hea.UnsupportedAttentionError, match=r"query_map .*feature_map='elu'.*: give no query_map"):
        hea.attention("linear", query, key, value, **maps)
    with pytest.raises(hea.UnsupportedAttentionError, match=r"query_map .*feature_map='favor'.*: give no query_map"):
        hea.attention("performer", query, key, value, **maps)
    with pytest.raises(hea.UnsupportedAttentionError, match=r"does not match .*num_features=13.* and 4 heads"):
        hea.attention("linear", query, key, value, feature_map="hedgehog", num_features=13, **maps)
    with pytest.raises(hea.UnsupportedAttentionError, match="Did you mean 'hedgehog'"):
        hea.LinearConfig(feature_map="hedghog")


@pytest.mark.parametrize("feature_map", LEARNED)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", DECODERS)
def test_decoding_from_a_state_uses_the_trained_maps(family, method, feature_map, tmp_path):
    """Also in the gradients of the maps."""
    model = tiny_model(family, head=True)
    hea.convert(model, method, feature_map=feature_map, num_features=12)
    ids = tiny_batch(family, length=30)["input_ids"]
    untrained = model(ids).logits
    shake(model)
    model.save_pretrained(tmp_path)
    model, found = type(model).from_pretrained(tmp_path).eval(), []
    for parts in ((30,), (20, 5, 1, 4)):
        model.zero_grad()
        cache, logits = None, []
        for part in ids.split(parts, 1):
            out = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, [*logits, out.logits]
        whole = torch.cat(logits, 1)
        whole.square().mean().backward()
        found.append([whole, *(p.grad.clone() for n, p in model.named_parameters() if "learned_parameters" in n)])
    assert differs(whole, untrained)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-3, atol=1e-3)
    for gradient, other in zip(found[0][1:], found[1][1:], strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(other, gradient, rtol=1e-3, atol=1e-4)


def test_untrained_maps_are_no_worse_than_elu_on_a_pretrained_model(data):
    folder = data / "models" / "gpt2-books"
    text = " ".join(x.__doc__ for x in (hea.convert, hea.calibrate, hea.attention_error, hea.attention))
    batch = AutoTokenizer.from_pretrained(folder)(text, truncation=True, max_length=256, return_tensors="pt")
    errors: dict[str, list[float]] = {name: [] for name in ("elu", *LEARNED)}

    def visit(call):
        for name, found in errors.items():
            out = call.compute(hea.LinearConfig(feature_map=name))
            found.append(((out - call.exact).norm() / call.exact.norm()).item())

    model = AutoModel.from_pretrained(folder).eval()
    with capture_attention(model, visit):
        forward(model, dict(batch))
    for feature_map in LEARNED:
        assert sum(errors[feature_map]) < sum(errors["elu"]), feature_map
