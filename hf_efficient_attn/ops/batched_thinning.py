"""Kernel halving on accelerators: all buckets of a round at a time, in a few kernels.

`hf_efficient_attn.ops.thinning` decides one pair of every bucket after the other: hundreds of steps of three kernels.

By Triton a round is two kernels, and the pairs of a bucket are still decided one after the other
(`hf_efficient_attn.ops.triton_thinning`).

By PyTorch's own kernels ("library") 16 pairs are decided as if none of them changed the error, and then again twice,
each time with the error of the decisions before. After t times the first t pairs are decided as one after the other,
and all pairs if the last time changed nothing. On activations of BERT and ViT the tokens that are kept are the same.
Where all differences are nearly equal, up to 9 % of the decisions are others, with an error like that of the sequence
of pairs. More pairs at a time would overshoot there: all of them answer to the same error.

A place without a token holds the other token of its pair, so that the difference of the two is 0.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.constants import constant, integers
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import Seed, head_slice, seed_value, uniform_of_heads

# How many pairs of a bucket are decided at a time, and how often with an error.
_TOGETHER, _TIMES = 16, 2
# The smallest square of the size of a decision.
_TINY = 1e-36
# The most pairs of a bucket that the Triton kernels decide.
_LARGEST_BUCKET = 2048


class Rounds(NamedTuple):
    """The sizes of all rounds of halving, the last round first.

    Attributes:
        kv_len: Nk.
        num_pairs: of each round. The places before the first round are twice as many as its pairs.
        buckets: pairs of a bucket of each round. The last bucket is filled with pairs of no tokens.
    """

    kv_len: int
    num_pairs: tuple[int, ...]
    buckets: tuple[int, ...]

    def padded(self) -> list[int]:
        """The number of pairs of each round, with those that fill the last bucket."""
        return [pairs + -pairs % bucket for pairs, bucket in zip(self.num_pairs, self.buckets, strict=True)]


class Numbers(NamedTuple):
    """The random numbers of all rounds, (all pairs, H), the last round first: `uniform` of a seed and a stream."""

    seed: Seed
    stream: int
    num_heads: int


def halve(
    key: Tensor,
    value: Tensor,
    order: Tensor | None,
    num_tokens: Tensor | None,
    rounds: Rounds,
    numbers: Numbers,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Halve the tokens of every head in rounds.

    Args:
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        order: int64 (BH, Nk), the valid tokens first, or None if all are valid.
        num_tokens: int64 (BH, 1), the number of valid tokens, or None if all are valid.
        rounds: the sizes of the rounds.
        numbers: which random numbers decide.
        scale: factor of the scores.

    Returns:
        The tokens that are left, int64 (BH, M), and the number of tokens that each represents, float64 (BH or 1, M).
    """
    (batch_heads, kv_len, head_dim), device = key.shape, key.device
    if order is None or num_tokens is None:
        plan = constant(_plan_of_all, rounds, device=device)
        index = constant(_places_of_all, rounds, device=device)
    else:
        plan = _plan(num_tokens, rounds)
        index = order.gather(1, _places(num_tokens, 2 * rounds.num_pairs[-1]))
    count = (plan[0] + plan[1])[:, : rounds.num_pairs[0]].expand(batch_heads, -1)
    if backend(key, value) == "triton" and _has_kernel(key, value, rounds):
        return _halve_by_triton(key, value, index, plan, rounds, numbers, scale), count
    index = index + (integers(batch_heads, device) * kv_len).unsqueeze(1)
    drawn = uniform_of_heads(sum(rounds.num_pairs), numbers.num_heads, numbers.seed, numbers.stream, device)
    pairs = _pairs(plan, rounds, drawn, batch_heads, accumulation_dtype(key.dtype))
    # A constant factor of the kernel has no influence. The shift prevents that it overflows.
    shift = torch.linalg.vector_norm(key, dim=2, dtype=pairs.lean.dtype).amax(1).square() * abs(scale)
    largest = torch.linalg.vector_norm(value, torch.inf, (1, 2), keepdim=True, dtype=shift.dtype)
    factors = largest.clamp(min=torch.finfo(shift.dtype).tiny).reciprocal().expand(-1, -1, value.shape[2])
    root = constant(_number, math.sqrt(abs(scale)), shift.dtype, device=device)
    factors = torch.cat((root.expand(batch_heads, 1, head_dim), factors), 2)
    tokens, start = torch.cat((key, value), 2).flatten(0, 1), plan.shape[2]
    for num_pairs, size, bucket in reversed(list(zip(rounds.num_pairs, rounds.padded(), rounds.buckets, strict=True))):
        start -= size
        own = pairs.of_round(slice(start, start + size), bucket)
        if missing := 2 * size - index.shape[1]:  # pairs of a token with itself
            index = torch.cat((index, index[:, -1:].expand(-1, missing)), 1)
        places = index.view(batch_heads, -1, bucket, 2)
        if order is not None:
            places = torch.where(torch.stack((own.both - own.second, own.second), 3) > 0.0, places, places.flip(3))
        difference = _differences(tokens, factors, places, head_dim, shift)
        keep_second = _decide(difference, own)
        index = torch.where(keep_second, places[..., 1], places[..., 0]).flatten(1)[:, :num_pairs]
    return index % kv_len, count


def _has_kernel(key: Tensor, value: Tensor, rounds: Rounds) -> bool:
    """Whether the Triton kernels compute these tensors: not float64, and not too many pairs to decide by a program."""
    return torch.float64 not in (key.dtype, value.dtype) and rounds.buckets[0] <= _LARGEST_BUCKET


def _halve_by_triton(
    key: Tensor, value: Tensor, index: Tensor, plan: Tensor, rounds: Rounds, numbers: Numbers, scale: float
) -> Tensor:
    """The tokens that are left, int64 (BH, M); `index` is that of the places before the first round, (BH or 1, S)."""
    norm = torch.linalg.vector_norm(key, dim=2, dtype=torch.float32).amax(1)
    largest = torch.linalg.vector_norm(value, torch.inf, (1, 2), dtype=torch.float32)
    seed = seed_value(numbers.seed)
    if not isinstance(seed, Tensor):
        seed = constant(_seed, seed & 0xFFFFFFFF, device=key.device)
    parts = list(zip(plan.split(rounds.padded(), 2), rounds.num_pairs, rounds.buckets, strict=True))
    first = sum(rounds.num_pairs)
    for own, num_pairs, bucket in reversed(parts):
        first -= num_pairs
        # The numbers of a pair are those of all heads of the layer, of which a process may hold some.
        first_head, total = head_slice(numbers.seed, numbers.num_heads)
        sizes = (numbers.stream, first * total + first_head, numbers.num_heads, total, num_pairs, bucket)
        index = halve_round(key, value, index, own, seed, norm, largest, *sizes, scale)
    return index


@torch.library.custom_op("hf_efficient_attn::halve_round", mutates_args=())
def halve_round(
    key: Tensor,
    value: Tensor,
    index: Tensor,
    plan: Tensor,
    seed: Tensor,
    norm: Tensor,
    largest: Tensor,
    stream: int,
    first_number: int,
    num_heads: int,
    total_heads: int,
    num_pairs: int,
    bucket: int,
    scale: float,
) -> Tensor:
    """One round of halving, by two Triton kernels, which decide one pair of a bucket after the other.

    Args:
        key: (BH, Nk, D), not float64.
        value: (BH, Nk, Dv), not float64.
        index: int64 (BH or 1, 2 P), the tokens of P pairs.
        plan: float64 (5, BH or 1, at least P), from `_plan`.
        seed: an integer, of which the lower 32 bits matter.
        norm: float32 (BH,), that of the longest key.
        largest: float32 (BH,), the largest absolute value.
        stream: of the random numbers.
        first_number: the number of the first head and pair of this round in the stream.
        num_heads: H.
        total_heads: the heads of the layer in all processes, which each have a number for a pair.
        num_pairs: P.
        bucket: pairs of a bucket.
        scale: factor of the scores.

    Returns:
        The token of each pair that is kept, int64 (BH, P).
    """
    from hf_efficient_attn.ops import triton_thinning

    sizes = (stream, first_number, num_heads, total_heads, num_pairs, bucket)
    return triton_thinning.halve_round(key, value, index, plan, seed, norm, largest, *sizes, scale)


@halve_round.register_fake
def _(key: Tensor, value: Tensor, index: Tensor, *options: Any) -> Tensor:
    return index.new_empty(key.shape[0], options[-3])


def _seed(seed: int, device: torch.device) -> Tensor:
    return torch.full((), seed, device=device)


class _Pairs(NamedTuple):
    """The pairs of all rounds, or of one in T buckets of P pairs. B' is 1 if all heads are alike.

    Attributes:
        both: (B', pairs) or (B', T, P), the number of tokens that both tokens of a pair represent.
        second: the number of tokens that the second one represents. If the first is kept, the error grows by so many
            differences of the two, and by `both` less if the second is kept.
        least: the square of the smaller number.
        lean: (BH, pairs) or (BH, T, P), the error from which on the second token is kept, relative to the norms.
        start: the decision without an error, 1 if the second token is kept and 0 if the first is.
    """

    both: Tensor
    second: Tensor
    least: Tensor
    lean: Tensor
    start: Tensor

    def of_round(self, some: slice, bucket: int) -> "_Pairs":
        return _Pairs(*(x[:, some].unflatten(1, (-1, bucket)) for x in self))


def _pairs(plan: Tensor, rounds: Rounds, numbers: Tensor, batch_heads: int, dtype: torch.dtype) -> _Pairs:
    num_heads = numbers.shape[1]
    if rounds.padded() != list(rounds.num_pairs):
        parts = zip(numbers.split(rounds.num_pairs), rounds.padded(), strict=True)
        numbers = torch.cat([pad(part, (0, 0, 0, size - len(part))) for part, size in parts])
    bias, margin = (x.unflatten(0, (-1, num_heads if len(x) > 1 else 1)) for x in plan[2:4])
    lean = torch.addcmul(bias, margin, numbers.mT, value=-2.0).to(dtype)
    lean = lean.expand(batch_heads // num_heads, -1, -1).flatten(0, 1)
    first, second, _, _, least = plan.to(dtype).unbind()
    return _Pairs(first + second, second, least, lean, lean.le(0.0).to(dtype))


def _differences(tokens: Tensor, factors: Tensor, index: Tensor, head_dim: int, shift: Tensor) -> Tensor:
    """The kernel of the differences between the two tokens of each pair.

    Args:
        tokens: (BH Nk, D + Dv), keys and values.
        factors: (BH, 1, D + Dv).
        index: int64 (BH, T, P, 2), the tokens of the pairs.
        head_dim: D.
        shift: (BH,), subtracted from the exponents.

    Returns:
        (BH, T, P, P).
    """
    batch_heads, _, bucket, _ = index.shape
    both = tokens.index_select(0, index.flatten()).view(batch_heads, -1, tokens.shape[1]) * factors
    key, value = both.view(-1, 2 * bucket, tokens.shape[1]).tensor_split((head_dim,), 2)
    kernel = torch.bmm(key, key.mT).unflatten(0, (batch_heads, -1)).sub_(shift[:, None, None, None]).exp_()
    one = constant(_number, 1.0, key.dtype, device=key.device)
    kernel.mul_(torch.baddbmm(one, value, value.mT).view_as(kernel))
    rows = kernel[..., ::2, :] - kernel[..., 1::2, :]
    differences: Tensor = rows[..., ::2] - rows[..., 1::2]
    return differences


def _decide(difference: Tensor, pairs: _Pairs) -> Tensor:
    """Whether the second token of each pair is kept: bool (BH, T, P) for differences (BH, T, P, P), which change."""
    square = difference.diagonal(dim1=2, dim2=3)
    limit = (square * (square * pairs.least).cummax(2).values).clamp_(min=_TINY).sqrt_().mul_(pairs.lean)
    # With s = 1 where the second token is kept and 0 elsewhere, it is kept where difference s + limit <= 0.
    difference, bucket = difference.tril_(-1), square.shape[2]
    limit = limit.unsqueeze(3) - difference @ pairs.second.unsqueeze(3)
    difference, limit = (difference * pairs.both.unsqueeze(2)).flatten(0, 1), limit.flatten(0, 1)
    decisions = pairs.start.reshape(limit.shape)
    for start in range(0, bucket, _TOGETHER):
        stop = min(start + _TOGETHER, bucket)
        some = slice(start, stop)
        for _ in range(_TIMES):
            error = torch.baddbmm(limit[:, some], difference[:, some, :stop], decisions[:, :stop])
            torch.le(error, 0.0, out=decisions[:, some])
    return decisions.view_as(square) > 0.0


def _places(num_tokens: Tensor, num_places: int) -> Tensor:
    """Which token is in each place, int64 (B', S), for int64 (B', 1); see `thinning._spread`.

    In a place without a token it is that of the other place of the pair, if there is one.
    """
    place = integers(num_places, num_tokens.device)
    token = _before(place, num_tokens, num_places)
    is_empty = token == _before(place + 1, num_tokens, num_places)
    return torch.minimum(token - (is_empty & (place % 2 == 1)).long(), num_tokens - 1).clamp_(min=0)


def _before(place: Tensor, num_tokens: Tensor, num_places: int) -> Tensor:
    """The number of tokens before a place."""
    return (place * num_tokens + num_places - 1) // num_places


def _plan(num_tokens: Tensor, rounds: Rounds) -> Tensor:
    """What is known of all pairs before the first round, float64 (5, B', pairs).

    These are the counts of the first and the second token, two numbers x and y so that the lean is x - 2 u y for a
    number u in (0, 1), and the square of the smaller count.
    """
    edges = constant(_edges, rounds, device=num_tokens.device)
    low, middle, high = _before(edges, num_tokens.unsqueeze(2), 2 * rounds.num_pairs[-1]).unbind(1)
    first, second = (middle - low).double(), (high - middle).double()
    bias = (first - second) / (first + second).clamp(min=1.0)
    num_rounds = (num_tokens > constant(_sizes, rounds, device=num_tokens.device)).sum(1, keepdim=True).double()
    # The margin is that of a failure probability of 1/2, divided among the rounds and the pairs of a round.
    margin = 0.5 + (constant(_pairs_of_round, rounds, device=num_tokens.device) * num_rounds).clamp(min=1.0).log()
    return torch.stack((first, second, (bias + 1.0) * margin, margin, torch.minimum(first, second).square()))


def _number(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1, 1, 1), number, dtype=dtype, device=device)


def _edges(rounds: Rounds, device: torch.device) -> Tensor:
    """The first place of each token of a pair, and the one after the pair: int64 (3, pairs)."""
    edges, num_places = [], 2 * rounds.num_pairs[-1]
    for size, pairs in zip(rounds.padded(), rounds.num_pairs, strict=True):
        width = num_places // (2 * pairs)
        first = 2 * width * torch.arange(size, device=device)
        edges.append(torch.stack((first, first + width, first + 2 * width)).clamp(max=num_places))
    return torch.cat(edges, 1)


def _sizes(rounds: Rounds, device: torch.device) -> Tensor:
    return torch.tensor(rounds.num_pairs, device=device)


def _pairs_of_round(rounds: Rounds, device: torch.device) -> Tensor:
    """Eight times the number of pairs of the round of each pair, float64."""
    sizes = 8.0 * _sizes(rounds, device).double()
    return sizes.repeat_interleave(torch.tensor(rounds.padded(), device=device), output_size=sum(rounds.padded()))


def _plan_of_all(rounds: Rounds, device: torch.device) -> Tensor:
    """`_plan` for sequences without masked tokens."""
    return _plan(torch.full((1, 1), rounds.kv_len, device=device), rounds)


def _places_of_all(rounds: Rounds, device: torch.device) -> Tensor:
    return _places(torch.full((1, 1), rounds.kv_len, device=device), 2 * rounds.num_pairs[-1])
