"""Linformer (Wang, Li, Khabsa, Fang, Ma 2020, arXiv 2006.04768): attention to learned projections of keys and values.

Eq. 7: out = softmax(Q (E K)^T / sqrt(D)) F V with tables E and F (P x M) for sequences of up to M tokens, the same for
all heads. `share` is the parameter sharing of section 4: "none" is headwise sharing, one E and one F for all heads of a
layer; "kv" is key-value sharing, E = F. Layerwise sharing, one table for all layers, is left out. Here the keys are
contracted after W_K, which gives the same product. The Linformer defines its own attention and never switches by
length.

Departures from the paper, in which all sequences have M tokens:

- `hf_efficient_attn.ops.projections` describes how the tables are applied to padded and to shorter input. With M tokens
  the contracted keys are the same as in the paper.
- A contracted key that has no weight at any valid token, in E or in F, is left out of the softmax.
- Conversion starts from means of P segments and not from a Gaussian, so a checkpoint that is not trained further
  attends to averages of keys and values. A segment that is not full averages the tokens that it has. With M <= P,
  every token is a segment and the output is exact.

There is no causal form, because a contracted key contains tokens of the future.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, ShardedForm, option
from hf_efficient_attn.methods._shared.projections import STARTS_FROM, ProjectionConfig, initial_parameters, tables
from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.backends.devices import product_dtype, rounded, sum_dtype
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.projections import contractions, naive_contraction, projected_key_mask
from hf_efficient_attn.ops.shards import Shards, total


@dataclass(frozen=True, kw_only=True)
class LinformerConfig(ProjectionConfig):
    """Hyperparameters of the Linformer."""

    method = "linformer"
    title = "Linformer"
    paper = "Wang, Li, Khabsa, Fang, Ma 2020"
    year = 2020
    exportable = True
    mixes_queries = False
    summary = "attention to learned projections of keys and values along the sequence"
    paper_url = "https://arxiv.org/abs/2006.04768"
    near = "none"
    far = "learned projections along the sequence"
    streams = (41, 42)

    share: str = option(
        "kv", "'kv': one table for keys and values. 'none': one for each.", choices=("kv", "none"), carried=True
    )


def forward(
    config: LinformerConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    shards: Shards | None = None,
) -> Tensor:
    """Fast form; see `register_method`. As a `ShardedForm` it exchanges the contracted keys and values."""
    dtype = product_dtype(query)
    num_heads = query.shape[1]
    key_mask = options.key_mask if shards is None else shards.key_mask
    kv_len, own = (key.shape[2], slice(None)) if shards is None else (shards.total, shards.own)
    both = contractions(tables(config, kv_len, options), key_mask, kv_len, sum_dtype(query))
    parts = [table.project_some(x, own) for table, x in zip(both, (key, value), strict=True)]  # (B, H_kv, P, .)
    parts = parts if shards is None else total(parts, shards.group)
    keys, values = (
        rounded(table.scale(x), dtype).repeat_interleave(num_heads // x.shape[1], 1).flatten(0, 1)[:, None]
        for table, x in zip(both, parts, strict=True)
    )  # (BH, 1, P, .) each
    bias = mask_bias(projected_key_mask(both, query.shape[0]), dtype).repeat_interleave(num_heads, 0)  # (BH, P)
    tensors = query.flatten(0, 1)[:, None].to(dtype), keys, values, bias[:, None, None]
    out = attend(*tensors, scale=options.scale, dropout_p=options.dropout_p).out[:, 0]  # (BH, Nq, Dv)
    return torch.unflatten(rounded(out, value.dtype), 0, query.shape[:2])  # (B, H, Nq, Dv)


def naive(config: LinformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: one batch row at a time without its padding."""
    contracted = naive_contraction(tables(config, key.shape[2], options), key, value, options.key_mask)
    rows = zip(query.double(), contracted, strict=True)
    outs = [(options.scale * q @ keys.mT).softmax(-1) @ values for q, (keys, values) in rows]  # (H, Nq, p) @ (H, p, Dv)
    return torch.stack(outs).to(value.dtype)  # (B, H, Nq, Dv)


register_method(
    LinformerConfig,
    forward=forward,
    naive=naive,
    initial_parameters=initial_parameters,
    starts_from=STARTS_FROM,
    sharded=ShardedForm(forward, lambda config, length, is_causal: True),
)
