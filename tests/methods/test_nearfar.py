"""nearfar: landmarks, near keys and the linear correction, beyond what the promises check."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import hf_efficient_attn as hea
from hf_efficient_attn.ops import weighted_coreset
from hf_efficient_attn.ops.attend import Partial
from hf_efficient_attn.ops.coreset_landmarks import directions, find_near_keys, group_queries
from instances import inputs, numbers, relative_error

nearfar = hea.functional.nearfar_attention


def _clustered():
    """600 keys around 30 centers, in an order that has nothing to do with the centers."""
    query, centers, value = numbers(1, 2, 600, 16), numbers(1, 2, 30, 16, seed=1), numbers(1, 2, 600, 8)
    key = centers[:, :, torch.arange(600) * 7 % 30] + 0.3 * numbers(1, 2, 600, 16, seed=3)
    return query.float(), key.float(), value.float()


def _error(tensors, **hyperparameters):
    return relative_error(nearfar(*tensors, **hyperparameters), scaled_dot_product_attention(*tensors))


def test_means_of_clusters_and_the_linear_correction_lower_the_error():
    query, key, value = _clustered()
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
    members = groups.query.flatten(1).gather(1, groups.slot)
    assert torch.equal(members, torch.arange(length).expand(3, -1))
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
    scores = scale * query @ key.mT
    assert torch.equal(found.sort()[0], scores.topk(7)[1].sort()[0])


@pytest.mark.parametrize("block_size", [0, 8])
@pytest.mark.parametrize("content", ["few", "outlier", "large", "aligned", "smooth", "sparse"])
def test_float32_is_as_accurate_as_float64(content, block_size):
    tensors = inputs(q_len=200, head_dim=32, content=content, dtype=torch.float64)
    single, double = (nearfar(*(x.to(dtype) for x in tensors), num_samples=48, block_size=block_size)
                      for dtype in (torch.float32, torch.float64))  # fmt: skip
    assert relative_error(single, double) < 1e-2


def test_a_call_is_few_operations():
    """12 heads of 32, 4,096 tokens."""
    count = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            nonlocal count
            count += 1
            return operator(*args, **(kwargs or {}))

    tensors = [numbers(1, 12, 4096, 32, seed=i).float() for i in range(3)]
    nearfar(*tensors)
    with Count():
        nearfar(*tensors)
    assert count <= 400


def test_queries_whose_landmarks_count_for_near_keys_only_attend_to_near_keys():
    """What is left without these is rounding."""
    far, counted, exact = torch.tensor([[[1.0], [1.0]]]), torch.tensor([[[1.0], [1.0]]]), torch.tensor([[[5.0], [7.0]]])
    zero, lse = torch.zeros(1, 2, 1), torch.tensor([[[-20.0], [2.0]]])
    out = weighted_coreset.replaced(Partial(far, zero), Partial(counted, zero), Partial(exact, lse))
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
