"""The readable form of `hf_efficient_attn.ops.causal_coreset`: a dense row of weights for each query, in float64."""

import torch
from torch import Tensor

from hf_efficient_attn.ops.causal_coreset import LARGEST, LEAST, LEAST_KEYS, LEAST_MISSED, REFERENCE, SAFE
from hf_efficient_attn.ops.causal_coreset_plan import (
    LEAST_LOG_WEIGHT,
    POWER,
    CausalCoresetOptions,
    Epoch,
    draw_numbers,
    epoch_bounds,
    plan_epoch,
)


def causal_coreset_naive(
    query: Tensor, key: Tensor, value: Tensor, options: CausalCoresetOptions, *, scale: float
) -> Tensor:
    """`causal_coreset_attention` with the same choices: (BH, N, D), (BH, N, D), (BH, N, Dv) -> float64 (BH, N, Dv)."""
    numbers = draw_numbers(key, options)
    plans = [plan_epoch(key, numbers, bounds, options, scale) for bounds in epoch_bounds(query.shape[1], options)]
    query, key, value = query.double(), key.double(), value.double()
    position = torch.arange(query.shape[1], device=query.device)
    scores = (scale * query @ key.mT).masked_fill(position > position[:, None], -torch.inf)
    out = scores.softmax(-1) @ value
    for plan in plans:
        for a in range(len(query)):
            out[a, plan.start : plan.end] = _epoch_of_a_head(query[a], key[a], value[a], a, plan, options, scale)
    return out


def _landmarks(points: Tensor, head: int, plan: Epoch) -> Tensor:
    """The landmarks (m, D) of an epoch from all keys (N, D) of a head, whose kernel is exp(<x, y>)."""
    landmarks = points[plan.candidate[plan.draw[head]]]
    norm = points[plan.candidate].square().sum(1)
    weight = (POWER * (norm - norm.max())).clamp(min=LEAST_LOG_WEIGHT).exp()
    for i in range(len(landmarks)):
        members = plan.cluster[head] == i
        if members.any():
            own = weight[members, None]
            landmarks[i] = (own * points[plan.candidate[members]]).sum(0) / own.sum()
    return landmarks


def _epoch_of_a_head(
    query: Tensor, key: Tensor, value: Tensor, head: int, plan: Epoch, options: CausalCoresetOptions, scale: float
) -> Tensor:
    """Output (L, Dv) of the queries of an epoch, from query (N, D), key (N, D) and value (N, Dv) of a head."""
    prefix, position = plan.start - options.block_size, torch.arange(len(key), device=key.device)
    targets = torch.cat((value, torch.ones_like(value[:, :1])), 1)
    key = key - key[:prefix].mean(0)
    root = options.temperature * abs(scale) ** 0.5
    points = key * root
    landmarks = _landmarks(points, head, plan)
    half = landmarks.square().sum(1) / 2
    kernel = torch.exp(-torch.cdist(landmarks, landmarks).square() / 2)
    inverse = torch.linalg.inv(kernel + options.ridge * torch.eye(len(kernel), dtype=key.dtype, device=key.device))
    reference = (half.max() - REFERENCE).clamp(min=0.0)  # bounds exponents, and cancels
    rows = torch.exp((landmarks @ points.mT - half[:, None] - reference).clamp(max=LARGEST))  # K_cj
    safe = torch.maximum(inverse @ rows[:, :prefix].sum(1), torch.exp(half - reference).clamp(min=LEAST))
    # The nearest landmark of each key, and what it misses of the key.
    distance, nearest = torch.cdist(points, landmarks).min(1)
    missed = (1.0 - torch.exp(-distance.square())).clamp(min=LEAST_MISSED)
    outs = []
    for i in range(plan.start, plan.end):
        block = (i - plan.start) // options.block_size
        is_near = (position >= prefix + block * options.block_size) & (position <= i)
        is_far = (position <= i) & ~is_near
        of_exact, logits = is_near.double(), scale * key @ query[i]
        of_landmarks = (scale / root if scale else 0.0) * landmarks @ query[i] + reference - half
        if prefix >= LEAST_KEYS * len(landmarks):
            member = (nearest[:prefix] == of_landmarks.argmax()).nonzero()[:, 0]
            member = member[max(0, len(member) - options.cluster_size) :]
            of_exact[member] = missed[member]
        largest = torch.maximum(logits[of_exact > 0].max(), of_landmarks.max())
        basis = torch.exp(of_landmarks - largest)
        exact = (of_exact * torch.exp(logits - largest)) @ targets
        total = exact + torch.where(is_far, basis @ inverse @ rows, 0.0) @ targets
        bound = exact + (basis @ safe) * targets[:prefix].mean(0)
        total = total if total[-1] > SAFE * bound[-1] else bound
        outs.append(total[:-1] / total[-1])
    return torch.stack(outs)
