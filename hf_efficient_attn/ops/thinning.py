"""The choice of a few keys that represent all keys of a sequence: pivots of a kernel matrix, or kernel halving.

`choose_pivots`: m pivots S approximate the kernel matrix of exp(<x, y>), for keys x and y that the caller has scaled,
by K_:S K_SS^-1 K_S: (Nystrom). Randomly pivoted Cholesky (Chen, Epperly, Tropp, Webber 2025) draws each pivot with a
probability proportional to the diagonal of the matrix that is left over. Here several pivots are drawn at a time, as in
the block form of the algorithm. Nothing overflows, because all matrices have the kernel exp(-|x - y|^2 / 2), whose
diagonal is 1. The factors exp(|x|^2) between the two diagonals occur in the probabilities only, as logarithms.

`thin`, kernel halving (KH-Compress): a round pairs the tokens in the order of their positions and keeps one token of
each pair, which then stands for both. The pairs of a bucket are decided one after the other. Each decision is random
and leans towards the token that reduces the error so far: the difference between the kept tokens of the bucket and all
of them, as sums in the space of a kernel. Every round halves the tokens that are left and doubles the size of a bucket
(Carrell, Gong, Shetty, Dwivedi, Mackey, "Low-Rank Thinning", ICML 2025, section 4).

Here a token has a count, the number of tokens that it stands for, and a pair may have one token or none. Tokens are
spread evenly over num_samples * 2**rounds places, so any number of tokens can be reduced to any other. Padding only
adds earlier rounds without a pair of two tokens. Such rounds change nothing, and the buckets and random numbers of a
round are determined by how many rounds follow it.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import LOG2_E
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, from_float64, widened
from hf_efficient_attn.ops.draws import Draws, draw_sizes
from hf_efficient_attn.ops.index import ceil_div, constant, integers, take, valid_first
from hf_efficient_attn.ops.slices import slice_size, sliced

# Streams of random numbers: the draws begin at the first, and halving uses the second.
_DRAWS = 5000
_HALVING = 60_000
# The first draws are of this size. A draw does not see how similar its own pivots are, so early ones must be small.
_FIRST_DRAW = 8
# Log weights below `_LEAST`, relative to the largest one, are raised to it. Pivots that add nothing come last.
_LEAST = -1e4
_LAST = -1e5
# The residual of the unit diagonal below which a pivot adds nothing but rounding.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
# A bucket has at least this many pairs. Smaller buckets are hardly better than fair draws, and hardly cheaper.
_BUCKET = 8
# The smallest range of a draw, which pairs of equal tokens have. The kernel of other pairs is up to 1 + Dv.
_TINY = 1e-20


@torch.no_grad()
def choose_pivots(
    points: Tensor, valid: Tensor | None, num_pivots: int, *, draws: Draws, batch: int, block: int = 64
) -> tuple[Tensor, Tensor]:
    """Choose pivots by randomized pivoted Cholesky on exp(<x_i, x_j>).

    A draw selects up to `block` candidates without replacement, with probabilities proportional to the residual
    diagonal: the ones with the largest log(residual) + Gumbel number. The numbers are a function of seed, head and
    candidate, and equal for all sequences of the batch. So the pivots of a sequence depend neither on the batch nor on
    padding, provided that the valid candidates come first. Candidates without a residual, such as duplicates, are
    selected only if no others are left. No gradient flows through the choice.

    The points (BH, C, D) have the accumulation dtype, and finite squared norms. `valid`, bool (BH, C) or None, is False
    for candidates that do not exist. There are at least `num_pivots` candidates.

    Returns:
        The indices of different candidates, int64 (BH, m); 0 where none is left, where the second
        result, bool (BH, m), is False.
    """
    batch_heads, num_candidates, _ = points.shape
    sizes = draw_sizes(num_pivots, _FIRST_DRAW, 1, block)
    # (draws, H, C)
    numbers = gumbel(draws, len(sizes), num_candidates, batch_heads // batch, points.dtype)

    def some_heads(points: Tensor, valid: Tensor | None, head: Tensor) -> Tensor:
        return torch.stack(_pivots_of_heads(points, valid, numbers[:, head], sizes), 1)  # (BH, 2, m)

    head = integers(batch_heads, points.device) % (batch_heads // batch)
    size = slice_size(num_pivots * num_candidates // 2, points.device)
    index, selected = sliced(some_heads, points, valid, head, size=size).unbind(1)
    return index, selected > 0


def _pivots_of_heads(points: Tensor, valid: Tensor | None, numbers: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Choose the pivots of a few heads, from numbers (draws, BH, C). Also returns, as 0 or 1, whether they exist.

    Each draw appends the rows of its pivots to the factor of the Cholesky decomposition: the kernel matrix is about
    factor^T factor.
    """
    tolerance = TOLERANCE[points.dtype]
    ridge = 0.1 * TOLERANCE[points.dtype]
    points = points * LOG2_E**0.5
    half_norm = 0.5 * points.square().sum(2, keepdim=True)  # (BH, C, 1)
    closed = torch.zeros_like(half_norm[..., 0], dtype=torch.bool) if valid is None else ~valid
    norm = (2.0 / LOG2_E) * half_norm[..., 0]
    norm = (norm - norm.masked_fill(closed, 0.0).amax(1, keepdim=True)).clamp(min=_LEAST)
    residual = torch.ones_like(norm)
    picked = []
    was_open = []
    factor = points.new_empty(len(points), 0, points.shape[1])  # (BH, chosen, C)
    for of_draw, size in zip(numbers, sizes, strict=True):
        scores = torch.where(residual > tolerance, residual.log() + norm, _LAST) + of_draw
        scores, index = scores.masked_fill(closed, -torch.inf).topk(size, dim=1)  # (BH, size) each
        selected = scores > -torch.inf
        index = torch.where(selected, index, 0)
        picked.append(index)
        was_open.append(selected)
        if len(picked) == len(sizes):
            break
        used = (selected & (residual.gather(1, index) > tolerance)).unsqueeze(2)  # (BH, size, 1)
        closed = closed.scatter(1, index, True)
        rows = torch.baddbmm(-half_norm.mT, take(points, index), points.mT) - take(half_norm, index)  # (BH, size, C)
        columns = index.unsqueeze(1)  # (BH, 1, size)
        earlier = factor.gather(2, columns.expand(-1, factor.shape[1], -1))  # (BH, chosen, size)
        rows = torch.baddbmm(rows.clamp_(max=0.0).exp2_(), earlier.mT, factor, alpha=-1.0) * used
        corner = rows.gather(2, columns.expand(-1, size, -1)) * used.mT  # (BH, size, size)
        corner.diagonal(dim1=1, dim2=2).add_(corner.new_ones(used.shape[:2]).masked_fill_(used.squeeze(2), ridge))
        lower, failed = torch.linalg.cholesky_ex(corner)
        # Only rounding can make this fail. Then the diagonal times the size replaces the corner, which is smaller.
        diagonal = torch.diag_embed((size * corner.diagonal(dim1=1, dim2=2).clamp(min=ridge)).sqrt())
        lower = torch.where((failed > 0)[:, None, None], diagonal, lower)
        # A product with the inverse of this small matrix is faster than a solve.
        one = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower)
        new = torch.linalg.solve_triangular(lower, one, upper=False) @ rows  # (BH, size, size) @ (BH, size, C)
        residual = (residual - new.square().sum(1)).clamp(min=0.0)  # (BH, C)
        factor = torch.cat((factor, new), 1)  # (BH, chosen, C)
    return torch.cat(picked, 1), torch.cat(was_open, 1).long()


@constant
@from_float64
def gumbel(draws: Draws, num_draws: int, num_candidates: int, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Draw standard Gumbel numbers (draws, H, C). The number of a candidate does not depend on how many there are."""
    numbers = [draws.uniform_of_heads(num_candidates, num_heads, _DRAWS + i) for i in range(num_draws)]
    return -(-torch.stack(numbers).mT.log()).log().to(dtype)


def _rounds(kv_len: int, num_samples: int) -> list[tuple[int, int]]:
    """Return the rounds that reduce `kv_len` tokens to `num_samples`, in reverse: the last round comes first.

    A round has a number of pairs, and a number of pairs of each bucket; the last bucket may have fewer.
    """
    rounds: list[tuple[int, int]] = []
    while (num_pairs := num_samples << len(rounds)) < kv_len:
        rounds.append((num_pairs, max(ceil_div(num_samples, 1 << len(rounds)), min(_BUCKET, num_samples))))
    return rounds


def draw_numbers(draws: Draws, kv_len: int, num_samples: int, num_heads: int) -> list[Tensor]:
    """Draw float64 numbers in (-1, 1), (H, num_pairs), for each round, the last round first.

    The numbers of a round do not depend on earlier rounds, and so not on `kv_len`.
    """
    sizes = [num_pairs for num_pairs, _ in _rounds(kv_len, num_samples)]
    numbers = draws.uniform_of_heads(sum(sizes), num_heads, _HALVING)  # (sum of num_pairs, H)
    return [2.0 * x.mT - 1.0 for x in numbers.split(sizes)]


@torch.no_grad()
def thin(
    key: Tensor, value: Tensor, key_mask: Tensor | None, num_samples: int, *, scale: float, draws: Draws, batch: int
) -> tuple[Tensor, Tensor]:
    """Keep `num_samples` (M < Nk) tokens of each head, or all valid tokens if there are not more, without a gradient.

    The kernel of two tokens is exp(scale <k, k'>) (<v, v'> + b^2), where b is the largest |v_ij| of the head. Masked
    keys and values are 0.

    Returns:
        The tokens that are kept, int64 (BH, M), and the logs of the numbers of tokens that each one stands for, float64
        (BH, M); -inf for an unused entry.
    """
    batch_heads, kv_len, _ = key.shape
    device = key.device
    acc_dtype = accumulation_dtype(key.dtype)
    rounds = _rounds(kv_len, num_samples)
    numbers = draw_numbers(draws, kv_len, num_samples, batch_heads // batch)
    num_tokens = torch.full((batch_heads, 1), kv_len, device=device)
    num_tokens = num_tokens if key_mask is None else key_mask.sum(1, keepdim=True)
    # Of n tokens and S >= n places, token j is in place floor(j S / n). A place has 0 or 1 tokens.
    num_places = num_samples << len(rounds)
    place = torch.arange(num_places, device=device)
    index = (place * num_tokens + num_places - 1) // num_places  # (BH, num_places)
    count = widened(index * num_places < (place + 1) * num_tokens)  # (BH, num_places)
    index = index.clamp(max=kv_len - 1)
    index = index if key_mask is None else valid_first(key_mask).gather(1, index)
    sizes = num_tokens.new_tensor([num_pairs for num_pairs, _ in rounds])
    num_rounds = widened((num_tokens > sizes).sum(1, keepdim=True))  # rounds that have a pair of two tokens
    # A constant factor of the kernel has no influence. This one prevents overflow. exp2 is several times as fast as exp
    # on a CPU.
    key = key.to(acc_dtype) * math.sqrt(abs(scale) * LOG2_E)
    value = value.to(acc_dtype)
    value = value / value.abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(acc_dtype).tiny)
    shift = key.square().sum(2).amax(1)  # (BH,)
    for (num_pairs, bucket), draw in zip(reversed(rounds), reversed(numbers), strict=True):
        # The margin belongs to a failure probability of 1/2, divided among the rounds and the pairs of a round.
        margin = 0.5 + (8.0 * num_pairs * num_rounds).clamp(min=1.0).log()
        missing = -num_pairs % bucket
        shape = (batch_heads, -1, bucket)
        pairs = pad(index, (0, 2 * missing)).view(*shape, 2)  # (BH, T, P, 2)
        counts = pad(count, (0, 2 * missing)).view(*shape, 2)
        size = slice_size(4 * (num_pairs + missing) * bucket, device)
        kernel = sliced(_pair_kernel, key, value, shift, pairs, counts, size=size)  # (BH, T, P, P)
        kept = _walk(kernel, counts, pad(draw, (0, missing)).repeat(batch, 1).view(shape), margin)  # (BH, T, P, 1)
        index = pairs.gather(3, kept).flatten(1)[:, :num_pairs]  # (BH, num_pairs)
        count = count.unflatten(1, (-1, 2)).sum(2)  # (BH, num_pairs)
    return index, count.log()


def _pair_kernel(key: Tensor, value: Tensor, shift: Tensor, pairs: Tensor, counts: Tensor) -> Tensor:
    """Compute the kernel of the differences between both tokens of each pair; 0 for pairs of fewer than two tokens.

    Args:
        key: (BH, Nk, D), times the root of the scale / log 2.
        value: (BH, Nk, Dv), divided by b.
        shift: (BH,), subtracted from the exponents.
        pairs: int64 (BH, T, P, 2), the tokens of the pairs of T buckets.
        counts: (BH, T, P, 2).

    Returns:
        (BH, T, P, P).
    """
    keys = take(key, pairs.flatten(2))  # (BH, T, 2 P, .)
    values = take(value, pairs.flatten(2))
    kernel = (keys @ keys.mT).sub_(shift.view(-1, 1, 1, 1)).exp2_()  # (BH, T, 2 P, 2 P)
    kernel *= (values @ values.mT).add_(1.0)
    rows = kernel[..., ::2, :] - kernel[..., 1::2, :]  # (BH, T, P, 2 P)
    both = (counts.amin(-1) > 0).to(kernel.dtype)  # (BH, T, P)
    return (rows[..., ::2] - rows[..., 1::2]).mul_(both.unsqueeze(-1)).mul_(both.unsqueeze(-2))


def _walk(kernel: Tensor, counts: Tensor, draw: Tensor, margin: Tensor) -> Tensor:
    """Decide which token of each pair is kept. The pairs of a bucket are decided one after the other.

    A pair has counts c and c' and the difference f of its tokens. The error grows by c' f if the first token is kept,
    and by -c f if the second is. As long as there is no error, the first token is kept with probability c / (c + c'),
    so that the expected growth is 0.

    Args:
        kernel: (BH, T, P, P), from `_pair_kernel`.
        counts: float64 (BH, T, P, 2).
        draw: float64 (BH, T, P), in (-1, 1).
        margin: float64 (BH, 1). An error of `margin` times the largest possible one makes a decision certain.

    Returns:
        int64 (BH, T, P, 1): 0 if the first token is kept, 1 if the second is.
    """
    first, second = counts.unbind(-1)  # (BH, T, P) each
    norm = widened(kernel.diagonal(dim1=2, dim2=3).clamp(min=0.0).sqrt())  # (BH, T, P)
    largest = (norm * counts.amin(-1)).cummax(2).values
    bias = (first - second) / (first + second).clamp(min=1.0)
    threshold = ((bias - draw) * (margin.unsqueeze(2) * norm * largest).clamp(min=_TINY)).to(kernel.dtype)
    growth = second.to(kernel.dtype).unbind(2)
    shrinkage = (-first).to(kernel.dtype).unbind(2)
    error = torch.zeros_like(threshold)
    kept = []
    for i, limit in enumerate(threshold.unbind(2)):  # (BH, T)
        keep_second = error[..., i] >= limit
        step = torch.where(keep_second, shrinkage[i], growth[i])
        error[..., i + 1 :].addcmul_(kernel[:, :, i, i + 1 :], step.unsqueeze(2))
        kept.append(keep_second)
    return torch.stack(kept, 2).unsqueeze(3).long()


def thin_naive(key: Tensor, value: Tensor, num_samples: int, numbers: list[Tensor], *, scale: float) -> Tensor:
    """Compute `thin` in the readable form, for float64 keys (Nk, D) and values (Nk, Dv) of one head without padding.

    `numbers` are those of this head from `draw_numbers`, (num_pairs,) for each round. Returns float64 (Nk,), how
    many tokens each token stands for; 0 for tokens that are not kept.
    """
    kv_len = len(key)
    rounds = _rounds(len(key), num_samples)
    exponent = abs(scale) * key @ key.mT  # (Nk, Nk)
    kernel = torch.exp(exponent - exponent.diagonal().max()) * (value @ value.mT / value.abs().max() ** 2 + 1.0)
    # Places hold the index and the count of a token.
    places = [(0, 0)] * (num_samples << len(rounds))
    for j in range(kv_len):
        places[j * len(places) // kv_len] = (j, 1)
    for (num_pairs, bucket), draw in zip(reversed(rounds), reversed(numbers), strict=True):
        margin = 0.5 + math.log(8.0 * num_pairs * len(rounds))
        kept = []
        for pair in range(num_pairs):
            if pair % bucket == 0:
                error = key.new_zeros(kv_len)
                largest = key.new_zeros(())
            i, first = places[2 * pair]
            j, second = places[2 * pair + 1]
            if first and second:
                difference = key.new_zeros(kv_len)
                difference[i] = 1.0
                difference[j] = -1.0
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
