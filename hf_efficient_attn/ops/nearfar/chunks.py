"""Clusters of the keys of finished chunks: what the causal form of `nearfar` knows of the past.

The tokens are cut into chunks of one block, of 4 blocks, of 16 blocks, and so on: a level for each size, as in an
H-matrix (Hackbusch 1999). The keys of a chunk are halved until clusters have `leaf` keys, by their scores for earlier
queries. A cluster has a landmark: a key, and the log weight and the mean value that are right for the mean query of the
last block of the chunk. Nothing of a chunk depends on later tokens, so what is known of it never changes.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends.devices import accumulation_dtype, coarse_dtype
from hf_efficient_attn.ops.index import constant, take
from hf_efficient_attn.ops.nearfar.groups import directions, halve_groups

# A chunk is as long as so many chunks of the level before it.
BASE = 4
# On the first levels clusters have `leaf` keys, and on each later one twice as many, so that what a query sees grows
# with the square root of the length.
_EQUAL_LEVELS = 4
# The keys of a chunk are divided by the norm of its first block, or by this if the norm is smaller.
_LEAST_SIZE = 1e-2
# A landmark's key is this share of the mean of its keys as the mean query weights them, and else of their plain mean.
WEIGHTED = 0.25
# What a landmark may miss is computed from a standard deviation of the scores of its keys that is clamped to these
# limits.
LEAST_SPREAD = 1e-3
LARGEST_SPREAD = 6.0
# The margin grows by this per standard deviation, because later queries may differ more than the queries of the chunk.
GROWTH = 2.0


class CausalNearFarOptions(NamedTuple):
    """Options of `causal_nearfar_attention`."""

    block_size: int  # tokens of a block, a power of two times `leaf`
    leaf: int  # keys of a cluster of the smallest chunks
    scale: float
    dropout_p: float = 0.0
    with_lse: bool = False  # whether to return the lse as well (`hf_efficient_attn.ops.attend.output_of`)
    first_query: int = 0  # outputs of queries before this one may be left out


def split_columns(columns: int, scale: float, dropout_p: float = 0.0, with_lse: bool = False) -> CausalNearFarOptions:
    """Choose sizes for a budget of keys per query: a block for half of it, in at most four clusters.

    Sizes are rounded up, so that the window of two blocks has at least as many keys as the budget.
    """
    leaf = max(1, (columns + 7) // 8)
    clusters = 1 << min(2, (max(1, columns - 1) // 2).bit_length())
    return CausalNearFarOptions(leaf * clusters, leaf, scale, dropout_p, with_lse)


class Level(NamedTuple):
    """Chunks of one size."""

    chunk: int  # tokens of a chunk
    leaf: int  # keys of a cluster


def levels_of(length: int, options: CausalNearFarOptions) -> tuple[Level, ...]:
    """Return the levels of which queries of a sequence see chunks."""
    levels: list[Level] = []
    while options.block_size * (BASE ** len(levels) + 1) < length:
        levels.append(level_at(len(levels), options))
    return tuple(levels)


@constant
def level_sizes(levels: tuple[Level, ...], device: torch.device) -> Tensor:
    """Return the sizes of chunks and clusters as a tensor, int32 (E, 2)."""
    return torch.tensor(levels, dtype=torch.int32, device=device)


def level_at(index: int, options: CausalNearFarOptions) -> Level:
    """Return a level by its number. Level 0 has the smallest chunks."""
    return Level(options.block_size * BASE**index, options.leaf << max(0, index + 1 - _EQUAL_LEVELS))


class Columns(NamedTuple):
    """M landmarks, with the margins of what they may miss."""

    center: Tensor  # (BH, M, D), their keys
    bias: Tensor  # (BH, M, 1), the logs of their weights times their margins
    mean: Tensor  # (BH, M, Dv + 1), their values divided by their margins, and the inverses of their margins


class Clusters(NamedTuple):
    """M clusters of equal size, of one level after another, each in the order of its chunks."""

    key: Tensor  # (BH, M, leaf, D)
    value: Tensor  # (BH, M, leaf, Dv)
    columns: Columns  # their landmarks


class QueryBlocks(NamedTuple):
    """What landmarks take from the queries of blocks."""

    mean: Tensor  # (BH, T, D), the mean query of each block
    size: Tensor  # (BH, T, D), the root of the mean of the squares of its queries


def query_blocks(query: Tensor, block_size: int, scale: float) -> QueryBlocks:
    """Return the means of the blocks of queries (BH, N, D), times the scale, that have ended."""
    dtype = accumulation_dtype(query.dtype)
    blocks = query[:, : query.shape[1] // block_size * block_size].unflatten(1, (-1, block_size))
    norm = torch.linalg.vector_norm(blocks.detach(), dim=2, dtype=dtype)  # (BH, T, D)
    return QueryBlocks(blocks.mean(2, dtype=dtype) * scale, norm * (abs(scale) * block_size**-0.5))


@torch.no_grad()
def cluster_index(query: Tensor, key: Tensor, levels: tuple[Level, ...]) -> Tensor:
    """Split the keys of the chunks of each level into clusters of keys with similar scores for earlier queries.

    Keys (BH, N, D) are compared along the directions in which evenly spaced queries of the first chunk of a level
    differ most. A chunk takes the last of these chunks that has ended when it ends.

    Returns:
        int32 or int64 (BH, S), positions in the sequence: those of one cluster after another, of one level after
        another, as `members_of` returns them.
    """
    batch_heads, length, _ = key.shape
    block = levels[0].chunk
    some = torch.stack([query[:, : level.chunk : level.chunk // block] for level in levels], 1)  # (BH, E, block, D)
    some = some.to(accumulation_dtype(key.dtype))
    factor = directions((some - some.mean(2, keepdim=True)).flatten(0, 1))  # (BH E, D, F)
    # Fourth powers of variances must not overflow. The sizes of later keys must not change what comes before them.
    blocks = key[:, : length // block * block].unflatten(1, (-1, block))
    size = torch.linalg.vector_norm(blocks, dim=(2, 3), dtype=factor.dtype).clamp(min=_LEAST_SIZE)  # (BH, T)
    key = key.to(coarse_dtype(key))
    size = size.to(key.dtype)[..., None, None]
    factor = factor.to(key.dtype).unflatten(0, (batch_heads, -1))  # (BH, E, D, F)
    points = []
    for chunk, _ in levels:
        count = length // chunk
        last = _last_ended(chunk, count, levels, key.device)  # (n,)
        own = factor[:, last] / size[:, :: chunk // block][:, :count]  # (BH, n, D, F)
        chunks = key[:, : count * chunk].unflatten(1, (count, chunk))
        points.append((chunks @ own).flatten(1, 2))  # (BH, n chunk, F)
    return _halved_chunks(torch.cat(points, 1), length, levels)


def _halved_chunks(points: Tensor, length: int, levels: tuple[Level, ...]) -> Tensor:
    """Halve the chunks of all levels, whose points are (BH, S, F): the result of `cluster_index`."""
    batch_heads, total, _ = points.shape
    dtype = torch.int32 if batch_heads * total < 2**31 else torch.int64  # fewer bytes on the way
    places = torch.arange(batch_heads * total, dtype=dtype, device=points.device).view(batch_heads, total)
    points = points.flatten(0, 1)
    begins = list(itertools.accumulate((length // chunk * chunk for chunk, _ in levels), initial=0))
    # The groups of the level with the largest chunks come first. No later ones have larger clusters.
    order = places[:0].view(0, 1)
    found = []
    left = waiting = len(levels)
    while left:
        if waiting and (not len(order) or levels[waiting - 1].chunk == order.shape[1]):
            waiting -= 1
            own = places[:, begins[waiting] : begins[waiting + 1]].reshape(-1, levels[waiting].chunk)
            order = torch.cat((order, own)) if len(order) else own
        while left > waiting and levels[left - 1].leaf == order.shape[1]:
            left -= 1
            count = batch_heads * (begins[left + 1] - begins[left]) // order.shape[1]
            own = order[:count].view(batch_heads, -1)
            found.append(own - begins[left] if left else own)
            order = order[count:]
        if len(order):
            order = halve_groups(points, order)
    return torch.cat(found[::-1], 1) % total


def members_of(index: Tensor, length: int, levels: tuple[Level, ...]) -> list[Tensor]:
    """Split the result (BH, S) of `cluster_index`: the keys of the clusters of each level, int64 (BH, M, leaf)."""
    parts = index.long().split([length // chunk * chunk for chunk, _ in levels], 1)
    return [x.unflatten(1, (-1, leaf)) for x, (_, leaf) in zip(parts, levels, strict=True)]


@constant
def _last_ended(chunk: int, count: int, levels: tuple[Level, ...], device: torch.device) -> Tensor:
    """Return the last level whose first chunk has ended when each of `count` chunks ends, int64 (count,)."""
    ends = torch.arange(1, count + 1, device=device) * chunk
    return torch.searchsorted(torch.tensor([level.chunk for level in levels], device=device), ends, right=True) - 1


@constant
def _last_blocks(length: int, levels: tuple[Level, ...], block_size: int, device: torch.device) -> Tensor:
    """Return the last block of the chunk of each cluster of some levels, int64 (M,)."""
    ends = (torch.arange(chunk, length + 1, chunk, device=device) for chunk, _ in levels)
    last = [end.repeat_interleave(chunk // leaf) for end, (chunk, leaf) in zip(ends, levels, strict=True)]
    return torch.cat(last).div(block_size, rounding_mode="floor") - 1


def make_clusters(
    key: Tensor, value: Tensor, levels: tuple[Level, ...], index: Sequence[Tensor], blocks: QueryBlocks, block_size: int
) -> Clusters:
    """Make landmarks for the clusters, int64 (BH, M, leaf) of each of some levels, whose clusters have the same size.

    Keys are (BH, N, D) and values (BH, N, Dv). The means of blocks of queries are in the accumulation dtype.
    """
    members = torch.cat(list(index), 1)  # (BH, M, leaf)
    given = take(key, members), take(value, members)  # (BH, M, leaf, .)
    keys, values = (x.to(blocks.mean.dtype) for x in given)
    of_block = _last_blocks(key.shape[1], levels, block_size, key.device)
    last, size = (x[:, of_block] for x in blocks)  # (BH, M, D)
    # `var` takes twenty times as long on a CPU.
    variance = (keys.detach() - keys.detach().mean(2, keepdim=True)).square_().mean(2)  # (BH, M, D)
    score = (keys @ last.unsqueeze(3)).squeeze(3)  # (BH, M, leaf)
    score = score - score.mean(2, keepdim=True)
    log = score.logsumexp(2, keepdim=True)  # (BH, M, 1)
    weight = (score - log).exp()  # (BH, M, leaf)
    share = torch.lerp(torch.full_like(weight, 1.0 / weight.shape[2]), weight, WEIGHTED)
    center, mean = ((x.unsqueeze(2) @ y).squeeze(2) for x, y in ((share, keys), (weight, values)))
    log_weight = log.squeeze(2) - WEIGHTED * (weight * score).sum(2)
    margin = _margin((variance * size.square()).sum(2))
    inverse = (-margin).exp().unsqueeze(2)  # (BH, M, 1)
    columns = Columns(center, (log_weight + margin).unsqueeze(2), torch.cat((mean * inverse, inverse), 2))
    return Clusters(*given, columns)


def _margin(variance: Tensor) -> Tensor:
    """Compute the log of about how much of a cluster's weight its landmark misses."""
    spread = variance.sqrt().clamp(LEAST_SPREAD, LARGEST_SPREAD)
    return spread.log() + GROWTH * spread


def landmarks_naive(
    query: Tensor, key: Tensor, value: Tensor, level: Level, index: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the landmarks of a head in the readable form, for clusters int64 (M, leaf) of its keys (N, D).

    Returns:
        Their keys (M, D), log weights (M,), values (M, Dv) and margins (M,).
    """
    found = []
    for members in index:
        keys = key[members]  # (leaf, D)
        start = members[0] // level.chunk * level.chunk
        queries = query[start : start + level.chunk][-block_size:]
        last = queries.mean(0)  # (D,)
        weight = (keys @ last).softmax(0)
        center = torch.lerp(keys.mean(0), weight @ keys, WEIGHTED)
        log_weight = ((keys - center) @ last).logsumexp(0)
        variance = ((keys - keys.mean(0)).square() @ queries.square().mean(0)).mean()
        found.append((center, log_weight, weight @ value[members], _margin(variance)))
    center, log_weight, mean, margin = (torch.stack(x) for x in zip(*found, strict=True))
    return center, log_weight, mean, margin
