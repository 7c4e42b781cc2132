"""The causal form of a method with a weighted coreset, for inputs with heads and a key mask."""

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import MethodConfig
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.methods._shared.sampled_keys import move_valid_first, restore_order
from hf_efficient_attn.ops import causal_landmarks_plan
from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.causal_coreset import causal_coreset_attention
from hf_efficient_attn.ops.causal_coreset_naive import causal_coreset_naive
from hf_efficient_attn.ops.causal_coreset_plan import CausalCoresetOptions, split_columns
from hf_efficient_attn.ops.causal_landmarks import causal_landmark_attention
from hf_efficient_attn.ops.causal_landmarks_naive import causal_landmark_naive
from hf_efficient_attn.ops.causal_landmarks_plan import LandmarkOptions
from hf_efficient_attn.ops.exact import exact_attention, exact_decode


def _options(columns: int, options: AttentionOptions) -> CausalCoresetOptions:
    return CausalCoresetOptions(**split_columns(columns), seed=options.seed)


def _landmark_options(columns: int, options: AttentionOptions) -> LandmarkOptions:
    return LandmarkOptions(**causal_landmarks_plan.split_columns(columns), seed=options.seed)


def forward_causal(columns: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Causal attention with about `columns` keys per query; see `register_method` for the other arguments."""
    shape, scale, dropout_p = query.shape, options.scale, options.dropout_p
    flat = flatten_heads(query, key, value, options.key_mask)
    if shape[2] <= columns:
        return unflatten_heads(exact_attention(*flat, is_causal=True, scale=scale, dropout_p=dropout_p), shape)
    query, key, value, order = move_valid_first(*flat)
    if backend(query) == "cpu":
        out = causal_coreset_attention(query, key, value, _options(columns, options), scale=scale, dropout_p=dropout_p)
    else:
        out = causal_landmark_attention(
            query, key, value, _landmark_options(columns, options), scale=scale, dropout_p=dropout_p
        )
    return unflatten_heads(restore_order(out, order, flat.key_mask), shape)


def naive_causal(columns: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """The readable form of `forward_causal`."""
    shape = query.shape
    flat = flatten_heads(query, key, value, options.key_mask)
    if shape[2] <= columns:
        pairs = torch.ones(shape[2], shape[2], dtype=torch.bool, device=query.device).tril()
        pairs = pairs if flat.key_mask is None else pairs & flat.key_mask[:, None]
        scores = (options.scale * flat.query.double() @ flat.key.double().mT).masked_fill(~pairs, -torch.inf)
        weights = scores.softmax(-1).masked_fill(~pairs.any(-1, keepdim=True), 0.0)
        return unflatten_heads((weights @ flat.value.double()).to(value.dtype), shape)
    query, key, value, order = move_valid_first(*flat)
    if backend(query) == "cpu":
        out = causal_coreset_naive(query, key, value, _options(columns, options), scale=options.scale)
    else:
        out = causal_landmark_naive(query, key, value, _landmark_options(columns, options), scale=options.scale)
    return unflatten_heads(restore_order(out.to(value.dtype), order, flat.key_mask), shape)


def decode_exactly(
    config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Decode a few tokens with exact attention to all cached keys."""
    return exact_decode(query, key, value, options.key_mask, scale=options.scale, dropout_p=options.dropout_p)
