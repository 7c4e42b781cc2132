"""The methods with landmarks, WildCat, nearfar and auto: the paper's formulas, and what holds beyond the promises."""

import dataclasses
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.methods import auto as module
from hf_efficient_attn.methods._shared.crossover import built_in_table
from hf_efficient_attn.ops import wildcat as wildcat_ops
from hf_efficient_attn.ops.attend import Partial
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import biased_exact
from hf_efficient_attn.ops.nearfar import attempts as schedule
from hf_efficient_attn.ops.nearfar import within_bound
from hf_efficient_attn.ops.nearfar.attempts import screening_error
from hf_efficient_attn.ops.nearfar.groups import directions, find_near_keys, group_queries, replace_counted
from hf_efficient_attn.ops.thinning import choose_pivots
from instances import inputs, numbers, relative_error
from promises import Memory

wildcat = hea.functional.wildcat_attention
nearfar = hea.functional.nearfar_attention


@pytest.mark.parametrize("content", ["few", "outlier", "large", "aligned", "smooth", "sparse", "signs"])
@pytest.mark.parametrize(
    ("form", "spread", "limit"),
    [(wildcat, 3.0, 5e-3), (partial(nearfar, block_size=0), 1.0, 1e-2), (partial(nearfar, block_size=8), 1.0, 1e-2)],
)
def test_float32_is_as_accurate_as_float64(form, spread, limit, content):
    """Sums of exponentials of the keys differ by up to 10^1000 between the keys of a coreset."""
    tensors = inputs(q_len=200, head_dim=32, content=content, spread=spread, dtype=torch.float64)
    single, double = form(*(x.float() for x in tensors), num_samples=48), form(*tensors, num_samples=48)
    if content == "signs":  # keys at equal distances, between which rounding decides
        exact = scaled_dot_product_attention(*tensors)
        assert relative_error(single, exact) < relative_error(double, exact) + limit
    else:
        assert relative_error(single, double) < limit


# WildCat.


def test_the_paper_without_its_numerical_precautions(monkeypatch):
    """Plain exponentials and inverses, without a ridge and without candidates."""
    monkeypatch.setattr(wildcat_ops, "RIDGE", 1e-13)
    query, key, value = inputs(num_heads=3, q_len=40, head_dim=6, dtype=torch.float64)
    beta, (q, k, v) = 6**-0.5, (x[0] for x in (query, key, value))
    k = k - k.mean(1, keepdim=True)
    tau_squared = 3.94582 * k.norm(dim=2).amax(1) / q.norm(dim=2).amax(1)
    factor = (beta / tau_squared)[:, None, None]
    pivot = choose_pivots(k * factor.sqrt(), None, 9, draws=Draws(5, torch.device("cpu")), batch=1)[0]
    coreset = k.gather(1, pivot.unsqueeze(2).expand(-1, -1, 6))
    weights = torch.linalg.inv((factor * coreset @ coreset.mT).exp()) @ (factor * coreset @ k.mT).exp()
    basis = (beta * q @ coreset.mT).exp()
    expected = (basis @ weights @ v) / (basis @ weights.sum(2, keepdim=True))
    expected = torch.maximum(torch.minimum(expected, v.amax(1, keepdim=True)), v.amin(1, keepdim=True))
    torch.testing.assert_close(wildcat(query, key, value, num_samples=9, seed=5)[0], expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("spread", "limit"), [(14.0, 1e-3), (1000.0, 0.15)])
def test_wildcat_converges_with_large_scores(spread, limit):
    """Scores of up to 1,000 or millions: the ridge and rounding have no part in the coreset's own keys.

    With millions the other keys are lost, and so are the queries that attend to them.
    """
    tensors = inputs(q_len=256, head_dim=8, spread=spread)
    exact = scaled_dot_product_attention(*tensors)
    few, half, most = (relative_error(wildcat(*tensors, num_samples=n), exact) for n in (64, 128, 250))
    assert few > half > 4 * most and most < limit


@pytest.mark.parametrize("size", [1.0, 1e30])
def test_float16_loses_no_precision(size, monkeypatch):
    """Accelerators compute bfloat16 in it, also if values are out of its range and a key is far from the others."""
    query, key, value = inputs(num_heads=4, q_len=600, head_dim=16, dtype=torch.bfloat16)
    key[:, :, 1] *= 30.0  # no candidate
    tensors = query, key, value * size
    exact = wildcat(*(x.double() for x in tensors), num_samples=32, num_candidates=60)
    monkeypatch.setattr(wildcat_ops, "precise_dtype", lambda x: torch.float16)
    found = wildcat(*tensors, num_samples=32, num_candidates=60)
    assert found.isfinite().all() and relative_error(found, exact) < 4e-3


def test_the_coreset_is_chosen_from_the_candidates():
    """If all candidates are in the coreset, nothing is drawn but their order."""
    tensors = inputs(q_len=100, dtype=torch.float64)
    options = {"num_samples": 20}
    all_of_them, more = ([wildcat(*tensors, **options, num_candidates=n, seed=s) for s in (0, 1)] for n in (20, 60))
    torch.testing.assert_close(*all_of_them)
    assert relative_error(*more) > 1e-3
    # No fewer than the coreset needs.
    torch.testing.assert_close(wildcat(*tensors, num_samples=20, num_candidates=1), all_of_them[0])
    # Values of keys that are no candidates count as well.
    changed = [*tensors[:2], tensors[2] + (torch.arange(100) % 5 == 1)[:, None]]  # candidates are 0, 5, 10, ...
    assert relative_error(wildcat(*changed, num_samples=20, num_candidates=20), all_of_them[0]) > 0.01


def gradients(form, tensors, *sizes):
    """Output and gradients of a weighted sum of the outputs."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = form("wildcat", *leaves, **dict(zip(("num_samples", "num_candidates"), sizes, strict=True)))
    return [out.detach(), *torch.autograd.grad((out * numbers(*out.shape, seed=4)).sum(), leaves)]


def test_outputs_that_are_clipped_and_without_a_denominator(monkeypatch):
    """Large logits take outputs out of the range. With a larger bound, all denominators are below it."""
    tensors = inputs(q_len=90, spread=8.0, dtype=torch.float64)
    value = tensors[2].flatten(0, 1)
    out = wildcat(*tensors, num_samples=16).flatten(0, 1)
    assert ((out == value.amin(1, keepdim=True)) | (out == value.amax(1, keepdim=True))).any()
    for x, y in zip(*(gradients(f, tensors, 16, 64) for f in (hea.attention, hea.naive_attention)), strict=True):
        assert relative_error(x, y) < 1e-9
    middle = (value.amin(1, keepdim=True) + value.amax(1, keepdim=True)) / 2
    with monkeypatch.context() as patched:
        patched.setattr(wildcat_ops, "regularized_solve", lambda kernel, right, ridge: -right - 2.0)
        out = wildcat(*tensors, num_samples=10).flatten(0, 1)
        torch.testing.assert_close(out, middle.expand_as(out))
    monkeypatch.setattr(wildcat_ops, "LEAST_DENOMINATOR", 2.0)
    out, *grads = gradients(hea.attention, tensors, 16, 64)
    torch.testing.assert_close(out.flatten(0, 1), middle.expand_as(value))
    weight = numbers(*out.shape, seed=4).sum(2, keepdim=True)
    ends = [tensors[2] == end(tensors[2], 2, keepdim=True) for end in (torch.amin, torch.amax)]
    torch.testing.assert_close(grads[2], 0.5 * weight * (ends[0].double() + ends[1].double()))
    assert not grads[0].any() and not grads[1].any()


def test_equal_keys_and_a_query_of_zeros():
    """The temperature is that of the least logit, or 0."""
    for query, key in ((1.0, 0.0), (0.0, 1.0), (1.0, 1e-6), (0.0, 0.0)):
        tensors = [x * f for x, f in zip(inputs(q_len=60, dtype=torch.float64), (query, key, 1.0), strict=True)]
        out, *grads = gradients(hea.attention, tensors, 8, 30)
        assert relative_error(out, tensors[2].mean(2, keepdim=True).expand_as(out)) < 1e-3
        assert all(x.isfinite().all() for x in grads)


# nearfar: landmarks, near keys and the linear correction.


def _error(tensors, **hyperparameters):
    return relative_error(nearfar(*tensors, **hyperparameters), scaled_dot_product_attention(*tensors))


def test_means_of_clusters_and_the_linear_correction_lower_the_error():
    query, noise, value = inputs(q_len=600, head_dim=16, value_dim=8)
    # 600 keys around 30 centers, in an order that has nothing to do with the centers.
    key = numbers(1, 2, 30, 16, seed=1).float()[:, :, torch.arange(600) * 7 % 30] + 0.3 * noise
    options = {"num_samples": 30, "block_size": 0}
    means, keys = (_error((query, key, value), **options, num_probes=0, **x) for x in ({}, {"num_refinements": 0}))
    assert means < 0.9 * keys
    tensors = 0.3 * query + 2.0 * query[:, :, :1], key, value
    assert _error(tensors, **options) < 0.7 * _error(tensors, **options, num_probes=0)


def test_heads_with_very_large_scores_have_outputs_within_the_values():
    query, key, value = inputs(num_heads=4, q_len=400, head_dim=3, dtype=torch.float32)
    factor = torch.tensor([1.0, 6.0, 1.0, 40.0])[:, None, None]
    for share in (0.0, 1.0):
        out = nearfar(query * factor, key * factor, value, num_samples=64, near_share=share, num_probes=0)
        low, high = value.amin(2, keepdim=True), value.amax(2, keepdim=True)
        assert ((out >= low - 1e-3) & (out <= high + 1e-3)).all()


def test_each_head_has_near_keys_only_where_landmarks_miss_much():
    """In the second of four heads, queries attend mostly to the keys around them."""
    angle = torch.arange(500)[:, None] * torch.tensor([0.5, 0.11, 0.023])
    tensors, options = inputs(num_heads=4, q_len=500, head_dim=6), {"num_samples": 24, "block_size": 8}
    tensors[0].mul_(0.2)
    tensors[0][:, 1] = tensors[1][:, 1] = 3.0 * torch.cat((angle.sin(), angle.cos()), 1)
    out, every, none = (nearfar(*tensors, **options, near_share=share) for share in (0.6, 0.0, 1.0))
    torch.testing.assert_close(none, nearfar(*tensors, num_samples=24, block_size=0))
    torch.testing.assert_close(out[:, 1], every[:, 1])
    torch.testing.assert_close(out[:, [0, 2, 3]], none[:, [0, 2, 3]])
    assert not torch.allclose(every[:, [0, 2, 3]], none[:, [0, 2, 3]], atol=1e-3)
    assert not torch.allclose(every[:, 1], none[:, 1], atol=1e-3)


@pytest.mark.parametrize("length", [8, 9, 13, 64, 100])
@pytest.mark.parametrize("num_groups", [1, 8, 11])
def test_each_query_is_in_a_group_of_like_ones(length, num_groups):
    query, key = numbers(3, length, 5), numbers(3, 40, 5, seed=1)
    groups = group_queries(query @ directions(key), num_groups)
    count = 1 << num_groups.bit_length() - 1
    assert groups.query.shape == (3, count, -(-length // count))
    assert torch.equal(groups.query.flatten(1).gather(1, groups.slot), torch.arange(length).expand(3, -1))
    # Of the variance of the scores, less is within groups than within the same number of consecutive queries.
    scores = query @ key.mT
    grouped = scores.gather(1, groups.query.flatten(1).unsqueeze(2).expand(-1, -1, 40)).unflatten(1, (count, -1))
    if num_groups > 1 and length == 64:
        assert grouped.var(2).mean() < 0.7 * scores.unflatten(1, (count, -1)).var(2).mean()


@pytest.mark.parametrize("scale", [0.5, -0.5])
@pytest.mark.parametrize("length", [20, 64, 701, 4096])
def test_near_keys_have_the_largest_scores_for_the_mean_query(length, scale):
    query, key = numbers(2, 3, 4), numbers(2, length, 4, seed=1)
    found = find_near_keys(query, key, 7, scale)
    assert torch.equal(found.sort()[0], (scale * query @ key.mT).topk(7)[1].sort()[0])


def test_a_call_is_few_operations():
    """12 heads of 32, 4,096 tokens."""
    tensors = inputs(1, 12, 4096, 32)
    nearfar(*tensors)
    with Memory() as memory:
        nearfar(*tensors)
    assert memory.operators <= 700


def test_queries_whose_landmarks_count_for_near_keys_only_attend_to_near_keys():
    """What is left without these is rounding."""
    far, counted, exact = torch.tensor([[[1.0], [1.0]]]), torch.tensor([[[1.0], [1.0]]]), torch.tensor([[[5.0], [7.0]]])
    zero, lse = torch.zeros(1, 2, 1), torch.tensor([[[-20.0], [2.0]]])
    out = replace_counted(Partial(far, zero), Partial(counted, zero), Partial(exact, lse)).out
    torch.testing.assert_close(out, exact)


def test_the_gradient_is_right_where_landmarks_miss_nothing():
    """With equal keys the correction is rounding, but not its gradient."""
    query, value = numbers(1, 1, 3, 4), numbers(1, 1, 33, 2, seed=1)
    key = numbers(1, 1, 1, 4, seed=2).expand(-1, -1, 33, -1).clone().requires_grad_()
    options = {"num_samples": 1, "block_size": 1}
    (gradient,) = torch.autograd.grad(nearfar(query, key, value, **options).sum(), key)
    step = 1e-6 * numbers(1, 1, 33, 4, seed=3)
    with torch.no_grad():
        moved = [nearfar(query, key + sign * step, value, **options).sum() for sign in (1.0, -1.0)]
    torch.testing.assert_close((gradient * step).sum(), 0.5 * (moved[0] - moved[1]), rtol=1e-4, atol=1e-12)


def test_with_a_bias_by_distance_windows_are_where_the_queries_are():
    query, key, value = numbers(1, 2, 256, 16), numbers(1, 2, 512, 16, seed=1), numbers(1, 2, 512, 16, seed=2)
    mask = (torch.arange(512) >= 150) & (torch.arange(512) % 9 > 0)
    table = (8.0 * (torch.arange(-32, 33) == 0)).expand(2, -1).to(query.dtype).clone().requires_grad_()
    ours = nearfar(query, key, value, attention_mask=mask[None], distance_bias=table, block_size=64, num_samples=32)
    exact = biased_exact(query, key, value, table, mask[None], is_causal=False, scale=0.25)
    assert relative_error(ours[:, :, 150:], exact[:, :, 150:]) < 0.2
    (gradient,) = torch.autograd.grad((ours * numbers(*ours.shape, seed=3)).sum(), table)
    assert gradient.sum(1).abs().max() < 1e-9 < gradient.abs().max()  # a constant bias changes nothing


# auto: when attention is exact, and how heads are judged.

auto = hea.functional.auto_attention


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    """The numbers of rows that correct the output and that bound the error are those of users."""
    monkeypatch.setattr(schedule, "NUM_PROBES", 384)
    monkeypatch.setattr(schedule, "NUM_ROWS", 64)


def _mixed(length=700):
    """Two heads that few landmarks approximate well, and two whose queries attend to many keys that are all unlike."""
    query, key, value = inputs(1, 4, length, 8)
    centers = numbers(1, 2, 8, 8, seed=4).float()
    key[:, :2] = centers[:, :, torch.arange(length) * 7 % 8] + 0.05 * key[:, :2]
    return query, key, value


def _errors(tensors, **options):
    """The error of each head, with 64 columns."""
    ours, exact = auto(*tensors, columns=64, **options), scaled_dot_product_attention(*tensors)
    return [relative_error(ours[:, h], exact[:, h]) for h in range(ours.shape[1])]


def test_heads_above_the_bound_are_exact_and_the_others_are_not():
    tensors = _mixed()
    errors = _errors(tensors, crossover=400)
    assert all(1e-4 < error <= 0.1 for error in errors[:2]) and max(errors[2:]) < 1e-5
    assert min(_errors(tensors, crossover=100, max_error=0.0)[2:]) > 0.1


@pytest.mark.parametrize("q_len", [300, 384, 385])
def test_a_call_with_few_queries_keeps_the_bound(q_len):
    """All of them, or all but one, correct an approximation, so that no rows are left to bound its error."""
    query, key, value = inputs(1, 2, 4096, 32)
    queries, mask = query[:, :, :q_len], (torch.arange(4096) < 4000)[None]
    ours = auto(queries, key, value, crossover=1500, attention_mask=mask)
    exact = scaled_dot_product_attention(queries, key, value, attn_mask=mask[:, None, None])
    assert all(relative_error(ours[:, h], exact[:, h]) <= 0.1 for h in range(2))


@pytest.fixture
def attempts(monkeypatch):
    """The number of heads and of columns of each attempt."""
    made = []
    within = within_bound.attend_within_bound

    def attend(heads, forms, *args):
        def spy(query, key, value, columns):
            made.append((len(query), columns))
            return forms.approximate(query, key, value, columns)

        return within(heads, forms._replace(approximate=spy), *args)

    monkeypatch.setattr(module, "attend_within_bound", attend)
    return made


def test_from_which_length_on_heads_are_attempted(monkeypatch, attempts):
    """From a given crossover, as from a measured one, but for the rows that bound the error."""
    monkeypatch.setattr(module, "crossover_length", lambda *size, **options: 900)
    for crossover, options in ((700, {"crossover": 700}), (900, {})):
        last = schedule.attempt_length(schedule.worthwhile_length(crossover))
        assert crossover < last < 1.15 * crossover
        for length in (last, last + 1):
            query, key, value = inputs(1, 2, length, 8)
            attempts.clear()
            auto(query, torch.zeros_like(key), value, columns=64, **options)  # which landmarks represent exactly
            assert bool(attempts) == (length > last)


def test_a_head_gets_more_columns_before_it_becomes_exact(attempts):
    errors = _errors(_mixed(), crossover=100, max_error=0.12)
    assert len({columns for _, columns in attempts}) > 1
    assert all(1e-4 < error <= 0.12 for error in errors)


def test_heads_that_need_exact_attention_cost_next_to_no_attempts(monkeypatch, attempts):
    tensors = [x[:, 2:].repeat(2, 4, 1, 1) for x in _mixed(1200)]  # 2 sequences of 8 heads
    assert max(_errors(tensors, crossover=400)) < 1e-5
    assert not attempts  # the copies tell
    monkeypatch.setattr(within_bound, "screening_error", lambda query, *_, **__: query.new_full(query.shape[:1], 0.1))
    assert max(_errors(tensors, crossover=400)) < 1e-5
    assert 2 <= sum(heads for heads, _ in attempts) <= 6  # of 16


def test_the_crossover_of_the_machine_is_that_of_one_sequence(monkeypatch):
    """With the whole batch it would depend on the batch."""
    length = Mock(return_value=150)
    monkeypatch.setattr(module, "crossover_length", length)
    auto(*inputs(batch=3, num_heads=2, q_len=200, head_dim=8, dtype=torch.bfloat16), columns=64, is_causal=True)
    expected = {"dtype": torch.bfloat16, "is_causal": True, "relative_cost": pytest.approx(0.2875 * 8**0.1)}
    assert length.call_count == 1 and length.call_args.args == ("nearfar", 16)
    assert length.call_args.kwargs | expected == length.call_args.kwargs


def test_the_built_in_crossover_decides_before_the_machine_is_measured():
    config = hea.method_info("auto").config_class()
    length = built_in_table("cpu")["float32"].at(1024)
    # Without a bound all heads have near keys, which costs more than nearfar with its default hyperparameters.
    assert 0.9 * length < config.exact_length < dataclasses.replace(config, max_error=0.0).exact_length < 1.5 * length


@pytest.mark.parametrize("compiled", [False, True])
def test_with_a_gradient_or_a_drawn_seed_every_head_has_the_same_columns(compiled):
    """Reentrant checkpointing computes without a gradient first, and repeats the call for its gradients."""
    tensors = _mixed()
    attend = torch.compile(auto, backend="aot_eager") if compiled else auto
    outs = []
    for needs_grad in (False, True):
        torch.manual_seed(3)
        leaves = [x.clone().requires_grad_(needs_grad) for x in tensors]
        outs.append(attend(*leaves, columns=64, crossover=100, seed=None).detach())
    torch.testing.assert_close(*outs)
    assert not torch.allclose(outs[0], auto(*tensors, columns=64, crossover=100), atol=1e-3)
    length = tensors[0].shape[2]
    plain = hea.attention(module._approximation(hea.method_info("auto").config_class(), 64, length, length), *tensors)
    torch.testing.assert_close(auto(*leaves, columns=64, crossover=100).detach(), plain, rtol=2e-4, atol=2e-4)


def test_the_static_form():
    """In training and in the causal form; the data decide in all other calls."""
    tensors = _mixed()
    leaves = [x.clone().requires_grad_() for x in tensors]
    sizes = {"columns": 64, "crossover": 100}
    options = {**sizes, "static_form": "exact"}
    torch.testing.assert_close(auto(*leaves, **options), scaled_dot_product_attention(*tensors))
    exact = scaled_dot_product_attention(*tensors, is_causal=True)
    torch.testing.assert_close(auto(*tensors, is_causal=True, **options), exact)
    torch.testing.assert_close(auto(*tensors, **options), auto(*tensors, **sizes))
    assert relative_error(auto(*tensors, **options), scaled_dot_product_attention(*tensors)) > 1e-3
    torch.testing.assert_close(*(auto(*tensors, **x, max_error=0.0) for x in (options, sizes)))


def test_the_copy_of_a_head_tells_whether_landmarks_approximate_it():
    query, key, value = (x[0] for x in _mixed(1200))
    error = screening_error(query, key, value, scale=8**-0.5)
    assert max(error[:2]) < 0.5 * min(error[2:])
    # Every head is judged apart from the others.
    torch.testing.assert_close(error[2:], screening_error(query[2:], key[2:], value[2:], scale=8**-0.5))
    assert screening_error(100.0 * query, 1e3 * key, value, scale=1.0).isfinite().all()
    assert (screening_error(query, key, torch.zeros_like(value), scale=1.0) == 0.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nearfar_is_finite_where_near_keys_are_all_of_a_landmark(dtype):
    query, key, value = (torch.randn(1, 4, 700, 32, generator=torch.Generator().manual_seed(i)) for i in range(3))
    assert hea.attention("nearfar", (30 * query).to(dtype), (30 * key).to(dtype), value.to(dtype)).isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_nearfar_is_finite_with_values_near_the_limit_of_float16(is_causal):
    query, key, value = (2.0 * numbers(1, 4, 700, 64, seed=i).half() for i in range(3))
    assert nearfar(query, key, 6e4 * value.sign(), is_causal=is_causal, block_size=20, num_samples=12).isfinite().all()
