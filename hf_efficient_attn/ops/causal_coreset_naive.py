"""The readable form of `hf_efficient_attn.ops.causal_coreset`: a dense row of weights for each query, in float64."""

import torch
from torch import Tensor

from hf_efficient_attn.ops.causal_coreset import (
    LARGEST,
    LEAST,
    LEAST_MISSED,
    REFERENCE,
    SAFE,
    CausalCoresetOptions,
    Epoch,
    choose_prefix_pivots,
    epoch_bounds,
    plan_epoch,
    toward_keys,
)
from hf_efficient_attn.ops.partial import accumulation_dtype


def causal_coreset_naive(
    query: Tensor, key: Tensor, value: Tensor, options: CausalCoresetOptions, *, scale: float
) -> Tensor:
    """`causal_coreset_attention` with the same choices: (BH, N, D), (BH, N, D), (BH, N, Dv) -> float64 (BH, N, Dv)."""
    acc_dtype = accumulation_dtype(query.dtype)
    plans = []
    for number, bounds in enumerate(epoch_bounds(query.shape[1], options)):
        pivot = choose_prefix_pivots(key, number, bounds[0] - options.block_size, options, scale)
        plans.append(plan_epoch(toward_keys(query.to(acc_dtype), scale), key.to(acc_dtype), pivot, bounds, options))
    query, key, value = query.double(), key.double(), value.double()
    position = torch.arange(query.shape[1], device=query.device)
    scores = (scale * query @ key.mT).masked_fill(position > position[:, None], -torch.inf)
    out = scores.softmax(-1) @ value
    for plan in plans:
        for a in range(len(query)):
            out[a, plan.start : plan.end] = _epoch_of_a_head(query[a], key[a], value[a], a, plan, options, scale)
    return out


def _epoch_of_a_head(
    query: Tensor, key: Tensor, value: Tensor, head: int, plan: Epoch, options: CausalCoresetOptions, scale: float
) -> Tensor:
    """Output (L, Dv) of the queries of an epoch, from query (N, D), key (N, D) and value (N, Dv) of a head."""
    prefix, position = plan.start - options.block_size, torch.arange(len(key), device=key.device)
    targets = torch.cat((value, torch.ones_like(value[:, :1])), 1)
    key = key - key[:prefix].mean(0)
    points = key * (options.temperature * abs(scale) ** 0.5)
    pivot = points[plan.pivot[head]]
    half = pivot.square().sum(1) / 2
    kernel = torch.exp(-torch.cdist(pivot, pivot).square() / 2)
    inverse = torch.linalg.inv(kernel + options.ridge * torch.eye(len(kernel), dtype=key.dtype, device=key.device))
    reference = (half.max() - REFERENCE).clamp(min=0.0)  # bounds exponents, and cancels
    rows = torch.exp((pivot @ points.mT - half[:, None] - reference).clamp(max=LARGEST))  # K_Sj
    safe = torch.maximum(inverse @ rows[:, :prefix].sum(1), torch.exp(half - reference).clamp(min=LEAST))
    # What the nearest pivot misses of each key.
    missed = (1.0 - torch.exp(-torch.cdist(points, pivot).square()).amax(1)).clamp(min=LEAST_MISSED)
    outs = []
    for i in range(plan.start, plan.end):
        block = (i - plan.start) // options.block_size
        is_near = (position >= prefix + block * options.block_size) & (position <= i)
        is_far = (position <= i) & ~is_near
        of_exact = is_near.double()
        if plan.clusters is not None:
            _, _, slot, slots, clusters = plan.clusters
            cluster = clusters[head, slot[head, i - plan.start] // slots]
            member = plan.clusters.member[head, cluster][plan.clusters.is_member[head, cluster]]
            of_exact[member] = missed[member]
        logits = scale * key @ query[i]
        of_pivots = logits[plan.pivot[head]] + reference - half
        largest = torch.maximum(logits[of_exact > 0].max(), of_pivots.max())
        basis = torch.exp(of_pivots - largest)
        exact = (of_exact * torch.exp(logits - largest)) @ targets
        total = exact + torch.where(is_far, basis @ inverse @ rows, 0.0) @ targets
        bound = exact + (basis @ safe) * targets[:prefix].mean(0)
        total = total if total[-1] > SAFE * bound[-1] else bound
        outs.append(total[:-1] / total[-1])
    return torch.stack(outs)
