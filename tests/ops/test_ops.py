"""The tensor primitives of `ops`, against explicit formulas and against PyTorch."""

import functools
import itertools
import math
from collections import OrderedDict

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_efficient_attn as hea
from each import attend_naive, close
from hf_efficient_attn import functional
from hf_efficient_attn.methods import make_config
from hf_efficient_attn.ops import index as index_ops
from hf_efficient_attn.ops.attend import Partial, merge
from hf_efficient_attn.ops.backends import devices
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.features import sums
from hf_efficient_attn.ops.features.maps import elu_features, elu_map, favor, log_weights_naive, orthogonal_features
from hf_efficient_attn.ops.features.sums import Tokens, add_to_state, causal, numel_of_head
from hf_efficient_attn.ops.sampled_keys.hashing import hash_keys, hyperplanes
from hf_efficient_attn.ops.sampled_keys.sampling import inclusion_probabilities
from hf_efficient_attn.ops.strata import independent_sample, stratified_ranks, systematic_sample
from instances import numbers

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 99), st.sampled_from((1.0, 30.0, 1e4)))
def test_merge_of_any_split_is_the_whole(sizes, seed, size):
    query, key, value = numbers(2, 5, 3, seed=seed) * size, numbers(2, sum(sizes), 3, seed=1), numbers(2, sum(sizes), 4)
    pairs = zip(key.split(sizes, 1), value.split(sizes, 1), strict=True)
    close(merge(*[attend_naive(query, k, v, scale=1.0) for k, v in pairs]), attend_naive(query, key, value, scale=1.0))


def test_merge_of_empty_parts_in_any_order_with_gradients():
    empty = Partial(torch.zeros(2, 3, 2).double(), torch.full((2, 3), -torch.inf).double())
    leaves = [x.requires_grad_() for p in range(3) for x in (numbers(2, 3, 2, seed=p), numbers(2, 3, seed=p + 3))]
    with torch.no_grad():
        leaves[1][0, 0] = leaves[3][0, 0] = leaves[5][0, 0] = -torch.inf  # nothing to attend to at all
        leaves[3][1, 2] = -1e4
    parts = [Partial(*pair) for pair in zip(leaves[::2], leaves[1::2], strict=True)]
    expected = merge(*parts)
    for merged in (
        merge(parts[2], empty, parts[0], parts[1], empty),
        merge(parts[0], merge(*parts[1:])),
        merge(merge(*parts[:2]), empty, parts[2]),
    ):
        close(merged, expected)
    assert not expected.out[0, 0].any() and expected.lse[0, 0] == -torch.inf
    assert all(x.isfinite().all() for x in torch.autograd.grad(expected.out.sum() + expected.lse[1].sum(), leaves))
    assert merge(parts[0]) is parts[0] and torch.equal(merge(empty, empty).lse, empty.lse)
    half = Partial(torch.ones(1, 2, 2, dtype=torch.float16), torch.zeros(1, 2))
    merged = merge(half, half)
    assert (merged.out.dtype, merged.lse.dtype) == (torch.float16, torch.float32)
    close(merged.lse, torch.full((1, 2), math.log(2)), 1e-6)


def lemma_order(r: int) -> list[tuple[bool, ...]]:
    """The order of Lemma A.2: that of r-1 bits with 0 appended, then the same reversed, with 1 appended."""
    if r == 0:
        return [()]
    shorter = lemma_order(r - 1)
    return [(*code, False) for code in shorter] + [(*code, True) for code in reversed(shorter)]


@pytest.mark.parametrize("r", range(1, 9))
def test_hash_keys_are_in_the_order_of_the_lemma(r):
    """The whole part is the rank of the cell in the order of Lemma A.2. Tokens of a cell are in their own order."""
    order, planes = lemma_order(r), hyperplanes(5, r, Draws(0, CPU))
    assert len(set(order)) == 2**r
    assert all(sum(a != b for a, b in zip(*pair, strict=True)) == 1 for pair in itertools.pairwise(order))
    x = numbers(2, 300, 5)
    x[:, 100] = x[:, 7]
    keys = hash_keys(x, r, Draws(0, CPU))
    ranks = [order.index(tuple(bits)) for bits in (x @ planes > 0).flatten(0, 1).tolist()]
    assert keys.floor().flatten().tolist() == ranks
    assert (keys[:, 7] < keys[:, 100]).all() and keys[0].unique().numel() == 300
    assert torch.equal(hash_keys(7.0 * x, r, Draws(0, CPU)), keys)
    masked = hash_keys(x, r, Draws(0, CPU), torch.arange(300).expand(2, -1) < torch.tensor([[300], [40]]))
    assert torch.equal(masked[0], keys[0]) and (masked[1, 40:] == torch.inf).all()
    assert torch.equal(masked[1, :40].floor(), keys[1, :40].floor())
    longest = hash_keys(numbers(1, 50, 5), 62, Draws(0, CPU))
    assert longest.dtype == torch.float64 and (longest >= 0).all() and (longest <= 2.0**62).all()


def test_the_hash_is_angular():
    """Two vectors fall on different sides of a plane with probability angle / pi."""
    planes = hyperplanes(2, 20000, Draws(0, CPU))
    for angle in (0.1, 1.0, 2.5):
        sides = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64) @ planes > 0
        assert (sides[0] != sides[1]).double().mean().item() == pytest.approx(angle / math.pi, abs=0.015)


scores_lists = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=60)


@given(scores_lists, st.integers(1, 40))
def test_inclusion_probabilities(scores, budget):
    """They are min(1, c score) for one c and sum to the budget, or are all 1 if fewer scores are positive."""
    scores = torch.tensor([scores], dtype=torch.float64)
    probabilities = inclusion_probabilities(scores, budget)[0]
    positive = scores[0] > 0
    assert ((probabilities >= 0) & (probabilities <= 1)).all()
    assert (probabilities[~positive] == 0).all()
    assert probabilities.sum().item() == pytest.approx(min(budget, int(positive.sum())), rel=1e-9)
    part = positive & (probabilities < 1)
    if part.any():
        c = (probabilities / scores[0])[part]
        close(c, c[:1].expand_as(c), 1e-9)
        assert (c[0] * scores[0][probabilities == 1] >= 1 - 1e-9).all()
    few = torch.zeros(2, 50)
    few[0, :3] = torch.tensor([1.0, 5.0, 1e-30])
    assert torch.equal(inclusion_probabilities(few, 40), (few > 0).double())


@given(scores_lists, st.integers(1, 40), st.floats(1e-6, 1 - 1e-6))
def test_systematic_sample_has_no_duplicates(scores, budget, offset):
    probabilities = inclusion_probabilities(torch.tensor([scores], dtype=torch.float64), budget)
    drawn = systematic_sample(probabilities[:, None], budget, torch.tensor([[offset]], dtype=torch.float64))
    index, log_weight = (x[0, 0] for x in drawn)
    selected = log_weight > -torch.inf
    chosen = index[selected].tolist()
    assert len(set(chosen)) == len(chosen) == round(probabilities.sum().item())
    assert chosen == sorted(chosen)
    close(log_weight[selected], -probabilities[0, chosen].log())
    assert (index[~selected] == 0).all()


@pytest.mark.parametrize("groups", [1, 3])
def test_rounding_moves_no_point_beyond_the_end(groups):
    probabilities = inclusion_probabilities(numbers(2, groups, 50).exp(), 20)
    offset = torch.tensor([[1e-12, 0.3, 1 - 1e-15, 0.7], [0.5, 0.1, 0.9, 1 - 1e-16]], dtype=torch.float64)
    group = None if groups == 1 else torch.tensor([[0, 1, 2, 2], [2, 0, 1, 2]])
    index, log_weight = systematic_sample(probabilities, 20, offset, group)
    assert log_weight.isfinite().all() and (index.diff(dim=2) > 0).all()


@pytest.mark.parametrize("independent", [False, True])
def test_samples_of_several_groups_are_those_of_each_group_alone(independent):
    """One search serves all groups: an empty one, one with fewer keys than samples, and others."""
    scores = numbers(2, 4, 30).exp()
    scores[:, 1] = 0.0
    scores[:, 2, 5:] = 0.0
    group = torch.tensor([[0, 3, 1, 2, 3, 0], [2, 2, 0, 1, 1, 3]])
    draws = Draws(0, CPU).uniform((2, 6, 9), 0)
    probabilities = inclusion_probabilities(scores, 9)
    together = (
        independent_sample(scores, 9, draws, group) if independent
        else systematic_sample(probabilities, 9, draws[..., 0], group)
    )  # fmt: skip
    for a, s in itertools.product(range(2), range(6)):
        own = slice(a, a + 1), group[a, s].reshape(1)
        alone = (
            independent_sample(scores[own], 9, draws[a, s].view(1, 1, 9)) if independent
            else systematic_sample(probabilities[own], 9, draws[a, s, 0].view(1, 1))
        )  # fmt: skip
        assert all(torch.equal(x[a, s], y[0, 0]) for x, y in zip(together, alone, strict=True))


@given(st.integers(1, 20), st.integers(1, 50), st.floats(1e-6, 1 - 1e-6))
def test_stratified_ranks(count, available, offset):
    """There is one rank in each stratum, for a number of keys as for a tensor."""
    offset = torch.tensor([[offset]], dtype=torch.float64)
    ranks = stratified_ranks(count, available, offset)
    assert torch.equal(stratified_ranks(count, torch.tensor([[available]]), offset), ranks)
    for i, rank in enumerate(ranks[0].tolist()):
        assert math.floor(i * available / count) <= rank <= min(available - 1, math.ceil((i + 1) * available / count))
    if count == available:
        assert ranks[0].tolist() == list(range(available))
    assert (stratified_ranks(count, torch.tensor([[0]]), offset) == 0).all()


def test_uniform_and_normal_have_their_distributions():
    for seed, stream in ((0, 0), (1, 0), (0, 1), (2**31 - 1, 7)):
        flat = Draws(seed, CPU).uniform((20000,), stream)
        assert flat.min() > 0 and flat.max() < 1
        assert scipy.stats.kstest(flat.numpy(), "uniform").pvalue > 1e-3
        assert scipy.stats.kstest(Draws(seed, CPU).normal((20000,), stream).numpy(), "norm").pvalue > 1e-3
        assert torch.corrcoef(torch.stack((flat[:-1], flat[1:])))[0, 1].abs() < 0.03
    # Of 20,000 numbers, 0.05 pairs are expected to be equal with 32 bits, and 12 pairs with 24 bits.
    steps = Draws(0, CPU).uniform((20000,), 0) * 2.0**32 - 0.5
    assert torch.equal(steps, steps.round()) and steps.unique().numel() >= 20000 - 2


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_random_numbers_depend_on_the_seed_only(default):
    draws, drawn = Draws(5, CPU), Draws(torch.tensor(5), CPU)
    expected = {f: f(draws, (3, 50), 2) for f in (Draws.uniform, Draws.normal)}
    state = torch.random.get_rng_state()
    torch.set_default_dtype(default)
    try:
        for function, values in expected.items():
            assert values.dtype == torch.float64
            assert torch.equal(function(draws, (3, 50), 2), values)
            assert torch.equal(function(drawn, (3, 50), 2), values)
            assert torch.equal(function(draws, (150,), 2).view(3, 50), values)
            close(torch.compile(function, fullgraph=True, backend="eager")(drawn, (3, 50), 2), values, 1e-12)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_features_are_orthogonal_and_each_is_normal():
    head_dim = 16
    features = orthogonal_features(Draws(0, CPU), 40, head_dim)
    assert features.shape == (40, head_dim)
    for block in features.split(head_dim):
        products = block @ block.t()
        close(products - products.diagonal().diag(), torch.zeros_like(products))
    many = torch.cat([orthogonal_features(Draws(seed, CPU), head_dim, head_dim) for seed in range(200)])
    assert scipy.stats.kstest(many[:, 3].numpy(), "norm").pvalue > 1e-3
    assert scipy.stats.kstest(many.square().sum(1).numpy(), scipy.stats.chi2(head_dim).cdf).pvalue > 1e-3
    assert (many / many.norm(dim=1, keepdim=True)).mean(0).abs().max() < 0.02


def features(name: str):
    return elu_map(0.7, 6) if name == "elu" else favor(20, -0.4, 6, Draws(3, CPU))


def tokens(length: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tokens:
    query, key, value = (numbers(2, length, d, seed=seed + i, dtype=dtype) for i, d in enumerate((6, 6, 5)))
    key_mask = torch.ones(2, length, dtype=torch.bool)
    key_mask[0, ::3], key_mask[1, :7] = False, False
    return Tokens(query, key, value, key_mask)


@pytest.mark.parametrize("name", ["elu", "favor"])
@pytest.mark.parametrize("with_state", [False, True])
def test_the_causal_scan(name, with_state, monkeypatch):
    monkeypatch.setattr(sums, "scan_chunks", lambda device: 2)
    own, before = tokens(300), tokens(40, seed=5)
    leaves = [x.clone().requires_grad_() for x in (*own[:3], *before[1:3])]

    def outputs(form):
        now, earlier = Tokens(*leaves[:3], own.key_mask), Tokens(before.query, *leaves[3:], before.key_mask)
        out, lse = form(now, earlier)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse[:, 7:].sum(), leaves, allow_unused=True)

    def ours(now, earlier):
        state = add_to_state(None, *earlier[1:], features(name)) if with_state else None
        return causal(now, features(name), state=state)

    def naive(now, earlier):
        parts = [earlier, now] if with_state else [now]
        key, value, mask = (torch.cat(x, 1) for x in zip(*(part[1:] for part in parts), strict=True))
        future = torch.ones(300, key.shape[1], dtype=torch.bool).triu(key.shape[1] - 300 + 1)
        scores = log_weights_naive(now.query, key, features(name)).masked_fill(~mask[:, None] | future, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ value, scores.logsumexp(-1)

    close(outputs(ours), outputs(naive))


def test_the_size_of_a_slice_does_not_depend_on_the_number_of_heads():
    key = torch.empty(2, 3, 50, 8)
    assert numel_of_head(key, 16, is_causal=False) == numel_of_head(key.flatten(0, 1), 16, is_causal=False) == 50 * 16


def test_the_features_of_very_negative_numbers_are_no_zeros():
    """elu(x) + 1 rounds to 0 below -17, and a query would lose all its keys."""
    x = torch.tensor([-60.0, -20.0, -1.0, 0.0, 2.0], requires_grad=True)
    expected = torch.tensor([math.exp(-60.0), math.exp(-20.0), math.exp(-1.0), 1.0, 3.0])
    (gradient,) = torch.autograd.grad(elu_features(x).sum(), x)
    for found, wanted in ((elu_features(x.detach()), expected), (gradient, expected.clamp(max=1.0))):
        torch.testing.assert_close(found, wanted, atol=0.0, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_is_finite_where_the_weights_nearly_underflow(is_causal, dtype):
    """The weights of the first query sum to about 1e-42 in float32; those of the second are of normal size."""
    size = 96.0 if dtype == torch.float32 else 710.0
    query, key, value = (
        torch.tensor(x, dtype=dtype).view(1, 1, 2, 1).requires_grad_() for x in ([-size, 1.0], [size, 2.0], [3.0, 5.0])
    )
    out = functional.linear_attention(query, key, value, is_causal=is_causal)
    weights = torch.tensor([size + 1.0, 3.0], dtype=dtype)
    mean = (weights * value.flatten()).sum() / weights.sum()
    expected = torch.stack([value[0, 0, 0, 0] if is_causal else mean, mean])
    torch.testing.assert_close(out.flatten(), expected, rtol=0.05, atol=0.0)
    gradients = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[1].count_nonzero() == 2 and gradients[2].count_nonzero() == 2


def test_constants_are_kept_up_to_a_size(monkeypatch):
    calls = []

    @index_ops.constant
    def ones(count, device):
        calls.append(count)
        return torch.ones(count, device=device)

    monkeypatch.setattr(index_ops, "_results", OrderedDict())
    monkeypatch.setattr(index_ops, "_KEPT_BYTES", 4 * 100)
    for count in (40, 50, 40, 60, 40, 60, 50, 200):  # 60 in place of 50, the oldest; 200 is too large to be kept
        assert ones(count, CPU).tolist() == [1.0] * count
    assert calls == [40, 50, 60, 50, 200]
    assert ones(count=50, device=CPU) is ones(50, CPU)


@pytest.mark.parametrize(
    ("method", "causal", "most"), [("performer", True, 2.0), ("linear", True, 1.5), ("linear", False, 1.25)]
)
def test_features_round_little_more_than_exact_attention(monkeypatch, method, causal, most):
    """The sum of the weights of a query is rounded several times independently, and weights of keys are exact."""
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda device: True)
    tensors = [numbers(1, 2, 512, 64, seed=i).bfloat16() for i in range(3)]
    config = make_config(method).with_budget(128)
    errors = []
    for attend in (functools.partial(hea.attention, config), torch.nn.functional.scaled_dot_product_attention):
        out, truth = (attend(*x, is_causal=causal) for x in (tensors, [x.double() for x in tensors]))
        errors.append(((out - truth).norm() / truth.norm()).item())
    assert errors[0] < most * errors[1]
