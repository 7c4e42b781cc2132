"""`hea.analysis`: errors, ranks and sparsity of attention (see `hf_efficient_attn.evaluation.metrics`)."""

from hf_efficient_attn.evaluation.metrics import (
    AttentionError,
    OrderRatios,
    attention_error,
    exact_output,
    head_to_tail,
    near_field_pairs,
    order_statistics_ratio,
    relative_error,
    residual_matrix,
    singular_values,
    softmax_matrix,
    stable_rank,
)

__all__ = [
    "AttentionError",
    "OrderRatios",
    "attention_error",
    "exact_output",
    "head_to_tail",
    "near_field_pairs",
    "order_statistics_ratio",
    "relative_error",
    "residual_matrix",
    "singular_values",
    "softmax_matrix",
    "stable_rank",
]
