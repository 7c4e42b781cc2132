"""Landmarks: weighted means of clusters of keys that begin with keys far from each other. And near keys.

`hf_efficient_attn.ops.weighted_coreset` explains the choice of landmarks.

A query attends to the keys near it exactly, next to weighted landmarks for all keys. This helps where attention is
local, which the exact rows of some queries tell for each head. Elsewhere more landmarks help as much. What landmarks
count for near keys is subtracted. For this each key has a weight on only its nearest landmark.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from hf_efficient_attn.ops.attend import LOG2_E, attend
from hf_efficient_attn.ops.coreset import cluster_sums, nearest, with_ones
from hf_efficient_attn.ops.shards import Seed
from hf_efficient_attn.ops.thinning import gumbel
from hf_efficient_attn.ops.tokens import ceil_div, constant, even_positions, pad_to_blocks, slice_size, sliced, take

# t: how much less the kernel distinguishes keys than the scores do. Of .5, .6, .7, .85 and 1, .7 has the least error.
TEMPERATURE = 0.7
# The share of the mean query in g, and the powers of exp(2 g) in the draw of a key and in the mean of its cluster.
TILT, DRAW_POWER, POWER = 0.3, 0.7, 0.5
# Queries of the mean, and the smallest logarithm of a key's weight in the mean of its cluster.
NUM_QUERIES, LEAST_LOG_WEIGHT = 512, -60.0
# Every third probe tells whether the attention of a head is local.
ROWS_OF_SHARE = 3
# Half the squared norm of a landmark that is not used: no key is near it, and it counts nothing.
_UNUSED = 1e30
# Largest exponent of two of what landmarks count for a near key, relative to the sum of the query or to the near key
# that counts most. It is at most about 0. More would be due to logits that float32 cannot represent.
_MAX_COUNTED = 2.0
# The least logarithm of a weight, relative to the largest, and the least share that is left over of a point, in a draw.
_LEAST, _LEAST_LEFT = -1e4, 1e-12


class CoresetOptions(NamedTuple):
    """How landmarks are chosen and fitted.

    Attributes:
        num_landmarks: landmarks of a head with near keys. Other heads have `block_size` more: m of all heads together.
        num_candidates: evenly spaced keys from which the landmarks are made, at least m.
        num_refinements: steps of Lloyd's algorithm; 0 for landmarks that are keys.
        num_probes: queries whose exact rows fit the weights; 0 for no fit.
        block_size: near keys of a query, or 0.
        near_share: a head has near keys if they hold more than this share of its attention, measured on the probes.
            With 0, or without probes, all heads have them; with 1 none has.
        scale: factor of the attention scores.
        seed: of the draw of the keys that the clusters begin with.
        dropout_p: probability of dropping a weight from the numerator.
    """

    num_landmarks: int
    num_candidates: int
    num_refinements: int
    num_probes: int
    block_size: int
    near_share: float
    scale: float
    seed: Seed
    dropout_p: float = 0.0

    @property
    def root(self) -> float:
        """The factor from keys to the points of the kernel exp(-|x - y|^2 / 2)."""
        return float(TEMPERATURE * abs(self.scale) ** 0.5)


class Candidates(NamedTuple):
    """Keys from which landmarks are made, and their clusters.

    Attributes:
        key: (BH, C, D).
        terms: (BH, C, D + Dv + 2), what clusters sum: weighted keys, their weights, values, and 1.
        tilt: `TILT` scale times the mean query, (BH, 1, D).
        unused: (BH, m, 1), `_UNUSED` for landmarks that a head does not have and 0 for others; None if all are used.
        choice: int64 (BH, m + C), the candidates with which the clusters begin, and the cluster of each candidate.
    """

    key: Tensor
    terms: Tensor
    tilt: Tensor
    unused: Tensor | None
    choice: Tensor


class Landmarks(NamedTuple):
    """m landmarks of each head, as keys of a softmax, with their clusters.

    Attributes:
        key: c, (BH, m, D).
        half_norm: |x|^2 / 2 of their points, (BH, m, 1).
        bias: -g(c), (BH, m).
        tilt: as in `Candidates`.
        kernel: K_cc, (BH, m, m).
        value: (BH, m, Dv), the mean value of the candidates of each cluster.
        log_count: (BH, m), the log of the number of these candidates; -inf without any.
    """

    key: Tensor
    half_norm: Tensor
    bias: Tensor
    tilt: Tensor
    kernel: Tensor
    value: Tensor
    log_count: Tensor


def middle_positions(length: int, count: int, device: torch.device) -> Tensor:
    """The middle of each of `count` equal parts of the sequence."""
    return ((torch.arange(count, dtype=torch.float64, device=device) + 0.5) * length / count).long()


def _growing_draws(count: int) -> list[int]:
    """How many points each draw of `draw_apart` selects: three times as many as all before it, and 64 at first."""
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(min(count - sum(sizes), max(64, 3 * sum(sizes))))
    return sizes


def gumbel_numbers(count: int, num_candidates: int, seed: Seed, like: Tensor) -> Tensor:
    """Standard Gumbel numbers (draws, C) for `draw_apart`. The numbers of a candidate do not depend on C.

    The numbers of an integer seed are kept, so they must not be modified.
    """
    shape = len(_growing_draws(count)), num_candidates, None
    return constant(gumbel, *shape, seed, like.dtype, device=like.device)[:, 0]


@torch.no_grad()
def draw_apart(points: Tensor, power: float, numbers: Tensor, count: int, tilt: Tensor | None = None) -> Tensor:
    """Draw points that are far from each other, in a few draws, each from the ones that the earlier draws left over.

    The probability of a point x grows with K(x, x)^power (1 - K(x, p)^2 / (K(x, x) K(p, p))) for the kernel
    K = exp(<x, y>) and the nearest p of the earlier draws: the diagonal of what Nystrom's approximation of K by p alone
    leaves over. With one draw per point this would be like k-means++ (Arthur & Vassilvitskii 2007).

    Args:
        points: (BH, C, D).
        power: see above.
        numbers: (draws, C), from `gumbel_numbers`, the same for all heads.
        count: m, at most C.
        tilt: (BH, C), what is added to the squared norm of each point in K(x, x), or None.

    Returns:
        int64 (BH, m), indices of different points. The first ones are a choice of fewer.
    """
    norm = points.square().sum(2)
    log_weight = norm if tilt is None else norm + tilt
    log_weight = ((log_weight - log_weight.amax(1, keepdim=True)) * power).clamp(min=_LEAST)
    weight_left, closest, picked, sizes = log_weight, None, [], _growing_draws(count)
    for i, size in enumerate(sizes):
        index = (weight_left + numbers[i]).topk(size, dim=1)[1]
        picked.append(index)
        if i + 1 < len(sizes):
            log_weight = log_weight.scatter(1, index, -torch.inf)  # what is drawn is not drawn again
            offset = norm.gather(1, index).unsqueeze(2)
            found = torch.baddbmm(offset, take(points, index), points.mT, beta=-1.0, alpha=2.0).amax(1)
            closest = found if closest is None else torch.maximum(closest, found)
            left = torch.expm1((closest - norm).clamp(max=0.0))
            weight_left = log_weight + left.clamp(max=-_LEAST_LEFT).abs().log()
    return torch.cat(picked, 1)


def choose_candidates(
    query: Tensor, key: Tensor, value: Tensor, local: Tensor | None, options: CoresetOptions
) -> Candidates:
    """Choose candidates and their clusters, which have no gradient; `local` bool (BH,) are the heads with near keys."""
    spread = constant(middle_positions, query.shape[1], min(query.shape[1], NUM_QUERIES), device=key.device)
    tilt = query.index_select(1, spread).mean(1, keepdim=True) * (TILT * options.scale)
    keys, values, length = key, value, key.shape[1]
    if length > options.num_candidates:
        position = constant(even_positions, length, options.num_candidates, device=key.device)
        keys, values = (x.index_select(1, position) for x in (key, value))
    count, unused = options.num_landmarks + options.block_size, None
    if local is not None:
        further = constant(_further, options.num_landmarks, count, key.dtype, device=key.device)
        unused = local.view(-1, 1, 1) * further
    numbers = gumbel_numbers(count, keys.shape[1], options.seed, key)
    points, tilted = keys * options.root, torch.bmm(keys, 2.0 * tilt.mT)
    weight = (points.square().sum(2, keepdim=True) + tilted) * (POWER * LOG2_E)
    weight = (weight - weight.amax(1, keepdim=True)).clamp(min=LEAST_LOG_WEIGHT * LOG2_E).exp2()
    terms = torch.cat((keys * weight, weight, with_ones(values)), 2)

    def some_heads(points: Tensor, tilted: Tensor, terms: Tensor, unused: Tensor | None) -> Tensor:
        return _clusters(points, tilted, terms, unused, numbers, options)

    with torch.no_grad():
        size = slice_size(count * keys.shape[1] // 6, key.device)
        choice = sliced(some_heads, points, tilted, terms, unused, size=size)
    return Candidates(keys, terms, tilt, unused, choice)


def _further(first: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(count, 1), 0 up to `first` and `_UNUSED` from there on."""
    return (torch.arange(count, device=device) >= first).to(dtype).unsqueeze(1) * _UNUSED


def _clusters(
    points: Tensor, tilted: Tensor, terms: Tensor, unused: Tensor | None, numbers: Tensor, options: CoresetOptions
) -> Tensor:
    """`Candidates.choice` by Lloyd's algorithm for points (BH, C, D); `tilted` is 2 <tilt, k>, (BH, C, 1)."""
    count = options.num_landmarks + options.block_size
    pivot = draw_apart(points, DRAW_POWER, numbers, count, tilted[..., 0])
    pivots = take(points, pivot)
    cluster = nearest(points, pivots, unused)
    for _ in range(1, options.num_refinements):
        means = _means(cluster_sums(cluster, terms, count), pivots, options.root)
        cluster = nearest(points, means, unused)
    return torch.cat((pivot, cluster), 1)


def _means(sums: Tensor, first: Tensor, factor: float = 1.0) -> Tensor:
    """The means of clusters by sums of `Candidates.terms`, times a factor; or `first` (BH, m, D) where none is left."""
    total, weight, _ = sums.split((first.shape[2], 1, sums.shape[2] - first.shape[2] - 1), 2)
    return torch.where(weight > 0, factor * total / weight.clamp(min=1e-35), first)


def make_landmarks(candidates: Candidates, options: CoresetOptions) -> Landmarks:
    """The means of the clusters, with a gradient."""
    keys, terms, tilt, unused, choice = candidates
    count, dim = options.num_landmarks + options.block_size, keys.shape[2]
    pivot, cluster = choice.split((count, keys.shape[1]), 1)
    landmarks, sums = take(keys, pivot), cluster_sums(cluster, terms, count)
    landmarks = _means(sums, landmarks) if options.num_refinements else landmarks
    # In float64, because the norms of neighbors nearly cancel.
    points = landmarks.double() * options.root
    half_norm = 0.5 * points.square().sum(2, keepdim=True)
    half_norm = half_norm if unused is None else half_norm + unused
    exponent = (torch.baddbmm(-half_norm, points, points.mT) - half_norm.mT).to(keys.dtype)
    kernel = (exponent * LOG2_E).clamp(max=0.0).exp2()
    half_norm = half_norm.to(keys.dtype)
    bias = -torch.baddbmm(half_norm, landmarks, tilt.mT).squeeze(2)
    number = sums[..., -1:].detach()
    value = sums[..., dim + 1 : -1] / number.clamp(min=1.0)
    return Landmarks(landmarks, half_norm, bias, tilt, kernel, value, number.squeeze(2).log())


def near_block_q(width: int) -> int:
    """Queries of a block that shares `width` near keys."""
    return max(1, width // 2)


def near_index(q_len: int, width: int, device: torch.device) -> Tensor:
    """The near keys of each block of `near_block_q` queries, int64 (T, width): those around the block.

    At both ends of the sequence they are moved inwards. There are at least `width` keys, and as many as queries.
    """
    block_q = near_block_q(width)
    first = torch.arange(ceil_div(q_len, block_q), device=device) * block_q - (width - block_q) // 2
    return first.clamp(0, q_len - width).unsqueeze(1) + torch.arange(width, device=device)


def _index_of_rows(q_len: int, width: int, count: int, step: int, device: torch.device) -> Tensor:
    """The near keys, int64 (P, width), of every `step`-th of `count` queries at `middle_positions`."""
    position = middle_positions(q_len, count, device)[::step]
    return near_index(q_len, width, device)[position // near_block_q(width)]


class Rows(NamedTuple):
    """Exact rows of P probe queries.

    Attributes:
        position: int64 (P,), of the probes.
        query: (BH, P, D).
        out: (BH, P, Dv), their exact output.
        lse: (BH, P), the log of their exact sums.
    """

    position: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor


def exact_rows(query: Tensor, key: Tensor, value: Tensor, options: CoresetOptions) -> Rows:
    """The exact rows of `num_probes` evenly spread queries."""
    position = constant(middle_positions, query.shape[1], options.num_probes, device=key.device)
    probes = query.index_select(1, position)
    part = attend(probes[:, None], key[:, None], value[:, None], scale=options.scale)
    return Rows(position, probes, part.out[:, 0], part.lse[:, 0])


def near_share_of_rows(query: Tensor, lse: Tensor, key: Tensor, options: CoresetOptions) -> Tensor:
    """The mean share of near keys in the attention, (BH,), of every third probe (BH, P, D), by their lse (BH, P)."""
    some = key.shape[1], options.block_size, options.num_probes, ROWS_OF_SHARE
    index = constant(_index_of_rows, *some, device=key.device)
    query, lse = query[:, ::ROWS_OF_SHARE] * options.scale, lse[:, ::ROWS_OF_SHARE]
    near = key.index_select(1, index.flatten()).unflatten(1, index.shape)  # (BH, P, w, D)
    scores = (near @ query.unsqueeze(3)).squeeze(3)
    share: Tensor = (scores - lse.unsqueeze(2)).exp().sum(2).mean(1)
    return share


@torch.no_grad()
def local_heads(key: Tensor, q_len: int, rows: Rows | None, options: CoresetOptions) -> Tensor | None:
    """Which heads have near keys: bool (BH,), or None if no head has."""
    if not options.block_size or q_len != key.shape[1] or options.near_share >= 1.0:
        return None
    if options.near_share == 0.0 or rows is None:
        return key.new_ones(len(key), dtype=torch.bool)
    local = near_share_of_rows(rows.query, rows.lse, key, options) > options.near_share
    return local if bool(local.any()) else None


class NearField(NamedTuple):
    """Near keys of a few heads, and what landmarks count for them.

    Attributes:
        key: centered keys, (BH, Nk, D).
        value: (BH, Nk, Dv).
        landmark: the landmark of each key, (BH, Nk, D).
        bias: what is added to its score, with the weight of the key: (BH, Nk).
        options: of the call.
    """

    key: Tensor
    value: Tensor
    landmark: Tensor
    bias: Tensor
    options: CoresetOptions

    def sums_of_all(self, query: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """`_sums` of all queries (BH, Nq, D), and `ref` (BH, Nq, 1), at least lse (BH, Nq)."""
        q_len, width = query.shape[1], self.options.block_size
        blocks, least = (pad_to_blocks(x, near_block_q(width)) for x in (query, lse.detach().unsqueeze(2)))
        sums, ref = self._sums(blocks, least, constant(near_index, q_len, width, device=query.device))
        return sums.flatten(1, 2)[:, :q_len], ref.flatten(1, 2)[:, :q_len]

    def sums_of_rows(self, query: Tensor, lse: Tensor) -> Tensor:
        """The same of the probes (BH, P, D), (BH, P, Dv + 1), relative to the exponential of their lse."""
        every = self.key.shape[1], self.options.block_size, query.shape[1], 1
        index = constant(_index_of_rows, *every, device=query.device)
        return self._sums(query.unsqueeze(2), lse[..., None, None], index)[0][:, :, 0, :-2]

    def _sums(self, query: Tensor, least: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """What near keys add to the sums of queries, without what landmarks count for them.

        Args:
            query: (BH, T, M, D), in blocks.
            least: (BH, T, M, 1), the least reference.
            index: int64 (T, w), the near keys of each block.

        Returns:
            sums: (BH, T, M, Dv + 3), numerators, denominator, the denominator again, and the sum of the sizes of its
                terms; dropout acts on the numerators only.
            ref: (BH, T, M, 1). The sums are relative to its exponential.
        """
        dim, dropout_p = query.shape[3], self.options.dropout_p
        # One gather for all: the keys of exact scores, landmarks and values, (BH, T, w, .).
        tokens = torch.cat((self.key, self.landmark, self.bias.unsqueeze(2), self.value), 2)
        tokens = tokens.index_select(1, index.flatten()).unflatten(1, index.shape)
        keys, landmarks, bias, values = tokens.split((dim, dim, 1, self.value.shape[2]), 3)
        query = query * self.options.scale
        exact, counted = query @ keys.mT, query @ landmarks.mT
        ref = torch.maximum(least, exact.detach().amax(3, keepdim=True))
        exact = ((exact - ref) * LOG2_E).exp2()
        pairs = exact - ((counted + (bias.mT - ref)) * LOG2_E).clamp(max=_MAX_COUNTED).exp2()
        kept = dropout(pairs, dropout_p) if dropout_p else pairs
        total = pairs.sum(3, keepdim=True)
        size = 2.0 * exact.detach().sum(3, keepdim=True) - total.detach()
        return torch.cat((kept @ values, total, total, size), 3), ref


def near_field(
    key: Tensor, value: Tensor, landmarks: Landmarks, options: CoresetOptions
) -> tuple[NearField, Tensor, Tensor]:
    """The near keys of heads, where each key (BH, Nk, D) is represented by its nearest landmark.

    The weight of a key is exp(-|x - y|^2 / 2 + g) for points x and y of the key and the landmark.

    Returns:
        The near field; the sums of the weights times [V, 1] over the keys of each landmark, (BH, m, Dv + 1), relative
        to exp(shift); and the shift (BH, 1).
    """
    with torch.no_grad():
        unused = (landmarks.half_norm >= _UNUSED) * landmarks.half_norm
        own = nearest(key * options.root, landmarks.key * options.root, unused)
    center = take(landmarks.key, own)
    # |x|^2 / 2 is part of both g and the distance.
    exponent = ((key - 0.5 * center) * center).sum(2) * options.root**2 + torch.bmm(key, landmarks.tilt.mT).squeeze(2)
    shift = exponent.detach().amax(1, keepdim=True)
    near = NearField(key, value, center, landmarks.bias.gather(1, own) + exponent, options)
    weight = ((exponent - shift) * LOG2_E).exp2().unsqueeze(2)
    return near, cluster_sums(own, torch.cat((value * weight, weight), 2), landmarks.key.shape[1]), shift
