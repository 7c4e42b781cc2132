"""ApproxKMV with an error bound, at lengths at which the approximation saves work."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from each import close
from hf_efficient_attn.methods import approx_kmv
from instances import numbers, relative_error

LENGTH = 1536


def clustered(length: int = LENGTH, dtype=torch.float32):
    """Query, key and value (1, 1, N, .) in clusters of 16 tokens, where a query attends mostly to its own cluster."""
    centers = numbers(length // 16, 8)
    centers = (5.0 * centers / centers.norm(dim=1, keepdim=True)).repeat_interleave(16, 0)
    query, key = (centers + 0.1 * numbers(length, 8, seed=i) for i in (1, 2))
    value = numbers(length, 5, seed=3) + centers[:, :5]
    return tuple(x[None, None].to(dtype) for x in (query, key, value))


def attention(tensors, seed=0):
    return hea.attention("approx_kmv", *tensors, scale=1.0, seed=seed, error_percent=60)


def keys_of_queries(tensors, **hyperparameters):
    """How many keys the queries of the first head attend to after its plan; nothing if these are all, without parts."""
    config, (query, key, value) = hea.ApproxKMVConfig(**hyperparameters), (x[0, 0] for x in tensors)
    parts = approx_kmv._parts(config, approx_kmv._Head(query, key, value, scale=1.0, dropout_p=0.0, seed=0))
    return [(part.bias > -torch.inf).sum(1) for part in parts]


def test_it_saves_work_and_the_error_is_small():
    tensors = clustered()
    exact = scaled_dot_product_attention(*tensors, scale=1.0)
    assert 0 < torch.cat(keys_of_queries(tensors, error_percent=60)).sum() < 0.8 * LENGTH**2
    assert not keys_of_queries(tensors, error_percent=5)
    errors = [relative_error(attention(tensors, seed=s), exact) for s in range(3)]
    assert min(errors) > 1e-4
    assert max(errors) < 0.1
    # The values of a query's own cluster are most of its output.
    assert relative_error(tensors[2].mean(2, keepdim=True).expand_as(exact), exact) > 0.5


def test_the_fast_form_and_its_gradients_are_those_of_the_readable_form_with_an_error_bound():
    tensors = [x.requires_grad_() for x in clustered(dtype=torch.float64)]
    config, weight = hea.ApproxKMVConfig(error_percent=60), numbers(1, 1, LENGTH, 5, seed=9)
    outs = [f(config, *tensors, scale=1.0) for f in (hea.attention, hea.naive_attention)]
    close(*outs, 1e-8)
    assert relative_error(outs[0], scaled_dot_product_attention(*tensors, scale=1.0)) > 1e-4
    close(*(torch.autograd.grad((out * weight).sum(), tensors) for out in outs), 1e-7)


def test_queries_with_a_small_denominator_are_exact():
    query, key, value = clustered()
    query[:, :, 7] = -query[:, :, 7]
    query[:, :, 9] *= 0.2
    exact = scaled_dot_product_attention(query, key, value, scale=1.0)
    ours = attention((query, key, value))
    assert relative_error(ours, exact) > 1e-4
    close(ours[:, :, [7, 9]], exact[:, :, [7, 9]], 1e-4)


@pytest.mark.parametrize("num_samples", [64, 256])
def test_no_query_exceeds_the_budget(num_samples):
    assert 0 < torch.cat(keys_of_queries(clustered(), num_samples=num_samples)).max() <= num_samples
