"""Attention of queries to clusters that each has chosen on its own.

Pairs of a query and a cluster are sorted by cluster, and computed for the queries of a cluster together.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from hf_efficient_attn.ops.attend import BlockKeys, Partial, attend, block_attention, safe_row_max
from hf_efficient_attn.ops.backends.devices import at_most
from hf_efficient_attn.ops.index import integers, take
from hf_efficient_attn.ops.nearfar.chunks import Clusters

# Queries of a cluster are computed so many at a time.
_QUERIES = 64


class Pairs(NamedTuple):
    """Queries, and clusters that they attend to exactly."""

    query: Tensor  # int64 (P,), the place of the query among the BH N queries of all heads
    cluster: Tensor  # int64 (P,), the place of the cluster among those of its head

    def of(self, start: int, count: int) -> "Pairs":
        """Return the pairs of `count` clusters, whose places are counted from `start` on."""
        own = ((self.cluster >= start) & (self.cluster < start + count)).nonzero()[:, 0]
        return Pairs(self.query[own], self.cluster[own] - start)


def attend_to_pairs(query: Tensor, clusters: Clusters, pairs: Pairs, scale: float, dropout_p: float) -> Partial:
    """Compute attention of queries (BH, N, D) to the clusters that they have chosen, in the accumulation dtype."""
    batch_heads, length, _ = query.shape
    row, cluster = pairs
    cluster = row.div(length, rounding_mode="floor") * clusters.key.shape[1] + cluster
    (out, lse), place = _by_cluster(query.flatten(0, 1), clusters, row, cluster, scale, dropout_p)
    count = row.new_zeros(batch_heads * length).scatter_add_(0, row, torch.ones_like(row))
    order = row.argsort(stable=True)
    # The pairs of a query are one segment. Additions by index would be rounded differently in every run on a GPU.
    row, place = row[order], place[order]
    lse = lse[place]
    largest = torch.segment_reduce(lse.detach(), "max", lengths=count)
    ref = safe_row_max(largest.masked_fill(count == 0, -torch.inf))
    weight = (lse - ref[row]).exp()
    total = torch.segment_reduce(weight, "sum", lengths=count)
    empty = total <= 0.0
    total = total.masked_fill(empty, 1.0)
    share = (weight / total[row]).to(out.dtype)  # sums of outputs may be too large for float16, unlike their means
    means = embedding_bag(place, out, count.cumsum(0) - count, mode="sum", per_sample_weights=share)  # (BH N, Dv)
    lse = (total.log() + ref).masked_fill(empty, -torch.inf)
    return Partial(means.to(total.dtype).view(batch_heads, length, -1), lse.view(batch_heads, length))


def _by_cluster(
    query: Tensor, clusters: Clusters, row: Tensor, cluster: Tensor, scale: float, dropout_p: float
) -> tuple[Partial, Tensor]:
    """Compute attention for P pairs of a row of `query`, (BH N, D), and one of the BH M clusters.

    Returns:
        Partial of out (S, Dv) and lse (S,) for blocks of queries of one cluster, and the place of each pair in them.
    """
    keys, values = (x.flatten(0, 1) for x in (clusters.key, clusters.value))  # (BH M, leaf, .)
    ordered, order = cluster.sort(stable=True)
    count = row.new_zeros(len(keys)).scatter_add_(0, cluster, torch.ones_like(row))  # (BH M,)
    ends = (count + _QUERIES - 1).div(_QUERIES, rounding_mode="floor").cumsum(0)  # of the blocks of each cluster
    shift = (pad(ends[:-1], (1, 0)) * _QUERIES - count.cumsum(0) + count)[ordered]
    slot = integers(len(row), row.device) + shift  # (P,), by cluster
    blocks = at_most(ends[-1:], len(row) // _QUERIES + min(len(row), len(keys)))
    queries = row.new_zeros(blocks * _QUERIES).scatter_(0, slot, row[order])
    of_block = torch.searchsorted(ends, integers(blocks, row.device), right=True).clamp_(max=len(keys) - 1)
    rows = take(query[None], queries[None])  # (1, S, D)
    ranges = BlockKeys(_QUERIES, start=(of_block * keys.shape[1])[None], range_len=keys.shape[1])
    of_all = keys.flatten(0, 1)[None], values.flatten(0, 1)[None]  # (1, BH M leaf, .)
    part = block_attention(rows, *of_all, ranges, scale=scale, dropout_p=dropout_p)
    if part is None:
        own_key, own_value = (
            take(x.flatten(1)[None], of_block[None]).view(1, blocks, *x.shape[1:]) for x in (keys, values)
        )
        block = rows.view(1, blocks, _QUERIES, query.shape[1])
        part = attend(block, own_key, own_value, scale=scale, dropout_p=dropout_p)
    place = torch.empty_like(slot).scatter_(0, order, slot)
    return Partial(part.out.flatten(0, -2), part.lse.flatten()), place
