"""The keys near each query, which it attends to exactly next to weighted landmarks for all keys.

They help where attention is local, which the exact rows of some queries tell for each head. Elsewhere more landmarks
help as much. What landmarks count for near keys is subtracted. For this each key has weights on only
`NUM_NEIGHBORS` landmarks: the nearest one and those nearest to that.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from hf_efficient_attn.ops.blocks import ceil_div, take
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.coreset import nearest
from hf_efficient_attn.ops.precision import LOG2_E

if TYPE_CHECKING:
    from hf_efficient_attn.ops.weighted_coreset import Landmarks

# Largest exponents of two of near keys, and of what landmarks count for them, relative to the sum of a query. The latter
# is at most about 1. More would be due to logits that float32 cannot represent.
MAX_EXPONENT, MAX_COUNTED = 30.0, 2.0


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


def near_index_of(q_len: int, width: int, device: torch.device) -> Tensor:
    return constant(near_index, q_len, width, device=device)


def near_share_of_rows(query: Tensor, lse: Tensor, key: Tensor, position: Tensor, width: int) -> Tensor:
    """The mean share of the attention that near keys hold, (BH,), of queries (BH, P, D) times the scale at positions."""
    index = near_index_of(key.shape[1], width, key.device)[position // near_block_q(width)]
    scores = (take(key, index.expand(len(key), -1, -1)) * query.unsqueeze(2)).sum(3)
    return (scores - lse.unsqueeze(2)).exp().sum(2).mean(1)


class KeyWeights(NamedTuple):
    """The weight of each key on its nearest landmark.

    Attributes:
        landmark: int64 (BH, Nk).
        log_weight: (BH, Nk), without `shift`.
        shift: (BH, 1).
    """

    landmark: Tensor
    log_weight: Tensor
    shift: Tensor


def weigh_keys(key: Tensor, root: float, landmarks: "Landmarks") -> KeyWeights:
    """The weights of keys (BH, Nk, D), exp(-|x - y|^2 / 2 + g) for points x and y of the key and of its landmark."""
    centers, points = landmarks.points.to(key.dtype), key * root
    own = nearest(points.detach(), centers.detach())
    center = take(centers, own)
    # |x|^2 / 2 is part of both g and the distance.
    exponent = ((points - 0.5 * center) * center).sum(2) + (key @ landmarks.tilt.mT).squeeze(2)
    shift = exponent.detach().amax(1, keepdim=True)
    return KeyWeights(own, exponent - shift, shift)


class NearField(NamedTuple):
    """Near keys of a few heads, and what landmarks count for them.

    Attributes:
        key: centered keys, (BH, Nk, D).
        value: (BH, Nk, Dv).
        landmark: the landmark of each key, (BH, Nk, D).
        bias: what is added to its score, with the weight of the key: (BH, Nk).
        scale: factor of the scores.
        dropout_p: probability of dropping a weight from the numerator.
    """

    key: Tensor
    value: Tensor
    landmark: Tensor
    bias: Tensor
    scale: float
    dropout_p: float

    def sums(self, query: Tensor, ref: Tensor, index: Tensor) -> Tensor:
        """What near keys add to the sums of queries, without what landmarks count for them.

        Args:
            query: (BH, T, M, D), in blocks.
            ref: (BH, T, M, 1). The sums are relative to exp(ref).
            index: int64 (T, w), the near keys of each block.

        Returns:
            (BH, T, M, Dv + 3), numerators, denominator, the denominator again, and the sum of the sizes of its terms;
            dropout acts on the numerators only.
        """
        index = index.expand(len(self.key), -1, -1)
        query, ref = query * (self.scale * LOG2_E), ref * LOG2_E
        exact, counted = (query @ take(x, index).mT - ref for x in (self.key, self.landmark))
        exact = exact.clamp(max=MAX_EXPONENT).exp2()
        bias = take(self.bias.unsqueeze(2), index).mT * LOG2_E
        pairs = exact - (counted + bias).clamp(max=MAX_COUNTED).exp2()
        kept = dropout(pairs, self.dropout_p) if self.dropout_p else pairs
        total = pairs.sum(3, keepdim=True)
        size = 2.0 * exact.detach().sum(3, keepdim=True) - total.detach()
        return torch.cat((kept @ take(self.value, index), total, total, size), 3)
