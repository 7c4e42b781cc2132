"""Errors of heads estimated from a few rows, against dense formulas, and how often their bound fails."""

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from each import close
from hf_efficient_attn.analysis.matrices import operator_norm
from hf_efficient_attn.evaluation.model_error import exact_rows
from hf_efficient_attn.ops.row_error import RowError, row_error, sample_rows
from hf_efficient_attn.ops.tokens import take
from instances import inputs, numbers, padding_mask


def sample(heads, q_len, num_rows, query_mask=None, seed=0, num_heads=None):
    return sample_rows(
        heads, q_len, num_rows, query_mask, num_heads=num_heads or heads, seed=seed, device=torch.device("cpu")
    )


def row_error_naive(
    approximate: Tensor, exact: Tensor, valid: Tensor | None = None, population: Tensor | int | None = None
) -> RowError:
    """The readable form of `row_error`, head by head with singular value decompositions in float64."""
    estimates, bounds = torch.zeros(2, len(exact))
    for head in range(len(exact)):
        rows = slice(None) if valid is None else valid[head]
        e = exact[head, rows].double()
        difference = approximate[head, rows].double() - e
        p = len(e)
        if not difference.any():
            continue
        _, errors, directions = torch.linalg.svd(difference, full_matrices=False)
        _, sizes, exact_directions = torch.linalg.svd(e, full_matrices=False)
        ratio = (errors[0] / sizes[0]).item()
        s = (difference @ directions[0]).square() / errors[0] ** 2
        t = (e @ exact_directions[0]).square() / sizes[0] ** 2 if sizes[0] > 0 else torch.zeros_like(s)
        n = torch.inf if population is None else torch.as_tensor(population).flatten().expand(len(exact))[head].item()
        margin = 0.5 * p**-0.5 + (s - t).norm().item()
        estimates[head] = ratio
        bounds[head] = ratio * (1.0 + max(0.0, 1.0 - p / n) ** 0.5 * margin)
    return RowError(estimates, bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("population", [None, 100, "per head"], ids=str)
def test_the_fast_form_is_the_naive_form(dtype, population):
    exact = numbers(5, 40, 12)
    exact[:, :, 0] += 3.0
    difference = 0.1 * numbers(5, 40, 12, seed=1) * torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]).view(-1, 1, 1)
    difference[0, 3] *= 50.0  # one row has most of the error
    difference[1, :, 4] *= 6.0
    valid = torch.arange(40) < torch.tensor([40, 30, 40, 1, 0])[:, None]
    count = torch.tensor([60, 30, 80, 1, 0])[:, None] if population == "per head" else population
    exact, approximate = exact.to(dtype), (exact + difference).to(dtype)
    for mask in (None, valid):
        given = approximate, exact, mask, count if mask is not None or population != "per head" else None
        fast, naive = row_error(*given), row_error_naive(*given)
        assert fast.estimate.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(fast.estimate, naive.estimate, rtol=1e-3, atol=1e-6, check_dtype=False)
        torch.testing.assert_close(fast.bound, naive.bound, rtol=2e-2, atol=1e-6, check_dtype=False)
        assert (fast.bound >= fast.estimate).all()


def test_with_all_rows_the_estimate_is_the_error_at_any_size():
    exact, approximate = numbers(3, 50, 8), numbers(3, 50, 8, seed=1)
    rows = sample(3, 50, 80)
    assert torch.equal(rows.queries, torch.arange(50).expand(3, -1))
    found = row_error(take(approximate, rows.queries), take(exact, rows.queries), rows.valid, rows.population)
    expected = operator_norm(approximate - exact) / operator_norm(exact)
    torch.testing.assert_close(found.estimate, expected, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(found.bound, found.estimate)
    for size in (1e-30, 1e-10, 1e10, 1e30):
        scaled = row_error((size * approximate).float(), (size * exact).float())
        torch.testing.assert_close(scaled.estimate.double(), expected, rtol=1e-4, atol=0.0)
    zero = torch.zeros(1, 20, 6)
    assert row_error(zero, zero).bound.item() == 0.0
    assert row_error(zero + 1.0, zero).estimate.item() == torch.inf


def test_rows_are_spread_and_not_repeated():
    for q_len, num_rows in ((100, 7), (7, 7), (5, 9), (1, 3), (1000, 128)):
        rows = sample(3, q_len, num_rows).queries
        count = min(q_len, num_rows)
        assert rows.shape == (3, count)
        stratum = rows.double() * count / q_len
        assert ((stratum - torch.arange(count)).abs() <= 1.0).all() and (rows.sort()[0].diff() > 0).all()
    assert len({tuple(row) for s in (0, 1) for row in sample(3, 100, 7, seed=s).queries.tolist()}) == 6


@pytest.mark.parametrize("kind", ["left", "right", "holes", "empty", "one"])
def test_only_queries_of_the_mask_are_sampled(kind):
    mask = padding_mask(kind, 4, 60, seed=3).repeat_interleave(2, 0)
    rows = sample(8, 60, 10, mask, num_heads=2)
    for queries, valid, allowed in zip(rows.queries, rows.valid, mask, strict=True):
        taken = queries[valid]
        assert taken.unique().numel() == len(taken) == min(10, allowed.sum()) and allowed[taken].all()
    assert torch.equal(rows.population, mask.sum(1, keepdim=True))
    alone = sample(2, 60, 10, mask[2:4])
    assert torch.equal(alone.queries[alone.valid], rows.queries[2:4][rows.valid[2:4]])
    # Padding on the right samples the queries that the sequence has without it.
    short = sample(2, 60, 10, (torch.arange(60) < 40).expand(2, -1))
    assert torch.equal(short.queries, sample(2, 40, 10).queries)


@pytest.mark.parametrize("padding", ["none", "left", "holes", "empty"])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "is_causal"), [(50, 50, False), (30, 50, False), (50, 50, True), (30, 50, True), (50, 30, True)]
)
def test_exact_rows_are_rows_of_exact_attention(q_len, kv_len, is_causal, padding):
    query, key, value = inputs(2, 2, q_len, kv_len=kv_len, value_dim=5, dtype=torch.float64)
    mask = padding_mask(padding, 2, kv_len)
    dense = hea.analysis.exact_output(query, key, value, attention_mask=mask, is_causal=is_causal).flatten(0, 1)
    key_mask = None if mask is None else mask.repeat_interleave(2, 0)
    rows = sample(4, q_len, 37, key_mask if q_len == kv_len else None, seed=1, num_heads=2)
    flat = (x.flatten(0, 1) for x in (query, key, value))
    close(exact_rows(*flat, rows, key_mask, is_causal=is_causal, scale=8**-0.5), take(dense, rows.queries))


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_the_bound_holds_where_the_estimate_does_not(rank):
    """Errors of low rank whose rows differ in size. Rows with rarer, larger errors need more rows."""
    exact = numbers(200, 1000, 16) + 2.0
    sizes = torch.exp(0.3 * numbers(200, 1000, 1, seed=1))
    errors = 0.1 * sizes * numbers(200, 1000, rank, seed=2) @ numbers(200, rank, 16, seed=3)
    rows = sample(200, 1000, 96, seed=5)
    found = row_error(take(exact + errors, rows.queries), take(exact, rows.queries), rows.valid, rows.population)
    true = operator_norm(errors) / operator_norm(exact)
    assert (found.estimate < true).double().mean() > 0.1
    assert (found.bound < true).double().mean() <= 0.02
    assert (found.bound / true).median() < 1.5
