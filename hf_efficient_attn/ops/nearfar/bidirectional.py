"""Attention to landmarks that represent all keys, and exactly to near keys where landmarks are not enough.

A query attends to m landmarks in place of all keys. The nearest landmark c represents a key k:

    exp(scale <q, k>)  ~  exp(scale <q, c> - g(c)) exp(g(k) - |x - y|^2 / 2)

Here x = t sqrt(scale) k and y = t sqrt(scale) c are the points of the key and of the landmark. The first factor is the
same for all keys of a landmark. The second factor does not depend on the query, so it is summed once: the sum of
exp(g(k) - |x - y|^2 / 2) [v, 1] over the keys of a landmark gives its value and its weight. All weights are positive,
so the output is a convex combination of values.

- Keys are centered. g(k) = |x|^2 / 2 + `TILT` scale <q, k> for the mean query q. With this g the factors that the
  landmark replaces vary little.
- A landmark is the weighted mean of a cluster of keys. Clusters begin with keys that are drawn far from each other
  (`draw_apart`), and some steps of Lloyd's algorithm follow. A key counts more where g is large, because it can have a
  large score.
- The exact outputs of a few queries, the probes, tell how much of the output of each head the landmarks miss. Heads
  that miss much have near keys: groups of similar queries attend exactly to the keys with the largest scores, and what
  landmarks count for these keys is subtracted (`hf_efficient_attn.ops.nearfar.landmarks`).
- A linear function of the query corrects the output. Ridge regression fits it to what the outputs of the probes still
  miss. On activations of BERT this lowers the error by a quarter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import BlockKeys, Partial, attend, block_attention, output_of, takes_blocks
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, product_dtype
from hf_efficient_attn.ops.clusters import middle_positions, regularized_solve, weighted_sums, with_ones
from hf_efficient_attn.ops.index import integers, take
from hf_efficient_attn.ops.nearfar.groups import (
    LEAST_SHARE,
    Groups,
    directions,
    find_near_keys,
    group_queries,
    replace_counted,
)
from hf_efficient_attn.ops.nearfar.landmarks import (
    NearFarOptions,
    choose_landmarks,
    key_weights,
    landmarks_naive,
    means_and_logs,
    represent,
    scores_naive,
)
from hf_efficient_attn.ops.slices import selects_heads, slice_size, sliced

# The ridge of the linear correction, its largest feature, and a small number that is added to the variance of a
# feature. A probe counts less if it misses more than `MAX_MISSING` times the median.
LINEAR_RIDGE = 30.0
MAX_FEATURE = 4.0
LEAST_VARIANCE = 1e-12
MAX_MISSING = 3.0
# Slices may be larger by this factor than other slices, 16 MiB on a CPU: many small operations take longer than few
# large ones.
_LARGER_SLICES = 4


def nearfar_attention(query: Tensor, key: Tensor, value: Tensor, options: NearFarOptions) -> Tensor:
    """Compute the bidirectional form.

    Landmarks and near keys are chosen in the accumulation dtype. Products of queries, keys and values run in the dtype
    of the tensors.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), more keys than landmarks and near keys together, without padding.
        value: (BH, Nk, Dv).
        options: how landmarks and near keys are chosen.

    Returns:
        (BH, Nq, Dv or Dv + 1). The probes do not correct the lse.
    """
    probes = compute_probes(query, key, value, options) if options.num_probes else None
    mean = key.mean(1, keepdim=True, dtype=accumulation_dtype(key.dtype))
    centered = key - mean
    landmarks = choose_landmarks(query, centered, options)
    keys = Keys(centered, value, landmarks.key, *represent(centered, value, landmarks))
    columns = _attend(query, keys, _heads_with_near_keys(query, keys, probes, options), options)
    out = columns[..., : value.shape[2]]
    out = out if probes is None else correct_by_probes(query, out, probes)
    if not options.with_lse:
        return out
    # The lse of the keys themselves
    lse = columns[..., -1] + options.scale * (query.to(mean.dtype) @ mean.mT)[..., 0]
    return output_of(Partial(out, lse), True)


class Keys(NamedTuple):
    """Keys, and the landmarks that represent them."""

    key: Tensor  # (BH, Nk, D), centered
    value: Tensor  # (BH, Nk, Dv)
    center: Tensor  # (BH, m, D), the keys of the landmarks
    # See `Represented`.
    sums: Tensor
    total: Tensor
    landmark: Tensor
    key_bias: Tensor


def _attend(query: Tensor, keys: Keys, has_near: Tensor | None, options: NearFarOptions) -> Tensor:
    """Compute attention before the correction, for the heads with near keys, bool (BH,), or None: (BH, Nq, Dv)."""
    if has_near is None:
        return output_of(_attend_to_landmarks(query, keys, options), options.with_lse)
    if not selects_heads(query.device):
        return _attend_with_near_keys(query, keys, has_near, options)
    some, others = (x.nonzero()[:, 0] for x in (has_near, ~has_near))
    if not len(others):
        return _attend_with_near_keys(query, keys, None, options)
    if not len(some):
        return output_of(_attend_to_landmarks(query, keys, options), options.with_lse)
    of_some = _attend_with_near_keys(query[some], Keys(*(x[some] for x in keys)), None, options)
    far = keys._replace(**{name: getattr(keys, name)[others] for name in ("center", "sums", "total")})
    outs = of_some, output_of(_attend_to_landmarks(query[others], far, options), options.with_lse)
    return torch.cat(outs).index_select(0, torch.cat((some, others)).argsort())


def _attend_to_landmarks(query: Tensor, keys: Keys, options: NearFarOptions) -> Partial:
    """Compute attention to the landmarks of all keys: out (BH, Nq, Dv) and lse (BH, Nq)."""
    value, log_weight = means_and_logs(keys.sums, keys.total)
    tensors = query[:, None], keys.center.to(query.dtype)[:, None], value.to(query.dtype)[:, None]
    partial = attend(*tensors, log_weight[:, None, None], scale=options.scale, dropout_p=options.dropout_p)
    return Partial(partial.out[:, 0], partial.lse[:, 0])


@torch.no_grad()
def _heads_with_near_keys(query: Tensor, keys: Keys, probes: "Probes | None", options: NearFarOptions) -> Tensor | None:
    """Choose the heads with near keys: bool (BH,), or None for no head."""
    if not options.block_size or options.near_share >= 1.0:
        return None
    if probes is None or options.near_share <= 0.0:
        return torch.ones_like(keys.key[:, 0, 0], dtype=torch.bool)
    rows = query.index_select(1, probes.position)
    out = _attend_to_landmarks(rows, keys, options._replace(dropout_p=0.0)).out
    return _missed_share(out, probes) > options.near_share


class Probes(NamedTuple):
    """P probe queries, and tensors of the linear correction."""

    position: Tensor  # int64 (P,), the positions of the probes
    out: Tensor  # (BH, P, Dv), the exact output of the probes, in the accumulation dtype
    size: Tensor  # (BH, 1, D), with `middle` the factor and the offset that standardize a query
    middle: Tensor
    basis: Tensor  # (BH, P, D + 1), features of the probes, and 1
    solve: Tensor  # (BH, D + 1, P), maps what the probes miss to the coefficients of the correction


def compute_probes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: NearFarOptions,
    bias_of_rows: Callable[[Tensor], Tensor] | None = None,
) -> Probes:
    """Compute the exact output of the queries in the middle of `num_probes` equal parts, and the correction by them.

    `bias_of_rows` returns the bias of the scores of some queries, (BH, 1, P, Nk) for their positions (P,).
    """
    position = middle_positions(query.shape[1], min(options.num_probes, query.shape[1]), key.device)
    rows = query.index_select(1, position)  # (BH, P, D)
    bias = None if bias_of_rows is None else bias_of_rows(position)
    out = attend(rows[:, None], key[:, None], value[:, None], bias, scale=options.scale).out[:, 0]  # (BH, P, Dv)
    rows, out = (x.to(accumulation_dtype(x.dtype)) for x in (rows, out))
    variance, mean = torch.var_mean(rows, 1, keepdim=True, correction=0)  # (BH, 1, D) each
    size = (variance + LEAST_VARIANCE).rsqrt()
    middle = -mean * size
    basis = with_ones(_features(rows, size, middle))  # (BH, P, D + 1)
    solve = regularized_solve(torch.bmm(basis.mT, basis), basis.mT, LINEAR_RIDGE)  # (BH, D + 1, P)
    return Probes(position, out, size, middle, basis, solve)


def _features(query: Tensor, size: Tensor, middle: Tensor) -> Tensor:
    """Standardize queries: (BH, N, D)."""
    # The limit prevents extrapolation to a query that is unlike all probes.
    return torch.addcmul(middle, query, size).clamp(-MAX_FEATURE, MAX_FEATURE)


@torch.no_grad()
def _missed_share(out: Tensor, probes: Probes) -> Tensor:
    """Compute what probes with outputs (BH, P, Dv) miss after a correction by the others, as a share of all: (BH,).

    This is the leave-one-out residual of ridge regression.
    """
    missing = probes.out - out  # (BH, P, Dv)
    left = missing - torch.bmm(probes.basis, torch.bmm(probes.solve, missing))  # (BH, P, Dv)
    left = left / (1.0 - (probes.basis * probes.solve.mT).sum(2, keepdim=True))
    share: Tensor = torch.linalg.vector_norm(left, dim=(1, 2)) / torch.linalg.vector_norm(probes.out, dim=(1, 2))
    return share


def correct_by_probes(query: Tensor, out: Tensor, probes: Probes) -> Tensor:
    """Add what the outputs of the probes miss, as a linear function of the query: (BH, Nq, Dv)."""
    missing = probes.out - out.index_select(1, probes.position)
    factor = torch.bmm(probes.solve, missing * _weight_of_probes(missing))  # (BH, D + 1, P) @ (BH, P, Dv)
    dtype = product_dtype(query) if out.dtype.itemsize == 2 else out.dtype
    query, size, middle, factor = (x.to(dtype) for x in (query, probes.size, probes.middle, factor))
    # (BH, Nq, D) @ (BH, D, Dv)
    correction = torch.baddbmm(factor[:, -1:], _features(query, size, middle), factor[:, :-1])
    return correction.add_(out)


def _weight_of_probes(missing: Tensor) -> Tensor:
    """Weigh probes by 1, or less if they miss much more than others (Huber 1964): (..., P, Dv) -> (..., P, 1)."""
    size = torch.linalg.vector_norm(missing, dim=-1, keepdim=True)  # (..., P, 1)
    # Not below a least size, so that the weight is 1, and has no gradient, where nothing but rounding is missing.
    limit = (MAX_MISSING * size.median(-2, keepdim=True)[0]).clamp(min=LEAST_VARIANCE)  # (..., 1, 1)
    weight: Tensor = limit / torch.maximum(size, limit)
    return weight


def _attend_with_near_keys(query: Tensor, keys: Keys, has_near: Tensor | None, options: NearFarOptions) -> Tensor:
    """Compute attention to near keys and to the landmarks of all other keys: (BH, Nq, Dv).

    Without near keys are the heads for which `has_near`, bool (BH,), is False.
    """
    groups = group_queries(torch.bmm(query.to(keys.key.dtype), directions(keys.key)), options.num_groups)
    columns = (options.block_size + options.num_samples) * max(query.shape[2], keys.value.shape[2])
    size = slice_size(max(columns, keys.key.shape[1]) // _LARGER_SLICES, query.device)

    def some_heads(groups: Groups, query: Tensor, keys: Keys, has_near: Tensor | None) -> Tensor:
        def some_groups(group: Tensor) -> Tensor:  # (BH, G, b)
            return _attend_in_groups(take(query, group), keys, has_near, options)  # (BH, G, b, Dv)

        draws = options.dropout_p > 0.0
        out = sliced(some_groups, groups.query, size=max(1, size // len(query)), dim=1, draws=draws)
        return take(out.flatten(1, 2), groups.slot)

    # What autograd keeps of groups is little, because slices of them are computed again.
    return sliced(
        some_heads, groups, query, keys, has_near, size=max(1, size // groups.query.shape[1]), recompute=False
    )


def _attend_in_groups(queries: Tensor, keys: Keys, has_near: Tensor | None, options: NearFarOptions) -> Tensor:
    """Compute `_attend_with_near_keys` for queries (BH, G, b, D) in groups: (BH, G, b, Dv).

    Each group has landmarks of its own without its near keys. If there are more landmarks than near keys, attention to
    near keys as the landmarks count them costs less. In half precision its difference would be rounding.
    """
    mean = queries.mean(2, dtype=keys.key.dtype)
    near = find_near_keys(mean, keys.key, options.block_size, options.scale)  # (BH, G, w)
    call: dict[str, Any] = {"scale": options.scale, "dropout_p": options.dropout_p}
    if options.num_samples > options.block_size and queries.dtype.itemsize > 2:
        far = _attend_to_landmarks(queries.flatten(1, 2), keys, options)
        parts = [Partial(x.out.flatten(1, 2), x.lse.flatten(1)) for x in near_attention(queries, near, keys, **call)]
        if has_near is not None:
            parts = [Partial(x.out, x.lse.masked_fill(~has_near[:, None], -torch.inf)) for x in parts]
        exact, counted, far = (Partial(x.out, x.lse.unsqueeze(2)) for x in (*parts, far))
        found = replace_counted(far, counted, exact)
        return output_of(found, options.with_lse).view(*queries.shape[:3], -1).to(queries.dtype)
    near_value = take(keys.value, near)
    sums, total, near_bias = _without(keys, near, near_value, has_near)
    value, log_weight = means_and_logs(sums, total, LEAST_SHARE * keys.total.unsqueeze(1))  # (BH, G, m, .), (BH, G, m)
    value = value.to(keys.value.dtype)
    bias = torch.cat((near_bias, log_weight), 2)  # (BH, G, w + m)
    center = keys.center.to(queries.dtype).unsqueeze(1).expand(-1, near.shape[1], -1, -1)  # (BH, G, m, D)
    rows = queries.flatten(1, 2)
    blocks = BlockKeys(queries.shape[2], listed=near, log_weight=bias)
    if takes_blocks(rows, rows, keys.value, blocks, options.dropout_p):
        # The landmarks of all groups follow the keys.
        own = keys.key.shape[1] + integers(log_weight[0].numel(), near.device).view_as(log_weight[0])  # (G, m)
        blocks = blocks._replace(listed=torch.cat((near, own.expand_as(log_weight)), 2))
        key = torch.cat((keys.key.to(queries.dtype), center.flatten(1, 2)), 1)  # (BH, Nk + G m, D)
        of_blocks = block_attention(rows, key, torch.cat((keys.value, value.flatten(1, 2)), 1), blocks, **call)
        assert of_blocks is not None
        return output_of(of_blocks, options.with_lse).view(*queries.shape[:3], -1)
    key = torch.cat((take(keys.key, near).to(queries.dtype), center), 2)  # (BH, G, w + m, D)
    found = attend(queries, key, torch.cat((near_value, value), 2), bias.unsqueeze(2), **call)
    return output_of(found, options.with_lse)


def near_attention(
    queries: Tensor,
    near: Tensor,
    keys: Keys,
    near_bias: Tensor | None = None,
    far_bias: Tensor | None = None,
    **call: Any,
) -> tuple[Partial, Partial]:
    """Compute attention of groups of queries (BH, G, b, D) to near keys, exactly and as the landmarks count it.

    The near keys of each group are int64 (BH, G, w). `near_bias` (BH, G, b, w) is a bias of their scores, and
    `far_bias` (BH, G, m) one of the landmarks. The partials are out (BH, G, b, Dv) and lse (BH, G, b).
    """
    own, bias = (x.gather(1, near.flatten(1)).view_as(near) for x in (keys.landmark, keys.key_bias))  # (BH, G, w) each
    near_key, values, centers = (
        take(x, i).to(queries.dtype) for x, i in ((keys.key, near), (keys.value, near), (keys.center, own))
    )
    bias = bias if far_bias is None else bias + far_bias.gather(2, own)
    exact = attend(queries, near_key, values, near_bias, **call)
    return exact, attend(queries, centers, values, bias.unsqueeze(2), **call)


def _without(keys: Keys, near: Tensor, value: Tensor, has_near: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract the near keys (BH, G, w) of groups, with values (BH, G, w, Dv), from what landmarks represent.

    Returns:
        The sums (BH, G, m, Dv) and weights (BH, G, m) that are left, and the bias (BH, G, w) of the near keys.
    """
    own, bias = (x.gather(1, near.flatten(1)).view_as(near) for x in (keys.landmark, keys.key_bias))
    weight = key_weights(bias)
    near_bias = torch.zeros_like(bias)
    if has_near is not None:
        weight = torch.where(has_near[:, None, None], weight, 0.0)
        near_bias = near_bias.masked_fill(~has_near[:, None, None], -torch.inf)
    own, value, weight = (x.flatten(0, 1) for x in (own, value, weight))
    counted = weighted_sums(own, value, weight, keys.sums.shape[1])
    sums, total = (
        x.unsqueeze(1) - y.unflatten(0, near.shape[:2]) for x, y in zip((keys.sums, keys.total), counted, strict=True)
    )
    return sums, total, near_bias


def nearfar_naive(query: Tensor, key: Tensor, value: Tensor, options: NearFarOptions) -> Tensor:
    """Compute the readable form, by dense matrices of one head after another, with the choices of the fast form.

    These choices are the keys that clusters begin with, the clusters, the landmark of each key, the heads with near
    keys, the groups of their queries and the near keys of each group.
    """
    with torch.no_grad():
        q = query.to(accumulation_dtype(query.dtype))
        k = key - key.mean(1, keepdim=True, dtype=q.dtype)
        landmarks = choose_landmarks(query, k, options)
        represented = represent(k, value, landmarks)
        probes = compute_probes(query, key, value, options) if options.num_probes else None
        keys = Keys(k, value, landmarks.key, *represented)
        has_near = _heads_with_near_keys(query, keys, probes, options)
        near = torch.zeros(*q.shape[:2], k.shape[1], dtype=torch.bool, device=q.device)  # (BH, Nq, Nk)
        for head in [] if has_near is None else has_near.nonzero()[:, 0].tolist():
            own = q[head, None], k[head, None]
            groups = group_queries(own[0] @ directions(own[1]), options.num_groups)
            means = take(own[0], groups.query).mean(2)  # (1, G, D)
            found = find_near_keys(means, own[1], options.block_size, options.scale)[0]  # (G, w)
            group = groups.slot[0] // groups.query.shape[2]  # (Nq,)
            near[head] = near[head].scatter(1, found[group], True)
    tensors = query.double(), key.double(), value.double(), landmarks.choice, represented.landmark, near
    return torch.stack([_naive_head(head[:3], head[3:], options) for head in zip(*tensors, strict=True)])


def _naive_head(tensors: tuple[Tensor, ...], chosen: tuple[Tensor, ...], options: NearFarOptions) -> Tensor:
    query, key, value = tensors
    choice, landmark, near = chosen
    mean = key.mean(0)
    key = key - mean
    c, tilt = landmarks_naive(query, key, choice, options)  # (m, D), (D,)
    exact, of_landmarks = scores_naive(query, key, c[landmark], tilt, options)  # (Nq, Nk) each
    # Landmarks that represent near keys only do not count.
    is_own = torch.nn.functional.one_hot(landmark, len(c)).double()  # (Nk, m)
    weight = (of_landmarks[0] - options.scale * c[landmark] @ query[0]).exp()  # (Nk,), on landmarks
    left = torch.where(near, 0.0, weight) @ is_own  # (Nq, m)
    is_rounding = (left <= LEAST_SHARE * weight @ is_own)[:, landmark]  # (Nq, Nk)
    scores = torch.where(near, exact, of_landmarks.masked_fill(is_rounding, -torch.inf))
    out = correct_by_probes_naive(query, scores.softmax(1) @ value, exact, value, options)
    return output_of(Partial(out, scores.logsumexp(1) + options.scale * query @ mean), options.with_lse)


def correct_by_probes_naive(
    query: Tensor, out: Tensor, scores: Tensor, value: Tensor, options: NearFarOptions
) -> Tensor:
    """Compute `correct_by_probes` of a head in the readable form, from the exact scores (Nq, Nk): (Nq, Dv)."""
    if not options.num_probes:
        return out
    probe = middle_positions(len(query), min(options.num_probes, len(query)), query.device)
    features = (query - query[probe].mean(0)) / (query[probe].var(0, correction=0) + LEAST_VARIANCE).sqrt()
    features = with_ones(features.clamp(-MAX_FEATURE, MAX_FEATURE))  # (Nq, D + 1)
    basis = features[probe]
    missing = scores[probe].softmax(1) @ value - out[probe]  # (P, Dv)
    ridge = LINEAR_RIDGE * torch.eye(features.shape[1], dtype=features.dtype, device=features.device)
    solve = torch.linalg.inv(basis.T @ basis + ridge) @ basis.T  # (D + 1, P)
    result: Tensor = out + features @ solve @ (missing * _weight_of_probes(missing))
    return result
