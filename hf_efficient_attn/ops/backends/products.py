"""Attention by plain products, for everything that no kernel computes.

This is float64 on an accelerator, other devices, dropout, a bias of single pairs with a gradient, tensors without
numbers, and graphs for ONNX.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout

from hf_efficient_attn.ops.backends.backend import AttendCall, Backend, Partial, safe_row_max
from hf_efficient_attn.ops.backends.devices import accumulation_dtype


def _forward(call: AttendCall) -> Partial:
    """Compute in the accumulation dtype. Autograd keeps the weights of all pairs."""
    query, key, value, bias, scale, dropout_p, is_exported = call
    acc_dtype = accumulation_dtype(query.dtype)
    product = _product_of_blocks if is_exported else torch.matmul
    # (BH, T, Nq, D) @ (BH, T, D, Nk) -> (BH, T, Nq, Nk)
    scores = product(query.to(acc_dtype), key.to(acc_dtype).mT) * scale
    if bias is not None:
        scores = scores + bias
    # Not by logsumexp, whose gradient is NaN if all scores of a query are -inf.
    row_max = safe_row_max(scores.detach().amax(-1, keepdim=True)) if key.shape[2] else scores.new_zeros(())
    weights = torch.exp(scores - row_max)  # (BH, T, Nq, Nk)
    total = weights.sum(-1, keepdim=True)  # (BH, T, Nq, 1)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (total.log() + row_max).masked_fill(empty, -torch.inf).squeeze(-1)  # (BH, T, Nq)
    weights = weights / total if dropout_p == 0.0 else dropout(weights / total, dropout_p)
    return Partial(product(weights, value.to(acc_dtype)).to(value.dtype), lse)


def _product_of_blocks(left: Tensor, right: Tensor) -> Tensor:
    """Product of (BH, T, M, K) and (BH, T or 1, K, N), with T unknown.

    If the example of an export has one block, `matmul` takes the dimension for a broadcast one.
    """
    shape = left.shape[:2]
    right = right.expand(*shape, -1, -1).flatten(0, 1)  # (BH * T, K, N)
    return torch.unflatten(torch.bmm(left.flatten(0, 1), right), 0, shape)


BACKEND = Backend("products", lambda call: True, _forward, backward=None)
