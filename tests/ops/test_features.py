"""Attention through features: the causal scan with states, masks and several segments against dense matrices."""

import math

import pytest
import torch

from hf_efficient_attn import functional
from hf_efficient_attn.ops import linear
from hf_efficient_attn.ops.features import Features, elu_features, elu_map, favor
from hf_efficient_attn.ops.linear import Tokens, causal, log_weights_naive, update_state
from instances import numbers

CPU = torch.device("cpu")


def features(name: str) -> Features:
    return elu_map(0.7, 6) if name == "elu" else favor(20, -0.4, 6, 3, CPU)


def tokens(length: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tokens:
    query, key, value = (numbers(2, length, d, seed=seed + i, dtype=dtype) for i, d in enumerate((6, 6, 5)))
    key_mask = torch.ones(2, length, dtype=torch.bool)
    key_mask[0, ::3], key_mask[1, :7] = False, False
    return Tokens(query, key, value, key_mask)


def dense(query, parts, features, future=None):
    """Attention to the keys of all parts, and its lse."""
    key, value, mask = (torch.cat(x, 1) for x in zip(*(part[1:] for part in parts), strict=True))
    scores = log_weights_naive(query, key, features).masked_fill(~mask[:, None], -torch.inf)
    scores = scores if future is None else scores.masked_fill(future, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("name", ["elu", "favor"])
@pytest.mark.parametrize("with_state", [False, True])
def test_the_causal_scan(name, with_state, monkeypatch):
    monkeypatch.setattr(linear, "_SEGMENT_CHUNKS", 2)
    own, before = tokens(300), tokens(40, seed=5)
    leaves = [x.clone().requires_grad_() for x in (*own[:3], *before[1:3])]

    def outputs(form):
        now, earlier = Tokens(*leaves[:3], own.key_mask), Tokens(before.query, *leaves[3:], before.key_mask)
        out, lse = form(now, earlier)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse[:, 7:].sum(), leaves, allow_unused=True)

    def ours(now, earlier):
        state = update_state(None, *earlier[1:], features(name)) if with_state else None
        return causal(now, features(name), state=state)

    def naive(now, earlier):
        parts = [earlier, now] if with_state else [now]
        length = sum(x.key.shape[1] for x in parts)
        future = torch.ones(300, length, dtype=torch.bool).triu(length - 300 + 1)
        return dense(now.query, parts, features(name), future)

    for found, wanted in zip(outputs(ours), outputs(naive), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


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
