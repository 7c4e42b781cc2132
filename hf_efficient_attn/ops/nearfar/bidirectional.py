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

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import Partial, attend
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.clusters import middle_positions, regularized_solve, with_ones
from hf_efficient_attn.ops.index import integers, take
from hf_efficient_attn.ops.nearfar.landmarks import (
    Groups,
    Landmarks,
    NearFarOptions,
    Represented,
    choose_landmarks,
    directions,
    find_near_keys,
    group_queries,
    landmarks_naive,
    represent,
    scores_naive,
)
from hf_efficient_attn.ops.slices import slice_size, sliced

# If the near keys leave less than this share of a query's weights on the landmarks, what is left is rounding, and the
# query attends to its near keys only.
LEAST_SHARE = 1e-3
# The ridge of the linear correction, its largest feature, and a small number that is added to the variance of a
# feature. A probe counts less if it misses more than `MAX_MISSING` times the median.
LINEAR_RIDGE = 30.0
MAX_FEATURE = 4.0
LEAST_VARIANCE = 1e-12
MAX_MISSING = 3.0
# Slices may be larger by this factor than other slices, 32 MiB on a CPU: many small operations take longer than few
# large ones.
_LARGER_SLICES = 8


def nearfar_attention(query: Tensor, key: Tensor, value: Tensor, options: NearFarOptions) -> Tensor:
    """Compute the bidirectional form.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), more keys than landmarks and near keys together, without padding.
        value: (BH, Nk, Dv).
        options: how landmarks and near keys are chosen.

    Returns:
        (BH, Nq, Dv) in the accumulation dtype.
    """
    query, key, value = (x.to(accumulation_dtype(key.dtype)) for x in (query, key, value))
    key = key - key.mean(1, keepdim=True)
    landmarks = choose_landmarks(query, key, options)
    represented = represent(key, value, landmarks)
    far = _attend_to_landmarks(query, landmarks, represented, options)
    probes = compute_probes(query, key, value, options) if options.num_probes else None
    heads = _heads_with_near_keys(far.out, probes, options)
    out = far.out
    if heads is not None:
        keys = CountedKeys(key, value, landmarks.key, represented.landmark, represented.key_bias)
        if len(heads) == len(query):
            out = _with_near_keys(query, keys, far, options)
        else:
            some_query, some_out, some_lse = (x.index_select(0, heads) for x in (query, *far))
            some_keys = CountedKeys(*(x.index_select(0, heads) for x in keys))
            out = out.index_copy(0, heads, _with_near_keys(some_query, some_keys, Partial(some_out, some_lse), options))
    return out if probes is None else correct_by_probes(query, out, probes)


class CountedKeys(NamedTuple):
    """Keys, and what landmarks count for them.

    Attributes:
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        center: (BH, m, D), the keys of the landmarks.
        landmark: int64 (BH, Nk), the landmark of each key.
        key_bias: (BH, Nk), the log of each key's weight on its landmark.
    """

    key: Tensor
    value: Tensor
    center: Tensor
    landmark: Tensor
    key_bias: Tensor


def _attend_to_landmarks(query: Tensor, landmarks: Landmarks, keys: Represented, options: NearFarOptions) -> Partial:
    """Compute attention to the landmarks: out (BH, Nq, Dv) and lse (BH, Nq, 1)."""
    bias = keys.bias.view(len(query), 1, 1, -1)  # (BH, 1, 1, m)
    tensors = query[:, None], landmarks.key[:, None], keys.value[:, None], bias
    out, lse = attend(*tensors, scale=options.scale, dropout_p=options.dropout_p)  # (BH, 1, Nq, Dv), (BH, 1, Nq)
    return Partial(out[:, 0], lse.mT)


def _heads_with_near_keys(out: Tensor, probes: "Probes | None", options: NearFarOptions) -> Tensor | None:
    """Choose the heads with near keys by attention to the landmarks (BH, Nq, Dv): int64, or None for no head."""
    if not options.block_size or options.near_share >= 1.0:
        return None
    if probes is None or options.near_share <= 0.0:
        return integers(len(out), out.device)
    heads = (_missed_share(out, probes) > options.near_share).nonzero()[:, 0]
    return heads if len(heads) else None


class Probes(NamedTuple):
    """P probe queries, and tensors of the linear correction.

    Attributes:
        position: int64 (P,), the positions of the probes.
        out: (BH, P, Dv), the exact output of the probes.
        size, middle: (BH, 1, D), factor and offset that standardize a query.
        basis: (BH, P, D + 1), features of the probes, and 1.
        solve: (BH, D + 1, P), maps what the probes miss to the coefficients of the correction.
    """

    position: Tensor
    out: Tensor
    size: Tensor
    middle: Tensor
    basis: Tensor
    solve: Tensor


def probe_positions(q_len: int, num_probes: int, device: torch.device) -> Tensor:
    """Return the positions (P,) of the probes: the queries in the middle of equal parts of the sequence."""
    return middle_positions(q_len, num_probes, device)


def compute_probes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: NearFarOptions,
    bias_of_rows: Callable[[Tensor], Tensor] | None = None,
) -> Probes:
    """Compute the exact output of `num_probes` evenly spread queries, and the correction by them.

    `bias_of_rows` returns the bias of the scores of some queries, (BH, 1, P, Nk) for their positions (P,).
    """
    position = probe_positions(query.shape[1], options.num_probes, key.device)
    rows = query.index_select(1, position)  # (BH, P, D)
    bias = None if bias_of_rows is None else bias_of_rows(position)
    out = attend(rows[:, None], key[:, None], value[:, None], bias, scale=options.scale).out[:, 0]  # (BH, P, Dv)
    variance, mean = torch.var_mean(rows, 1, keepdim=True, correction=0)  # (BH, 1, D) each
    size = (variance + LEAST_VARIANCE).rsqrt()
    middle = -mean * size
    basis = _features(rows, size, middle)  # (BH, P, D + 1)
    solve = regularized_solve(torch.bmm(basis.mT, basis), basis.mT, LINEAR_RIDGE)  # (BH, D + 1, P)
    return Probes(position, out, size, middle, basis, solve)


def _features(query: Tensor, size: Tensor, middle: Tensor) -> Tensor:
    """Standardize queries and append 1: (BH, N, D + 1)."""
    # The limit prevents extrapolation to a query that is unlike all probes.
    return with_ones(torch.addcmul(middle, query, size).clamp(-MAX_FEATURE, MAX_FEATURE))


@torch.no_grad()
def _missed_share(out: Tensor, probes: Probes) -> Tensor:
    """Compute what each probe misses after a correction by the others, as a share of a head's exact output: (BH,).

    This is the leave-one-out residual of ridge regression.
    """
    missing = probes.out - out.index_select(1, probes.position)  # (BH, P, Dv)
    left = missing - torch.bmm(probes.basis, torch.bmm(probes.solve, missing))  # (BH, P, Dv)
    left = left / (1.0 - (probes.basis * probes.solve.mT).sum(2, keepdim=True))
    share: Tensor = torch.linalg.vector_norm(left, dim=(1, 2)) / torch.linalg.vector_norm(probes.out, dim=(1, 2))
    return share


def correct_by_probes(query: Tensor, out: Tensor, probes: Probes) -> Tensor:
    """Add what the outputs of the probes miss, as a linear function of the query: (BH, Nq, Dv)."""
    missing = probes.out - out.index_select(1, probes.position)
    factor = torch.bmm(probes.solve, missing * _weight_of_probes(missing))  # (BH, D + 1, P) @ (BH, P, Dv)
    return torch.baddbmm(out, _features(query, probes.size, probes.middle), factor)


def _weight_of_probes(missing: Tensor) -> Tensor:
    """Weigh probes by 1, or less if they miss much more than others (Huber 1964): (..., P, Dv) -> (..., P, 1)."""
    size = torch.linalg.vector_norm(missing, dim=-1, keepdim=True)  # (..., P, 1)
    # Not below a least size, so that the weight is 1, and has no gradient, where nothing but rounding is missing.
    limit = (MAX_MISSING * size.median(-2, keepdim=True)[0]).clamp(min=LEAST_VARIANCE)  # (..., 1, 1)
    weight: Tensor = limit / torch.maximum(size, limit)
    return weight


def _with_near_keys(query: Tensor, keys: CountedKeys, far: Partial, options: NearFarOptions) -> Tensor:
    """Replace what landmarks count for near keys by exact attention: (BH, Nq, Dv)."""
    groups = group_queries(torch.bmm(query, directions(keys.key)), options.num_groups)

    def some_heads(groups: Groups, query: Tensor, keys: CountedKeys, far: Partial) -> Tensor:
        queries = take(query, groups.query)  # (BH, G, b, D)
        near = find_near_keys(queries.mean(2), keys.key, options.block_size, options.scale)  # (BH, G, w)
        exact, counted = near_attention(queries, groups.slot, near, keys, options.scale, options.dropout_p)
        return replace_counted(far, counted, exact)

    # The near keys of all groups, and the scores of all keys for the means of the groups.
    _, kv_len, head_dim = keys.key.shape
    numel = groups.query.shape[1] * max(options.block_size * max(head_dim, keys.value.shape[2]), kv_len)
    size = slice_size(numel // _LARGER_SLICES, query.device)
    return sliced(some_heads, groups, query, keys, far, size=size, draws=options.dropout_p > 0.0)


def near_attention(
    queries: Tensor, slot: Tensor, near: Tensor, keys: CountedKeys, scale: float, dropout_p: float
) -> tuple[Partial, Partial]:
    """Compute attention to near keys, exactly and as the landmarks count it.

    Args:
        queries: (BH, G, b, D), in groups.
        slot: int64 (BH, Nq), the place of each query in the groups.
        near: int64 (BH, G, w), the keys of each group.
        keys: the keys, and what landmarks count for them.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        Partials of out (BH, Nq, Dv) and lse (BH, Nq, 1).
    """
    key, value, center, landmark, key_bias = keys
    flat = near.flatten(1)  # (BH, G * w)
    own, bias = (x.gather(1, flat).view_as(near) for x in (landmark, key_bias))  # (BH, G, w) each
    near_key = take(key, near)  # (BH, G, w, D), (BH, G, w, Dv)
    values = take(value, near)
    exact = attend(queries, near_key, values, scale=scale, dropout_p=dropout_p)  # out (BH, G, b, Dv), lse (BH, G, b)
    counted = attend(queries, take(center, own), values, bias.unsqueeze(2), scale=scale, dropout_p=dropout_p)
    parts = torch.cat((exact.out, counted.out, torch.stack((exact.lse, counted.lse), 3)), 3)  # (BH, G, b, 2 Dv + 2)
    outs = take(parts.flatten(1, 2), slot).split((value.shape[2], value.shape[2], 1, 1), 2)  # (BH, Nq, .) each
    return Partial(outs[0], outs[2]), Partial(outs[1], outs[3])


def replace_counted(far: Partial, counted: Partial, exact: Partial) -> Tensor:
    """Remove `counted`, a part of `far`, and add `exact`; each is out (..., Nq, Dv) and lse (..., Nq, 1)."""
    with torch.no_grad():
        ref = torch.maximum(far.lse, exact.lse)
    of_far, of_counted, of_exact = ((x.lse - ref).exp() for x in (far, counted, exact))  # (..., Nq, 1) each
    total = of_far - of_counted + of_exact  # (..., Nq, 1)
    is_rounding = total <= LEAST_SHARE * of_far
    sums = torch.addcmul(torch.addcmul(far.out * of_far, counted.out, of_counted, value=-1.0), exact.out, of_exact)
    return torch.where(is_rounding, exact.out, sums / total.masked_fill(is_rounding, 1.0))


def nearfar_naive(query: Tensor, key: Tensor, value: Tensor, options: NearFarOptions) -> Tensor:
    """Compute the readable form, by dense matrices of one head after another, with the choices of the fast form.

    These choices are the keys that clusters begin with, the clusters, the landmark of each key, the heads with near
    keys, the groups of their queries and the near keys of each group.
    """
    dtype = accumulation_dtype(key.dtype)
    with torch.no_grad():
        q, k, v = (x.to(dtype) for x in (query, key, value))
        k = k - k.mean(1, keepdim=True)
        landmarks = choose_landmarks(q, k, options)
        represented = represent(k, v, landmarks)
        probes = compute_probes(q, k, v, options) if options.num_probes else None
        with_near = _heads_with_near_keys(_attend_to_landmarks(q, landmarks, represented, options).out, probes, options)
        near = torch.zeros(*q.shape[:2], k.shape[1], dtype=torch.bool, device=q.device)  # (BH, Nq, Nk)
        for head in [] if with_near is None else with_near.tolist():
            own = q[head, None], k[head, None]
            groups = group_queries(own[0] @ directions(own[1]), options.num_groups)
            means = take(own[0], groups.query).mean(2)  # (1, G, D)
            keys = find_near_keys(means, own[1], options.block_size, options.scale)[0]  # (G, w)
            group = groups.slot[0] // groups.query.shape[2]  # (Nq,)
            near[head] = near[head].scatter(1, keys[group], True)
    tensors = query.double(), key.double(), value.double(), landmarks.choice, represented.landmark, near
    return torch.stack([_naive_head(head[:3], head[3:], options) for head in zip(*tensors, strict=True)])


def _naive_head(tensors: tuple[Tensor, ...], chosen: tuple[Tensor, ...], options: NearFarOptions) -> Tensor:
    query, key, value = tensors
    choice, landmark, near = chosen
    key = key - key.mean(0)
    c, tilt = landmarks_naive(query, key, choice, options)  # (m, D), (D,)
    exact, of_landmarks = scores_naive(query, key, c[landmark], tilt, options)  # (Nq, Nk) each
    scores = torch.where(near, exact, of_landmarks)  # (Nq, Nk)
    out = scores.softmax(1) @ value
    rounding = scores.logsumexp(1) - of_landmarks.logsumexp(1) <= math.log(LEAST_SHARE)
    only_near = exact.masked_fill(~near & near.any(), -torch.inf).softmax(1) @ value
    return correct_by_probes_naive(query, torch.where(rounding[:, None], only_near, out), exact, value, options)


def correct_by_probes_naive(
    query: Tensor, out: Tensor, scores: Tensor, value: Tensor, options: NearFarOptions
) -> Tensor:
    """Compute `correct_by_probes` of a head in the readable form, from the exact scores (Nq, Nk): (Nq, Dv)."""
    if not options.num_probes:
        return out
    probe = probe_positions(len(query), options.num_probes, query.device)
    features = (query - query[probe].mean(0)) / (query[probe].var(0, correction=0) + LEAST_VARIANCE).sqrt()
    features = with_ones(features.clamp(-MAX_FEATURE, MAX_FEATURE))  # (Nq, D + 1)
    basis = features[probe]
    missing = scores[probe].softmax(1) @ value - out[probe]  # (P, Dv)
    ridge = LINEAR_RIDGE * torch.eye(features.shape[1], dtype=features.dtype, device=features.device)
    solve = torch.linalg.inv(basis.T @ basis + ridge) @ basis.T  # (D + 1, P)
    result: Tensor = out + features @ solve @ (missing * _weight_of_probes(missing))
    return result
