"""Exact attention that also returns its weights: `attn_implementation="eager"` of the models in this package."""

from typing import Any

import torch
from torch import Tensor, nn


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention, in the form of Transformers' attention interface.

    Args:
        module: the attention module; its training mode switches dropout on.
        query: (B, H, Nq, D).
        key: (B, H, Nk, D).
        value: (B, H, Nk, Dv).
        attention_mask: added to the logits, or None.
        scaling: factor of the logits.
        dropout: probability with which an attention weight is dropped.
        **kwargs: ignored.

    Returns:
        Output (B, Nq, H, Dv) and attention weights (B, H, Nq, Nk), in the dtype of `value`.
    """
    # The query is scaled before the product, and the logits are at least float32: float16 would overflow.
    acc_dtype = torch.promote_types(query.dtype, torch.float32)
    logits = torch.matmul(query.to(acc_dtype) * scaling, key.to(acc_dtype).transpose(2, 3))
    if attention_mask is not None:
        logits = logits + attention_mask
    weights = logits.softmax(-1).to(value.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
