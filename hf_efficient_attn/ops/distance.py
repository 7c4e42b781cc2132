"""A bias by distance, as of T5 or ALiBi: of some queries and keys, and its means over pairs of blocks."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from hf_efficient_attn.ops.exact import bias_between
from hf_efficient_attn.ops.index import integers


class Bias(NamedTuple):
    """A bias by distance, and where the tokens of the call are."""

    table: Tensor  # (BH, 2R + 1), the bias by distance (`hf_efficient_attn.ops.exact`)
    query_position: Tensor  # int64 (1 or BH, Nq)
    key_position: Tensor  # int64 (1 or BH, Nk), increasing

    def of_pairs(self) -> Tensor:
        """Return the bias of all pairs, (BH, Nq, Nk)."""
        return bias_between(self.table, self.query_position.unsqueeze(1), self.key_position.unsqueeze(1))[:, 0]

    def expanded(self, batch_heads: int, dtype: torch.dtype) -> "Bias":
        """Return the bias with positions (BH, N) of every head, and a table of another dtype."""
        positions = (x.expand(batch_heads, -1) for x in (self.query_position, self.key_position))  # (BH, N) each
        return Bias(self.table.to(dtype), *positions)

    def distances(self, size: int, count: int) -> Tensor:
        """Return the distances between the middles of `count` blocks of `size` queries and of keys: (1 or BH, T, T)."""
        rank = integers(count, self.table.device) * size + size // 2
        # (1 or BH, T) each
        query, key = (x[:, rank.clamp(max=x.shape[1] - 1)] for x in (self.query_position, self.key_position))
        distance: Tensor = key.unsqueeze(1) - query.unsqueeze(2)  # (1 or BH, T, T)
        return distance


def pair_means(terms: Tensor, distance: Tensor, size: int) -> Tensor:
    """Compute the means of a function of the distance over all pairs of two blocks of `size` positions: (BH, T, S).

    `terms`, (BH, 2E + 1), are the function at the distances -E to E. `distance`, int64 (1 or BH, T, S), is the one
    between the middles of the blocks, at most E - size.
    """
    # The mean of `size` neighbors, taken twice. Its first entry belongs to blocks at the distance size - 1 - E.
    means = avg_pool1d(avg_pool1d(terms, size, 1), size, 1)  # (BH, 2E + 3 - 2 size)
    index = (distance + terms.shape[1] // 2 - size + 1).expand(len(terms), -1, -1)  # (BH, T, S)
    return means.gather(1, index.flatten(1)).view_as(index)
