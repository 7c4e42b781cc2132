"""Performer (Choromanski et al., ICLR 2021): positive orthogonal random features of the softmax kernel (FAVOR+).

Eq. 5 with the orthogonal features of section 3.2, and the scale split evenly between queries and keys. Two
departures, both in rounding alone: the sums are kept in the log domain with one maximum per feature and per query
(`ops.features`), where the authors subtract one maximum over all keys, a leak of the future in a causal model, and
add 1e-6. Causal: the state of the completed chunks is an exclusive scan over the chunks' partials; within a chunk the
feature products are formed pair by pair, with one maximum per query and per key. Dropout acts on the weights of a
query over the features (and over the keys of its own chunk).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import dropout

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.registry import AttentionOptions, Recurrence, register_method
from hf_efficient_attn.ops.blocks import can_reuse_buffers, chunked_over_heads, pad_to_blocks
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.features import key_state, query_state, softmax_features
from hf_efficient_attn.ops.partial import LOG2_E, Partial, accumulation_dtype, merge, prefix_merge, safe_row_max
from hf_efficient_attn.ops.scan import running_sum

_CHUNK = 128
# Without a gradient: tokens of a chunk for at most so many features, and numbers at a time, of 8 heads.
_FEW, _SMALL_CHUNK = 128, 64
_TILE, _HEADS = 1 << 18, 8


@dataclass(frozen=True, kw_only=True)
class PerformerConfig(MethodConfig):
    """Hyperparameters of the Performer."""

    method = "performer"
    title = "Performer"
    paper = "Choromanski et al., ICLR 2021"
    year = 2020
    causal = True
    rectangular = True
    mixes_queries = False
    summary = "positive orthogonal random features of the softmax kernel (FAVOR+)"

    num_features: int = option(
        256, "Random features; the cost per query is that of as many columns.", minimum=1, carried=True
    )
    seed: int = option(0, "Seed of the features. In training they are redrawn at every call.", minimum=0)

    def with_budget(self, columns: int) -> "PerformerConfig":
        """As many features as columns."""
        return PerformerConfig(num_features=self.check_budget(columns), seed=self.seed)


def _scaled(query, key, value, mask, scale):
    """(A, N, D) queries and keys, each times sqrt(scale), in the accumulator's type; bias -|k|^2/2, -inf if absent."""
    return _scaled_query(query, scale), *_scaled_key(key, value, mask, scale)


def _scaled_query(query: Tensor, scale: float) -> Tensor:
    root = abs(scale) ** 0.5
    return query.to(accumulation_dtype(query.dtype)) * (root if scale >= 0 else -root)


def _scaled_key(key, value, mask, scale) -> tuple[Tensor, Tensor, Tensor]:
    wide = accumulation_dtype(key.dtype)
    key, value = key.to(wide) * abs(scale) ** 0.5, value.to(wide)
    bias = -0.5 * key.square().sum(-1)
    return key, value, bias if mask is None else bias + mask_bias(mask, wide)


def forward(config: PerformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; arguments as in `hf_efficient_attn.methods._shared.registry.register_method`."""
    mask, is_causal, scale, dropout_p, seed = (
        options.key_mask,
        options.is_causal,
        options.scale,
        options.dropout_p,
        options.seed,
    )
    features = softmax_features(config.num_features, query.shape[-1], seed, query.device)

    def walk(query, key, value, mask, out=None):
        return _causal_walk(query, key, value, mask, features, scale, out=out)

    def some_heads(query, key, value, mask):
        dtype = value.dtype
        query, key, value, bias = _scaled(query, key, value, mask, scale)
        if is_causal:
            return _causal(query, key, value, bias, features, dropout_p).to(dtype)
        state = key_state(key[:, None], value[:, None], features, bias[:, None, None])
        rows = pad_to_blocks(query, min(query.shape[1], 1024))
        return query_state(rows, state, features, dropout_p).out.flatten(1, 2)[:, : query.shape[1]].to(dtype)

    flat = [x.flatten(0, 1) for x in (query, key, value)]
    flat_mask = None if mask is None else mask.repeat_interleave(query.shape[1], 0)
    if is_causal and not dropout_p and can_reuse_buffers(*flat):
        result = (query.shape[2], value.shape[3], value.dtype)
        out = chunked_over_heads(walk, *flat, flat_mask, result=result, step=_HEADS)
    else:
        out = chunked_over_heads(some_heads, *flat, flat_mask)
    return out.unflatten(0, query.shape[:2])


def _causal(query, key, value, bias, features, dropout_p: float, start: Partial | None = None) -> Tensor:
    """Chunks of (A, N, .) and the prefix of each; `start` (A, F, .) is the partial of the features before them all."""
    length, size = query.shape[1], min(_CHUNK, query.shape[1])
    query, key, value = (pad_to_blocks(x, size) for x in (query, key, value))
    missing = query.shape[1] * size - length
    bias = torch.nn.functional.pad(bias, (0, missing), value=-torch.inf).view(key.shape[:3])
    parts = [_own_chunk(query, key, value, bias, features, dropout_p)]
    if query.shape[1] > 1:
        before = prefix_merge(key_state(key, value, features, bias[:, :, None]), 1)
        parts.append(query_state(query, before, features, dropout_p))
    if start is not None:
        parts.append(query_state(query, Partial(start.out[:, None], start.lse[:, None]), features, dropout_p))
    return merge(*parts).out.flatten(1, 2)[:, :length]


def _causal_walk(
    query, key, value, mask, features, scale: float, start: Partial | None = None, out: Tensor | None = None
) -> Tensor:
    """`_causal` without gradient or dropout: one walk over tiles of chunks of (A, N, .), in memory that stays warm.

    The sums over all keys before a chunk, S (A, F, Dv) and Z (A, 1, F), are those of exp(log feature - r) with r
    (A, 1, F) the highest log feature so far: nothing overflows, and no later key has a part in it.
    """
    (heads, length, width), count, wide = query.shape, features.shape[0], accumulation_dtype(query.dtype)
    size = min(_SMALL_CHUNK if count <= _FEW else _CHUNK, length)
    tile = max(1, _TILE // (heads * size * max(count, size, width))) * size
    # All logs are to base 2: see `exp_`.
    directions, tiny = features.to(wide).t() * LOG2_E, torch.finfo(wide).tiny
    out = value.new_empty(heads, length, value.shape[2]) if out is None else out
    if start is None:
        empty = query.new_zeros(heads, count, dtype=wide)
        start = Partial(empty.new_zeros(heads, count, value.shape[2]), empty - torch.inf)
    top = start.lse.unsqueeze(1) * LOG2_E
    sums, norm = start.out[:, None], (start.lse != -torch.inf).to(wide)[:, None, None]
    for at in range(0, length, tile):
        here = slice(at, min(at + tile, length))
        queries, keys, values, bias = _scaled(
            query[:, here], key[:, here], value[:, here], None if mask is None else mask[:, here], scale
        )
        missing = -queries.shape[1] % size
        queries, keys, values = (pad_to_blocks(x, size) for x in (queries, keys, values))
        bias = torch.nn.functional.pad(bias * LOG2_E, (0, missing), value=-torch.inf).view(*keys.shape[:3], 1)
        queries, keys = queries @ directions, keys @ directions
        own, own_top = _own_pairs(queries, keys, bias)
        keys += bias
        tops = torch.cat((top, keys.amax(2)), 1).cummax(1).values
        weights = keys.sub_(safe_row_max(tops[:, 1:]).unsqueeze(2)).exp2_().transpose(2, 3)
        kept = torch.exp2(tops[:, :-1] - safe_row_max(tops[:, 1:])).unsqueeze(3)
        sums = running_sum(weights @ values, kept, sums[:, -1])
        norm = running_sum(weights.sum(3).unsqueeze(2), kept.transpose(2, 3), norm[:, -1])
        # What is before the chunk and the chunk itself, each divided by its sum, by their shares of the whole.
        queries += tops[:, :-1].unsqueeze(2)
        far_top = queries.amax(3, keepdim=True)
        far = queries.sub_(safe_row_max(far_top)).exp2_()
        parts = (own.sum(3, keepdim=True), own_top), ((far * norm[:, :-1]).sum(3, keepdim=True), far_top)
        # Sums too small for their inverse count as none.
        lses = [(total.log2() + top).masked_fill_(total < tiny, -torch.inf) for total, top in parts]
        common = safe_row_max(torch.maximum(*lses))
        shares = [torch.exp2(lse - common) for lse in lses]
        both = shares[0] + shares[1]
        both.masked_fill_(both == 0, 1.0)
        own_share, far_share = (x.div_(both).div_(t.clamp_(min=tiny)) for x, (t, _) in zip(shares, parts, strict=True))
        got = (own @ values).mul_(own_share).addcmul_(far @ sums[:, :-1], far_share)
        out[:, here] = got.flatten(1, 2)[:, : here.stop - at]
        top = tops[:, -1:]
    return out


def _own_pairs(queries: Tensor, keys: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (A, T, C, C) of the pairs of each chunk, relative to 2^reference, and that reference (A, T, C, 1).

    The reference is the query's highest feature plus the highest of the keys up to it. No weight is above F, and none
    of a feature product that float32 can hold is lost to it unless a nearer one is greater by the same range.

    Args:
        queries, keys: (A, T, C, F), logs to base 2 of their features. bias: (A, T, C, 1), of the keys.
    """
    query_top, key_top = queries.amax(-1, keepdim=True), keys.amax(-1, keepdim=True)
    products = (queries - query_top).exp2_() @ (keys - key_top).exp2_().transpose(2, 3)
    key_top = key_top + bias
    reference = key_top.cummax(2).values
    weights = (key_top.transpose(2, 3) - safe_row_max(reference)).exp2_().mul_(products).tril_()
    return weights, reference + query_top


def _own_chunk(query, key, value, bias, features, dropout_p: float) -> Partial:
    """Causal attention of each chunk to itself by the feature products of its pairs: (A, T, C, .) -> Partial."""
    directions = features.to(query.dtype).t()
    query, key = query @ directions, key @ directions
    query_top, key_top = (x.detach().amax(-1, keepdim=True) for x in (query, key))
    products = torch.exp(query - query_top) @ torch.exp(key - key_top).transpose(2, 3)
    # A product that is all but 0 would have a gradient that is all but infinite on its way to the features.
    least = torch.finfo(products.dtype).tiny ** 0.8
    seen = torch.ones(products.shape[-2:], dtype=torch.bool, device=query.device).tril() & (products > least)
    scores = products.masked_fill(~seen, 1.0).log() + query_top + (key_top + bias.unsqueeze(-1)).transpose(2, 3)
    scores = scores.masked_fill(~seen, -torch.inf)
    top = safe_row_max(scores.detach().amax(-1, keepdim=True))
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    weights = weights / total
    weights = dropout(weights, dropout_p) if dropout_p else weights
    return Partial(weights @ value, (total.log() + top).masked_fill(empty, -torch.inf).squeeze(-1))


def recurrence_update(
    config: PerformerConfig, state: Partial | None, key: Tensor, value: Tensor, options: AttentionOptions
) -> Partial:
    """See `Recurrence`: the state is the partial of the features, (B, H, F, .)."""
    mask, scale, seed = options.key_mask, options.scale, options.seed
    features = softmax_features(config.num_features, key.shape[-1], seed, key.device)
    flat_mask = None if mask is None else mask.repeat_interleave(key.shape[1], 0)
    keys, values, bias = _scaled_key(key.flatten(0, 1), value.flatten(0, 1), flat_mask, scale)
    if state is not None and mask is None and key.shape[2] == 1:
        # `merge` with the partial of a single key, whose output is its value for every feature.
        score = (keys @ features.to(keys.dtype).t() + bias.unsqueeze(-1)).view(state.lse.shape)
        weight = torch.sigmoid(score - state.lse)
        out = torch.lerp(state.out, values.view(*key.shape[:3], -1), weight.unsqueeze(-1))
        return Partial(out, torch.logaddexp(state.lse, score))
    part = key_state(keys[:, None], values[:, None], features, bias[:, None, None])
    part = Partial(*(x[:, 0].unflatten(0, key.shape[:2]) for x in part))
    return part if state is None else merge(state, part)


def recurrence_query(config: PerformerConfig, state: Partial, query: Tensor, options: AttentionOptions) -> Tensor:
    """See `Recurrence`; `query_state` in plain products, faster for a few queries."""
    scale, dropout_p, seed = options.scale, options.dropout_p, options.seed
    features = softmax_features(config.num_features, query.shape[-1], seed, query.device)
    query = _scaled_query(query, scale)
    # A state of no token has an output of 0 whatever the weights.
    lse = state.lse.masked_fill(state.lse.amax(-1, keepdim=True) == -torch.inf, 0.0)
    weights = (query @ features.to(query.dtype).t() + lse.unsqueeze(2)).softmax(-1)
    return (dropout(weights, dropout_p) if dropout_p else weights) @ state.out


def recurrence_forward(
    config: PerformerConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    initial_state: Partial,
) -> Tensor:
    """See `Recurrence`; `_causal` with something before the first chunk."""
    mask, scale, dropout_p, seed = options.key_mask, options.scale, options.dropout_p, options.seed
    state = initial_state
    features = softmax_features(config.num_features, query.shape[-1], seed, query.device)

    def some_heads(query, key, value, mask, out, lse):
        if not dropout_p and can_reuse_buffers(query, key, value, out, lse):
            return _causal_walk(query, key, value, mask, features, scale, Partial(out, lse))
        query, key, value, bias = _scaled(query, key, value, mask, scale)
        return _causal(query, key, value, bias, features, dropout_p, Partial(out, lse))

    flat = [x.flatten(0, 1) for x in (query, key, value)]
    flat_mask = None if mask is None else mask.repeat_interleave(query.shape[1], 0)
    return chunked_over_heads(some_heads, *flat, flat_mask, *(x.flatten(0, 1) for x in state)).unflatten(
        0, query.shape[:2]
    )


def naive(config: PerformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: the dense matrix of feature products, in the log domain."""
    mask, is_causal, scale, seed = options.key_mask, options.is_causal, options.scale, options.seed
    shape, dtype = query.shape[:2], value.dtype
    features = softmax_features(config.num_features, query.shape[-1], seed, query.device)
    flat = (x.flatten(0, 1).double() for x in (query, key, value))
    flat_mask = None if mask is None else mask.repeat_interleave(query.shape[1], 0)
    query, key, value, bias = _scaled(*flat, flat_mask, scale)
    pairs = (query @ features.t())[:, :, None] + (key @ features.t())[:, None]
    scores = pairs.logsumexp(-1) + bias[:, None]
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value).to(dtype).unflatten(0, shape)


register_method(
    PerformerConfig, forward=forward, naive=naive, recurrence=Recurrence(recurrence_update, recurrence_query, recurrence_forward)
)
