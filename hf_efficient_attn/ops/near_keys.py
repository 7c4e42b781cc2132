"""The keys near each query, which it attends to exactly next to weighted landmarks for all keys.

They help where attention is local, which the exact rows of some queries tell for each head. Elsewhere more landmarks
help as much. What landmarks count for near keys is subtracted. For this each key has weights on only
`NUM_NEIGHBORS` landmarks: the nearest one and those nearest to that.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from hf_efficient_attn.ops.coreset import nearest
from hf_efficient_attn.ops.coreset_landmarks import TEMPERATURE, CoresetOptions, Landmarks
from hf_efficient_attn.ops.partial import LOG2_E
from hf_efficient_attn.ops.random import constant
from hf_efficient_attn.ops.tokens import ceil_div, pad_to_blocks, take

# Largest exponent of two of what landmarks count for a near key, relative to the sum of the query or to the near key
# that counts most. It is at most about 0. More would be due to logits that float32 cannot represent.
MAX_COUNTED = 2.0


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


def _kept_index(q_len: int, width: int, device: torch.device) -> Tensor:
    return constant(near_index, q_len, width, device=device)


def near_share_of_rows(query: Tensor, lse: Tensor, key: Tensor, position: Tensor, width: int) -> Tensor:
    """The mean share of near keys in the attention, (BH,), of queries (BH, P, D), times the scale, at positions."""
    index = _kept_index(key.shape[1], width, key.device)[position // near_block_q(width)]
    scores = (take(key, index.expand(len(key), -1, -1)) * query.unsqueeze(2)).sum(3)
    return (scores - lse.unsqueeze(2)).exp().sum(2).mean(1)


def near_field(
    key: Tensor, value: Tensor, landmarks: Landmarks, options: CoresetOptions
) -> tuple["NearField", Tensor, Tensor, Tensor]:
    """The near keys of heads, where each key (BH, Nk, D) is represented by its nearest landmark.

    The weight of a key is exp(-|x - y|^2 / 2 + g) for points x and y of the key and the landmark.

    Returns:
        The near field; the landmark of each key, int64 (BH, Nk); its weight (BH, Nk) relative to exp(shift); and the
        shift (BH, 1).
    """
    root = TEMPERATURE * abs(options.scale) ** 0.5
    points, centers = key * root, landmarks.points.to(key.dtype)
    own = nearest(points.detach(), centers.detach())
    center = take(centers, own)
    # |x|^2 / 2 is part of both g and the distance.
    exponent = ((points - 0.5 * center) * center).sum(2) + torch.bmm(key, landmarks.tilt.mT).squeeze(2)
    shift = exponent.detach().amax(1, keepdim=True)
    bias = landmarks.bias.gather(1, own) + exponent
    near = NearField(key, value, take(landmarks.key, own), bias, options)
    return near, own, ((exponent - shift) * LOG2_E).exp2(), shift


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
        sums, ref = (
            x.flatten(1, 2)[:, :q_len] for x in self._sums(blocks, least, _kept_index(q_len, width, query.device))
        )
        return sums, ref

    def sums_of_rows(self, query: Tensor, position: Tensor, lse: Tensor) -> Tensor:
        """The same of queries (BH, P, D) at positions, (BH, P, Dv + 1), relative to the exponential of their lse."""
        width = self.options.block_size
        index = _kept_index(self.key.shape[1], width, query.device)[position // near_block_q(width)]
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
        index, dropout_p = index.expand(len(self.key), -1, -1), self.options.dropout_p
        exact, counted = (query @ take(x * self.options.scale, index).mT for x in (self.key, self.landmark))
        ref = torch.maximum(least, exact.detach().amax(3, keepdim=True))
        exact = ((exact - ref) * LOG2_E).exp2()
        counted = (counted + take(self.bias.unsqueeze(2), index).mT - ref) * LOG2_E
        pairs = exact - counted.clamp(max=MAX_COUNTED).exp2()
        kept = dropout(pairs, dropout_p) if dropout_p else pairs
        total = pairs.sum(3, keepdim=True)
        size = 2.0 * exact.detach().sum(3, keepdim=True) - total.detach()
        return torch.cat((kept @ take(self.value, index), total, total, size), 3), ref
