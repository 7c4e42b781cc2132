"""A bias by distance, as of T5 or ALiBi, of some queries and keys."""

from typing import NamedTuple

from torch import Tensor

from hf_efficient_attn.ops.exact import bias_between
from hf_efficient_attn.ops.index import integers

# The most parts of the sequence with a mean bias of their own.
NUM_PARTS = 256


class Bias(NamedTuple):
    """A bias by distance, and where the tokens of the call are.

    Attributes:
        table: (BH, 2R + 1), the bias by distance (`hf_efficient_attn.ops.exact`).
        query_position: int64 (1 or BH, Nq).
        key_position: int64 (1 or BH, Nk), increasing.
    """

    table: Tensor
    query_position: Tensor
    key_position: Tensor

    def of_pairs(self) -> Tensor:
        """Return the bias of all pairs, (BH, Nq, Nk)."""
        return bias_between(self.table, self.query_position.unsqueeze(1), self.key_position.unsqueeze(1))[:, 0]

    def distances(self, size: int, count: int) -> Tensor:
        """Return the distances between the middles of `count` blocks of `size` queries and of keys: (1 or BH, T, T)."""
        rank = integers(count, self.table.device) * size + size // 2
        query, key = (x[:, rank.clamp(max=x.shape[1] - 1)] for x in self[1:])
        distance: Tensor = key.unsqueeze(1) - query.unsqueeze(2)
        return distance
