"""Longformer (Beltagy, Peters, Cohan 2020): a sliding window, and optional global tokens.

A query attends to `window_size` keys on each side, or on the left only in the causal form (section 3.1). Global tokens,
the first `global_tokens` valid tokens, attend to all tokens, and all tokens attend to them. They use the same
projections as the other tokens: the paper's second set of projections would be new parameters that a pretrained
checkpoint does not have.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.methods._shared.call import repeat_kv
from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, ShardedForm, option
from hf_efficient_attn.methods._shared.heads import exactly
from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.ops.attend import attend, output_of
from hf_efficient_attn.ops.exact import dense_softmax
from hf_efficient_attn.ops.shards import Shards, with_neighbors
from hf_efficient_attn.ops.tracing import exporting_to_onnx
from hf_efficient_attn.ops.windows import WindowCall, window_attention, window_bias


@dataclass(frozen=True, kw_only=True)
class LongformerConfig(MethodConfig):
    """Hyperparameters of the sliding window. Up to window_size + 1 keys the output is exact."""

    method = "longformer"
    title = "Longformer"
    paper = "Beltagy, Peters, Cohan 2020"
    year = 2020
    causal = True
    rectangular = False
    exportable = True
    knows_lse = True
    adds_causal_bias = True
    summary = "a sliding window, and optional global tokens"
    paper_url = "https://arxiv.org/abs/2004.05150"
    near = "a window"
    far = "none, or a few global tokens"
    default_rank = 20
    default_for = ("calibrate",)
    cost = 0.4

    window_size: int = option(256, "Keys that a query attends to on each side (causal: on the left only).", minimum=0)
    global_tokens: int = option(
        0, "Number of first tokens that attend to all tokens and that all tokens attend to.", minimum=0
    )
    seed: int = option(0, "No effect, because nothing is random. Every method has this hyperparameter.", minimum=0)

    @property
    def exact_length(self) -> int:
        """The window on one side, and the token itself."""
        return self.window_size + 1

    @property
    def adds_distance_bias(self) -> bool:
        """True without global tokens: the form with global tokens adds no bias."""
        return self.global_tokens == 0

    def with_budget(self, columns: int) -> "LongformerConfig":
        """Spend on the window (`window_size` on each side) what the global tokens leave of the budget."""
        minimum = self.global_tokens + 1
        return replace(self, window_size=(self.check_budget(columns, minimum) - minimum) // 2)


def _call(config: LongformerConfig, options: AttentionOptions, is_causal: bool) -> WindowCall:
    call = config.window_size, config.global_tokens, is_causal, options.scale, options.dropout_p
    return WindowCall(*call, with_lse=options.with_lse)


def forward(config: LongformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; see `register_method`."""
    table = options.distance_bias
    call = _call(config, options, options.is_causal)
    if key.shape[2] <= config.exact_length and table is None and not exporting_to_onnx():
        return exactly(query, key, value, options)
    return window_attention(query, key, value, options.key_mask, table, call)  # (B, H, N, Dv)


def naive(config: LongformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form, with the dense matrix of allowed pairs."""
    mask = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if options.key_mask is None else options.key_mask
    call = _call(config, options, options.is_causal)
    weights = window_bias(query.shape[2], mask, options.distance_bias, call, torch.float64)  # (B, H or 1, Nq, Nk)
    scores = query.double() @ key.double().mT * options.scale + weights  # (B, H, Nq, Nk)
    return dense_softmax(scores, value, with_lse=options.with_lse)  # (B, H, Nq, Dv)


def decode(config: LongformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Decode a few tokens. Without global tokens this reads only the cached keys within the window."""
    q_len = query.shape[2]
    call = _call(config, options, True)
    mask = options.key_mask
    num_keys = key.shape[2] if call.num_global else min(call.window_size + q_len, key.shape[2])
    key = key[:, :, -num_keys:]
    value = value[:, :, -num_keys:]
    mask = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if mask is None else mask[:, -num_keys:]
    bias = window_bias(q_len, mask, options.distance_bias, call, query.dtype)  # (B, 1 or H, Nq, Nk)
    bias = bias.expand(-1, query.shape[1], -1, -1)  # (B, H, Nq, Nk)
    # Batch rows take the place of heads in `attend`, and heads take the place of blocks.
    found = attend(query, key, value, bias, scale=call.scale, dropout_p=call.dropout_p)  # (B, H, Nq, Dv)
    return output_of(found, call.with_lse)


def forward_shard(
    config: LongformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, shards: Shards
) -> Tensor:
    """Compute a sequence that processes share, which exchange the keys of the window; see `ShardedForm`."""
    right = 0 if options.is_causal else config.window_size
    length = query.shape[2]
    (key, value), before, after = with_neighbors((key, value), config.window_size, right, shards)
    query = pad(query, (0, 0, before, after))  # queries of the neighbors, whose outputs are dropped
    mask = shards.key_mask
    mask = None if mask is None else mask[:, shards.first - before : shards.own.stop + after]  # (B, before + n + after)
    # (B, H, before + n + after, Dv)
    out = forward(config, query, *repeat_kv(query, key, value), options._replace(key_mask=mask))
    return out[:, :, before : before + length]  # (B, H, n, Dv)


register_method(
    LongformerConfig,
    forward=forward,
    naive=naive,
    decode=decode,
    sharded=ShardedForm(forward_shard, lambda config, length, is_causal: not config.global_tokens),
)
