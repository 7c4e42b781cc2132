"""Reformer: the formulas of the paper in float64, and shared queries and keys."""

from itertools import product

import pytest
import torch
from torch.nn.functional import normalize

import hf_efficient_attn as hea
from each import close
from hf_efficient_attn.ops import hashing
from hf_efficient_attn.ops.hashing import NearField, bucket_codes, plan_rounds, rounds_attention
from hf_efficient_attn.ops.tokens import inverse
from instances import inputs, numbers, padding_mask, relative_error

HEAD_DIM = 8
reformer = hea.functional.reformer_attention


# Section 2 of the paper, in float64 and with (N, N) matrices.


def pairs_of_rounds(plan: NearField) -> torch.Tensor:
    """The set P_i of every round: bool (BH, S, Nq, Nk)."""
    query_index, key_index = (inverse(x.flatten(0, 1)).view_as(x) for x in (plan.query_order, plan.key_order))
    start = plan.start.gather(2, query_index // plan.block_q).unsqueeze(3)
    pairs = (key_index.unsqueeze(2) >= start) & (key_index.unsqueeze(2) < start + plan.block_k)
    if isinstance(plan.num_keys, torch.Tensor):
        pairs &= (key_index < plan.num_keys[:, :, None]).unsqueeze(2)
    return pairs


def paper_attention(query, key, value, pairs, scale: float, shared: bool) -> torch.Tensor:
    """Eq. 5-7: o_i = sum_r exp(z(i, P_i^r) - z(i, P_i)) o_i^r, with m_ij^r = log N_ij, 10^5 if i = j, or infinity."""
    scores = scale * query @ key.transpose(1, 2)
    penalty = pairs.sum(1).clamp(min=1).double().log()
    if shared:
        penalty = penalty + 1e5 * torch.eye(scores.shape[1])
    logits = (scores - penalty).unsqueeze(1).masked_fill(~pairs, -torch.inf)
    z = logits.logsumexp(3, keepdim=True)
    rounds = (logits - z.masked_fill(z == -torch.inf, 0.0)).exp() @ value.unsqueeze(1)
    weights = (z - z.logsumexp(1, keepdim=True)).exp().nan_to_num(0.0)
    return (weights * rounds).sum(1)


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes", "empty"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("size", "rounds"), [(8, 1), (8, 2), (5, 3), (3, 6)])
def test_the_formulas_of_the_paper(size, rounds, shared, padding):
    tensors = inputs(batch=2, q_len=150, head_dim=HEAD_DIM, value_dim=5, dtype=torch.float64)
    mask = padding_mask(padding, 2, 150)
    options = {"block_size": size, "num_hashes": rounds, "shared_query_key": shared}
    ours = reformer(*tensors, attention_mask=mask, seed=3, **options)
    query, key, value = (x.flatten(0, 1) for x in tensors)
    flat_mask = None if mask is None else mask.repeat_interleave(2, 0)
    key, value = (x if mask is None else x.masked_fill(~flat_mask[:, :, None], 0.0) for x in (key, value))
    plan = plan_rounds(query, query if shared else key, flat_mask, block_size=size, rounds=rounds, seed=3)
    pairs = pairs_of_rounds(plan)
    assert (pairs.sum(1) > 1).any() == (rounds > 1), "no pair is in two rounds"
    key = normalize(query, dim=-1) if shared else key
    theirs = paper_attention(query, key, value, pairs, HEAD_DIM**-0.5, shared).unflatten(0, (2, 2))
    valid = torch.ones(2, 150, dtype=torch.bool) if mask is None else mask
    close(ours.transpose(1, 2)[valid], theirs.transpose(1, 2)[valid])


def test_a_bucket_is_a_pair_of_the_papers_hashes():
    x, turns = numbers(3, 90, HEAD_DIM), numbers(4, 2, 2, HEAD_DIM, seed=1)
    halves = torch.tensor([[4, 3]])
    codes = bucket_codes(x, turns, halves)
    for s in range(2):
        first, second = (x @ turns[:n, s, f].t() for f, n in ((0, 4), (1, 3)))
        first, second = (torch.cat((p, -p), -1).argmax(-1) for p in (first, second))
        assert torch.equal(codes[:, s], first * 6 + second)
    assert (codes.flatten().bincount(minlength=48) > 0).all()
    # The norm of a vector has no influence.
    assert torch.equal(bucket_codes(7.0 * x, turns, halves), codes)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_number_of_buckets(size):
    """There are enough buckets for half a chunk each, and at most twice as many, or 4."""
    counts = torch.arange(1, 5000)
    most = len(hashing.rotations(5000, size, 1, 2, 0, counts.device))
    first, second = hashing.bucket_halves(counts[:, None], size, most).unbind(1)
    assert first.min() == second.min() == 1
    assert max(first.max(), second.max()) <= most
    buckets = (4 * first * second).flatten()
    assert (buckets * size >= 2 * counts).all()
    assert (buckets <= (4 * counts / size).clamp(min=4) + 4).all()


def test_chunks_of_queries_find_the_keys_of_their_buckets():
    """With clusters of very different sizes, chunk b of the queries is far from chunk b of the keys.

    Each cluster has another of the same size opposite to it, so that the mean is about 0.
    """
    centres = 8.0 * normalize(numbers(6, 16), dim=-1)
    centres, sizes = torch.cat((centres, -centres)), torch.arange(1, 7).repeat(2)
    of_query = torch.arange(12).repeat_interleave(sizes * 16)
    of_key = torch.arange(12).repeat_interleave((7 - sizes) * 16)
    shuffle = torch.randperm(672, generator=torch.Generator().manual_seed(0))
    query = (centres[of_query] + 0.3 * numbers(672, 16, seed=1))[None, None]
    key = (centres[of_key][shuffle] + 0.3 * numbers(672, 16, seed=2))[None, None]
    value = numbers(1, 1, 672, 16, seed=3)
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=1.0)
    ours = reformer(query, key, value, scale=1.0, block_size=64, num_hashes=2)
    assert relative_error(ours, exact) < 0.4
    plan = plan_rounds(query[0], key[0], None, block_size=64, rounds=2, seed=0)
    in_step = (torch.arange(11) * 64 - 32).clamp(0, 672 - 128).expand(1, 2, -1)
    by_number = rounds_attention(query[0], key[0], value[0], plan._replace(start=in_step), others=False, scale=1.0)
    assert relative_error(by_number, exact[0]) > 1.5 * relative_error(ours, exact)


def test_a_shift_of_all_keys_has_no_effect():
    """As in exact attention, adding a vector to all keys does not change the output."""
    query, key, value = inputs(batch=2, q_len=150, dtype=torch.float64)
    for mask in (None, padding_mask("holes", 2, 150)):
        close(*(reformer(query, x, value, attention_mask=mask, block_size=8) for x in (key, key + 20.0)))


def test_shared_queries_ignore_the_given_keys_and_their_own_token():
    query, key, value = inputs(q_len=100)
    options = {"shared_query_key": True, "block_size": 8}
    out = reformer(query, key, value.requires_grad_(), **options)
    assert torch.equal(reformer(query, 2 * key - 1, value, **options), out)
    # No output depends on the value of its own token,
    for i in (0, 50, 99):
        grad = torch.autograd.grad(out[:, :, i].sum(), value, retain_graph=True)[0]
        assert not grad[:, :, i].any() and grad.any()
    # except if there is no other token.
    alone = reformer(query[:, :, :1], key[:, :, :1], value[:, :, :1], **options)
    assert torch.equal(alone, value[:, :, :1])
    with pytest.raises(hea.UnsupportedAttentionError, match=r"as many queries as values; got 50 and 100"):
        reformer(query[:, :, :50], key, value, shared_query_key=True)


def test_budgets():
    assert hea.ReformerConfig().to_dict() == {
        "method": "reformer", "block_size": 64, "num_hashes": 2, "shared_query_key": False, "seed": 0
    }  # fmt: skip
    for columns, rounds in product((2, 3, 4, 7, 64, 1000), (1, 2, 5)):
        config = hea.ReformerConfig(num_hashes=rounds, shared_query_key=True, seed=3).with_budget(columns)
        assert columns - 2 * config.num_hashes < 2 * config.block_size * config.num_hashes <= columns
        assert config.num_hashes == min(rounds, columns // 2)
        assert config.shared_query_key and config.seed == 3
