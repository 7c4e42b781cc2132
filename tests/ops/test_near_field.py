"""The plans of KDEformer and HyperAttention: near fields, sampled keys, and the near field that exact rows choose."""

import math

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from each import close
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.index import inverse
from hf_efficient_attn.ops.sampled_keys import bidirectional, causal
from hf_efficient_attn.ops.sampled_keys.bidirectional import dense_log_weights
from hf_efficient_attn.ops.sampled_keys.causal import dense_causal_log_weights
from hf_efficient_attn.ops.sampled_keys.hashing import NearField, plan_lsh
from hf_efficient_attn.ops.sampled_keys.sampling import (
    FarField,
    SamplingOptions,
    density_norms,
    query_groups,
    sample_keys,
    sampled_norm_squared,
)
from instances import FIRST, numbers

CPU = torch.device("cpu")


def sampling(**changes) -> SamplingOptions:
    default = SamplingOptions("lsh", 16, 4, None, 20, "probe", 8, False, 0.5, draws=Draws(0, CPU), batch=2, groups=3)
    return default._replace(**changes)


def plan(near_field="lsh", q_len=90, mask=None, **changes):
    """Inputs with 90 keys, two sequences of two heads; the near field and the far field."""
    row = numbers(4, q_len, 6), numbers(4, 90, 6, seed=1), numbers(4, 90, 5, seed=2)
    return row, *bidirectional.make_plan(*row, mask, sampling(near_field=near_field, **changes))


def held_pairs(near: NearField, q_len: int, kv_len: int) -> Tensor:
    """bool (BH, Nq, Nk), the pairs of a near field."""
    nothing = torch.zeros(near.start.shape[0], 1, 0)
    return dense_log_weights(near, FarField(nothing.long(), nothing), q_len, kv_len) == 0


def residual(query: Tensor, key: Tensor, near: NearField, key_mask: Tensor | None) -> Tensor:
    """D^-1 A_res of 90 tokens, with rows of masked queries."""
    scores = query @ key.transpose(1, 2) * 0.5
    scores = scores if key_mask is None else scores.masked_fill(~key_mask[:, None], -torch.inf)
    return scores.softmax(-1).masked_fill(held_pairs(near, 90, 90), 0.0)


MASKED = torch.arange(90) < torch.tensor([[90], [90], [61], [61]])
each_mask = pytest.mark.parametrize("mask", [None, MASKED], ids=["", "masked"])


@pytest.mark.parametrize("length", [700, 2000])
@pytest.mark.parametrize("near_field", ["lsh", "window"])
def test_padding_changes_no_sample(near_field, length):
    """A sum that is rounded differently would change the weights, and in the next layer also the sample."""
    tensors = [numbers(1, 2, length + 90, 8, seed=i).float() for i in range(3)]
    mask = torch.arange(length + 90)[None] < length
    config = hea.KDEformerConfig(near_field=near_field, block_size=128, num_samples=128)
    short = [x[:, :, :length] for x in tensors]
    alone = hea.attention(config, *short)
    assert torch.equal(hea.attention(config, *tensors, attention_mask=mask)[:, :, :length], alone)
    assert torch.equal(hea.attention(config, *short, attention_mask=mask[:, :length]), alone)


@pytest.mark.parametrize("independent", [False, True])
@each_mask
@pytest.mark.parametrize("length", [90, 35])
@pytest.mark.parametrize("near_field", ["lsh", "window", "auto"])
def test_a_plan_counts_no_pair_twice_and_no_masked_key(near_field, length, mask, independent):
    _, near, far = plan(near_field, length, mask, independent=independent)
    weights = dense_log_weights(near, far, length, 90)
    assert ((near.start[0] >= 0) & (near.start[0] <= 90 - 16)).all()
    valid = torch.ones(4, 90, dtype=torch.bool) if mask is None else mask
    queries = valid if length == 90 else torch.ones(4, length, dtype=torch.bool)
    assert (weights[~valid[:, None].expand(-1, length, -1)] == -torch.inf).all()
    # Every query has a near field of `block_size` keys with weight 1. Sampled keys have a weight of 1 or more.
    assert ((weights == 0).sum(-1)[queries] >= 16).all()
    if not independent:
        assert (weights[weights > -torch.inf] >= 0).all()
        assert ((weights > -torch.inf).sum(-1)[queries] <= 16 + 20).all()


def test_hashed_keys_are_similar_to_their_queries():
    """`test_analysis.py` checks the keys that a window selects."""
    (query, key, _), near, _ = plan()
    similar = torch.nn.functional.cosine_similarity(query[:, :, None], key[:, None], dim=-1)
    assert similar[held_pairs(near, 90, 90)].mean() > similar.mean() + 0.15


@each_mask
@pytest.mark.parametrize("near_field", ["lsh", "window", "auto"])
def test_probes_of_a_group_are_queries_of_its_blocks(near_field, mask):
    """If all queries of a group are probes, the estimate is that of its rows of D^-1 A_res, scaled to all queries.

    In one group these are all queries, so that the estimate is exactly the squared column norms of D^-1 A_res.
    """
    (query, key, _), near, _ = plan(near_field, mask=mask)
    expected = residual(query, key, near, mask)
    for a, total in ((0, 90), (2, 90 if mask is None else 61)):
        all_of_them, _ = bidirectional.probe_norms(query, key, mask, near, None, sampling(num_probes=total, groups=1))
        close(all_of_them[a, 0], expected[a, :total].square().sum(0))
        own = (query_groups(near, 2).expand(4, -1)[a] == 1).nonzero()[:, 0]
        index = torch.arange(int(own[0]) * near.block_q, total)
        ours, _ = bidirectional.probe_norms(query, key, mask, near, None, sampling(num_probes=2 * len(index), groups=2))
        queries = index if near.query_order is None else near.query_order[a, index]
        close(ours[a, 1], expected[a, queries].square().sum(0) * total / len(index))


@each_mask
@pytest.mark.parametrize("near_field", ["lsh", "window"])
def test_densities_give_the_column_norms_of_the_residual(near_field, mask):
    """If the densities are exact, so are the norms without the near field, whose last block is not full."""

    def exact_norms(queries, keys, seed):
        scores = queries @ keys.mT
        log_sums = scores.logsumexp(1)
        return (2.0 * (scores - log_sums[:, None])).logsumexp(0), log_sums

    (query, key, _), near, _ = plan(near_field, mask=mask)
    expected = residual(query, key, near, mask)
    expected = expected if mask is None else expected.masked_fill(~mask[:, :, None], 0.0)
    close(density_norms(query, key, mask, near, sampling(scores=exact_norms))[:, 0], expected.square().sum(1))


def test_each_block_has_its_own_sample_unless_all_share_one():
    _, _, far = plan("window", scores="uniform")
    assert far.sorted_index.shape == far.log_weight.shape and far.sorted_index.shape[0::2] == (4, 20)
    # Only nine different samples of 20 of 90 keys have even steps of 4.5.
    assert all(len(set(map(tuple, queries))) > 3 for queries in far.sorted_index.tolist())
    for options in ({}, {"independent": True}, {"mask": MASKED}):
        assert plan("window", shared=True, **options)[2].sorted_index.shape == (4, 1, 20)


def test_sampling_scores_are_those_of_the_paper():
    (query, key, value), near, _ = plan()

    def scores(kind):
        options = sampling(scores=kind, num_probes=90, groups=1)
        return bidirectional.sampling_scores(query, key, value, None, near, None, options)[0]

    squares = value.square().sum(-1)
    close(scores("value_norm")[:, 0], squares.gather(1, near.key_order), 1e-5)
    assert torch.equal(scores("uniform"), torch.ones(4, 1, 90, dtype=torch.float64))
    norms = bidirectional.probe_norms(query, key, None, near, None, sampling(num_probes=90, groups=1))[0]
    singular = torch.linalg.svdvals(value)
    gamma = 1.0 / singular.pow(4).sum(1).sqrt()
    close(sampled_norm_squared(value, None)[:, 0], 1.0 / gamma)
    # The Frobenius norm of V^T V is not less than the square of the operator norm of V, and equal for rank 1.
    assert (1.0 / gamma >= singular[:, 0].square()).all()
    line = value[:, :, :1] * value[:, :1]
    close(sampled_norm_squared(line, None)[:, 0], torch.linalg.matrix_norm(line, 2).square())
    # Of more than 767 values, every second is used, every third from 3 * 384 on, and so on.
    many = numbers(4, 1153, 5)
    largest = torch.linalg.matrix_norm(many[:, 1::3].mT @ many[:, 1::3]) * (1153 / 384)
    close(sampled_norm_squared(many, None)[:, 0], largest)
    close(scores("probe")[:, 0].gather(1, inverse(near.key_order)), norms[:, 0] + gamma[:, None] * squares, 1e-5)


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("scores", ["probe", "value_norm", "uniform"])
def test_the_far_field_is_unbiased(scores, independent):
    """Over many samples the mean weight of every key with a score is 1, as in the residual."""
    (query, key, value), near, _ = plan("window")
    options = sampling(scores=scores, groups=1, independent=independent)
    weights, _ = bidirectional.sampling_scores(query, key, value, None, near, None, options)
    total, draws, together = torch.zeros(4, 90), 4000, 40
    for seed in range(draws // together):
        turns = Draws(seed, CPU).uniform((2, together), 12).repeat(2, 1)
        far = sample_keys(weights, turns, options._replace(draws=Draws(seed, CPU)))
        total.scatter_add_(1, far.sorted_index.flatten(1), far.log_weight.flatten(1).exp().float())
    mean = total / draws
    assert (mean.mean(1) - 1.0).abs().max() < 0.02
    # The mean is less certain for keys that are sampled less than once in twenty times.
    assert (mean - 1.0).abs().max() < 0.5
    assert (mean - 1.0).abs().mean() < 0.06


def causal_plan(length: int, scores: str = "probe", independent: bool = False, seed: int = 0, num_hashes: int = 0):
    row = numbers(4, length, 6), numbers(4, length, 6, seed=1), numbers(4, length, 5, seed=2)
    changes = {"scores": scores, "independent": independent, "draws": Draws(seed, CPU), "num_hashes": num_hashes}
    return row, causal.plan_intervals(*row, sampling(num_samples=12, num_probes=5, **changes))


def test_causal_hashed_blocks_have_similar_keys_and_count_no_key_twice():
    (query, key, _), _ = causal_plan(203)
    plans = (causal_plan(203, num_hashes=n)[1] for n in (3, 0))
    hashed, plain = (dense_causal_log_weights(plan, 203, 8, 20, torch.zeros(4)) for plan in plans)
    assert torch.equal(hashed[plain == 0], plain[plain == 0])
    # A block of hashed keys adds keys similar to the query to the near field. The samples do not change otherwise.
    added = (hashed == 0) & (plain != 0)
    similar = torch.nn.functional.cosine_similarity(query[:, :, None], key[:, None], dim=-1)
    assert similar[added].mean() > similar.mean() + 0.15
    assert torch.equal(hashed[~added], plain[~added])


@pytest.mark.parametrize("scores", ["value_norm", "probe"])
def test_a_causal_far_field_is_unbiased(scores):
    total, draws = 0.0, 40
    for seed in range(draws):
        _, plans = causal_plan(50, scores, seed=seed)
        total = total + dense_causal_log_weights(plans, 50, 8, 8, torch.zeros(4)).exp()
    close((total / draws)[:, 8:].sum(-1).mean(0), torch.arange(9, 51).double(), 0.08)


@pytest.mark.parametrize("num_hashes", [0, 3])
@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("scores", ["probe", "value_norm", "uniform"])
def test_causal_samples_are_from_completed_blocks_only(scores, independent, num_hashes):
    length, size = 203, 8
    _, plans = causal_plan(length, scores, independent, num_hashes=num_hashes)
    assert [p.level for p in plans] == list(range(5))
    assert all(((p.sample_index >= 0) & (p.sample_index < size << p.level)).all() for p in plans)
    weights = dense_causal_log_weights(plans, length, size, 20, torch.zeros(4))
    block, position = torch.arange(length) // size, torch.arange(length)
    near = ((block[:, None] - block <= 1) | (position[:, None] < 20)) & (position <= position[:, None])
    completed = block[:, None] - block >= 2
    assert (weights[:, near] == 0).all()
    assert (weights[:, ~(near | completed)] == -torch.inf).all()
    # Every completed interval is sampled: the expected total weight of the samples is the number of its keys.
    far = weights.exp().masked_fill(~(completed & ~near), 0.0).sum((0, 2))[20:] / 4
    assert torch.equal(far > 0, (completed.sum(1) > 0)[20:])
    if scores == "uniform" and not num_hashes:
        close(far, completed.sum(1)[20:].double(), 1e-9)


# The near field that exact rows choose.


def plans(query: Tensor, key: Tensor, mask: Tensor | None = None) -> tuple[NearField, NearField, NearField]:
    """The window, the blocks of a hash, and the choice between them."""
    window = bidirectional.plan_window(query, key, 8, mask)
    lsh = plan_lsh(query, key, 8, mask, 6, Draws(0, CPU), window.block_q)
    options = SamplingOptions("auto", 8, 6, None, 0, "uniform", 8, False, 1.0, draws=Draws(0, CPU), batch=1)
    return window, lsh, bidirectional.plan_near_field(query, key, mask, options)[0]


@pytest.mark.parametrize("q_len", [30, 21])
@pytest.mark.parametrize("masked", [False, True])
def test_the_choice_is_that_of_dense_matrices(q_len, masked):
    # With no more queries than rows, every query is one of the exact rows.
    assert q_len <= bidirectional.NUM_ROWS
    query, key = numbers(16, q_len, 4).float(), numbers(16, 30, 4, seed=1).float()
    # In half of the heads, tokens resemble their neighbors.
    angle = torch.arange(30) * (2 * math.pi / 30)
    local = 3.0 * torch.stack((angle.cos(), angle.sin()), 1)
    query[8:, :, :2], key[8:, :, :2] = local[:q_len], local
    mask = torch.arange(30) < torch.arange(15, 31)[:, None] if masked else None
    window, lsh, chosen = plans(query, key, mask)
    weights = query.double() @ key.double().mT
    weights = (weights if mask is None else weights.masked_fill(~mask[:, None], -torch.inf)).softmax(2)
    valid = mask if mask is not None and q_len == 30 else torch.ones(16, q_len, dtype=torch.bool)
    pairs = [held_pairs(plan, q_len, 30) for plan in (window, lsh)]
    left = [((weights * ~p).sum(2).square() * valid).sum(1) for p in pairs]
    take_lsh = left[1] < 0.99 * left[0]
    assert 0 < take_lsh.sum() < 16
    assert torch.equal(held_pairs(chosen, q_len, 30), torch.where(take_lsh[:, None, None], pairs[1], pairs[0]))


def test_equal_near_fields_are_no_matter_of_rounding():
    """All weights are equal, so that both near fields hold the same share of every row."""
    key = numbers(6, 40, 4).float()
    window, _, chosen = plans(torch.zeros_like(key), key)
    assert torch.equal(held_pairs(chosen, 40, 40), held_pairs(window, 40, 40))


@pytest.mark.parametrize("method", ["kdeformer", "hyperattention"])
def test_the_causal_form_has_a_window_whatever_the_tokens_are(method):
    tokens, form = 4.0 * numbers(8, 4, seed=5).float()[torch.arange(64) % 8][None, None], FIRST[method]
    assert torch.equal(*(form.row(near_field=x)(*[tokens] * 3, is_causal=True) for x in ("auto", "window")))
