"""`hf_efficient_attn.ops.weighted_coreset` for accelerators: the same few kernels at any length.

Landmarks, Nystrom weights and their fit are those of the form for the CPU. To take few launches, what differs is:

- Nothing is decided by data. All heads have as many landmarks as near keys and landmarks together, and near keys.
- Blocks have as many queries as there are landmarks, and their near keys are the keys of the block.
- Landmarks are plain means of clusters after one step of Lloyd's algorithm.
- One system has Nystrom's conditions and the fit. With the kernel K between the landmarks, the rows B of the probes,
  relative to the sum of their weights, and the exact sums S of the landmarks and t of the probes over all keys,

      (K + ridge I + B^T B / size) W = S + B^T t / size

  has the solution of the ridge regression of `coreset_weights`. It is linear in the sums. So the weights for a block of
  queries, which must not count the near keys, come from the sums over the other blocks.
- A query whose denominator is far from that over the means of the clusters, or has terms with very large weights that
  cancel, attends to these means.

With these near keys the error on activations of BERT and ViT is 10 to 20 % smaller than that of the form for the CPU.

In half precision, tensors of the length of the sequence and products with them have half precision. The matrix that
makes weights of sums is the sum of two such matrices, because its entries are large numbers that nearly cancel.
Matrices of the size of K are float64.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.coreset_blocks_plan import (
    LEAST_LOGIT,
    LEAST_TOTAL,
    LEAST_TOTAL_FLOAT16,
    MAX_LOGIT,
    RIDGE,
    SQUARE,
    SUM_RANGE,
    SUM_UNIT,
    SUM_UNIT_FLOAT16,
    Given,
    Plan,
    filled,
    number,
)
from hf_efficient_attn.ops.coreset_landmarks import DRAW_POWER, take_alike
from hf_efficient_attn.ops.export import is_compiling
from hf_efficient_attn.ops.fused_attention import fused_attention
from hf_efficient_attn.ops.outputs import compute_into
from hf_efficient_attn.ops.partial import accumulation_dtype

# The least size of the weights of a landmark: less is no share of the largest that float64 represents.
_LEAST_SIZE = 1e-260
# Differences of squared distances are multiplied by this number, so that a softmax is the nearest landmark, except for
# ties, and takes one kernel.
_SHARPNESS = 2.0**60
# The weight of the first key of a cluster in addition, so that rounding cannot leave a cluster without a mean.
_TINY = 1e-33


def _sum_limits(dtype: torch.dtype) -> tuple[float, float]:
    """The numbers that `_is_safe` compares are multiples of the first. A denominator is more than the second."""
    return (SUM_UNIT_FLOAT16, LEAST_TOTAL_FLOAT16) if dtype == torch.float16 else (SUM_UNIT, LEAST_TOTAL)


def _sums_of(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a near key adds to the sums of weights: 1, and to those that `_is_safe` compares with both limits."""
    row = torch.zeros(1, 1, size, dtype=dtype, device=device)
    unit = _sum_limits(dtype)[0]
    row[..., 0], row[..., 1], row[..., 2] = 1.0, unit / SUM_RANGE[0], unit * (1.0 / SUM_RANGE[1] - 1.0)
    return row


def _factors(plan: Plan, device: torch.device) -> Tensor:
    """Of a landmark's row and its bias, twice, to those of a key of the last attention."""
    row = torch.zeros(1, 1, plan.padded[0], dtype=torch.float64, device=device)
    row[..., : plan.dims[0]] = 1.0 / plan.half
    row[..., plan.dims[0]] = 1.0 / (plan.scale * plan.unit)
    row[..., plan.dims[0] + 1] = -1.0 / (plan.scale * plan.unit)
    return row


def _of_kernel(num_landmarks: int, device: torch.device) -> Tensor:
    """What the kernel, which has the sizes of sums on its diagonal, is multiplied with and what is added: (2, 2, m, m).

    Of the two results, the first is the kernel with 1 + ridge on its diagonal, and the second has the sizes alone.
    """
    identity = torch.eye(num_landmarks, dtype=torch.float64, device=device)
    parts = torch.stack((1.0 - identity, identity, (1.0 + RIDGE) * identity, _LEAST_SIZE * identity))
    return parts.view(2, 2, num_landmarks, num_landmarks)


def _squared_norms(x: Tensor, factor: float = 1.0, offset: Tensor | None = None) -> Tensor:
    """`factor` times the squared norms of rows (BH, N, D), plus `offset` (BH, N): (BH, N), by one product."""
    flat, beta = x.flatten(0, 1), 0.0 if offset is None else 1.0
    start = flat.new_empty(1, 1, 1) if offset is None else offset.reshape(-1, 1, 1)
    return torch.baddbmm(start, flat.unsqueeze(1), flat.unsqueeze(2), beta=beta, alpha=factor).view(x.shape[:2])


def _with_sums(key: Tensor, value: Tensor, num_keys: Tensor | int, plan: Plan) -> Tensor:
    """Centered keys and values with their further dimensions, in whole blocks: (BH, T m, D' + Dv')."""
    if isinstance(num_keys, int):
        key = key - key.mean(1, keepdim=True)
    else:
        mean = key.sum(1, keepdim=True, dtype=accumulation_dtype(key.dtype)) / num_keys.clamp(min=1).unsqueeze(2)
        key = key - mean.to(key.dtype)
    (batch_heads, kv_len, head_dim), length = key.shape, plan.num_blocks * plan.num_landmarks
    zeros, sums = plan.padded[0] - head_dim, plan.padded[1] - value.shape[2]
    bias = constant(filled, 0.0, zeros, key.dtype, device=key.device)
    if plan.has_padding:
        counts = num_keys.unsqueeze(2) if isinstance(num_keys, Tensor) else num_keys
        padding = torch.arange(length, device=key.device)[None, :, None] >= counts
        key, value = (pad(x, (0, 0, 0, length - kv_len)).masked_fill(padding, 0.0) for x in (key, value))
        excluded = padding.to(key.dtype) * -math.copysign(plan.largest, plan.scale)
        bias = pad(excluded, (2, zeros - 3))
    ones = constant(_sums_of, sums, key.dtype, device=key.device)
    return torch.cat((key, bias.expand(batch_heads, length, -1), value, ones.expand(batch_heads, length, -1)), 2)


def _take_into(out: Tensor, x: Tensor, index: Tensor) -> None:
    """Store `take_alike(x, index)` in `out`."""
    if len(index) == 1:
        compute_into(out, torch.index_select, x, 1, index[0])
    else:
        out.copy_(take_alike(x, index))


class Landmarks(NamedTuple):
    """Landmarks, and what their gradient needs.

    Attributes:
        sums: (BH, m, Dv'), the sums of the values of each cluster.
        total: (BH, m, 1), the number of its candidates.
        member: (BH, C, m), 1 where a candidate belongs to a cluster, or shares where it is as close to several.
        pivot: int64 (BH, m), which candidates the clusters began with.
        own: bool (BH, 1, 1), sequences with at most m keys, each of which is a landmark; None: none has.
        selected: bool (BH, m, 1), which landmarks exist; None: all.
    """

    sums: Tensor
    total: Tensor
    member: Tensor
    pivot: Tensor
    own: Tensor | None
    selected: Tensor | None


def _choose(candidates: Tensor, given: Given, plan: Plan, row: Tensor) -> Landmarks:
    """Draw keys among the candidates (BH, C, D' + Dv'), and move them to the means of their clusters.

    `row` (BH, m, D') becomes `Plan.half` times the landmarks, with further dimensions.
    """
    (head_dim, value_dim), split, valid = plan.dims, plan.padded[0], given.valid
    points = candidates[..., :head_dim]
    scores = _squared_norms(points, DRAW_POWER * SQUARE * abs(plan.scale), given.numbers)
    scores = scores if valid is None else scores.masked_fill(~valid, -torch.inf)
    best, pivot = scores.topk(plan.num_landmarks, dim=1)
    picked = candidates.gather(1, pivot.unsqueeze(2).expand(-1, -1, candidates.shape[2]))
    drawn = picked[..., :head_dim]
    half_norm = _squared_norms(drawn, 0.5 * _SHARPNESS).unsqueeze(1)
    member = torch.baddbmm(half_norm, points, drawn.mT, beta=-1.0, alpha=_SHARPNESS).softmax(2)
    member = member if valid is None else member.mul_(valid.unsqueeze(2))
    sums = torch.baddbmm(picked, member.mT, candidates, beta=_TINY)
    total = sums[..., split + value_dim].unsqueeze(2)
    own = selected = None
    if isinstance(given.num_keys, Tensor):
        own, selected = (given.num_keys <= plan.num_landmarks).unsqueeze(2), (best > -torch.inf).unsqueeze(2)
        sums = torch.where(own, picked * selected, sums)
        total = sums[..., split + value_dim].unsqueeze(2).clamp(min=_TINY)
    if plan.has_steps:
        compute_into(row, torch.addcdiv, number(0.0, sums), sums[..., :split], total, value=plan.half)
    else:
        compute_into(row, torch.mul, picked[..., :split], plan.half)
    if selected is not None:
        row[..., head_dim] = torch.where(selected, 0.0, -plan.largest).squeeze(2)
    if plan.has_padding:
        row[..., head_dim + 2] = plan.unit
    return Landmarks(sums[..., split:], total, member, pivot, own, selected)


class Sums(NamedTuple):
    """Exact sums of the rows, R = m + P of them: those of the landmarks and of the probes.

    Attributes:
        row: (BH, R, D').
        lse: (BH, T, R), over the keys of each block.
        share: (BH, T, R), the weight of each block.
        lse_of_all: (BH, R), over all keys.
        of_all: (BH, R, Dv'), relative to `lse_of_all`.
        of_others: (BH, R, T, Dv'), without the keys of each block, or None.
    """

    row: Tensor
    lse: Tensor
    share: Tensor
    lse_of_all: Tensor
    of_all: Tensor
    of_others: Tensor | None


def _blocks(x: Tensor, plan: Plan) -> Tensor:
    blocks: Tensor = x.unflatten(1, (-1, plan.num_landmarks))
    return blocks


def _sums(row: Tensor, keys: Tensor, values: Tensor, plan: Plan) -> Sums:
    """Exact sums of rows (BH, R, D') over keys and values (BH, T m, .), block by block."""
    out, lse = fused_attention(row.unsqueeze(1).expand(-1, plan.num_blocks, -1, -1), keys, values, None, plan.scale)
    log_share = lse.log_softmax(1)
    share = log_share.exp()
    out = out.mul_(share.unsqueeze(3))
    of_all, of_others = out.sum(1, dtype=lse.dtype), None
    if plan.by_block:
        out = out.transpose(1, 2)
        if is_compiling():
            of_others = (of_all.unsqueeze(2) - out).to(out.dtype).contiguous()
        else:
            of_others = torch.sub(of_all.unsqueeze(2), out, out=out.new_empty(out.shape))
    return Sums(row, lse, share, lse[:, 0] - log_share[:, 0], of_all, of_others)


class Weights(NamedTuple):
    """The weights of the landmarks as a linear map of the sums of the rows.

    Attributes:
        row: float64 (BH, R, D'). In the first two further dimensions of a landmark is its log-weight.
        basis: float64 (BH, R, m), the kernel between the landmarks, and what they count for the probes. The kernel has
            `size` on its diagonal, which no gradient depends on.
        targets: float64 (BH, R, m), the right side of the system.
        lower: float64 (BH, m, m), the Cholesky factor of the system.
        solved: float64 (BH, m, R), the solution.
        size: float64 (BH, m), of the weights. This factor goes into the bias of a landmark.
        strength: float64 (BH, 1, 1), the squared norm of the probes' rows divided by m, or None.
    """

    row: Tensor
    basis: Tensor
    targets: Tensor
    lower: Tensor
    solved: Tensor
    size: Tensor
    strength: Tensor | None


def _weigh(sums: Sums, plan: Plan) -> Weights:
    """Solve (K + ridge I + B^T B / size) W = S + B^T t / size for the map from the sums of the rows to W."""
    m, row, dim = plan.num_landmarks, sums.row.to(torch.float64, copy=True), plan.dims[0]
    points, strength = row[..., :dim], None
    # What is subtracted from the exponents of each row: half its squared norm, or the lse of all keys for a probe.
    offset = _squared_norms(points, 0.5 * plan.twice)
    half_norm = offset[:, :m]
    basis = torch.baddbmm(half_norm.unsqueeze(1), points, points[:, :m].mT, beta=-1.0, alpha=plan.twice)
    level = sums.lse_of_all[:, :m] - half_norm
    shift = level.amax(1, keepdim=True)
    # The bias of a landmark as a key, in both of its columns.
    bias = row[:, :m, dim : dim + 2]
    compute_into(bias, torch.sub, *(x.unsqueeze(2).expand(-1, -1, 2) for x in (level, half_norm)))
    probes = basis[:, m:]
    if probes.shape[1]:
        compute_into(offset[:, m:], torch.sub, sums.lse_of_all[:, m:], shift)
    basis.sub_(offset.unsqueeze(2))
    if probes.shape[1]:
        probes.clamp_(LEAST_LOGIT, MAX_LOGIT)
    # The sizes of the sums of the landmarks take the place of the kernel's diagonal.
    compute_into(basis.diagonal(dim1=1, dim2=2), torch.sub, level, shift)
    basis.exp_()
    factors, terms = constant(_of_kernel, m, device=row.device)
    both = basis.new_empty(len(basis), m + basis.shape[1], m)
    parts = both[:, : 2 * m].unflatten(1, (2, m))
    compute_into(parts, torch.addcmul, terms, basis[:, None, :m].expand_as(parts), factors)
    system, targets = both[:, :m], both[:, m:]
    if probes.shape[1]:
        strength = _squared_norms(probes.flatten(1).unsqueeze(1), 1.0 / m).unsqueeze(2)
        compute_into(targets[:, m:], torch.div, probes, strength)
        system = torch.baddbmm(system, probes.mT, targets[:, m:])
    lower = torch.linalg.cholesky_ex(system)[0]
    solved = torch.cholesky_solve(targets.mT, lower)
    size = targets.diagonal(dim1=1, dim2=2)
    return Weights(row, basis, targets, lower, solved, size, strength)


class Attention(NamedTuple):
    """The two attentions of all queries, and what their gradient needs.

    Attributes:
        query: (BH, T or 1, Nq, D'), in blocks or not.
        key: (BH, T or 1, ., D'), the keys of the block and landmarks.
        value: (BH, T or 1, ., Dv'), their values and weights.
        sums: (BH, T or 1, Nq, Dv'), the result.
        lse: (BH, T or 1, Nq).
        weights: (BH, m, R), the map from the sums of rows to the weights of landmarks.
        to_means: (BH, 1, Nq, Dv'), the sums over the means of clusters.
        lse_of_means: (BH, 1, Nq).
        means: (BH, 1, m, Dv'), the values of the second attention.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sums: Tensor
    lse: Tensor
    weights: Tensor
    to_means: Tensor
    lse_of_means: Tensor
    means: Tensor


def _keys_of_landmarks(weights: Weights, like: Tensor, plan: Plan) -> Tensor:
    """The landmarks with their bias, (BH, 1, m, D'), in the dtype of `like`."""
    row, dim = weights.row[:, : plan.num_landmarks], plan.dims[0]
    factors = constant(_factors, plan, device=like.device)
    key = torch.mul(row, factors, out=like.new_empty(row.shape))
    # The bias is the sum of two numbers of the dtype. Both columns have the first, the second one its negative.
    key[..., dim + 1].add_(row[..., dim], alpha=1.0 / (plan.scale * plan.unit))
    return key.unsqueeze(1)


def _penalize(sums: Tensor, spread: Tensor) -> None:
    """Make, in place, of the third sums of the landmarks, (BH, m, T or 1), what `_is_safe` compares with the means.

    Near keys raise the limit, so that their share in the sums is negative and that of a landmark is not.
    """
    largest = torch.linalg.vector_norm(spread, torch.inf, 2, keepdim=True)
    compute_into(sums, torch.sub, largest, sums)


def _values_of_landmarks(spread: Tensor, first: Tensor, values: Tensor, sums: Sums, plan: Plan) -> Tensor:
    """The values of near keys and the weights of landmarks of each block, (BH, T, 2 m, Dv'), or these (BH, 1, m, Dv').

    `first` is the map `spread` in the dtype of the values.
    """
    m, column = plan.num_landmarks, plan.dims[1] + 2
    if sums.of_others is None:
        weights = spread @ sums.of_all.double()
        _penalize(weights[..., column, None], spread)
        largest = min(1e37, torch.finfo(values.dtype).max / 1.1)
        return weights.clamp_(-largest, largest).to(values.dtype).unsqueeze(1)
    # Landmarks, blocks, numbers: so the product of a head is one matrix.
    both = values.new_empty(len(values), 2 * m, plan.num_blocks, values.shape[3])
    weights, others = both[:, m:].flatten(2), sums.of_others.flatten(2)
    weights.baddbmm_(first, others, beta=0.0)
    if values.dtype in (torch.bfloat16, torch.float16):
        weights.baddbmm_(torch.sub(spread, first, out=torch.empty_like(first)), others)
    _penalize(both[:, m:, :, column], spread)
    if values.dtype == torch.float16:
        weights.clamp_(-plan.largest, plan.largest)
    both[:, :m] = values.transpose(1, 2)
    return both.transpose(1, 2)


class Saved(NamedTuple):
    """What the backward pass needs of the forward pass, each as a tuple of its fields."""

    given: Given
    landmarks: Landmarks
    sums: Sums
    weights: Weights
    attention: Attention
    blocks: tuple[Tensor, Tensor]
    is_safe: Tensor
    combined: Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, given: Given, plan: Plan, keep: bool
) -> tuple[Tensor, Saved | None]:
    """The output (BH, Nq, Dv), and what the backward pass needs.

    Args:
        query: (BH, Nq, D), valid tokens first.
        key: (BH, Nk, D), valid tokens first and 0 elsewhere.
        value: (BH, Nk, Dv), likewise.
        given: positions and numbers.
        plan: sizes.
        keep: whether there is a backward pass. Else tensors are freed early, and the second result is None.
    """
    (batch_heads, q_len, _), kv_len, acc_dtype = query.shape, key.shape[1], accumulation_dtype(key.dtype)
    both = _with_sums(key, value, given.num_keys, plan)
    more = plan.num_blocks * plan.num_landmarks - q_len if plan.by_block else 0
    queries = pad(query, (0, plan.padded[0] - plan.dims[0], 0, more), value=plan.unit)
    step = candidate_stride(given, kv_len)
    candidates = (take_alike(both, given.position) if step is None else both[:, :kv_len:step]).to(acc_dtype)
    num_probes = 0 if given.probe is None else given.probe.shape[1]
    row = query.new_empty(batch_heads, plan.num_landmarks + num_probes, plan.padded[0])
    landmarks = _choose(candidates, given, plan, row[:, : plan.num_landmarks])
    if given.probe is not None:
        _take_into(row[:, plan.num_landmarks :], queries, given.probe)
    blocks = _blocks(both[..., : plan.padded[0]], plan), _blocks(both[..., plan.padded[0] :], plan)
    sums = _sums(row, *blocks, plan)
    weights = _weigh(sums, plan)
    spread = (weights.solved / weights.size.unsqueeze(2)).clamp_(-plan.max_weight, plan.max_weight)
    first, means = spread.to(query.dtype), query.new_empty(landmarks.sums.shape)
    torch.mul(landmarks.sums, 1.0 / landmarks.member.shape[1], out=means)
    all_values = _values_of_landmarks(spread, first, blocks[1], sums, plan)
    all_keys = _keys_of_landmarks(weights, query, plan)
    if plan.by_block:
        sums = sums if keep else sums._replace(of_others=None)
        all_keys = torch.cat((blocks[0], all_keys.expand(-1, plan.num_blocks, -1, -1)), 2)
    both = both if keep else query.new_empty(0)
    blocks = blocks if keep else (both, both)
    queries = _blocks(queries, plan) if plan.by_block else queries.unsqueeze(1)
    far = fused_attention(queries, all_keys, all_values, None, plan.scale)
    if not keep:
        all_keys, all_values = both, both
    of_landmarks = sums.row[:, None, : plan.num_landmarks]
    to_means = fused_attention(queries.flatten(1, 2).unsqueeze(1), of_landmarks, means.unsqueeze(1), None, plan.twice)
    is_safe = _is_safe(far, to_means, given, plan)
    is_safe = is_safe if landmarks.own is None else is_safe & ~landmarks.own
    combined = torch.where(is_safe, far[0].flatten(1, 2), to_means[0].squeeze(1))
    attention = Attention(queries, all_keys, all_values, *far, first, *to_means, means.unsqueeze(1)) if keep else None
    del far, to_means
    out = (combined[..., : plan.dims[1]] / combined[..., plan.dims[1], None])[:, :q_len]
    if attention is None:
        return out, None
    return out, Saved(given, landmarks, sums, weights, attention, blocks, is_safe, combined)


def _is_safe(far: tuple[Tensor, Tensor], to_means: tuple[Tensor, Tensor], given: Given, plan: Plan) -> Tensor:
    """Which denominators are within `SUM_RANGE`: bool (BH, T m or Nq, 1), from sums and lse of both attentions."""
    sums, column = far[0].flatten(1, 2), plan.dims[1]
    ratio = to_means[1].squeeze(1) - far[1].flatten(1, 2)
    if plan.has_padding:  # the bias that excludes padding adds this to all rows as keys
        ratio = ratio - plan.twice * plan.unit**2
    ratio = ratio.exp_().unsqueeze(2)
    count = float(plan.num_keys)
    if isinstance(given.num_keys, Tensor):
        count, ratio = 1.0, ratio * given.num_keys.clamp(min=1).unsqueeze(2)
    if given.valid is not None:
        of_candidates = given.valid.sum(1, keepdim=True).clamp(min=1) / given.numbers.shape[1]
        ratio = ratio / of_candidates.unsqueeze(2)
    means, (unit, least) = to_means[0].squeeze(1)[..., column, None], _sum_limits(sums.dtype)
    of_means = torch.addcmul(number(unit * least, ratio), ratio, means, value=unit * count)
    # Those within both limits are their own nearest number there. NaN is not.
    return of_means.clamp(sums[..., column + 2, None], sums[..., column + 1, None]) == of_means


def candidate_stride(given: Given, kv_len: int) -> int | None:
    """The distance of the candidates where it is one number."""
    count = given.position.shape[1]
    return kv_len // count if given.valid is None and kv_len % count == 0 else None
