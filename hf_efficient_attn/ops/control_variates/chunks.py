"""Chunks of keys, and the summary of each: the control variates of EVA.

`hf_efficient_attn.methods.eva` describes the method and its departures from the paper. A window is a set of consecutive
keys that a query sees exactly. A chunk is a part of a window, or a group of 2**level consecutive windows, and has one
summary. Sequences come without padding.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.index import integers

# Learned maps of mean queries and of mean keys, or two times None.
Maps = tuple[Tensor | None, Tensor | None]


class ChunkOptions(NamedTuple):
    """Options of both forms."""

    window_size: int  # number of keys of a window; in the causal form, of the two blocks of the near field
    # Largest number of chunks; in the causal form, twice the largest number of chunks of an interval.
    num_landmarks: int
    maps: Maps  # W_q and W_k (H, D, D) of a learned proposal, or two times None
    # draw(stream, count) returns standard normal numbers (H, count, D) of chunks, or None if omega is not drawn. Stream
    # 0 is for the chunks, and 1, 2, ... for the groups or the intervals of each level.
    draw: Callable[[int, int], Tensor | None]
    scale: float  # factor of the scores
    dropout_p: float  # probability of dropping a weight

    def maps_of(self, batch_heads: int) -> Maps:
        """Repeat the maps for every batch row: (BH, D, D) each."""
        query_map, key_map = (None if x is None else x.repeat(batch_heads // len(x), 1, 1) for x in self.maps)
        return query_map, key_map

    def noise(self, batch_heads: int, stream: int, count: int) -> Tensor | None:
        """Draw numbers for every batch row: (BH, count, D)."""
        drawn = self.draw(stream, count)
        return None if drawn is None else drawn.repeat(batch_heads // len(drawn), 1, 1)


class Chunks(NamedTuple):
    """C chunks of at most P tokens each."""

    token: Tensor  # int64 (C, P), the tokens of each chunk
    valid: Tensor | None  # bool (C, P), False for entries that are padding; None if there is none

    def take(self, x: Tensor) -> Tensor:
        """Take the tokens of x (BH, N, D): (BH, C, P, D)."""
        return torch.unflatten(x.index_select(1, self.token.flatten()), 1, self.token.shape)


def chunks_between(start: Tensor, stop: Tensor, size: int, length: int, are_full: bool) -> Chunks:
    """Make the chunks of the tokens from `start` to `stop` - 1, int64 (C,), at most `size`, of a sequence.

    `are_full` tells that all have `size` tokens.
    """
    token = start[:, None] + integers(size, start.device)  # (C, P)
    return Chunks(token.clamp(max=length - 1), None if are_full else token < stop[:, None])


def chunk_means(x: Tensor, valid: Tensor | None) -> Tensor:
    """Average the tokens of chunks: (BH, C, P, D) -> (BH, C, D) in the accumulation dtype."""
    x = x.to(accumulation_dtype(x.dtype))
    if valid is None:
        return x.mean(2)
    return x.masked_fill(~valid.unsqueeze(-1), 0.0).sum(2) / valid.sum(1).clamp(min=1).unsqueeze(-1)


def summarize(
    mean_query: Tensor, tokens: Sequence[Tensor], valid: Tensor | None, maps: Maps, noise: Tensor | None, scale: float
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
    mean_key = chunk_means(key, valid)  # (BH, C, D)
    root = abs(scale) ** 0.5
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
