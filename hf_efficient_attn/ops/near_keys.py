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
from hf_efficient_attn.ops.coreset import largest_of_rows, regularized_solve
from hf_efficient_attn.ops.precision import LOG2_E

if TYPE_CHECKING:
    from hf_efficient_attn.ops.weighted_coreset import Landmarks

NUM_NEIGHBORS = 4
# What landmarks count for a near key is at most about 1 relative to the largest term of its query's sum. More would be
# due to logits that float32 cannot represent. Exponents of two for near keys are limited for the same reason.
MAX_COUNTED, MAX_EXPONENT = 4.0, 30.0


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
    scores = (key[:, index] * query.unsqueeze(2)).sum(3)
    return (scores - lse.unsqueeze(2)).exp().sum(2).mean(1)


class KeyWeights(NamedTuple):
    """Weights of keys on a few landmarks, relative to exp(shift).

    Attributes:
        index: int64 (BH, Nk, nn), the landmarks.
        weight: (BH, Nk, nn).
        num_landmarks: m.
    """

    index: Tensor
    weight: Tensor
    num_landmarks: int

    def sums(self, values: Tensor) -> Tensor:
        """The weighted sums of values (BH, Nk, F) for each landmark: (BH, m, F)."""
        batch_heads, m = len(values), self.num_landmarks
        first = (torch.arange(batch_heads, device=values.device) * m)[:, None, None]
        terms = (self.weight.unsqueeze(3) * values.unsqueeze(2)).flatten(0, 2)
        return values.new_zeros(batch_heads * m, values.shape[2]).index_add(0, (self.index + first).flatten(), terms).unflatten(0, (batch_heads, m))


def weigh_keys(key: Tensor, root: float, landmarks: "Landmarks", ridge: float) -> tuple[KeyWeights, Tensor]:
    """The weights of keys (BH, Nk, D) on their landmarks, and the shift (BH, 1, 1)."""
    points, centers = key * root, landmarks.points.to(key.dtype)
    half_norm, m = 0.5 * points.square().sum(2, keepdim=True), centers.shape[1]
    count = min(NUM_NEIGHBORS, m)
    closeness = torch.baddbmm(-0.5 * centers.square().sum(2).unsqueeze(1), points, centers.mT)
    own = largest_of_rows(closeness.detach(), in_place=False)[1]
    kernel = landmarks.kernel
    neighbors = kernel.detach().topk(count, 2).indices  # (BH, m, nn)
    heads = torch.arange(len(key), device=key.device).view(-1, 1, 1, 1)
    system = kernel[heads, neighbors.unsqueeze(3), neighbors.unsqueeze(2)]
    inverse = regularized_solve(system, None, ridge)
    index = take(neighbors, own)
    near = (closeness.gather(2, index) - half_norm).clamp(max=0.0).exp()
    g = half_norm + key @ landmarks.tilt.mT
    shift = g.detach().amax(1, keepdim=True)
    weight = (take(inverse.flatten(2), own).unflatten(2, (count, count)) @ near.unsqueeze(3)).squeeze(3)
    return KeyWeights(index, weight * (g - shift).exp(), m), shift


class NearField(NamedTuple):
    """Near keys of a few heads, and what landmarks count for them.

    Attributes:
        key: centered, (BH, Nk, D).
        value: (BH, Nk, Dv).
        weights: of all keys.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight from the numerator.
    """

    key: Tensor
    value: Tensor
    weights: KeyWeights
    scale: float
    dropout_p: float

    def sums(self, query: Tensor, features: Tensor, ref: Tensor, index: Tensor) -> Tensor:
        """What near keys add to the sums of queries, without what landmarks count for them.

        Args:
            query: (BH, T, M, D), in blocks.
            features: (BH, T, M, m), what landmarks with a weight of 1 count for each query, relative to exp(ref).
            ref: (BH, T, M, 1).
            index: int64 (T, w), the near keys of each block.

        Returns:
            (BH, T, M, Dv + 3), numerators, denominator, the denominator again, and the sum of the sizes of its terms;
            dropout acts on the numerators only.
        """
        index = index.expand(len(self.key), -1, -1)
        keys, values = take(self.key, index), take(self.value, index)
        own, weight = take(self.weights.index, index).flatten(2), take(self.weights.weight, index).unsqueeze(2)
        counted = features.gather(3, own.unsqueeze(2).expand(-1, -1, features.shape[2], -1))
        counted = (counted.unflatten(3, weight.shape[3:]) * weight).sum(4).clamp(-MAX_COUNTED, MAX_COUNTED)
        exact = ((self.scale * query @ keys.mT - ref) * LOG2_E).clamp(max=MAX_EXPONENT).exp2()
        pairs = exact - counted
        kept = dropout(pairs, self.dropout_p) if self.dropout_p else pairs
        total, size = pairs.sum(3, keepdim=True), (exact + counted.abs()).detach().sum(3, keepdim=True)
        return torch.cat((kept @ values, total, total, size), 3)
