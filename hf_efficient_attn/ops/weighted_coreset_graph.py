"""`weighted_coreset_attention` as one operator of a graph, on the CPU.

In a graph nothing may depend on data, so that all heads would have room for near keys and for further landmarks, and
all queries for each kind of weights. On the CPU this takes longer than to decide. An operator may decide.
"""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.coreset_landmarks import CoresetOptions
from hf_efficient_attn.ops.export import exporting_to_onnx, is_compiling
from hf_efficient_attn.ops.random import seed_value
from hf_efficient_attn.ops.weighted_coreset import weighted_coreset_attention


def weighted_coreset(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, options: CoresetOptions, dropout_p: float = 0.0
) -> Tensor:
    """`weighted_coreset_attention`, under `torch.compile` by an operator where this is faster.

    The operator has no gradient: with one, the graph contains all forms.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    in_graph = is_compiling() and not exporting_to_onnx() and backend(query) == "cpu"
    if not in_graph or needs_grad or dropout_p > 0.0:
        return weighted_coreset_attention(query, key, value, key_mask, options, dropout_p)
    *sizes, share, scale, seed = options
    seed = torch.as_tensor(seed_value(seed), device=query.device)
    operator = torch.ops.hf_efficient_attn.weighted_coreset
    out: Tensor = operator(query, key, value, key_mask, seed, sizes, share, scale)
    return out


@torch.library.custom_op("hf_efficient_attn::weighted_coreset", mutates_args=())
def _weighted_coreset(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    seed: Tensor,
    sizes: list[int],
    share: float,
    scale: float,
) -> Tensor:
    options = CoresetOptions(*sizes, share, scale, int(seed))  # type: ignore[call-arg]  # five sizes
    return weighted_coreset_attention(query, key, value, key_mask, options)


@_weighted_coreset.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return value.new_empty(*query.shape[:2], value.shape[2])
