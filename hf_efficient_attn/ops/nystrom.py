"""Attention to a coreset of keys with Nystrom weights, for accelerators: in few launches for all heads.

`hf_efficient_attn.methods.wildcat` states the formulas. What is different here:

- Keys and values are centered before the sums over all keys: the keys at their mean, the values at the middle of the
  range of each feature, so that the softmax adds no constant to either.
- A weight is a number in the accumulation dtype times the exponential of a bias. The bias of a key is the sum of two
  numbers, each in a further dimension of the keys, where the queries have the inverse of the scale.
- Sums of weights alone are in units of `UNIT`. So they are as large as the sums of values or larger, and the size of a
  key's weights is that of its sums of weights, unless these cancel each other.
- The kernel matrix in float64 has an exact unit diagonal and a ridge far above its rounding, so that its decomposition
  does not fail.

`hf_efficient_attn.ops.nystrom_graph` has the gradient and the call.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, threshold

from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.export import is_compiling
from hf_efficient_attn.ops.fused_attention import fused_attention
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.pivots import pivots_in_two_draws

# The paper's constant of the temperature, 1 / W_0(1 / sqrt(1 + exp(2 W_0(2 / e^2) + 2))) with Lambert's function W_0.
RHO = 3.94582
# The temperature is that of logits of at least this size, so that it is finite for equal keys.
LEAST_LOGIT = 1e-3
# A denominator below this is rounding. The largest of its terms is about 1.
LEAST_DENOMINATOR = 1e-6
# The bias of an entry without a key. It is finite, because it becomes a number of that key.
NO_KEY = -1e30
# What a sum of weights is a multiple of.
UNIT = 2.0**30
# Into so many blocks the queries are divided, if they can be. A backward pass may process each by itself.
_BLOCKS = 64


class Options(NamedTuple):
    """How a coreset is made.

    Attributes:
        num_samples: m, the keys of a coreset.
        ridge: of the kernel matrix, whose diagonal is 1.
        scale: factor of the scores, not 0.
        masks_queries: whether the mask of the keys is also that of the queries.
    """

    num_samples: int
    ridge: float
    scale: float
    masks_queries: bool


class Given(NamedTuple):
    """What depends on masks and seeds.

    Attributes:
        position: of the candidates, int64 (BH, C). None: every (Nk / C)-th key.
        valid: bool (BH, C), which candidates exist, or None.
        mask: bool (BH, Nk), which keys exist, or None. The others are zero.
        numbers: Gumbel numbers (2, H, C).
    """

    position: Tensor | None
    valid: Tensor | None
    mask: Tensor | None
    numbers: Tensor


class Tokens(NamedTuple):
    """Keys and values around their centers.

    Attributes:
        mean: (BH, 1, D), of the keys.
        key: (BH, Nk, D), keys minus their mean.
        low: (BH, 1, Dv), the smallest value of each feature, in the dtype of the values.
        high: the largest one.
        middle: between both.
        bias: (BH, 1, 1, Nk), 0 or -inf, or None without a mask.
        num_keys: (BH, 1, 1), or None without a mask.
    """

    mean: Tensor
    key: Tensor
    low: Tensor
    high: Tensor
    middle: Tensor
    bias: Tensor | None
    num_keys: Tensor | None


class Temperature(NamedTuple):
    """Factor of the kernel's exponents, and where it comes from.

    Attributes:
        factor: beta / tau^2, (BH, 1, 1).
        query_norm: (BH, 1), the largest norm of a query.
        query_index: int64 (BH, 1), the query.
        key_norm: (BH, 1), the largest norm of a candidate.
        key_index: int64 (BH, 1), the candidate.
    """

    factor: Tensor
    query_norm: Tensor
    query_index: Tensor
    key_norm: Tensor
    key_index: Tensor


class Weights(NamedTuple):
    """Nystrom weights and how they are computed. Float64 except where noted.

    Attributes:
        pivot: int64 (BH, m), the candidates of the coreset.
        out: (BH, 1, m, Dv), means of all values by the kernel, in the accumulation dtype.
        lse: (BH, 1, m), the log of the sums of the kernel, in the accumulation dtype.
        share: (BH, m, 1), the sums, as parts of those of all keys of the coreset.
        kernel: (BH, m, m), with a ridge.
        lower: (BH, m, m), its Cholesky decomposition.
        solved: (BH, m, F), the weights applied to values and to `UNIT`, as multiples of exp(|k|^2 / 2).
        size: (BH, m, 1), the largest of them for each key.
    """

    pivot: Tensor
    out: Tensor
    lse: Tensor
    share: Tensor
    kernel: Tensor
    lower: Tensor
    solved: Tensor
    size: Tensor


class Coreset(NamedTuple):
    """A coreset, as the attention of the queries takes it, in the accumulation dtype.

    Attributes:
        key: (BH, m, D + 2 or more), centered keys, and the two parts of their bias.
        weighted: (BH, m, F), weights applied to values and to `UNIT`.
    """

    key: Tensor
    weighted: Tensor


class Saved(NamedTuple):
    """What the gradient needs besides query, key and value.

    Attributes:
        sums: (BH, T, Nq / T, F), of the attention to the coreset.
        lse: (BH, T, Nq / T), of the same.
    """

    tokens: Tokens
    temperature: Temperature
    weights: Weights
    coreset: Coreset
    sums: Tensor
    lse: Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, given: Given, options: Options) -> tuple[Tensor, Saved]:
    """Attention of all queries to a coreset of the keys.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        given: see there.
        options: see there.

    Returns:
        Output (BH, Nq, Dv), and what its gradient needs. The keys of its tokens are empty.
    """
    tokens, temperature, weights, coreset = _make_coreset(query, key, value, given, options)
    saved = _attend(query, coreset, options.scale)
    out = ratio(saved[0], tokens.middle)[0]
    if is_compiling():
        # In PyTorch 2.11, graphs lose the gradient of a result that two operators return, like `new_empty` and `clamp`.
        out = torch.clamp(out, tokens.low, tokens.high)
        out = out if out.dtype == value.dtype else out.to(value.dtype)
    else:
        out = torch.clamp(out, tokens.low, tokens.high, out=value.new_empty(out.shape))
    return out, Saved(tokens, temperature, weights, coreset, *saved)


def _make_coreset(
    query: Tensor, key: Tensor, value: Tensor, given: Given, options: Options
) -> tuple[Tokens, Temperature, Weights, Coreset]:
    tokens = center(key, value, given.mask)
    candidates = candidates_of(tokens.key, given)
    temperature, norm = _temperature(query, candidates, given.mask if options.masks_queries else None, options.scale)
    pivot, selected = pivots_in_two_draws(
        candidates, norm, temperature.factor, given.valid, given.numbers, options.num_samples
    )
    keys = rows_of(candidates, pivot)
    weights, half = _weigh(value, tokens, keys, pivot, temperature.factor, given, options)
    # Sums of exponentials differ by many orders of magnitude, so their size goes into the exponent of the query.
    log_size = weights.size.log()
    if selected is not None:
        log_size = log_size.masked_fill_(~selected.unsqueeze(2), NO_KEY)
    further = padding(key.shape[2], 2)
    rest = constant(zeros, further - 2, keys.dtype, device=key.device).expand(*keys.shape[:2], -1)
    augmented = keys.new_empty(*keys.shape[:2], keys.shape[2] + further)
    coreset = Coreset(
        torch.cat((keys, log_size, half, rest), 2, out=augmented),
        torch.div(weights.solved, weights.size, out=keys.new_empty(weights.solved.shape)),
    )
    return tokens._replace(key=key.new_empty(0)), temperature, weights, coreset


def center(key: Tensor, value: Tensor, mask: Tensor | None) -> Tokens:
    """Centered keys, and the ranges of the values."""
    dtype = accumulation_dtype(key.dtype)
    if mask is None:
        mean = key.mean(1, keepdim=True, dtype=dtype)
        low, high = torch.aminmax(value, dim=1, keepdim=True)
        return Tokens(mean, key - mean, low, high, torch.lerp(low, high, 0.5), None, None)
    num_keys = mask.sum(1)[:, None, None].to(dtype)
    mean = key.sum(1, keepdim=True, dtype=dtype) / num_keys.clamp(min=1)
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    low, high = ends_of(value, mask)
    low, high = (x.masked_fill(num_keys == 0, 0.0) for x in (low.amin(1, keepdim=True), high.amax(1, keepdim=True)))
    return Tokens(mean, key - mean, low, high, torch.lerp(low, high, 0.5), bias[:, None, None], num_keys)


def ends_of(value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The values, for their minimum over all keys, and for their maximum."""
    if mask is None:
        return value, value
    masked = ~mask.unsqueeze(2)
    return value.masked_fill(masked, torch.inf), value.masked_fill(masked, -torch.inf)


def candidates_of(key: Tensor, given: Given) -> Tensor:
    """The candidates among centered keys (BH, Nk, D), (BH, C, D); 0 where none exists."""
    if given.position is None:
        return key[:, :: key.shape[1] // given.numbers.shape[2]]
    candidates = rows_of(key, given.position)
    return candidates if given.valid is None else candidates.masked_fill_(~given.valid.unsqueeze(2), 0.0)


def rows_of(x: Tensor, index: Tensor) -> Tensor:
    """Gather tokens of (BH, N, D) by an index (BH, n), in one launch."""
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.shape[2]))


def _temperature(
    query: Tensor, candidates: Tensor, query_mask: Tensor | None, scale: float
) -> tuple[Temperature, Tensor]:
    """The temperature of queries (BH, Nq, D) and candidates (BH, C, D), and the norms of the candidates, (BH, C)."""
    norms = torch.linalg.vector_norm(query, dim=2, dtype=candidates.dtype)
    if query_mask is not None:
        norms = norms.masked_fill_(~query_mask, 0.0)
    norm = torch.linalg.vector_norm(candidates, dim=2)
    query_norm, query_index = norms.max(1, keepdim=True)
    key_norm, key_index = norm.max(1, keepdim=True)
    # x / R_K for x = beta R_Q / rho, and x^2 / (x R_K) for the least logit x R_K.
    zero, share = constant(zeros, 1, norm.dtype, device=norm.device), abs(scale) / RHO
    factor = torch.addcdiv(zero, query_norm, key_norm, value=share)
    factor = torch.fmin(factor, torch.addcmul(zero, query_norm, query_norm, value=share * abs(scale) / LEAST_LOGIT))
    return Temperature(factor.unsqueeze(2), query_norm, query_index, key_norm, key_index), norm


def _weigh(
    value: Tensor,
    tokens: Tokens,
    keys: Tensor,
    pivot: Tensor,
    factor: Tensor,
    given: Given,
    options: Options,
) -> tuple[Weights, Tensor]:
    """The weights, and the log of what those of each key are multiples of: -|k|^2 / 2, float64 (BH, m, 1)."""
    out, lse = all_sums(keys * factor, value, tokens)
    double = keys.double()
    kernel = double @ double.mT
    zero = constant(zeros, 1, torch.float64, device=keys.device)
    half = torch.addcmul(zero, kernel.diagonal(dim1=1, dim2=2).unsqueeze(2), factor, value=-0.5)
    kernel = torch.addcmul(half, kernel, factor).add_(half.mT).exp_()
    kernel.diagonal(dim1=1, dim2=2).add_(options.ridge)
    few = few_keys(tokens, options)
    level = lse if few is None else lse.masked_fill(few, 0.0)
    share = torch.add(level.mT, half).softmax(1)  # up to a factor of all
    lower, _ = torch.linalg.cholesky_ex(kernel)
    solved = torch.cholesky_solve(moments(out) * share, lower)
    if few is not None and given.position is not None:
        # With n keys in a coreset for more than n, each is its own coreset.
        own = rows_of(value, given.position.gather(1, pivot)) - tokens.middle.to(out.dtype)
        solved, half = torch.where(few, moments(own.unsqueeze(1)), solved), half.masked_fill(few, 0.0)
    size = torch.linalg.vector_norm(solved, torch.inf, 2, keepdim=True)
    size = size.clamp_(min=torch.finfo(torch.float64).tiny)
    return Weights(pivot, out, lse, share, kernel, lower, solved, size), half


def few_keys(tokens: Tokens, options: Options) -> Tensor | None:
    """Which heads have no more keys than a coreset, bool (BH, 1, 1), or None without a mask."""
    return None if tokens.num_keys is None else tokens.num_keys <= options.num_samples


def centered_values(value: Tensor, middle: Tensor) -> Tensor:
    """Values minus the middle of the range of each feature, in the accumulation dtype."""
    one = constant(_ones, accumulation_dtype(value.dtype), device=value.device)
    return torch.addcmul(value, middle, one, value=-1.0)


def all_sums(rows: Tensor, value: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Attention of rows of the kernel (BH, m, D) to all keys: (BH, 1, m, Dv) and the lse, (BH, 1, m)."""
    values = centered_values(value, tokens.middle)
    return fused_attention(rows[:, None], tokens.key[:, None], values[:, None], tokens.bias, 1.0)


def moments(out: Tensor) -> Tensor:
    """Means of values (BH, 1, m, Dv) and `UNIT`, (BH, m, F) with F of `padding`."""
    return pad(out.squeeze(1), (0, padding(out.shape[3], 1)), value=UNIT)


def padding(dim: int, least: int) -> int:
    """How many dimensions are added to `dim`: at least so many, and those that the kernels would add by a copy."""
    return least + -(dim + least) % 8


def augmented_query(query: Tensor, coreset: Coreset, scale: float) -> Tensor:
    """Queries with the factors of the biases: (BH, T, Nq / T, D + 2 or more)."""
    unit = constant(_unit, padding(query.shape[2], 2), 1.0 / scale, coreset.key.dtype, device=query.device)
    queries = torch.cat((query, unit.expand(*query.shape[:2], -1)), 2)
    blocks: Tensor = queries.unflatten(1, (_BLOCKS if query.shape[1] % _BLOCKS == 0 else 1, -1))
    return blocks


def _attend(query: Tensor, coreset: Coreset, scale: float) -> tuple[Tensor, Tensor]:
    """The sums of the coreset for each query, (BH, T, Nq / T, F), and the lse, (BH, T, Nq / T)."""
    queries = augmented_query(query, coreset, scale)
    return fused_attention(queries, coreset.key[:, None], coreset.weighted[:, None], None, scale)


def ratio(sums: Tensor, middle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output before it is clipped, by the sums of `Saved`.

    Where the denominator is not positive, the output is the middle of the range, as if it were infinite.

    Returns:
        The output (BH, Nq, Dv), the numerators (BH, Nq, Dv), and the denominators in units of `UNIT`, (BH, Nq, 1).
    """
    sums, value_dim = sums.flatten(1, 2), middle.shape[2]
    total = threshold(sums[..., value_dim : value_dim + 1], LEAST_DENOMINATOR, torch.inf)
    return torch.addcdiv(middle, sums[..., :value_dim], total, value=UNIT), sums[..., :value_dim], total


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant of `hf_efficient_attn.ops.constants`."""
    return torch.zeros(size, dtype=dtype, device=device)


def _ones(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A factor with three dimensions, so that its dtype counts."""
    return torch.ones(1, 1, 1, dtype=dtype, device=device)


def _unit(size: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers of the further dimensions of a query: twice the value, and zeros."""
    return pad(torch.full((2,), value, dtype=dtype, device=device), (0, size - 2))
