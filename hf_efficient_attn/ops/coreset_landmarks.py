"""Landmarks: weighted means of clusters of keys that begin with keys far from each other.

`hf_efficient_attn.ops.weighted_coreset` explains the choice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import take, valid_first
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.coreset import candidate_positions, cluster_sums, draw_apart, nearest, refinement_steps
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.onednn import multiplies_float32
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.precision import product_dtype
from hf_efficient_attn.ops.random import Seed
from hf_efficient_attn.ops.sampling import stratified_ranks

# t: how much less the kernel of the weights distinguishes keys than the scores do. Of .5, .6, .7, .85 and 1, .7 has the
# least error on activations of BERT and ViT.
TEMPERATURE = 0.7
# Of the weight of a key in the draw, of that in the mean of its cluster, and the smallest logarithm of the latter.
DRAW_POWER, POWER, LEAST_LOG_WEIGHT = 0.85, 0.5, -60.0


class CoresetOptions(NamedTuple):
    """How landmarks are chosen and fitted.

    Attributes:
        num_landmarks: m.
        num_candidates: evenly spaced keys from which the landmarks are made, at least m + block_size.
        num_refinements: steps of Lloyd's algorithm; 0 for landmarks that are keys.
        num_probes: queries whose exact rows fit the weights; 0 for Nystrom weights.
        block_size: keys that each query attends to exactly, or 0.
        near_share: a head has such keys if they hold more than this share of its attention, measured on the probes.
            Other heads have as many more landmarks. With 0, or without probes, all heads have them; with 1 none has.
        scale: factor of the attention scores.
        seed: of the draw of the keys that the clusters begin with.
    """

    num_landmarks: int
    num_candidates: int
    num_refinements: int
    num_probes: int
    block_size: int
    near_share: float
    scale: float
    seed: Seed


class Inputs(NamedTuple):
    """Query (BH, Nq, D), key (BH, Nk, D) and value (BH, Nk, Dv), valid tokens first.

    `num_keys` and `num_queries` are integers, or int64 (BH, 1) for a batch with padding, in which case `bias`
    (BH, 1, 1, Nk) excludes the padding.

    After `center` the tensors have the accumulation dtype and the keys are centered, or they have half precision
    (`keeps_half`) and `mean` (BH, 1, D) is the mean of the keys in the accumulation dtype: a centered copy of them
    would be rounded.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    num_keys: Tensor | int
    num_queries: Tensor | int
    mean: Tensor | None = None


def keeps_half(x: Tensor) -> bool:
    """Whether products with all keys or all queries run in half precision.

    Measured on activations of BERT and ViT: with operands, weights and results in bfloat16 the error of each head is
    the same to two digits, since that of the approximation is at least ten times that of exact attention in bfloat16.

    On the CPU this holds where bfloat16 products are fast and those of float32 by oneDNN are not. With the latter
    attention takes as long in float32, since its exponentials are faster.
    """
    if backend(x) != "cpu":
        return x.dtype in (torch.bfloat16, torch.float16)
    return x.dtype == product_dtype(x) == torch.bfloat16 and not multiplies_float32()


def order_tokens(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> tuple[Inputs, Tensor | None]:
    """The inputs, with the keys not yet centered, and the order that puts the valid tokens first, or None."""
    q_len, kv_len = query.shape[1], key.shape[1]
    if key_mask is None:
        return Inputs(query, key, value, None, kv_len, q_len), None
    order, num_keys = valid_first(key_mask), key_mask.sum(1, keepdim=True)
    key, value = take(key, order), take(value, order)
    valid = torch.arange(kv_len, device=key.device) < num_keys
    bias = mask_bias(valid, accumulation_dtype(key.dtype))[:, None, None]
    if q_len != kv_len:
        return Inputs(query, key, value, bias, num_keys, q_len), None
    return Inputs(take(query, order), key, value, bias, num_keys, num_keys), order


def center(inputs: Inputs) -> Inputs:
    """Subtract the mean of the valid keys, which changes all scores of a query alike, or compute it."""
    inputs, acc_dtype, num_keys = to_products(inputs), accumulation_dtype(inputs.key.dtype), inputs.num_keys
    key = inputs.key
    if isinstance(num_keys, int):
        return subtract_mean(inputs, key.mean(1, keepdim=True, dtype=acc_dtype))
    masked = (torch.arange(key.shape[1], device=key.device) >= num_keys).unsqueeze(2)
    key = key.masked_fill(masked, 0.0)
    mean = key.sum(1, keepdim=True, dtype=acc_dtype) / num_keys.clamp(min=1).unsqueeze(2)
    inputs = subtract_mean(inputs._replace(key=key), mean)
    return inputs if inputs.mean is not None else inputs._replace(key=inputs.key.masked_fill(masked, 0.0))


def to_products(inputs: Inputs) -> Inputs:
    """The inputs in the dtype of products with all tokens: half precision (`keeps_half`) or the accumulation dtype."""
    if keeps_half(inputs.key):
        return inputs
    query, key, value = (x.to(accumulation_dtype(inputs.key.dtype)) for x in inputs[:3])
    return inputs._replace(query=query, key=key, value=value)


def subtract_mean(inputs: Inputs, mean: Tensor) -> Inputs:
    """Subtract the mean (BH, 1, D) from the keys, or keep it next to keys in half precision."""
    if inputs.key.dtype != mean.dtype:
        return inputs._replace(mean=mean)
    return inputs._replace(key=inputs.key - mean)


def candidates_of(inputs: Inputs, limit: int) -> tuple[Tensor, Tensor | None]:
    """The positions (BH or 1, C) of at most `limit` evenly spaced keys, and which exist, bool (BH, C) or None: all.

    Landmarks are made from them.
    """
    kv_len, device = inputs.key.shape[1], inputs.key.device
    if isinstance(inputs.num_keys, int):
        return constant(_positions, kv_len, limit, device=device), None
    # The valid tokens are the first.
    return candidate_positions(torch.arange(kv_len, device=device) < inputs.num_keys, kv_len, limit, device)


def take_candidates(x: Tensor, position: Tensor) -> Tensor:
    """The numbers (BH, C, D) of the candidates, from those of all keys (BH, Nk, D), which come first if they exist."""
    return x if position.shape[1] == x.shape[1] else take_alike(x, position)


def _positions(kv_len: int, limit: int, device: torch.device) -> Tensor:
    return candidate_positions(None, kv_len, limit, device)[0]


def spread_queries(inputs: Inputs, count: int) -> Tensor:
    """The positions of `count` evenly spaced queries, int64 (BH or 1, count)."""
    number, device = inputs.num_queries, inputs.query.device
    return (
        constant(middle_ranks, count, number, device=device)
        if isinstance(number, int)
        else middle_ranks(count, number, device)
    )


def middle_ranks(count: int, number: Tensor | int, device: torch.device) -> Tensor:
    """The ranks in the middle of `count` equal parts of so many tokens: int64 (BH or 1, count)."""
    return stratified_ranks(count, number, torch.full((1, 1), 0.5, dtype=torch.float64, device=device))


def take_alike(x: Tensor, index: Tensor) -> Tensor:
    """`take` with an index for each head, or (1, ...) for all of them."""
    if len(index) == len(x) or x.device.type == "cpu":
        return take(x, index.expand(len(x), *index.shape[1:]))
    taken: Tensor = x.index_select(1, index.flatten()).unflatten(1, index.shape[1:])
    return taken


class Landmarks(NamedTuple):
    """m landmarks of each head.

    Attributes:
        key: (BH, m, D), centered, in the accumulation dtype but rounded to that of the inputs.
        value: (BH, m, Dv), the mean value of the candidates of each cluster.
        log_count: (BH, m), the log of the number of these candidates.
        used: bool (BH, m), False beyond the number of landmarks of a sequence; None if all are used.
        own: bool (BH, 1, 1), the sequences with at most m keys. Each of their keys is its own landmark. None: none has.
    """

    key: Tensor
    value: Tensor
    log_count: Tensor
    used: Tensor | None
    own: Tensor | None


class Candidates(NamedTuple):
    """The keys from which landmarks are made.

    Attributes:
        key: (BH, C, D), centered, in the accumulation dtype.
        value: (BH, C, Dv), in the accumulation dtype.
        valid: bool (BH, C), which of them exist, or None: all.
        num_keys: as in `Inputs`.
        dtype: of the inputs, to which landmarks are rounded.
    """

    key: Tensor
    value: Tensor
    valid: Tensor | None
    num_keys: Tensor | int
    dtype: torch.dtype


def gather_candidates(inputs: Inputs, limit: int) -> Candidates:
    """At most `limit` evenly spaced tokens of inputs with centered keys."""
    position, valid = candidates_of(inputs, limit)
    acc_dtype = accumulation_dtype(inputs.key.dtype)
    keys, values = (take_candidates(x, position).to(acc_dtype) for x in (inputs.key, inputs.value))
    keys = keys if inputs.mean is None else keys - inputs.mean
    return Candidates(keys, values, valid, inputs.num_keys, inputs.key.dtype)


def choose_landmarks(
    candidates: Candidates, numbers: Tensor, options: CoresetOptions, with_near_keys: Tensor | None = None
) -> Landmarks:
    """Draw keys among the candidates, and move them to the means of their clusters.

    Args:
        candidates: C keys of each head.
        numbers: (draws, C), from `gumbel_numbers`.
        options: num_landmarks is the number of this call.
        with_near_keys: bool (BH,), heads that have `options.block_size` landmarks less.
    """
    keys, values, valid, num_keys, dtype = candidates
    device, count, acc_dtype = keys.device, options.num_landmarks, keys.dtype
    root = TEMPERATURE * abs(options.scale) ** 0.5
    points = keys.detach() * root
    pivot, selected = draw_apart(points, DRAW_POWER, numbers, valid, count)
    own = (num_keys <= count).unsqueeze(2) if isinstance(num_keys, Tensor) else None
    if with_near_keys is not None:
        # The first keys of a draw are a draw of fewer.
        few = torch.where(with_near_keys, count - options.block_size, count).unsqueeze(1)
        selected = selected & (torch.arange(count, device=device) < few)
    norm = (keys * root).square().sum(2)
    norm = norm if valid is None else norm.masked_fill(~valid, 0.0)
    weight = (POWER * (norm - norm.amax(1, keepdim=True))).clamp(min=LEAST_LOG_WEIGHT).exp().unsqueeze(2)
    exists = torch.ones_like(weight) if valid is None else valid.unsqueeze(2).to(weight.dtype)
    pivots, weight, tiny = take(keys, pivot), weight * exists, torch.finfo(acc_dtype).tiny
    weighted = torch.cat((keys * weight, weight), 2)
    landmarks = pivots
    used = selected if valid is not None or with_near_keys is not None else None
    cluster, last = nearest(points, landmarks.detach() * root, used), refinement_steps(options.num_refinements, points)
    for step in range(1, last + 1):
        # Only the last means need a gradient: the clusters have none.
        with torch.set_grad_enabled(torch.is_grad_enabled() and step == last):
            sums = cluster_sums(cluster, weighted, count)
            total = sums[..., -1:]
            landmarks = torch.where(total > 0, sums[..., :-1] / total.clamp(min=tiny), pivots)
            landmarks = landmarks if own is None else torch.where(own, pivots, landmarks)
        if step < last:
            cluster = nearest(points, landmarks.detach() * root, used)
    sums = cluster_sums(cluster, torch.cat((values * exists, exists), 2), count)
    number = sums[..., -1] if used is None else sums[..., -1].masked_fill(~used, 0.0)
    value, log_count = sums[..., :-1] / number.clamp(min=1.0).unsqueeze(2), number.log()
    if own is not None:
        value = torch.where(own, take(values, pivot), value)
        log_count = torch.where(own.squeeze(2), torch.zeros_like(number).masked_fill(~selected, -torch.inf), log_count)
    return Landmarks(landmarks.to(dtype).to(acc_dtype), value, log_count, used, own)
