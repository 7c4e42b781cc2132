"""Attention to a few keys exactly and to one summary of each chunk of the other keys, in one softmax (EVA).

`hf_efficient_attn.methods.eva` describes the method and its departures from the paper. A window is a set of consecutive
keys that a query sees exactly. A group is 2**level consecutive windows. A chunk is a part of a window, or a group, and
has one summary. `hf_efficient_attn.ops.chunks_causal` is the causal form.

Both forms move valid tokens before masked ones, so that n valid keys have the positions 0 to n - 1. Shapes: BH is B *
H, and R is B, or 1 if all batch rows are alike because nothing is masked.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import accumulation_dtype, attend, keeps_pairs
from hf_efficient_attn.ops.shards import Seed, head_slice
from hf_efficient_attn.ops.tokens import (
    ceil_div,
    integers,
    inverse,
    normal,
    pad_to_blocks,
    slice_size,
    sliced,
    take,
    valid_first,
)

# The stream of random numbers of the chunks. The levels of groups or intervals use the streams after it.
_STREAM = 40
# draw(stream, count) returns standard normal numbers (H, count, D) for chunks, or None if omega is not drawn.
Draw: TypeAlias = Callable[[int, int], Tensor | None]


class Heads(NamedTuple):
    """Query (B, H, Nq, D), key (B, H, Nk, D), value (B, H, Nk, Dv), and the proposal's W_q and W_k (H, D, D) or None.

    In a slice of heads the first dimension is BH, in place of B and H.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_map: Tensor | None
    key_map: Tensor | None

    def flattened(self, noises: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the tensors, and the numbers (H, C, D) of summaries, with BH as their first dimension."""
        batch = len(self.query)
        of_heads = (None if x is None else x.expand(batch, *x.shape).flatten(0, 1) for x in (*self[3:], *noises))
        return [*(x.flatten(0, 1) for x in self[:3]), *of_heads]


class Masks(NamedTuple):
    """The masks of keys and queries: bool (B, Nk) and (B, Nq), or None if all count.

    `same_tokens` tells whether the queries are the keys' own tokens. Then both masks are the same.
    """

    keys: Tensor | None
    queries: Tensor | None
    same_tokens: bool


def chunk_noise(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, seed: Seed | None, stream: int, count: int
) -> Tensor | None:
    """Draw standard normal numbers (H, count, D) of chunks for queries of a shape (B, H, Nq, D); None without a seed.

    The numbers of a chunk depend on its index, not on the number of chunks.
    """
    if seed is None:
        return None
    first, total = head_slice(seed, shape[1])
    # The numbers are kept for later calls. A power of two of them serves sequences of many lengths.
    sizes = 1 << (count - 1).bit_length(), total, shape[3]
    drawn = normal(sizes, seed, _STREAM + stream, device)[:count, first : first + shape[1]]
    return drawn.transpose(0, 1).to(dtype)


def repeat_for_heads(x: Tensor | None, batch: int, num_heads: int) -> Tensor | None:
    """Repeat (B, ...) for every head, or (1, ...) for every batch row and head: (BH, ...)."""
    if x is None:
        return None
    return x.expand(batch * num_heads, *x.shape[1:]) if len(x) == 1 else x.repeat_interleave(num_heads, 0)


def summarize(
    tokens: Sequence[Tensor], valid: Tensor | None, heads: Heads, noise: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the mean key and the estimated value beta_c(omega_c) of each chunk.

    Args:
        tokens: the queries (BH, C, P, D) or their means (BH, C, D), the keys (BH, C, P, D) and the values
            (BH, C, P, Dv) of C chunks.
        valid: bool (BH or 1, C, P), False for padding; None if there is no padding.
        heads: gives the maps of the mean query and the mean key in mu.
        noise: (BH, C, D), standard normal, or None for omega = mu.
        scale: factor of the scores.

    Returns:
        (BH, C, D) and (BH, C, Dv) in the dtypes of keys and values; 0 for an empty chunk.
    """
    acc_dtype, root = accumulation_dtype(tokens[1].dtype), abs(scale) ** 0.5
    query, key, value = (x.to(acc_dtype) for x in tokens)
    mean_query, mean_key = query if query.ndim == 3 else _mean(query, valid), _mean(key, valid)  # (BH, C, D) each
    mu_query = mean_query if heads.query_map is None else mean_query @ heads.query_map.mT
    mu_key = mean_key if heads.key_map is None else mean_key @ heads.key_map.mT
    omega = ((-mu_query if scale < 0 else mu_query) + mu_key) * root  # (BH, C, D)
    omega = omega if noise is None else omega + noise
    # log xi(sqrt(scale) k, omega), with both terms in one product: (BH, C, P).
    logits = (key * (omega.unsqueeze(2) * root - key * (0.5 * root * root))).sum(-1)
    if valid is not None:
        # The bias of an empty chunk is -inf. Equal logits keep its softmax and the gradient finite.
        logits = logits.masked_fill(~valid, torch.finfo(acc_dtype).min)
        value = value.masked_fill(~valid.unsqueeze(-1), 0.0)
    beta = (logits.softmax(-1).unsqueeze(2) @ value).squeeze(2)  # (BH, C, 1, P) @ (BH, C, P, Dv) -> (BH, C, Dv)
    return mean_key.to(tokens[1].dtype), beta.to(tokens[2].dtype)


def _mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """Average the valid tokens of chunks: (BH, C, P, D) -> (BH, C, D)."""
    if valid is None:
        return x.mean(2)
    return x.masked_fill(~valid.unsqueeze(-1), 0.0).sum(2) / valid.sum(2).clamp(min=1).unsqueeze(-1)


class WindowSizes(NamedTuple):
    """The numbers of windows and chunks, as far as they depend on shapes alone.

    Attributes:
        kv_len: number of keys.
        window: number of keys of a window.
        num_windows: number of windows of the sequence.
        num_landmarks: largest number of chunks.
        level: a chunk is a group of 2**level windows if there are more windows than landmarks. Otherwise this is 0.
        per_window: number of chunks of a window; 1 if there are more windows than landmarks.
        num_chunks: number of chunks of the sequence. In a padded batch it is an upper bound.
    """

    kv_len: int
    window: int
    num_windows: int
    num_landmarks: int
    level: int
    per_window: int
    num_chunks: int

    @property
    def summaries(self) -> list[int]:
        """The number of chunks, then the number of groups of each level below the level of the chunks."""
        return [self.num_chunks, *(ceil_div(self.num_windows, 1 << i) for i in range(self.level))]


def window_sizes(kv_len: int, window_size: int, num_landmarks: int, masked: bool) -> WindowSizes:
    """Cut `kv_len` keys into windows and at most `num_landmarks` chunks."""
    window, level = min(window_size, kv_len), 0
    num_windows = ceil_div(kv_len, window)
    while ceil_div(num_windows, 1 << level) > num_landmarks:
        level += 1
    per_window = min(window, max(1, num_landmarks // num_windows))
    # A batch row with fewer keys has more chunks in a window.
    num_chunks = min(num_landmarks, num_windows * window) if masked else per_window * ceil_div(num_windows, 1 << level)
    return WindowSizes(kv_len, window, num_windows, num_landmarks, level, per_window, num_chunks)


class _Plan(NamedTuple):
    """The tokens of the chunks, and what each block of queries sees.

    The first dimension is R, or BH in a slice of heads.

    Attributes:
        key_order: int64 (R, Nk), the valid keys first; None without a mask.
        query_order: int64 (R, S * block_q), the query in each slot of the blocks; unused slots hold any query. None if
            the blocks are the windows and nothing is masked.
        slot: int64 (R, Nq), the slot of each query; None where `query_order` is None.
        window: int64 (R, S), the window of each block.
        num_keys: int64 (R, 1), the number of valid keys.
        token: int64 (R, C, P), the tokens of each chunk.
        valid: bool (R, C, P), False for entries of `token` that are padding.
        bias: (R, S, 1, K), added to the scores of the keys of the window, of the chunks, and of one group of each
            level: 0 for a key, the log of the number of keys for a summary, -inf for what the block does not see.
        mean_query: (BH, C', D), the mean query of every summary; None if it is the mean over the summary's tokens.
    """

    key_order: Tensor | None
    query_order: Tensor | None
    slot: Tensor | None
    window: Tensor
    num_keys: Tensor
    token: Tensor
    valid: Tensor
    bias: Tensor
    mean_query: Tensor | None


def window_attention(
    heads: Heads, masks: Masks, draw: Draw, window_size: int, num_landmarks: int, *, scale: float, dropout_p: float
) -> Tensor:
    """Compute the bidirectional form: (BH, Nq, Dv).

    Args:
        heads: the tensors of all heads. Masked queries, keys and values are 0.
        masks: which keys and queries count.
        draw: gives standard normal numbers: stream 0 for the chunks, and 1, 2, ... for the groups of each level.
        window_size: number of keys of a window.
        num_landmarks: largest number of chunks.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
    """
    sizes = window_sizes(heads.key.shape[2], window_size, num_landmarks, masks.keys is not None)
    noises = [draw(i, count) for i, count in enumerate(sizes.summaries)]
    (batch, num_heads, kv_len, dim), window = heads.key.shape, sizes.window
    heads = heads._replace(query=heads.query.to(heads.key.dtype))  # FLuRKA contracts keys to another dtype
    plan, block_q = _plan(heads.query, heads.key, masks, sizes)
    # Chunks that are equal parts of the sequence are views.
    equal_parts = masks.keys is None and window % sizes.per_window == 0
    part_sizes = [window // sizes.per_window << sizes.level, *(window << i for i in range(sizes.level))]

    def some_heads(*tensors: Tensor | None) -> Tensor:
        heads, plan, noises = Heads._make(tensors[:5]), _Plan._make(tensors[-9:]), tensors[5:-9]
        key, value = (x if plan.key_order is None else take(x, plan.key_order) for x in heads[1:3])
        query = heads.query if plan.query_order is None else take(heads.query, plan.query_order)

        tokens = [key, value] if plan.mean_query is not None else [query, key, value]

        def summaries(i: int, count: int) -> tuple[Tensor, Tensor]:
            size, missing = part_sizes[i], max(0, count * part_sizes[i] - kv_len)
            if i or equal_parts:
                padded = [pad(x, (0, 0, 0, missing)) if missing else x for x in tokens]
                parts = [x[:, : count * size].unflatten(1, (count, size)) for x in padded]
                position = integers(count * size, key.device).view(count, size)
                valid = None if masks.keys is None and not missing else position < plan.num_keys[..., None]
            else:
                parts, valid = [take(x, plan.token) for x in tokens], plan.valid
            if plan.mean_query is not None:
                parts = [plan.mean_query.split(sizes.summaries, 1)[i], *parts]
            return summarize(parts, valid, heads, noises[i], scale)

        num_blocks, found = plan.window.shape[1], [summaries(i, count) for i, count in enumerate(sizes.summaries)]
        siblings = [((plan.window >> i) ^ 1).clamp(max=n - 1) for i, n in enumerate(sizes.summaries[1:])]

        def seen(x: Tensor, summaries: tuple[Tensor, ...]) -> Tensor:
            """Concatenate the keys of each block's window, all chunks, and the other half of each level's group."""
            near = pad_to_blocks(x, window)  # (BH, S, window, .)
            if not masks.same_tokens:
                near = take(near.flatten(2), plan.window).unflatten(2, near.shape[2:])
            far = summaries[0].unsqueeze(1).expand(-1, num_blocks, -1, -1)  # (BH, S, C, .)
            groups = [take(group, index).unsqueeze(2) for group, index in zip(summaries[1:], siblings, strict=True)]
            return torch.cat((near, far, *groups), 2)  # (BH, S, window + C + levels, .)

        mean_keys, betas = zip(*found, strict=True)
        tensors = pad_to_blocks(query, block_q), seen(key, mean_keys), seen(value, betas), plan.bias
        out = attend(*tensors, scale=scale, dropout_p=dropout_p).out.flatten(1, 2)
        return out[:, : query.shape[1]] if plan.slot is None else take(out, plan.slot)

    tensors = [repeat_for_heads(x, batch, num_heads) for x in plan[:-1]]
    pairs = block_q if keeps_pairs(heads.query, heads.key, plan.bias, scale, dropout_p) else 0
    size = slice_size(plan.bias[0].numel() * max(dim, heads.value.shape[3], pairs), heads.key.device)
    flat = *heads.flattened(noises), *tensors, plan.mean_query
    return sliced(some_heads, *flat, size=size, draws=dropout_p > 0.0)


def _plan(query: Tensor, key: Tensor, masks: Masks, sizes: WindowSizes) -> tuple[_Plan, int]:
    """Make the plan, and return it with the number of queries of a block."""
    device, kv_len, window, level = key.device, sizes.kv_len, sizes.window, sizes.level
    num_keys = torch.full((1, 1), kv_len, device=device) if masks.keys is None else masks.keys.sum(1, keepdim=True)
    key_order = None if masks.keys is None else valid_first(masks.keys)
    if masks.same_tokens:
        query_order, slot, block_q = key_order, None if key_order is None else inverse(key_order), window
        own_window = integers(sizes.num_windows, device)[None]
    else:
        rank, num_queries = integers(query.shape[2], device)[None], torch.full((1, 1), query.shape[2], device=device)
        if masks.queries is not None:
            rank, num_queries = (masks.queries.cumsum(1) - 1).clamp(min=0), masks.queries.sum(1, keepdim=True)
        query_order, slot, own_window, block_q = _query_blocks(masks.queries, rank, num_queries, num_keys, sizes)
    # A batch row with fewer keys is cut by its own number of keys.
    own_windows = ((num_keys + window - 1) // window).clamp(min=1)
    own_level = torch.zeros_like(num_keys)
    for i in range(level):
        own_level = own_level + ((own_windows + (1 << i) - 1) >> i > sizes.num_landmarks)
    per_window = (sizes.num_landmarks // own_windows).clamp(1, window)
    chunk, group_size = integers(sizes.num_chunks, device), window << own_level
    first, part = chunk // per_window * group_size, chunk % per_window
    start = torch.minimum(first + part * group_size // per_window, num_keys)  # (R, C)
    stop = torch.minimum(first + (part + 1) * group_size // per_window, num_keys)
    token = start[..., None] + integers(ceil_div(window, sizes.per_window) << level, device)  # (R, C, P)
    # A block sees its own window, and the chunks outside of its own group.
    own = own_window[:, :, None]  # (R, S, 1)
    near = own * window + integers(window, device) < num_keys[:, :, None]  # (R, S, window)
    outside = (chunk // per_window)[:, None] != own >> own_level[:, :, None]  # (R, S, C)
    counts = [near, outside * (stop - start)[:, None]]
    # In its own group, it sees at each level the other half of its group of 2**(i + 1) windows.
    starts, stops = [start], [stop]
    for i, count in enumerate(sizes.summaries[1:]):
        size = window << i
        counts.append((own_level > i)[:, :, None] * (num_keys[:, :, None] - ((own >> i) ^ 1) * size).clamp(0, size))
        starts.append(torch.minimum(integers(count, device) * size, num_keys))
        stops.append((starts[-1] + size).minimum(num_keys))
    rows = max(len(x) for x in counts)
    bias = torch.cat([x.expand(rows, -1, -1) for x in counts], 2).to(accumulation_dtype(key.dtype)).log().unsqueeze(2)
    mean_query = None
    if not masks.same_tokens:
        # Query i of m covers the positions from i n / m to (i + 1) n / m among n keys.
        first = torch.cat(starts, 1) * num_queries // num_keys.clamp(min=1)
        last = (torch.cat(stops, 1) * num_queries + num_keys - 1) // num_keys.clamp(min=1)
        mean_query = _mean_queries(query, rank, first, last)
    valid, token = token < stop[..., None], token.clamp(max=kv_len - 1)
    return _Plan(key_order, query_order, slot, own_window, num_keys, token, valid, bias, mean_query), block_q


def _query_blocks(
    query_mask: Tensor | None, rank: Tensor, num_queries: Tensor, num_keys: Tensor, sizes: WindowSizes
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Compute `query_order`, `slot` and `window` of `_Plan` for queries that are other tokens, and the size of a block.

    Query i of m has position i n / m among n keys. With w as the window of that position, it has slot i + w block_q: a
    block starts at a multiple of block_q queries, and again where a window starts. With many queries at most an eighth
    of the slots are unused. With few queries up to half of them are, because smaller blocks would gather more keys.
    """
    q_len, num_windows = rank.shape[1], sizes.num_windows
    block_q = max(ceil_div(q_len, 8 * num_windows), min(64, ceil_div(q_len, num_windows)))
    num_blocks = ceil_div(q_len, block_q) + num_windows - 1
    window = rank * num_keys // num_queries.clamp(min=1) // sizes.window  # (R, Nq)
    slot = rank + window * block_q
    if query_mask is not None:  # masked queries have one more slot, at the end
        slot = slot.masked_fill(~query_mask, num_blocks * block_q)
    empty = slot.new_zeros(len(slot), num_blocks * block_q + 1)
    order = empty.scatter(1, slot, integers(q_len, rank.device).expand_as(slot))[:, :-1]
    own_window = empty[:, : num_blocks + 1].scatter(1, slot // block_q, window.expand_as(slot))[:, :-1]
    return order, slot.clamp(max=num_blocks * block_q - 1), own_window, block_q


def _mean_queries(query: Tensor, rank: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Average queries (B, H, Nq, D), 0 where masked, whose ranks (R, Nq) are `first` to `last` - 1: (BH, C, D)."""

    def some_rows(query: Tensor, *indices: Tensor) -> Tensor:
        rank, first, last = (x.unsqueeze(i) for i, x in zip((1, 2, 2), indices, strict=True))
        tokens = query.transpose(1, 2).flatten(2).to(accumulation_dtype(query.dtype))  # (b, Nq, H D)
        inside = ((rank >= first) & (rank < last)).to(tokens.dtype)  # (b, C, Nq)
        means = inside @ tokens / (last - first).clamp(min=1)  # (b, C, Nq) @ (b, Nq, H D) -> (b, C, H D)
        of_heads: Tensor = means.unflatten(2, query.shape[1::2])
        return of_heads.transpose(1, 2)

    size = slice_size(query.shape[2] * max(first.shape[1], query[0, :, 0].numel()), query.device)
    rows = (x.expand(len(query), -1) for x in (rank, first, last))
    return sliced(some_rows, query, *rows, size=size).flatten(0, 1)
