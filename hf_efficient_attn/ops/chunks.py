"""Attention to a few keys exactly and to one summary of each chunk of the other keys, in one softmax (EVA).

`hf_efficient_attn.methods.eva` describes the method and its departures from the paper. A window is a set of consecutive
keys that a query sees exactly. A group is 2**level consecutive windows. A chunk is a part of a window, or a group, and
has one summary. `hf_efficient_attn.ops.chunks_causal` is the causal form. Sequences come without padding.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import accumulation_dtype, attend, keeps_pairs
from hf_efficient_attn.ops.shards import Seed, head_slice
from hf_efficient_attn.ops.tokens import ceil_div, integers, normal, pad_to_blocks, slice_size, sliced

# The stream of random numbers of the chunks. The levels of groups or intervals use the streams after it.
_STREAM = 40


class ChunkOptions(NamedTuple):
    """Options of both forms.

    Attributes:
        window_size: number of keys of a window; in the causal form, of the two blocks of the near field.
        num_landmarks: largest number of chunks; in the causal form, twice the largest number of chunks of an interval.
        maps: W_q and W_k (H, D, D) of a learned proposal, or two times None.
        draw: draw(stream, count) returns standard normal numbers (H, count, D) of chunks, or None if omega is not
            drawn. Stream 0 is for the chunks, and 1, 2, ... for the groups or the intervals of each level.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
    """

    window_size: int
    num_landmarks: int
    maps: tuple[Tensor | None, Tensor | None]
    draw: Callable[[int, int], Tensor | None]
    scale: float
    dropout_p: float

    def repeated(self, batch_heads: int, *drawn: Tensor | None) -> list[Tensor | None]:
        """Repeat the maps, and drawn numbers (H, count, D), for every batch row: (BH, ., D)."""
        given = (*self.maps, *drawn)
        return [None if x is None else x.repeat(batch_heads // len(x), 1, 1) for x in given]


def chunk_noise(
    num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, seed: Seed | None, stream: int, count: int
) -> Tensor | None:
    """Draw standard normal numbers (H, count, D) of chunks; None without a seed.

    The numbers of a chunk depend on its index, not on the number of chunks.
    """
    if seed is None:
        return None
    first, total = head_slice(seed, num_heads)
    # The numbers are kept for later calls. A power of two of them serves sequences of many lengths.
    drawn = normal((1 << (count - 1).bit_length(), total, head_dim), seed, _STREAM + stream, device)
    return drawn[:count, first : first + num_heads].transpose(0, 1).to(dtype)


class Chunks(NamedTuple):
    """C chunks of at most P tokens each.

    Attributes:
        num_chunks: C.
        size: P.
        token: int64 (C, P), the tokens of each chunk; None if each chunk has the P tokens after those of the one
            before.
        valid: bool (C, P), False for entries that are padding; None if there is none.
    """

    num_chunks: int
    size: int
    token: Tensor | None
    valid: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """Take the tokens of x (BH, N, D): (BH, C, P, D)."""
        if self.token is not None:
            taken: Tensor = x.index_select(1, self.token.flatten()).unflatten(1, self.token.shape)
            return taken
        missing = max(0, self.num_chunks * self.size - x.shape[1])
        x = pad(x, (0, 0, 0, missing)) if missing else x
        view: Tensor = x[:, : self.num_chunks * self.size].unflatten(1, (self.num_chunks, self.size))
        return view


def chunks_between(start: Tensor, stop: Tensor, size: int, length: int, *, are_equal: bool = False) -> Chunks:
    """Make the chunks of the tokens from `start` to `stop` - 1, int64 (C,), at most `size`, of a sequence.

    `are_equal` tells that all but the last have `size` tokens and begin where the one before ends.
    """
    token = start[:, None] + integers(size, start.device)
    valid = token < stop[:, None]
    if are_equal:
        return Chunks(len(start), size, None, None if len(start) * size <= length else valid)
    return Chunks(len(start), size, token.clamp(max=length - 1), valid)


def chunk_means(x: Tensor, valid: Tensor | None) -> Tensor:
    """Average the tokens of chunks: (BH, C, P, D) -> (BH, C, D) in the accumulation dtype."""
    x = x.to(accumulation_dtype(x.dtype))
    if valid is None:
        return x.mean(2)
    return x.masked_fill(~valid.unsqueeze(-1), 0.0).sum(2) / valid.sum(1).clamp(min=1).unsqueeze(-1)


def summarize(
    mean_query: Tensor,
    tokens: Sequence[Tensor],
    valid: Tensor | None,
    maps: Sequence[Tensor | None],
    noise: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute the mean key and the estimated value beta_c(omega_c) of each chunk.

    Args:
        mean_query: (BH, C, D), in the accumulation dtype.
        tokens: the keys (BH, C, P, D) and the values (BH, C, P, Dv) of C chunks.
        valid: bool (C, P), False for padding; None if there is no padding.
        maps: W_q and W_k (BH, D, D), or two times None.
        noise: (BH, C, D), standard normal, or None for omega = mu.
        scale: factor of the scores.

    Returns:
        (BH, C, D) and (BH, C, Dv) in the dtypes of keys and values; 0 for an empty chunk.
    """
    key, value = (x.to(mean_query.dtype) for x in tokens)
    mean_key, root = chunk_means(key, valid), abs(scale) ** 0.5  # (BH, C, D)
    mu_query, mu_key = (x if w is None else x @ w.mT for x, w in zip((mean_query, mean_key), maps, strict=True))
    omega = ((-mu_query if scale < 0 else mu_query) + mu_key) * root  # (BH, C, D)
    omega = omega if noise is None else omega + noise
    # log xi(sqrt(scale) k, omega), with both terms in one product: (BH, C, P).
    logits = (key * (omega.unsqueeze(2) * root - key * (0.5 * root * root))).sum(-1)
    if valid is not None:
        # The bias of an empty chunk is -inf. Equal logits keep its softmax and the gradient finite.
        logits = logits.masked_fill(~valid, torch.finfo(logits.dtype).min)
        value = value.masked_fill(~valid.unsqueeze(-1), 0.0)
    beta = (logits.softmax(-1).unsqueeze(2) @ value).squeeze(2)  # (BH, C, 1, P) @ (BH, C, P, Dv) -> (BH, C, Dv)
    return mean_key.to(tokens[0].dtype), beta.to(tokens[1].dtype)


def window_attention(query: Tensor, key: Tensor, value: Tensor, options: ChunkOptions) -> Tensor:
    """Compute the bidirectional form: (BH, Nq, D), (BH, Nk, D), (BH, Nk, Dv) -> (BH, Nq, Dv)."""
    query = query.to(key.dtype)  # FLuRKA contracts keys to another dtype
    (batch_heads, q_len, dim), kv_len, device = query.shape, key.shape[1], key.device
    window, level = min(options.window_size, kv_len), 0
    num_windows = ceil_div(kv_len, window)
    # With more windows than landmarks a chunk is a group of 2**level windows, else one of `parts` parts of a window.
    while ceil_div(num_windows, 1 << level) > options.num_landmarks:
        level += 1
    parts = min(window, max(1, options.num_landmarks // num_windows))
    window_index = integers(num_windows, device)  # a block of queries sees its own window
    block_q, slot, order = window, None, None
    if q_len != kv_len:
        # Query i of m has position i n / m among n keys, and is in the block of that position's window.
        index, block_q = integers(q_len, device), window * q_len // kv_len + 1
        query_window, first = index * kv_len // q_len // window, (window_index * window * q_len + kv_len - 1) // kv_len
        slot = index - first[query_window] + query_window * block_q  # (Nq,)
        order = index.new_zeros(num_windows * block_q).scatter(0, slot, index)
    seen = [window_index[:, None] * window + integers(window, device) < kv_len]
    # It sees the chunks outside of its own group, and in its group at each level the other half of its group of
    # 2**(i + 1) windows.
    key_chunks, query_chunks, siblings = [], [], []
    for size, in_parts in ((window << level, parts), *((window << i, 1) for i in range(level))):
        index, most = integers(ceil_div(kv_len, size) * in_parts, device), ceil_div(size, in_parts)
        start, stop = (
            (index // in_parts * size + (index % in_parts + i) * size // in_parts).clamp(max=kv_len) for i in (0, 1)
        )
        key_chunks.append(chunks_between(start, stop, most, kv_len, are_equal=size % in_parts == 0))
        # Query i of m covers the positions from i n / m to (i + 1) n / m among n keys.
        first, last = start * q_len // kv_len, (stop * q_len + kv_len - 1) // kv_len
        query_part = chunks_between(first, last, ceil_div(most * q_len, kv_len) + 1, q_len)
        query_chunks.append(key_chunks[-1] if q_len == kv_len else query_part)
        if len(key_chunks) == 1:
            seen.append((index // in_parts != window_index[:, None] >> level) * (stop - start))  # (S, C)
        else:
            sibling = (window_index * window // size) ^ 1
            siblings.append(sibling.clamp(max=len(index) - 1))
            seen.append((kv_len - sibling * size).clamp(0, size)[:, None])
    # 0 for a key, the log of the number of keys for a summary, -inf for what a block does not see.
    bias = torch.cat(seen, 1).to(accumulation_dtype(key.dtype)).log()[None, :, None]  # (1, S, 1, window + C + level)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, *drawn: Tensor | None) -> Tensor:
        summaries = []
        for query_part, key_part, noise in zip(query_chunks, key_chunks, drawn[2:], strict=True):
            means = chunk_means(query_part.take(query), query_part.valid)
            tokens = key_part.take(key), key_part.take(value)
            summaries.append(summarize(means, tokens, key_part.valid, drawn[:2], noise, options.scale))

        def together(x: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
            """Concatenate the keys of each block's window, all chunks, and the other half of each level's group."""
            near = pad_to_blocks(x, window)  # (BH, S, window, .) for S windows
            far = parts[0].unsqueeze(1).expand(-1, num_windows, -1, -1)  # (BH, S, C, .)
            groups = [x.index_select(1, i).unsqueeze(2) for x, i in zip(parts[1:], siblings, strict=True)]
            return torch.cat((near, far, *groups), 2)  # (BH, S, window + C + level, .)

        blocks = pad_to_blocks(query if order is None else query.index_select(1, order), block_q)
        mean_keys, betas = zip(*summaries, strict=True)
        tensors = blocks, together(key, mean_keys), together(value, betas), bias.expand(len(blocks), -1, -1, -1)
        out = attend(*tensors, scale=options.scale, dropout_p=options.dropout_p).out.flatten(1, 2)
        return out[:, :q_len] if slot is None else out.index_select(1, slot)

    drawn = options.repeated(batch_heads, *(options.draw(i, chunks.num_chunks) for i, chunks in enumerate(key_chunks)))
    pairs = block_q if keeps_pairs(query, key, bias, options.scale, options.dropout_p) else 0
    size = slice_size(bias.numel() * max(dim, value.shape[2], pairs), device)
    return sliced(some_heads, query, key, value, *drawn, size=size, draws=options.dropout_p > 0.0)
