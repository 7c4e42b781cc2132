"""The readable bidirectional form of a method with near keys and weighted landmarks, with heads and a key mask."""

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.coreset import candidate_positions, draw_apart, gumbel_numbers
from hf_efficient_attn.ops.coreset_landmarks import DRAW_POWER, TEMPERATURE, CoresetOptions
from hf_efficient_attn.ops.weighted_coreset_naive import (
    naive_block_head,
    naive_head,
    naive_landmarks,
    naive_near_keys,
)


def naive_bidirectional(
    coreset: CoresetOptions, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """One batch row and one head at a time without padding, with dense weights of all keys: (B, H, Nq, Dv).

    Args:
        coreset: how landmarks are chosen. Up to num_landmarks + block_size keys the output is exact.
        query: (B, H, Nq, D).
        key: (B, H, Nk, D).
        value: (B, H, Nk, Dv).
        options: mask, scale and seed.
    """
    out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    budget = coreset.num_landmarks + coreset.block_size
    for b in range(query.shape[0]):
        valid = key.new_ones(key.shape[2], dtype=torch.bool) if options.key_mask is None else options.key_mask[b]
        if not valid.any():
            continue
        same = query.shape[2] == key.shape[2]
        rows = valid if same else query.new_ones(query.shape[2], dtype=torch.bool)
        queries, keys, values = query[b][:, rows].double(), key[b][:, valid].double(), value[b][:, valid].double()
        num_keys = keys.shape[1]
        if num_keys <= budget:
            out[b, :, rows] = (options.scale * queries @ keys.mT).softmax(-1) @ values
            continue
        keys = keys - keys.mean(1, keepdim=True)
        position, _ = candidate_positions(None, num_keys, coreset.num_candidates, key.device)
        candidates = keys[:, position[0]]
        if backend(key) != "cpu":
            numbers = gumbel_numbers(budget, len(position[0]), options.seed, keys)[0]
            heads = zip(queries, keys, values, strict=True)
            out[b, :, rows] = torch.stack([naive_block_head(*x, position[0], numbers, coreset) for x in heads])
            continue
        points = candidates * (TEMPERATURE * abs(options.scale) ** 0.5)
        numbers = gumbel_numbers(budget, points.shape[1], options.seed, points)
        pivots = draw_apart(points, DRAW_POWER, numbers, None, budget).candidate
        for h in range(queries.shape[0]):
            near = naive_near_keys(queries[h], keys[h], coreset)
            count = coreset.num_landmarks if near.any() else budget
            landmarks, cluster = naive_landmarks(
                candidates[h], pivots[h, :count], coreset.num_refinements, options.scale
            )
            members = torch.nn.functional.one_hot(cluster, count).double().T
            sizes = members.sum(1)
            means = members @ values[h, position[0]] / sizes.clamp(min=1)[:, None]
            head = queries[h], keys[h], values[h], landmarks, (means, sizes)
            out[b, h, rows] = naive_head(*head, near, coreset)
    return out.to(value.dtype)
