"""Sizes, limits and numbers of `hf_efficient_attn.ops.coreset_blocks`."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.coreset_landmarks import CoresetOptions, Inputs

# t^2 of `weighted_coreset`: a power of two, so that half precision holds multiples of landmarks.
SQUARE = 0.5
RIDGE = 1e-3
# Smallest and largest exponent of a landmark in the row of a probe, relative to the sum over all keys.
LEAST_LOGIT, MAX_LOGIT = -69.0, 20.0
# A denominator must be more than the first multiple of the sum over the means of the clusters, each with the number of
# keys it represents, and less than the second multiple of that and the near keys. The exact one is a little larger.
SUM_RANGE = (0.5, 2.0)
# In the comparison with the latter, the terms of the denominator also count with the largest weights of their landmarks
# divided by this: weights that are that large are what remains of sums that cancel, and no sum with them is an average.
# The second number is for float16, which holds no larger multiples.
SUM_UNIT, SUM_UNIT_FLOAT16 = 2.0**14, 2.0**12
# And a denominator must be more than this share of the sum of exponentials.
LEAST_TOTAL, LEAST_TOTAL_FLOAT16 = 1e-6, 1e-4
# Largest weight of the sum of a row, relative to the sum of the landmark.
MAX_WEIGHT = 1e28


class Plan(NamedTuple):
    """Sizes and numbers of a call.

    Attributes:
        num_landmarks: m, also the number of keys and of queries of a block.
        num_keys: Nk.
        num_blocks: T.
        by_block: whether the queries of each block have near keys.
        has_padding: whether some keys of the blocks are padding.
        has_steps: whether landmarks are means of clusters, not keys.
        scale: factor of the scores.
        unit: the number in the further dimensions of the queries. Further dimensions of the keys hold biases.
        largest: the negative of this excludes a key, as a bias.
        dims: head_dim and value_dim.
        padded: both with further dimensions.
    """

    num_landmarks: int
    num_keys: int
    num_blocks: int
    by_block: bool
    has_padding: bool
    has_steps: bool
    scale: float
    unit: float
    largest: float
    dims: tuple[int, int]
    padded: tuple[int, int]

    @property
    def half(self) -> float:
        """The factor between a landmark and its row, whose scores with keys have the scale of K."""
        return math.copysign(SQUARE, self.scale)

    @property
    def max_weight(self) -> float:
        """Largest weight of the sum of a row, relative to the sum of the landmark."""
        return min(MAX_WEIGHT, self.largest)

    @property
    def twice(self) -> float:
        """The scale of products of two rows, of which one is that of a landmark."""
        return abs(self.scale) / SQUARE


class Given(NamedTuple):
    """Tensors without a gradient: positions and numbers.

    Attributes:
        num_keys: of each sequence, int64 (BH, 1), or one number for all.
        probe: int64 (BH or 1, P), which queries are probes, or None.
        position: int64 (BH or 1, C), which keys are candidates.
        valid: bool (BH, C), which candidates exist; None: all.
        numbers: (BH, C), Gumbel numbers, the same for all heads.
    """

    num_keys: Tensor | int
    probe: Tensor | None
    position: Tensor
    valid: Tensor | None
    numbers: Tensor


def has_near_keys(options: CoresetOptions, q_len: int, kv_len: int) -> bool:
    """Whether the heads have near keys on an accelerator: all of them, or none."""
    return options.block_size > 0 and options.near_share < 1.0 and q_len == kv_len


def make_plan(inputs: Inputs, options: CoresetOptions) -> Plan:
    """The sizes and numbers of a call."""
    num_landmarks, head_dim, value_dim = (
        options.num_landmarks + options.block_size,
        inputs.query.shape[2],
        inputs.value.shape[2],
    )
    # Further dimensions: three biases of a key; two sums of weights, that of near keys and a zero of a value.
    padded = head_dim + 3 + -(head_dim + 3) % 8, value_dim + 4 + -(value_dim + 4) % 8
    is_float16 = inputs.key.dtype == torch.float16
    return Plan(
        num_landmarks,
        inputs.key.shape[1],
        ceil_div(inputs.key.shape[1], num_landmarks),
        has_near_keys(options, inputs.query.shape[1], inputs.key.shape[1]),
        isinstance(inputs.num_keys, Tensor) or inputs.key.shape[1] % num_landmarks > 0,
        options.num_refinements > 0,
        options.scale,
        2.0 ** min(15, round(math.log2((32.0 if is_float16 else 1.0) / abs(options.scale)))),
        6e4 if is_float16 else 1e30,
        (head_dim, value_dim),
        padded,
    )


def filled(value: float, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A row of one number, (1, 1, size)."""
    return torch.full((1, 1, size), value, dtype=dtype, device=device)


def number(value: float, like: Tensor) -> Tensor:
    """A number, (1, 1, 1)."""
    return constant(filled, value, 1, like.dtype, device=like.device)
