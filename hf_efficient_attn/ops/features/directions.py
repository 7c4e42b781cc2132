"""Attention through features that are exponentials, by two softmax attentions."""

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, product_dtype
from hf_efficient_attn.ops.features.maps import Features
from hf_efficient_attn.ops.features.sums import Tokens, by_kernel


def through_directions(tokens: Tokens, features: Features, dropout_p: float = 0.0) -> Tensor:
    """Compute `bidirectional` for features that are exponentials by two softmax attentions, without storing features.

    The directions attend to the keys, with the log factors of the keys as a bias. The queries attend to the
    directions, whose values are these outputs and whose bias is their lse.
    """
    found = by_kernel(tokens, features, dropout_p, is_causal=False)
    if found is not None:
        return found.out
    query, key, value, key_mask = tokens
    scale = features.fused.scale
    assert features.fused.directions is not None
    acc_dtype = accumulation_dtype(key.dtype)
    query, key, value = (x.to(product_dtype(x)).unsqueeze(1) for x in (query, key, value))  # (BH, 1, N, .)
    exact = features.fused.directions.to(acc_dtype)  # (F, D)
    directions = exact.to(key.dtype).expand(key.shape[0], 1, -1, -1)  # (BH, 1, F, D)
    bias = torch.linalg.vector_norm(key, dim=3, dtype=acc_dtype).square().unsqueeze(2) * (-0.5 * abs(scale))
    if key_mask is not None:  # (BH, 1, 1, Nk)
        bias = bias.masked_fill(~key_mask[:, None, None], -torch.inf)
    first = directions
    if key.dtype != acc_dtype:  # directions as sums of two numbers: rounded ones would choose other features
        rest = (exact - exact.to(key.dtype)).to(key.dtype).expand_as(directions)
        first, key = torch.cat((directions, rest), 3), torch.cat((key, key), 3)
    values, lse = attend(first, key, value, bias, scale=1.0)  # (BH, 1, F, Dv), (BH, 1, F)
    sign = 1.0 if scale >= 0 else -1.0
    return attend(query, directions, values, lse.unsqueeze(2), scale=sign, dropout_p=dropout_p).out.squeeze(1)
