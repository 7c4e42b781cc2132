"""ScatterBrain against the estimate of its paper, which subtracts the features on the near field."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from each import close, differs
from hf_efficient_attn.ops.features import orthogonal_features
from instances import inputs

OPTIONS = {"block_size": 8, "num_features": 12}


def paper(query, key, value, near, *, scale: float, count: int = 12, seed: int = 0, allowed=None):
    """[near * (exp(q k) - phi(q) phi(k)) + phi(q) phi(k)] V, divided by the same with 1 for V: (B, H, N, Dv)."""
    directions = orthogonal_features(count, query.shape[-1], seed, query.device).to(query.dtype)

    def phi(x):
        x = x * scale**0.5
        return torch.exp(x @ directions.t() - x.square().sum(-1, keepdim=True) / 2) / count**0.5

    features = phi(query) @ phi(key).transpose(2, 3)
    exact = torch.exp(scale * query @ key.transpose(2, 3))
    weights = features + torch.where(near, exact - features, 0.0)
    weights = weights if allowed is None else weights * allowed
    return weights @ value / weights.sum(-1, keepdim=True)


def same_block(length: int, size: int) -> torch.Tensor:
    block = torch.arange(length) // size
    return block[:, None] == block


@pytest.mark.parametrize("length", [9, 40, 45, 150])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_estimate_of_the_paper(length, is_causal):
    """In the causal form the near field is the own block of 4 tokens and the one before."""
    tensors = inputs(q_len=length, head_dim=6, value_dim=5, dtype=torch.float64, spread=0.8)
    options = {"scale": 0.5, "is_causal": is_causal}
    ours = hea.functional.scatterbrain_attention(*tensors, **OPTIONS, **options, seed=3)
    block = torch.arange(length) // 4
    near = block[:, None] - block <= 1 if is_causal else same_block(length, 8)
    allowed = torch.ones(length, length).tril() if is_causal else None
    close(ours, paper(*tensors, near, scale=0.5, seed=3, allowed=allowed))
    exact = scaled_dot_product_attention(*tensors, **options)
    if is_causal:
        close(ours[:, :, :8], exact[:, :, :8])
    assert differs(ours, exact, 0.02 if is_causal else 0.05) or length == 9


def test_the_far_field_is_never_negative():
    """If the features overestimate a near key by far, the total minus the near field is nothing but rounding errors."""
    query, key, value = inputs(q_len=64, head_dim=64, num_heads=1, spread=0.1)
    value = value.abs()
    # One key is one of the features. exp(q . k) is about 1, but the product of features is exp(|k|^2 / 2) / 12.
    key[:, :, 0] = orthogonal_features(12, 64, 1, query.device)[0]
    near, options = same_block(64, 8), {"scale": 1.0, "seed": 1}
    ours = hea.functional.scatterbrain_attention(query, key, value, **OPTIONS, **options)
    truth = paper(*(x.double() for x in (query, key, value)), near, **options)
    torch.testing.assert_close(ours[:, :, :8].double(), truth[:, :, :8], rtol=1e-5, atol=1e-5)
