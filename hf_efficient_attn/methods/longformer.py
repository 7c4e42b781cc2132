"""Longformer (Beltagy, Peters, Cohan 2020): a sliding window, and optional global tokens.

A query attends to `window_size` keys on each side, or on the left only in the causal form (section 3.1). Global tokens,
the first `global_tokens` valid tokens, attend to all tokens, and all tokens attend to them. They use the same
projections as the other tokens: the paper's second set of projections would be new parameters that a pretrained
checkpoint does not have.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registration import register_method
from hf_efficient_attn.methods._shared.registry import AttentionOptions, ShardedForm
from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.blocks import pad_to_blocks, take
from hf_efficient_attn.ops.distance_bias import bias_of, biased_window
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.export import exporting_to_onnx
from hf_efficient_attn.ops.near_far import dense_attention
from hf_efficient_attn.ops.partial import Partial, merge
from hf_efficient_attn.ops.shards import Shards, with_neighbors
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.window import window_partial

# Queries that attend to the global tokens at a time.
_BLOCK_Q = 128


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
    summary = "a sliding window, and optional global tokens"
    paper_url = "https://arxiv.org/abs/2004.05150"
    near = "a window"
    far = "none, or a few global tokens"
    default_rank = 20
    default_for = ("calibrate",)

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
        """All pairs of the window are computed, those of global tokens in a form without a bias."""
        return self.global_tokens == 0

    def with_budget(self, columns: int) -> "LongformerConfig":
        """Spend the budget on the global tokens and on a window of the same size on each side."""
        minimum = self.global_tokens + 1
        return replace(self, window_size=(self.check_budget(columns, minimum) - minimum) // 2)


def forward(config: LongformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the fast form; see `register_method` for the arguments."""
    shape, key_mask = query.shape, options.key_mask
    if options.distance_bias is not None:
        window = config.window_size, 0 if options.is_causal else config.window_size
        return biased_window(
            query, key, value, options.distance_bias, key_mask, window=window, scale=options.scale,
            dropout_p=options.dropout_p,
        )  # fmt: skip
    if exporting_to_onnx():  # the same graph for every length and batch
        query, key, value, key_mask = flatten_heads(query, key, value, key_mask)
        return unflatten_heads(_window_and_global(config, options, key_mask, query, key, value), shape)
    if key.shape[2] <= config.exact_length:
        query, key, value, key_mask = flatten_heads(query, key, value, key_mask)
        scale, dropout_p = options.scale, options.dropout_p
        out = exact_attention(
            query, key, value, key_mask, is_causal=options.is_causal, scale=scale, dropout_p=dropout_p
        )
        return unflatten_heads(out, shape)
    # In the backward pass a slice holds the gradients of the keys of all its blocks. Only dropout keeps weights.
    drops = options.dropout_p > 0.0
    size = slice_size(key.shape[2] * (key.shape[3] + value.shape[3]) * 2, key.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        form = functools.partial(_window_and_global, config, options, mask)
        return sliced(form, query, key, value, size=size, draws=drops, recompute=drops)

    if key_mask is None:
        query, key, value, _ = flatten_heads(query, key, value, None)
        return unflatten_heads(attend(query, key, value, None), shape)
    # With a mask each block has its own bias. One sequence of the batch at a time, so that all heads share it.
    rows = zip(query, key, value, key_mask.split(1), strict=True)
    return torch.stack([attend(*row) for row in rows])


def _window_and_global(
    config: LongformerConfig,
    options: AttentionOptions,
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Attention of (BH, N, D) inputs with a mask (1 or BH, N): (BH, N, Dv)."""
    is_causal, scale, dropout_p = options.is_causal, options.scale, options.dropout_p
    length, device = query.shape[1], query.device
    num_global, left, block_q = config.global_tokens, config.window_size, _BLOCK_Q
    if not exporting_to_onnx():
        num_global, left, block_q = min(num_global, length), min(left, length - 1), min(block_q, length)
    right = 0 if is_causal else left
    if not num_global:
        return window_partial(query, key, value, mask, left=left, right=right, scale=scale, dropout_p=dropout_p).out
    # `index` (1 or BH, G): positions of the first G valid tokens. If there are fewer, `valid` is False at the others.
    position = torch.arange(length, device=device)
    if mask is None:
        index, valid, skipped, local_mask = position[None, :num_global], None, num_global, None
    else:
        index = torch.where(mask, length - position, -position).topk(num_global, dim=1).indices
        valid, skipped = mask.gather(1, index), 0
        local_mask = mask & (mask.cumsum(1) > num_global)
    near = window_partial(
        query, key, value, local_mask, left=left, right=right, skip=skipped, scale=scale, dropout_p=dropout_p
    )
    # All tokens attend to the global tokens. In the causal form those before a global token do not; padding between the
    # tokens can put any token before one.
    if valid is None:
        allowed = torch.ones(1, length, num_global, dtype=torch.bool, device=device)
    else:
        allowed = valid[:, None].expand(-1, length, -1)
    if is_causal:
        allowed = allowed & (index[:, None] <= position[:, None])
    index_per_head = index.expand(query.shape[0], -1)
    blocks = pad_to_blocks(query, block_q)
    bias = pad_to_blocks(mask_bias(allowed, query.dtype), blocks.shape[2])
    global_keys, global_values = (take(x, index_per_head)[:, None] for x in (key, value))
    far = attend(blocks, global_keys, global_values, bias, scale=scale, dropout_p=dropout_p)
    far = Partial(far.out.flatten(1, 2)[:, :length], far.lse.flatten(1, 2)[:, :length])
    local_out = merge(near, far).out
    # The global tokens attend to all tokens, and their outputs replace those of the window.
    allowed = torch.ones(1, length, dtype=torch.bool, device=device) if mask is None else mask
    allowed = allowed[:, None].expand(-1, num_global, -1)
    if is_causal:
        allowed = allowed & (position <= index[:, :, None])
    global_queries, bias = take(query, index_per_head)[:, None], mask_bias(allowed, query.dtype)[:, None]
    of_global = attend(global_queries, key[:, None], value[:, None], bias, scale=scale, dropout_p=dropout_p).out[:, 0]
    is_global = torch.zeros(index.shape[0], length, dtype=torch.bool, device=device)
    is_global = is_global.scatter(1, index, torch.ones_like(index, dtype=torch.bool) if valid is None else valid)
    spread = local_out.scatter(1, index_per_head[:, :, None].expand_as(of_global), of_global)
    return torch.where(is_global[:, :, None], spread, local_out)


def allowed_pairs(
    config: LongformerConfig, q_len: int, kv_len: int, key_mask: Tensor | None, is_causal: bool, device: torch.device
) -> Tensor:
    """The pairs of the window and of the global tokens, as a bool matrix (B, Nq, Nk); B is 1 without a mask.

    The queries are the last `q_len` positions.
    """
    position = torch.arange(kv_len, device=device)
    distance = position - position[kv_len - q_len :, None]
    valid = torch.ones(1, kv_len, dtype=torch.bool, device=device) if key_mask is None else key_mask
    is_global = valid & (valid.cumsum(1) <= config.global_tokens)
    pairs = (distance.abs() <= config.window_size) | is_global[:, None] | is_global[:, kv_len - q_len :, None]
    pairs = pairs & valid[:, None]
    return pairs & (distance <= 0) if is_causal else pairs


def _bias_of_pairs(table: Tensor, shape: torch.Size, kv_len: int) -> Tensor:
    """The bias by distance of the last Nq positions, (BH, Nq, Nk), for queries of the shape (B, H, Nq, D)."""
    position = torch.arange(kv_len, device=table.device)
    bias = bias_of(table, position - position[kv_len - shape[2] :, None])
    return bias.repeat(shape[0], 1, 1)


def naive(config: LongformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the readable form, with the dense matrix of allowed pairs."""
    pairs = allowed_pairs(config, query.shape[2], key.shape[2], options.key_mask, options.is_causal, query.device)
    weights = torch.zeros(pairs.shape, dtype=torch.float64, device=query.device).masked_fill(~pairs, -torch.inf)
    weights = weights.expand(query.shape[0], -1, -1).repeat_interleave(query.shape[1], 0)
    shape = query.shape
    if options.distance_bias is not None:
        weights = weights + _bias_of_pairs(options.distance_bias, shape, key.shape[2]).double()
    query, key, value, _ = flatten_heads(query, key, value, None)
    return unflatten_heads(dense_attention(query, key, value, weights, scale=options.scale), shape)


def decode(config: LongformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Decode a few tokens: without global tokens only the cached keys within the window are read."""
    key_mask, shape, q_len = options.key_mask, query.shape, query.shape[2]
    if not config.global_tokens:
        num_keys = min(config.window_size + q_len, key.shape[2])
        key, value = key[:, :, -num_keys:], value[:, :, -num_keys:]
        key_mask = None if key_mask is None else key_mask[:, -num_keys:]
    pairs = allowed_pairs(config, q_len, key.shape[2], key_mask, True, query.device)
    bias = mask_bias(pairs, query.dtype).expand(query.shape[0], -1, -1).repeat_interleave(shape[1], 0)
    if options.distance_bias is not None:
        bias = bias + _bias_of_pairs(options.distance_bias.to(bias.dtype), shape, key.shape[2])
    query, key, value = (x.flatten(0, 1)[:, None] for x in (query, key, value))
    out = attend(query, key, value, bias[:, None], scale=options.scale, dropout_p=options.dropout_p).out
    return unflatten_heads(out[:, 0], shape)


def forward_shard(
    config: LongformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, shards: Shards
) -> Tensor:
    """The form for a sequence that processes share: the keys of the window travel; see `ShardedForm`."""
    right, (num_heads, length) = 0 if options.is_causal else config.window_size, query.shape[1:3]
    (key, value), before, after = with_neighbors((key, value), config.window_size, right, shards)
    groups, mask = num_heads // key.shape[1], shards.key_mask
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    query = pad(query, (0, 0, before, after))  # queries of the neighbors, whose outputs are dropped
    mask = None if mask is None else mask[:, shards.first - before : shards.own.stop + after]
    out = forward(config, query, key, value, options._replace(key_mask=mask))
    return out[:, :, before : before + length]


register_method(
    LongformerConfig,
    forward=forward,
    naive=naive,
    decode=decode,
    sharded=ShardedForm(forward_shard, lambda config, length, is_causal: not config.global_tokens),
)
