"""Feature maps against their formulas, written out with dense matrices.

`forward` and `naive` share the functions that compute features, so that a comparison of the two says nothing of them.
"""

import itertools
import math

import pytest
import torch

import hf_efficient_attn as hea
from each import close
from instances import inputs, numbers, padding_mask

NUM_HEADS, HEAD_DIM, NUM_FEATURES = 2, 6, 5
# What a learned log weight of the far field may be.
FAR_LOG_WEIGHT = (0.7, -1.3)


def phi(x: torch.Tensor, feature_map: str, weight: torch.Tensor | None) -> torch.Tensor:
    """The features of tokens (B, H, N, D) with maps (H, D, F) or, for "t2r", (H, D + 1, F)."""
    if weight is None:
        return torch.where(x > 0, x + 1.0, x.exp())
    if feature_map == "t2r":
        return (x @ weight[:, :-1] + weight[:, -1:]).relu()
    y = x @ weight
    y = torch.cat([y, -y], -1)
    return y.exp() if feature_map == "exp" else y.exp() / y.exp().sum(-1, keepdim=True)


@pytest.mark.parametrize("method", ["linear", "performer"])
@pytest.mark.parametrize("feature_map", ["elu", "hedgehog", "t2r", "exp"])
def test_attention_by_the_formula(feature_map, method):
    """Weights phi(q) . phi(k), in a window exp(scale q . k), and outside of it with the factor exp(far_log_weight).

    Performer has no window.
    """
    if (method, feature_map) == ("performer", "elu"):
        pytest.skip("a map of linear attention")
    length, scale = 61, 0.5
    query, key, value = inputs(
        batch=2, num_heads=NUM_HEADS, q_len=length, head_dim=HEAD_DIM, value_dim=3, dtype=torch.float64, spread=0.6
    )
    maps = (None, None)
    options = {"feature_map": feature_map}
    if feature_map != "elu":
        num_rows = HEAD_DIM + (feature_map == "t2r")
        maps = tuple(0.7 * numbers(NUM_HEADS, num_rows, NUM_FEATURES, seed=seed) for seed in (3, 4))
        options |= {"num_features": NUM_FEATURES, "query_map": maps[0], "key_map": maps[1]}
    if feature_map == "t2r":
        for one in maps:
            one[:, -1].abs_().add_(1.0)  # so that some feature of every token is positive
    factor = scale * HEAD_DIM**0.5  # a scale multiplies the queries, as in the softmax
    features = phi(query * factor, feature_map, maps[0]) @ phi(key, feature_map, maps[1]).transpose(2, 3)
    exact = (scale * query @ key.transpose(2, 3)).exp()
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = padding_mask("right", 2, length, seed=1)
    windows = (0, 4) if method == "linear" else (0,)
    for window, is_causal in itertools.product(windows, (False, True)):
        weights = features
        given = options | ({"window_size": window} if window else {})
        if window:
            log_weight = torch.full((NUM_HEADS,), -math.log(HEAD_DIM), dtype=torch.float64)
            if feature_map != "elu":
                log_weight = torch.tensor(FAR_LOG_WEIGHT, dtype=torch.float64)
                given |= {"far_log_weight": log_weight}
            weights = torch.where(distance.abs() <= window, exact, features * log_weight.exp()[:, None, None])
        weights = weights * mask[:, None, None]
        weights = weights.tril() if is_causal else weights
        expected = weights @ value / weights.sum(-1, keepdim=True)
        ours = hea.attention(method, query, key, value, attention_mask=mask, is_causal=is_causal, scale=scale, **given)
        valid = mask[:, None, :, None].expand_as(ours)
        close(ours[valid], expected[valid])
