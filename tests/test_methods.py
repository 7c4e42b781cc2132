"""The methods: the fast form against the readable one, configs, the functional forms, and what a caller may vary."""

import dataclasses
import inspect
import json
import math

import pytest
import torch

import hf_efficient_attn as hea
from broken_methods import broken, correct
from hf_efficient_attn.methods import get_method, make_config, register_method
from instances import DEFAULTS, INSTANCES, Instance, forms, inputs, padding_mask, relative_error

FORMS = [pytest.param(i, c, id=f"{i}{'-causal' if c else ''}") for i, c in forms()]
each_form = pytest.mark.parametrize(("instance", "is_causal"), FORMS)
each_instance = pytest.mark.parametrize("instance", INSTANCES, ids=str)
each_method = pytest.mark.parametrize("instance", DEFAULTS, ids=str)


def naive(instance: Instance, *row, is_causal: bool, mask=None, **options):
    return hea.naive_attention(instance.config(), *row, attention_mask=mask, is_causal=is_causal, **options)


# The fast form and the readable one.


@pytest.mark.parametrize("mask", ["none", "left", "right", "holes", "empty"])
@each_form
def test_fast_is_naive(instance, is_causal, mask):
    for length in (1, 30, 110):
        row = inputs(batch=2, q_len=length, value_dim=5, dtype=torch.float64, seed=length)
        there = padding_mask(mask, 2, length)
        ours = instance(*row, there, is_causal=is_causal, scale=0.6, seed=3)
        other = naive(instance, *row, mask=there, is_causal=is_causal, scale=0.6, seed=3)
        rows = torch.ones(2, length, dtype=torch.bool) if there is None else there
        rows = rows[:, None].expand(-1, 2, -1)
        torch.testing.assert_close(ours[rows], other[rows], rtol=1e-9, atol=1e-9)


@each_form
def test_gradients_of_fast_are_those_of_naive(instance, is_causal):
    row = [x.requires_grad_() for x in inputs(batch=2, q_len=150, dtype=torch.float64)]
    # No row may be empty: the dense form's softmax has no gradient there.
    there = torch.arange(150) < torch.tensor([[143], [148]])
    rows = there[:, None, :, None]
    weight = torch.randn(2, 2, 150, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grads = []
    for form in (instance, lambda q, k, v, m, is_causal: naive(instance, q, k, v, mask=m, is_causal=is_causal)):
        out = form(*row, there, is_causal=is_causal)
        grads.append(torch.autograd.grad((out * weight).masked_fill(~rows, 0.0).sum(), row))
    for ours, other in zip(*grads, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-8, atol=1e-8)


@each_instance
def test_fast_is_naive_for_rectangles(instance):
    if not instance.info.rectangular:
        pytest.skip("needs as many queries as keys")
    for queries, keys in ((1, 130), (130, 1), (37, 120), (120, 37), (50, 40)):
        row = inputs(q_len=queries, kv_len=keys, dtype=torch.float64)
        there = padding_mask("left", 1, keys)
        for mask in (None, there):
            other = naive(instance, *row, mask=mask, is_causal=False)
            torch.testing.assert_close(instance(*row, mask), other, rtol=1e-9, atol=1e-9)


@each_method
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_fast_is_naive_at_default_hyperparameters(instance, is_causal):
    if is_causal not in instance.forms:
        pytest.skip("no causal form")
    # Beyond all budgets and chunks; the readable Performer holds (N, N, features) numbers.
    row = inputs(num_heads=1, q_len=300 if "performer" in instance.method else 700, dtype=torch.float64)
    other = naive(instance, *row, is_causal=is_causal)
    torch.testing.assert_close(instance(*row, is_causal=is_causal), other, rtol=1e-8, atol=1e-8)


# What a caller may vary.


@each_form
def test_grouped_queries_read_the_keys_of_their_group(instance, is_causal):
    query, key, value = inputs(batch=2, num_heads=6, num_kv_heads=2, q_len=90, dtype=torch.float64)
    repeated = (x.repeat_interleave(3, 1) for x in (key, value))
    ours = instance(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(ours, instance(query, *repeated, is_causal=is_causal), rtol=1e-10, atol=1e-10)


@each_form
def test_scale_is_a_factor_of_the_queries(instance, is_causal):
    query, key, value = inputs(q_len=90, head_dim=4, dtype=torch.float64)
    default = instance(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(instance(query, key, value, is_causal=is_causal, scale=0.5), default)
    ours = instance(query, key, value, is_causal=is_causal, scale=1.5)
    # Split evenly where random features, or distances of queries to keys, show what the exact product does not.
    even = instance.method in ("approx_kmv", "eva", "flurka_eva", "flurka_performer", "performer", "scatterbrain")
    factors = (3.0**0.5, 3.0**0.5) if even else (3.0, 1.0)
    other = instance(factors[0] * query, factors[1] * key, value, is_causal=is_causal)
    torch.testing.assert_close(ours, other, rtol=1e-9, atol=1e-9)
    assert relative_error(ours, default) > 0.01
    # A negative scale turns the queries round.
    torch.testing.assert_close(
        instance(query, key, value, is_causal=is_causal, scale=-0.5),
        naive(instance, query, key, value, is_causal=is_causal, scale=-0.5),
        rtol=1e-9,
        atol=1e-9,
    )


@each_form
def test_dropout_keeps_the_mean_and_draws_from_the_global_generator(instance, is_causal):
    row = inputs(q_len=60, head_dim=4)
    there = padding_mask("left", 1, 60)
    without = instance(*row, there, is_causal=is_causal)
    torch.manual_seed(0)
    first = instance(*row, there, is_causal=is_causal, dropout_p=0.2)
    mean = torch.stack([instance(*row, there, is_causal=is_causal, dropout_p=0.2) for _ in range(400)]).mean(0)
    assert relative_error(first, without) > 0.05
    assert relative_error(mean, without) < 0.06
    torch.manual_seed(0)
    assert torch.equal(instance(*row, there, is_causal=is_causal, dropout_p=0.2), first)


@each_form
def test_dropout_has_gradients(instance, is_causal):
    row = [x.requires_grad_() for x in inputs(q_len=60)]
    instance(*row, padding_mask("left", 1, 60), is_causal=is_causal, dropout_p=0.5).sum().backward()
    assert all(x.grad.isfinite().all() and x.grad.abs().sum() > 0 for x in row)


@pytest.mark.parametrize("mask", ["none", "left"])
@each_form
def test_causal_queries_are_the_last_positions(instance, is_causal, mask):
    """Fewer queries than keys, as with a cache: what the method gives there, or exact attention where it says so."""
    if not is_causal:
        pytest.skip("of the causal form")
    length = 120
    query, key, value = inputs(batch=2, q_len=length, dtype=torch.float64)
    there = padding_mask(mask, 2, length, 3)
    pairs = torch.ones(length, length, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    pairs = pairs if there is None else pairs & there[:, None, None]
    whole = instance(query, key, value, there, is_causal=True)
    if not instance.exact_steps:
        expected = whole
    else:
        exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=pairs)
        expected = exact.masked_fill(~pairs.any(-1, keepdim=True), 0.0)
    for step in (1, 2, 7, 31):
        ours = instance(query[:, :, -step:], key, value, there, is_causal=True)
        torch.testing.assert_close(ours, expected[:, :, -step:], rtol=1e-8, atol=1e-8)


@each_instance
def test_more_causal_queries_than_keys_see_nothing_at_first(instance):
    if not instance.info.causal:
        pytest.skip("no causal form")
    query, key, value = inputs(q_len=90, kv_len=70)
    out = instance(query, key, value, is_causal=True)
    assert torch.equal(out[:, :, :20], torch.zeros_like(out[:, :, :20]))
    assert torch.equal(out[:, :, 20:], instance(query[:, :, 20:], key, value, is_causal=True))


@each_form
def test_chunks_of_a_prompt(instance, is_causal):
    """Many last queries are the chunk of a prompt: the method itself, at the positions where they stand."""
    if not is_causal:
        pytest.skip("of the causal form")
    query, key, value = inputs(q_len=400, dtype=torch.float64)
    whole = instance(query, key, value, is_causal=True)
    if not instance.exact_steps:
        ours = instance(query[:, :, 200:], key, value, is_causal=True)
        torch.testing.assert_close(ours, whole[:, :, 200:], rtol=1e-8, atol=1e-8)
    else:
        # Columns and summaries are those of the queries that there are; they stay an approximation of it.
        exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)[:, :, 200:]
        ours = instance(query[:, :, 200:], key, value, is_causal=True)
        assert relative_error(ours, exact) < 1.5 * relative_error(whole[:, :, 200:], exact)


@each_form
def test_nothing_in_nothing_out(instance, is_causal):
    assert instance(*inputs(batch=0, q_len=50), is_causal=is_causal).shape == (0, 2, 50, 8)
    empty = inputs(q_len=0)
    assert instance(*empty, is_causal=is_causal).shape == (1, 2, 0, 8)


@each_form
def test_inputs_are_left_alone(instance, is_causal):
    row = inputs(batch=2, q_len=90)
    there = padding_mask("holes", 2, 90)
    before = [x.clone() for x in (*row, there)]
    instance(*row, there, is_causal=is_causal)
    assert all(torch.equal(x, y) for x, y in zip((*row, there), before, strict=True))


@each_form
def test_strides_do_not_matter(instance, is_causal):
    """As Transformers hands them over: (B, N, H, D) seen as (B, H, N, D)."""
    row = inputs(batch=2, q_len=90)
    seen = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in row]
    ours, other = (instance(*x, is_causal=is_causal) for x in (seen, row))
    torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-6)


@each_form
def test_deepcopied_inference_tensors(instance, is_causal):
    with torch.inference_mode():
        row = inputs(q_len=90)
        out = instance(*row, is_causal=is_causal)
    assert torch.equal(out, instance(*(x.clone() for x in row), is_causal=is_causal))


# Error at a budget, on inputs with structure: what the choice of columns is for.


def test_sampling_by_probes_is_better_than_uniform_where_a_few_columns_matter():
    query, key, value = inputs(num_heads=4, q_len=512, head_dim=16, dtype=torch.float64)
    at = torch.randperm(512, generator=torch.Generator().manual_seed(0))[:12]
    # A dozen keys that all queries attend to, wherever they stand: two thirds of each row's weight.
    query[..., 0] += 3.0
    key[:, :, at, 0] += 6.0
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    budget = {"block_size": 16, "num_samples": 32, "near_field": "window"}

    def error(method, **options):
        outs = [hea.attention(method, query, key, value, seed=s, **budget, **options) for s in range(8)]
        return sum(relative_error(out, exact) for out in outs) / 8

    probe, uniform = error("kdeformer"), error("hyperattention")
    assert probe < 0.75 * uniform
    assert error("kdeformer", draw="independent") > probe


# Configs.


@each_instance
def test_config_round_trip(instance):
    config = instance.config()
    values = json.loads(json.dumps(config.to_dict()))
    assert values["method"] == instance.method
    assert instance.info.config_class.from_dict(values) == config
    assert instance.info.config_class.from_dict({"method": instance.method}) == instance.info.config_class()
    assert make_config(config) is config
    assert make_config(instance.method, **instance.hyperparameters) == config
    assert make_config(config, seed=5) == dataclasses.replace(config, seed=5)
    assert hash(config) == hash(dataclasses.replace(config))


@each_method
def test_config_fields(instance):
    """Every field has a sentence of help and a default that its own checks let through; configs do not change."""
    config = instance.config()
    for spec in dataclasses.fields(config):
        assert len(spec.metadata["help"]) > 10
        assert spec.metadata["help"].endswith(".")
        switch = isinstance(spec.default, bool)
        assert switch or spec.metadata["minimum"] is not None or spec.metadata["choices"] is not None
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, spec.name, spec.default)
        if spec.metadata["minimum"] is not None:
            for wrong in (spec.metadata["minimum"] - 1, 2**31, 1.5, "3", None, True):
                with pytest.raises(hea.UnsupportedAttentionError, match=rf"{instance.method}: {spec.name}="):
                    instance.config(**{spec.name: wrong})
        elif switch:
            assert getattr(instance.config(**{spec.name: not spec.default}), spec.name) != spec.default
            for wrong in (0, 1, "true", None):
                with pytest.raises(hea.UnsupportedAttentionError, match=rf"{instance.method}: {spec.name}="):
                    instance.config(**{spec.name: wrong})
        else:
            for choice in spec.metadata["choices"]:
                assert getattr(instance.config(**{spec.name: choice}), spec.name) == choice
            for wrong in ("x" + spec.default, 3, None, [], True):
                with pytest.raises(hea.UnsupportedAttentionError, match=rf"{instance.method}: {spec.name}=.*Known: "):
                    instance.config(**{spec.name: wrong})
    with pytest.raises(TypeError):
        instance.info.config_class(*[spec.default for spec in dataclasses.fields(config)])


def test_defaults_are_those_of_the_documentation():
    defaults = {name: hea.method_info(name).config_class().to_dict() for name in hea.available_methods()}
    for name in ("kdeformer", "hyperattention"):
        assert [defaults[name][k] for k in ("block_size", "num_samples", "num_hashes")] == [256, 256, 7]
    assert (defaults["longformer"]["window_size"], defaults["longformer"]["global_tokens"]) == (256, 0)
    assert defaults["performer"]["num_features"] == 256
    assert set(defaults["linear"]) == {"method", "seed"}
    assert (defaults["kdeformer"]["column_scores"], defaults["kdeformer"]["draw"]) == ("probe", "systematic")


@each_instance
def test_a_budget_is_what_a_query_costs(instance):
    if instance.method == "reformer":
        pytest.skip("its columns are a product: tests/test_reformer.py")
    config = instance.config(seed=7)
    for columns in (4, 10, 64, 1000):
        values = config.with_budget(columns).to_dict()
        assert values["seed"] == 7
        cost = {
            "block_size": 1, "num_samples": 1, "num_features": 1, "global_tokens": 1, "projection_dim": 1,
            "num_landmarks": 2 if instance.method == "nystromformer" else 1,
            "window_size": 2 if instance.method == "longformer" else 1,
        }  # fmt: skip
        total = sum(cost.get(name, 0) * value for name, value in values.items() if isinstance(value, int))
        assert instance.method == "linear" or columns - 2 <= total <= columns
        same = {k: v for k, v in config.to_dict().items() if k not in cost}
        assert {k: values[k] for k in same} == same


def test_a_budget_too_small_for_the_global_tokens():
    with pytest.raises(hea.UnsupportedAttentionError, match=r"budget of 3 columns .* an integer of 4 or more"):
        hea.LongformerConfig(global_tokens=3).with_budget(3)


def test_dictionaries_of_other_methods_and_unknown_keys():
    with pytest.raises(hea.UnsupportedAttentionError, match="KDEformerConfig cannot be made.*'linear'"):
        hea.KDEformerConfig.from_dict({"method": "linear"})
    with pytest.raises(hea.UnsupportedAttentionError, match=r"'windowsize'\. Did you mean 'window_size'"):
        hea.LongformerConfig.from_dict({"windowsize": 3})
    with pytest.raises(hea.UnsupportedAttentionError, match="must be at most 62"):
        hea.KDEformerConfig(num_hashes=63)


@each_instance
def test_ablations_of_the_fields_run(instance):
    """No near or far field to speak of, one of everything: extremes that the checks let through."""
    row = inputs(q_len=70, dtype=torch.float64)
    for spec in dataclasses.fields(instance.config()):
        if spec.metadata["minimum"] is None or spec.name == "max_length":
            continue
        for value in (spec.metadata["minimum"], 33):
            config = instance.config(**{spec.name: value})
            for is_causal in instance.forms:
                ours, other = (f(config, *row, is_causal=is_causal) for f in (hea.attention, hea.naive_attention))
                torch.testing.assert_close(ours, other, rtol=1e-8, atol=1e-8)


# The registry.


@each_method
def test_method_info_is_plain(instance):
    info = instance.info
    assert info.name == instance.method
    assert info.name == info.config_class.method
    for text in (info.title, info.paper, info.summary):
        assert isinstance(text, str)
        assert text.strip() == text
        assert "\n" not in text
        assert text
    assert 2015 < info.year < 2100
    assert all(isinstance(flag, bool) for flag in (info.causal, info.rectangular, info.recurrent))
    assert all(isinstance(name, str) for name in info.learned_parameters)
    assert "Raises" in hea.attention.__doc__


def test_methods_of_this_release():
    assert {"kdeformer", "hyperattention", "longformer", "linear", "performer"} <= set(hea.available_methods())
    assert isinstance(hea.available_methods(), tuple)


@pytest.mark.parametrize("name", ["my_flash", "a/b", "sdpa2", "flex_attention_x", "a|b", "a-b", "auto", "eager"])
def test_reserved_names_are_refused(name):
    with broken(correct) as instance:
        method = get_method(instance.method)
        other = type("Other", (method.info.config_class,), {"method": name})
        with pytest.raises(hea.UnsupportedAttentionError, match="special meaning|must be a Python identifier"):
            register_method(other, forward=method.forward, naive=method.naive)
        assert name not in hea.available_methods()
        with pytest.raises(hea.UnsupportedAttentionError, match="registered already"):
            register_method(method.info.config_class, forward=method.forward, naive=method.naive)
    assert "correct" not in hea.available_methods()


def test_a_new_method_is_there_at_once():
    with broken(correct) as instance:
        assert "correct" in hea.available_methods()
        row = inputs(q_len=20)
        assert torch.equal(hea.functional.correct_attention(*row), instance(*row))
        assert torch.equal(hea.attention("correct", *row), instance(*row))


# Functional forms.


@each_instance
def test_functional_form_is_attention(instance):
    form = getattr(hea.functional, f"{instance.method}_attention")
    row = inputs(batch=2, q_len=90)
    there = padding_mask("left", 2, 90)
    options = {"is_causal": instance.info.causal, "scale": 0.4, "seed": 3}
    ours = form(*row, attention_mask=there, **options, **instance.hyperparameters)
    assert torch.equal(ours, instance(*row, there, **options))
    with pytest.raises(hea.UnsupportedAttentionError, match="unknown hyperparameter 'qqq'"):
        form(*row, qqq=1)


@each_method
def test_functional_form_documents_itself(instance):
    form = getattr(hea.functional, f"{instance.method}_attention")
    parameters = inspect.signature(form).parameters
    standard = {"attention_mask": None, "is_causal": False, "scale": None, "dropout_p": 0.0, "seed": 0}
    own = {f.name: f.default for f in dataclasses.fields(instance.config()) if f.name != "seed"}
    learned = instance.info.learned_parameters
    assert list(parameters) == ["query", "key", "value", *standard, *own, *learned]
    assert all(parameters[name].default is None for name in learned)
    assert {name: parameters[name].default for name in (*standard, *own)} == {**standard, **own}
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in (*standard, *own, *learned))
    assert all(f.metadata["help"] in form.__doc__ for f in dataclasses.fields(instance.config()) if f.name != "seed")
    assert form.__name__ in dir(hea.functional)
    assert form.__name__ == f"{instance.method}_attention"


def test_functional_has_no_other_names():
    with pytest.raises(AttributeError, match=r"no attribute 'sdpa_attention'; it has .*longformer_attention"):
        hea.functional.sdpa_attention  # noqa: B018
    with pytest.raises(AttributeError):
        hea.functional.kdeformer  # noqa: B018


# Numbers of the papers.


def test_the_exponential_of_linear_attention():
    """Eq. 4-7 of Katharopoulos et al. by hand for two keys."""
    query = torch.tensor([[[[0.5, -1.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[1.0, 0.0], [-2.0, 3.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[1.0], [5.0]]]], dtype=torch.float64)
    phi_q = (1.5, math.exp(-1.0))
    weights = [phi_q[0] * 2.0 + phi_q[1] * 1.0, phi_q[0] * math.exp(-2.0) + phi_q[1] * 4.0]
    expected = (weights[0] * 1.0 + weights[1] * 5.0) / sum(weights)
    assert hea.functional.linear_attention(query, key, value).item() == pytest.approx(expected, rel=1e-12)


def test_longformer_by_hand():
    """Equal scores: the output is the mean of the values within the window, and of all at a global token."""
    zeros, value = torch.zeros(1, 1, 9, 2), torch.arange(9.0).view(1, 1, 9, 1)
    ours = hea.functional.longformer_attention(zeros, zeros, value, window_size=1).flatten().tolist()
    assert ours == pytest.approx([0.5, *range(1, 8), 7.5])
    ours = hea.functional.longformer_attention(zeros, zeros, value, window_size=1, global_tokens=1).flatten().tolist()
    assert ours == pytest.approx([4.0, 1.0, 1.5, *(3 * i / 4 for i in range(3, 8)), 5.0])
    ours = hea.functional.longformer_attention(zeros, zeros, value, window_size=2, is_causal=True).flatten().tolist()
    assert ours == pytest.approx([0.0, 0.5, *range(1, 8)])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["linear", "performer"])
def test_causal_walk_over_several_tiles_agrees_with_the_form_that_has_a_gradient(name, masked):
    """Without a gradient the tokens are walked over with carried sums; with one all chunks are formed at once."""
    query, key, value = (torch.randn(2, 4, 2500, 32, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = None
    if masked:
        # Whole chunks without a key, the first ones of a row among them.
        mask = torch.ones(2, 2500, dtype=torch.bool)
        mask[0, :300] = mask[1, 700:1100] = False
    attend = getattr(hea.functional, f"{name}_attention")
    options = {"is_causal": True, "attention_mask": mask}
    with torch.no_grad():
        walked = attend(query, key, value, **options)
    formed = attend(query.requires_grad_(), key, value, **options)
    torch.testing.assert_close(walked, formed.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in hea.available_methods() if not get_method(name).mixes_queries])
def test_a_method_that_mixes_no_queries_gives_each_the_same_beside_any_others(name):
    query, key, value = (torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(n)) for n in (40, 90, 91))
    attend = getattr(hea.functional, f"{name}_attention")
    out = attend(query, key, value[:, :, :90])
    query[:, :, 10:] = 5.0
    assert torch.equal(out[:, :, :10], attend(query, key, value[:, :, :90])[:, :, :10])
