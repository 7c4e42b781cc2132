"""Longformer (Beltagy, Peters, Cohan 2020): a sliding window, and optional global tokens.

A query sees `window_size` keys to each side (to the left only, when causal; section 3.1). Global tokens (the first
`global_tokens` that are there) see all and are seen by all, with the same projections as the others: the paper's second
set of projections would be new parameters in a checkpoint that has none.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.registry import AttentionOptions, register_method
from hf_efficient_attn.ops.blocks import chunked_over_heads, pad_to_blocks, take, valid_first
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.near_far import dense_attention
from hf_efficient_attn.ops.partial import Partial, merge, partial_attention
from hf_efficient_attn.ops.window import window_partial


@dataclass(frozen=True, kw_only=True)
class LongformerConfig(MethodConfig):
    """Hyperparameters of the sliding window. Up to window_size + 1 keys the output is exact."""

    method = "longformer"
    title = "Longformer"
    paper = "Beltagy, Peters, Cohan 2020"
    year = 2020
    causal = True
    rectangular = False
    summary = "a sliding window, and optional global tokens"
    default_rank = 20

    window_size: int = option(256, "Keys that a query sees to each side (when causal: to the left).", minimum=0)
    global_tokens: int = option(0, "So many first tokens see all and are seen by all.", minimum=0)
    seed: int = option(0, "Without effect: nothing is drawn. There since every method has one.", minimum=0)

    def with_budget(self, columns: int) -> "LongformerConfig":
        """Half the columns, less the global tokens, to each side."""
        least = self.global_tokens + 1
        window = (self.check_budget(columns, least) - least) // 2
        return LongformerConfig(window_size=window, global_tokens=self.global_tokens, seed=self.seed)


def forward(config: LongformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; arguments as in `hf_efficient_attn.methods._shared.registry.register_method`."""
    mask, is_causal, scale, dropout_p = options.key_mask, options.is_causal, options.scale, options.dropout_p
    options = {"scale": scale, "dropout_p": dropout_p}
    if key.shape[2] <= config.window_size + 1:
        flat_mask = None if mask is None else mask.repeat_interleave(query.shape[1], 0)
        out = exact_attention(
            *(x.flatten(0, 1) for x in (query, key, value)), flat_mask, is_causal=is_causal, **options
        )
        return out.unflatten(0, query.shape[:2])

    def some_heads(query, key, value, mask=None, out=None):
        got = _rows(config, query, key, value, mask, is_causal, options, out)
        return got if out is None or got.data_ptr() == out.data_ptr() else out.copy_(got)

    result = {"result": (query.shape[2], value.shape[3], value.dtype)}
    if mask is None:
        flat = (x.flatten(0, 1) for x in (query, key, value))
        return chunked_over_heads(some_heads, *flat, **result).unflatten(0, query.shape[:2])
    # With a mask the window's bias differs from tile to tile: one batch row at a time, all heads share it.
    rows = zip(query.unbind(), key.unbind(), value.unbind(), mask, strict=True)
    return torch.stack(
        [chunked_over_heads(functools.partial(some_heads, mask=here), q, k, v, **result) for q, k, v, here in rows]
    )


def _rows(config: LongformerConfig, query, key, value, mask, is_causal: bool, options, out=None) -> Tensor:
    """(A, N, D) inputs with one mask (N,) for all of them; `out` is memory that the result may take."""
    length, count = query.shape[1], min(config.global_tokens, query.shape[1])
    left = min(config.window_size, length - 1)
    right = 0 if is_causal else left
    if not count:
        return window_partial(query, key, value, mask, left=left, right=right, out=out, **options).out
    # The global tokens: the first `count` that are there, at the positions `index`.
    if mask is None:
        index, seen, hidden, rest = torch.arange(count, device=query.device), None, count, None
    else:
        index = valid_first(mask[None])[0, :count]
        seen, hidden = mask[index], 0
        rest = mask & (mask.cumsum(0) > count)
    near = window_partial(query, key, value, rest, left=left, right=right, hidden=hidden, **options)
    flat = index.expand(query.shape[0], -1)
    columns = [take(x, flat)[:, None] for x in (key, value)]
    # A query before a global token does not see it when causal; with holes in the mask, others than it may be such.
    shown = (
        torch.ones(length, count, dtype=torch.bool, device=query.device) if seen is None else seen.expand(length, -1)
    )
    if is_causal:
        shown = shown & (index <= torch.arange(length, device=query.device)[:, None])
    blocks = pad_to_blocks(query, min(length, 128))
    bias = pad_to_blocks(mask_bias(shown, query.dtype)[None], blocks.shape[2])
    far = partial_attention(blocks, *columns, bias, **options)
    far = Partial(far.out.flatten(1, 2)[:, :length], far.lse.flatten(1, 2)[:, :length])
    out = merge(near, far).out
    everything = torch.ones(length, dtype=torch.bool, device=query.device) if mask is None else mask
    shown = everything.expand(count, -1)
    if is_causal:
        shown = shown & (torch.arange(length, device=query.device) <= index[:, None])
    own = partial_attention(
        take(query, flat)[:, None], key[:, None], value[:, None], mask_bias(shown, query.dtype)[None, None], **options
    )
    is_global = torch.zeros(length, dtype=torch.bool, device=query.device)
    is_global = is_global.index_fill(0, index, True) if seen is None else is_global.index_put((index,), seen)
    own = out.index_copy(1, index, own.out[:, 0])
    return torch.where(is_global[:, None], own, out)


def allowed_pairs(config: LongformerConfig, queries: int, columns: int, mask, is_causal: bool, device) -> Tensor:
    """The pairs that may attend, as a bool matrix (B, queries, columns), B = 1 without a mask.

    The queries are the last ones: all of them, or those of a step of decoding.
    """
    position = torch.arange(columns, device=device)
    distance = position - position[columns - queries :, None]
    there = torch.ones(1, columns, dtype=torch.bool, device=device) if mask is None else mask
    is_global = there & (there.cumsum(1) <= config.global_tokens)
    pairs = (distance.abs() <= config.window_size) | is_global[:, None] | is_global[:, columns - queries :, None]
    pairs = pairs & there[:, None]
    return pairs & (distance <= 0) if is_causal else pairs


def naive(config: LongformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: the dense matrix of allowed pairs."""
    mask, is_causal, scale = options.key_mask, options.is_causal, options.scale
    pairs = allowed_pairs(config, query.shape[2], key.shape[2], mask, is_causal, query.device)
    weights = torch.zeros(pairs.shape, dtype=torch.float64, device=query.device).masked_fill(~pairs, -torch.inf)
    weights = weights.expand(query.shape[0], -1, -1).repeat_interleave(query.shape[1], 0)
    out = dense_attention(*(x.flatten(0, 1) for x in (query, key, value)), weights, scale=scale)
    return out.unflatten(0, query.shape[:2])


def decode(config: LongformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """A few last queries with the keys of all positions: see `Method.decode`."""
    mask, scale, dropout_p = options.key_mask, options.scale, options.dropout_p
    reach = min(config.window_size + query.shape[2], key.shape[2])
    if not config.global_tokens:
        key, value = key[:, :, -reach:], value[:, :, -reach:]
        mask = None if mask is None else mask[:, -reach:]
    pairs = allowed_pairs(config, query.shape[2], key.shape[2], mask, True, query.device)
    bias = mask_bias(pairs, query.dtype).expand(query.shape[0], -1, -1).repeat_interleave(query.shape[1], 0)
    flat = [x.flatten(0, 1)[:, None] for x in (query, key, value)]
    return (
        partial_attention(*flat, bias[:, None], scale=scale, dropout_p=dropout_p)
        .out[:, 0]
        .unflatten(0, query.shape[:2])
    )


register_method(LongformerConfig, forward=forward, naive=naive, decode=decode)
