"""Exact attention written out, which also gives its weights: `attn_implementation="eager"` of the models here."""

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
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """As Transformers' interface wants it.

    Args:
        module: says whether it is training.
        query, key, value: (B, H, Nq, D), (B, H, Nk, D), (B, H, Nk, Dv).
        attention_mask: added to the logits, or None.

    Returns:
        (B, Nq, H, Dv) and the weights (B, H, Nq, Nk), in the type of `value`.
    """
    # Scaled before the product, and the logits in float32 at least: they outgrow float16.
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = torch.matmul(query.to(wide) * scaling, key.to(wide).transpose(2, 3))
    if attention_mask is not None:
        logits = logits + attention_mask
    weights = logits.softmax(-1).to(value.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
