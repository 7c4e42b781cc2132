"""Attention through ApproxKMV where the error allowed sets the work, at lengths where something is saved."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.methods import approx_kmv
from instances import inputs, numbers, relative_error

LENGTH = 1536


def clustered(length: int = LENGTH, dtype=torch.float32):
    """Queries and keys in clusters of 16 on a sphere, each attending mostly to its own: (1, 1, length, 8)."""
    centres = numbers(length // 16, 8)
    centres = (5.0 * centres / centres.norm(dim=1, keepdim=True)).repeat_interleave(16, 0)
    query, key = (centres + 0.1 * numbers(length, 8, seed=i) for i in (1, 2))
    value = numbers(length, 5, seed=3) + centres[:, :5]
    return tuple(x[None, None].to(dtype) for x in (query, key, value))


def attention(row, mask=None, seed=0, error_percent=60):
    return hea.functional.approx_kmv_attention(
        *row, attention_mask=mask, scale=1.0, seed=seed, error_percent=error_percent
    )


def parts_of(config, row):
    """What the fast form computes for the first head."""
    query, key, value = (x[0, 0] for x in row)
    return approx_kmv._parts(config, approx_kmv._Head(query, key, value, scale=1.0, dropout_p=0.0, seed=0))


def evaluated(row, error_percent=60):
    """Share of all pairs that one head computes after its plan, or None where all are."""
    config = hea.ApproxKMVConfig(error_percent=error_percent)
    parts = parts_of(config, row)
    if parts is None:
        return None
    return sum((part.bias > -torch.inf).sum().item() for part in parts) / (row[0].shape[2] * row[1].shape[2])


def test_something_is_saved_and_the_error_is_small():
    row = clustered()
    exact = scaled_dot_product_attention(*row, scale=1.0)
    assert evaluated(row) < 0.8
    errors = [relative_error(attention(row, seed=s), exact) for s in range(3)]
    assert min(errors) > 1e-4
    assert max(errors) < 0.1
    # Without the values of each query's own cluster there is little left of the output.
    assert relative_error(row[2].mean(2, keepdim=True).expand_as(exact), exact) > 0.5


def test_fast_is_naive_where_the_error_sets_the_work():
    row = clustered(dtype=torch.float64)
    config = hea.ApproxKMVConfig(error_percent=60)
    ours, other = (f(config, *row, scale=1.0) for f in (hea.attention, hea.naive_attention))
    torch.testing.assert_close(ours, other, rtol=1e-8, atol=1e-8)
    assert relative_error(ours, scaled_dot_product_attention(*row, scale=1.0)) > 1e-4


def test_gradients_where_the_error_sets_the_work():
    row = [x.requires_grad_() for x in clustered(dtype=torch.float64)]
    config = hea.ApproxKMVConfig(error_percent=60)
    weight = numbers(*row[0].shape[:3], 5, seed=9)
    grads = [
        torch.autograd.grad((f(config, *row, scale=1.0) * weight).sum(), row)
        for f in (hea.attention, hea.naive_attention)
    ]
    for ours, other in zip(*grads, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-7, atol=1e-7)


def test_rows_whose_denominator_is_small_are_exact():
    query, key, value = clustered()
    query = query.clone()
    query[:, :, 7] = -query[:, :, 7]
    query[:, :, 9] *= 0.2
    exact = scaled_dot_product_attention(query, key, value, scale=1.0)
    ours = attention((query, key, value))
    assert relative_error(ours, exact) > 1e-4
    torch.testing.assert_close(ours[:, :, [7, 9]], exact[:, :, [7, 9]], rtol=1e-4, atol=1e-4)


def test_padding_beside_a_row():
    row = clustered()
    padded = [torch.nn.functional.pad(x, (0, 0, 3, 70), value=torch.nan) for x in row]
    mask = torch.zeros(1, LENGTH + 73, dtype=torch.bool)
    mask[:, 3 : LENGTH + 3] = True
    both = attention(padded, mask)
    assert both.isfinite().all()
    torch.testing.assert_close(both[:, :, 3 : LENGTH + 3], attention(row), rtol=1e-5, atol=1e-5)


def test_short_and_diffuse_sequences_are_computed_exactly():
    row = inputs(q_len=200)
    torch.testing.assert_close(
        hea.functional.approx_kmv_attention(*row), scaled_dot_product_attention(*row), rtol=1e-5, atol=1e-5
    )
    assert evaluated(clustered(), error_percent=5) is None


@pytest.mark.parametrize("num_samples", [64, 256])
def test_a_budget_is_kept(num_samples):
    for part in parts_of(hea.ApproxKMVConfig(num_samples=num_samples), clustered()):
        assert ((part.bias > -torch.inf).sum(1) <= num_samples).all()
        assert part.keys.shape[0] == len(part.queries)


def test_no_causal_form():
    with pytest.raises(
        hea.UnsupportedAttentionError, match=r"approx_kmv: it has no causal form\. Methods that have one"
    ):
        hea.functional.approx_kmv_attention(*inputs(q_len=20), is_causal=True)
