"""Kernel halving (KH-Compress): a few keys, with their values, that represent all keys of a sequence.

A round of halving pairs the tokens in the order of their positions and keeps one token of each pair, which then stands
for both. The pairs of a bucket are decided one after the other. Each decision is random and leans towards the token
that reduces the error so far: the difference between the kept tokens of the bucket and all of them, as sums in the
space of a kernel. Every round halves the tokens that are left and doubles the size of a bucket (Carrell, Gong, Shetty,
Dwivedi, Mackey, "Low-Rank Thinning", ICML 2025, section 4).

Here a token has a count, the number of tokens that it stands for, and a pair may have one token or none. Tokens are
spread evenly over num_samples * 2**rounds places, so any number of tokens can be reduced to any other. Padding only
adds earlier rounds without a pair of two tokens. Such rounds change nothing, and the buckets and random numbers of a
round are determined by how many rounds follow it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.partial import LOG2_E, accumulation_dtype
from hf_efficient_attn.ops.random import Seed, uniform_of_heads
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.tokens import ceil_div, take, valid_first

_STREAM = 60_000
# Pairs of a bucket, at least. Smaller ones are hardly better than fair draws, and hardly cheaper.
_BUCKET = 8
# The smallest range of a draw. It is that of pairs of equal tokens; the kernel of others is up to 1 + Dv.
_TINY = 1e-20


class Thinned(NamedTuple):
    """The tokens that are kept for each head.

    Attributes:
        token: int64 (BH, M).
        log_weight: float64 (BH, M), the log of the number of tokens that each one stands for; -inf for an unused entry.
    """

    token: Tensor
    log_weight: Tensor


class _Round(NamedTuple):
    """One round of halving: `num_pairs` pairs, in buckets of `bucket` pairs; the last bucket may have fewer."""

    num_pairs: int
    bucket: int


def _rounds(kv_len: int, num_samples: int) -> list[_Round]:
    """The rounds that reduce `kv_len` tokens to `num_samples`, in reverse: the last one comes first.

    Each has twice as many pairs as the one that follows it, in buckets of half the size, so they cost the same.
    """
    rounds: list[_Round] = []
    while (num_pairs := num_samples << len(rounds)) < kv_len:
        rounds.append(_Round(num_pairs, max(ceil_div(num_samples, 1 << len(rounds)), min(_BUCKET, num_samples))))
    return rounds


def draw_numbers(kv_len: int, num_samples: int, num_heads: int, seed: Seed, device: torch.device) -> list[Tensor]:
    """Float64 numbers in (-1, 1), (H, num_pairs), for each round, the last round first.

    Those of a round do not depend on the rounds before it, that is, on `kv_len`.
    """
    sizes = [round.num_pairs for round in _rounds(kv_len, num_samples)]
    numbers = uniform_of_heads(sum(sizes), num_heads, seed, _STREAM, device)
    return [2.0 * x.mT - 1.0 for x in numbers.split(sizes)]


@torch.no_grad()
def thin(
    key: Tensor, value: Tensor, key_mask: Tensor | None, num_samples: int, *, scale: float, seed: Seed, batch: int
) -> Thinned:
    """Keep `num_samples` tokens of each head, or all valid ones if there are not more. No gradient flows through it.

    The kernel of two tokens is exp(scale <k, k'>) (<v, v'> + b^2), where b is the largest |v_ij| of the head.

    Args:
        key: (BH, Nk, D), 0 where masked.
        value: (BH, Nk, Dv), 0 where masked.
        key_mask: bool (BH, Nk), True for valid tokens, or None.
        num_samples: M, less than Nk.
        scale: factor of the scores.
        seed: seed of the decisions.
        batch: B. All sequences of a batch use the same random numbers.
    """
    (batch_heads, kv_len, _), device, acc_dtype = key.shape, key.device, accumulation_dtype(key.dtype)
    rounds = _rounds(kv_len, num_samples)
    draws = draw_numbers(kv_len, num_samples, batch_heads // batch, seed, device)
    num_tokens = torch.full((batch_heads, 1), kv_len, device=device)
    num_tokens = num_tokens if key_mask is None else key_mask.sum(1, keepdim=True)
    index, count = _spread(num_tokens, num_samples << len(rounds))
    index = index.clamp(max=kv_len - 1)
    index = index if key_mask is None else valid_first(key_mask).gather(1, index)
    sizes = num_tokens.new_tensor([round.num_pairs for round in rounds])
    num_rounds = (num_tokens > sizes).sum(1, keepdim=True).double()  # those with a pair of two tokens
    # A constant factor of the kernel has no influence. This one prevents that it overflows. The exponential is one to
    # base 2, which is several times as fast on a CPU.
    key, value = key.to(acc_dtype) * math.sqrt(abs(scale) * LOG2_E), value.to(acc_dtype)
    value = value / value.abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(acc_dtype).tiny)
    shift = key.square().sum(2).amax(1)
    for round, draw in zip(reversed(rounds), reversed(draws), strict=True):
        # The margin is that of a failure probability of 1/2, divided among the rounds and the pairs of a round.
        margin = 0.5 + (8.0 * round.num_pairs * num_rounds).clamp(min=1.0).log()
        missing = -round.num_pairs % round.bucket
        shape = (batch_heads, -1, round.bucket)
        pairs = pad(index, (0, 2 * missing)).view(*shape, 2)
        counts = pad(count, (0, 2 * missing)).view(*shape, 2)
        size = slice_size(4 * (round.num_pairs + missing) * round.bucket, device)
        kernel = sliced(_pair_kernel, key, value, shift, pairs, counts, size=size)
        kept = _walk(kernel, counts, pad(draw, (0, missing)).repeat(batch, 1).view(shape), margin)
        index = pairs.gather(3, kept).flatten(1)[:, : round.num_pairs]
        count = count.unflatten(1, (-1, 2)).sum(2)
    return Thinned(index, count.log())


def thinned_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    num_samples: int,
    *,
    scale: float,
    seed: Seed,
    batch: int,
    dropout_p: float,
) -> Tensor:
    """Attention of queries (BH, Nq, D) to the tokens that `thin` keeps, with their log-weights: (BH, Nq, Dv)."""
    token, log_weight = thin(key, value, key_mask, num_samples, scale=scale, seed=seed, batch=batch)
    keys, values = (take(x, token)[:, None] for x in (key, value))
    bias = log_weight.to(accumulation_dtype(query.dtype))[:, None, None]
    return attend(query[:, None], keys, values, bias, scale=scale, dropout_p=dropout_p).out[:, 0]


def _spread(num_tokens: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
    """Spread n tokens evenly over S >= n places: token j is in place floor(j S / n).

    Args:
        num_tokens: n, int64 (BH, 1).
        num_places: S.

    Returns:
        The token in each place, int64 (BH, S), and the number of tokens in it, 0 or 1, float64 (BH, S).
    """
    place = torch.arange(num_places, device=num_tokens.device)
    token = (place * num_tokens + num_places - 1) // num_places
    return token, (token * num_places < (place + 1) * num_tokens).double()


def _pair_kernel(key: Tensor, value: Tensor, shift: Tensor, pairs: Tensor, counts: Tensor) -> Tensor:
    """The kernel of the differences between the two tokens of each pair; 0 for pairs of fewer than two tokens.

    Args:
        key: (BH, Nk, D), times the root of the scale / log 2.
        value: (BH, Nk, Dv), divided by b.
        shift: (BH,), subtracted from the exponents.
        pairs: int64 (BH, T, P, 2), the tokens of the pairs of T buckets.
        counts: (BH, T, P, 2).

    Returns:
        (BH, T, P, P).
    """
    keys, values = take(key, pairs.flatten(2)), take(value, pairs.flatten(2))
    kernel = (keys @ keys.mT).sub_(shift.view(-1, 1, 1, 1)).exp2_()
    kernel *= (values @ values.mT).add_(1.0)
    rows = kernel[..., ::2, :] - kernel[..., 1::2, :]
    both = (counts.amin(-1) > 0).to(kernel.dtype)
    return (rows[..., ::2] - rows[..., 1::2]).mul_(both.unsqueeze(-1)).mul_(both.unsqueeze(-2))


def _walk(kernel: Tensor, counts: Tensor, draw: Tensor, margin: Tensor) -> Tensor:
    """Decide which token of each pair is kept, one pair of every bucket after the other.

    For a pair with counts c and c' and the difference f of its tokens, the error grows by c' f if the first token is
    kept, and by -c f if the second is. As long as there is no error, the first token is kept with probability
    c / (c + c'), so that the expected growth is 0.

    Args:
        kernel: (BH, T, P, P), from `_pair_kernel`.
        counts: float64 (BH, T, P, 2).
        draw: float64 (BH, T, P), in (-1, 1).
        margin: float64 (BH, 1). An error of `margin` times the largest possible one makes a decision certain.

    Returns:
        int64 (BH, T, P, 1): 0 if the first token is kept, 1 if the second is.
    """
    first, second = counts.unbind(-1)
    norm = kernel.diagonal(dim1=2, dim2=3).clamp(min=0.0).sqrt().double()
    largest = (norm * counts.amin(-1)).cummax(2).values
    bias = (first - second) / (first + second).clamp(min=1.0)
    threshold = ((bias - draw) * (margin.unsqueeze(2) * norm * largest).clamp(min=_TINY)).to(kernel.dtype)
    growth, shrinkage = second.to(kernel.dtype).unbind(2), (-first).to(kernel.dtype).unbind(2)
    error, kept = torch.zeros_like(threshold), []
    for i, limit in enumerate(threshold.unbind(2)):
        keep_second = error[..., i] >= limit
        step = torch.where(keep_second, shrinkage[i], growth[i])
        error[..., i + 1 :].addcmul_(kernel[:, :, i, i + 1 :], step.unsqueeze(2))
        kept.append(keep_second)
    return torch.stack(kept, 2).unsqueeze(3).long()


def thin_naive(key: Tensor, value: Tensor, num_samples: int, draws: list[Tensor], *, scale: float) -> Tensor:
    """The readable form of `thin` for one head of one sequence without padding.

    Args:
        key: float64 (Nk, D).
        value: float64 (Nk, Dv).
        num_samples: M.
        draws: the numbers of this head from `draw_numbers`, (num_pairs,) for each round.
        scale: factor of the scores.

    Returns:
        float64 (Nk,), how many tokens each token stands for; 0 for those that are not kept.
    """
    kv_len, rounds = len(key), _rounds(len(key), num_samples)
    exponent = abs(scale) * key @ key.mT
    kernel = torch.exp(exponent - exponent.diagonal().max()) * (value @ value.mT / value.abs().max() ** 2 + 1.0)
    # Places hold the index and the count of a token.
    places = [(0, 0)] * (num_samples << len(rounds))
    for j in range(kv_len):
        places[j * len(places) // kv_len] = (j, 1)
    for round, draw in zip(reversed(rounds), reversed(draws), strict=True):
        margin, kept = 0.5 + math.log(8.0 * round.num_pairs * len(rounds)), []
        for pair in range(round.num_pairs):
            if pair % round.bucket == 0:
                error, largest = key.new_zeros(kv_len), key.new_zeros(())
            (i, first), (j, second) = places[2 * pair], places[2 * pair + 1]
            if first and second:
                difference = key.new_zeros(kv_len)
                difference[i], difference[j] = 1.0, -1.0
                norm = (difference @ kernel @ difference).clamp(min=0.0).sqrt()
                largest = torch.maximum(largest, norm * min(first, second))
                lean = difference @ kernel @ error / (margin * norm * largest).clamp(min=_TINY)
                keep_first = bool(draw[pair] < (first - second) / (first + second) - lean)
                error = error + (second if keep_first else -first) * difference
            else:
                keep_first = first > 0
            kept.append((i if keep_first else j, first + second))
        places = kept
    out = key.new_zeros(kv_len)
    for j, count in places:
        out[j] += count
    return out


def thinned_attention_naive(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, num_samples: int, *, scale: float, seed: Seed
) -> Tensor:
    """The readable form for (B, H, N, .) tokens: dense, one head at a time, without padding."""
    (batch, num_heads, _, _), device = query.shape, key.device
    out = value.new_zeros((*query.shape[:3], value.shape[3]), dtype=torch.float64)
    for b in range(batch):
        valid = key.new_ones(key.shape[2], dtype=torch.bool) if key_mask is None else key_mask[b]
        if not valid.any():
            continue
        draws = draw_numbers(int(valid.sum()), num_samples, num_heads, seed, device)
        for h in range(num_heads):
            keys, values = key[b, h, valid].double(), value[b, h, valid].double()
            count = thin_naive(keys, values, num_samples, [draw[h] for draw in draws], scale=scale)
            out[b, h] = (scale * query[b, h].double() @ keys.mT + count.log()).softmax(-1) @ values
    return out.to(value.dtype)
