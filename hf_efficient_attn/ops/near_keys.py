"""The keys near each query, which it attends to exactly next to weighted landmarks for all keys.

They help where attention is local, which the exact rows of some queries tell for each head. Elsewhere more landmarks
help as much. What landmarks count for near keys is subtracted. For this each key has weights on only
`NUM_NEIGHBORS` landmarks: the nearest one and those nearest to that.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import ceil_div, pad_to_blocks, take
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.coreset import largest_of_rows, regularized_solve
from hf_efficient_attn.ops.partial import Partial, partial_attention

if TYPE_CHECKING:
    from hf_efficient_attn.ops.weighted_coreset import CoresetOptions, Landmarks

NUM_NEIGHBORS = 4
# Largest exponent of what near keys count in the row of a probe.
MAX_LOGIT = 20.0


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


def _indexes(q_len: int, width: int, device: torch.device) -> Tensor:
    return constant(near_index, q_len, width, device=device)


def near_share_of_rows(query: Tensor, lse: Tensor, key: Tensor, position: Tensor, width: int) -> Tensor:
    """The mean share of the attention that near keys hold, (BH,), of queries (BH, P, D) times the scale at positions."""
    index = _indexes(key.shape[1], width, key.device)[position // near_block_q(width)]
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
        landmark: (BH, m, D).
        bias: (BH, m), of the landmarks.
        options: of the call.
    """

    key: Tensor
    value: Tensor
    weights: KeyWeights
    landmark: Tensor
    bias: Tensor
    options: "CoresetOptions"

    def _keys(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values (BH, T, w (1 + nn), .) and bias of blocks with near keys (T, w).

        A near key counts 1. It is followed by its landmarks, which count as much as its weights, negative. Values have
        columns for the sums, the denominator, and the sizes of its terms, as in `weighted_coreset`.
        """
        shape = (len(self.key), *index.shape)
        index = index.expand(shape)
        keys, values = take(self.key, index), take(self.value, index)
        ones = torch.ones_like(values[..., :1])
        values = torch.cat((values, ones, ones), 3)
        own, weight = take(self.weights.index, index).flatten(2), take(self.weights.weight, index).flatten(2)
        key = torch.cat((keys, take(self.landmark, own)), 2)
        size = weight.detach().abs().clamp(min=1e-35)
        bias = take(self.bias.unsqueeze(2), own).squeeze(3) + size.log()
        values = torch.cat((values, -(weight / size).unsqueeze(3) * values.repeat_interleave(NUM_NEIGHBORS, 2)), 2)
        values = torch.cat((values, values[..., -1:].detach().abs()), 3)
        return key, values, torch.cat((torch.zeros_like(keys[..., 0]), bias), 2).unsqueeze(2)

    def partial(self, query: Tensor) -> Partial:
        """What near keys add to the sums of queries (BH, Nq, D), without what landmarks count for them."""
        from hf_efficient_attn.ops.weighted_coreset import attend_in_numerator

        q_len, width = query.shape[1], self.options.block_size
        blocks = pad_to_blocks(query, near_block_q(width))
        out, lse = attend_in_numerator(blocks, *self._keys(_indexes(q_len, width, query.device)), self.options)
        return Partial(out.flatten(1, 2)[:, None, :q_len], lse.flatten(1, 2)[:, None, :q_len])

    def sums_of_rows(self, query: Tensor, position: Tensor, lse: Tensor) -> Tensor:
        """The same for queries (BH, P, D) at some positions, relative to exp(lse), (BH, P, Dv + 1)."""
        width = self.options.block_size
        index = _indexes(self.key.shape[1], width, query.device)[position // near_block_q(width)]
        out, own = partial_attention(query.unsqueeze(2), *self._keys(index), scale=self.options.scale)
        return out[:, :, 0, :-2] * (own - lse.unsqueeze(2)).clamp(max=MAX_LOGIT).exp()
