"""Random features of the softmax kernel (Choromanski et al. 2021, FAVOR+), in the log domain.

exp(q . k) = E_w [exp(w . q - |q|^2/2) exp(w . k - |k|^2/2)]. With F features w_f the sums over the keys,

    b_f = log sum_j exp(w_f . k_j - |k_j|^2/2),   M_f = the average of v_j by these weights,

are the `Partial` of features that attend to keys. The output of a query is the softmax over the features of
w_f . q + b_f, applied to M_f, which is a second attention. So the maxima that prevent overflow are taken for each
feature and for each query, never over the queries and keys of a sequence, and no epsilon is added.
"""

import math

import torch
from torch import Tensor

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.block_states import merge_other_blocks
from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.export import is_compiling
from hf_efficient_attn.ops.partial import (
    Partial,
    accumulation_dtype,
    exp_,
    merge,
    partial_attention,
    prefix_merge,
    safe_row_max,
)
from hf_efficient_attn.ops.random import Seed, normal


def orthogonal_features(num_features: int, head_dim: int, seed: Seed, device: torch.device) -> Tensor:
    """Gaussian directions that are orthogonal within blocks of D: float64 (F, D).

    A block is the Q of a Gaussian matrix, which is Haar distributed after its signs are fixed. Each direction gets the
    length of an independent Gaussian vector, so that it is standard normal by itself.
    """
    blocks = ceil_div(num_features, head_dim)
    q, r = torch.linalg.qr(normal((blocks, head_dim, head_dim), seed, 5, device))
    signs = r.diagonal(dim1=1, dim2=2).sign()
    directions = (q * signs[:, None, :]).transpose(1, 2).reshape(-1, head_dim)[:num_features]
    lengths = torch.linalg.vector_norm(normal((num_features, head_dim), seed, 7, device), dim=1, keepdim=True)
    features: Tensor = directions * lengths
    return features


def softmax_features(num_features: int, head_dim: int, seed: Seed, device: torch.device) -> Tensor:
    """`orthogonal_features`, kept if the seed is a number, because QR takes longer than a short attention."""
    return constant(orthogonal_features, num_features, head_dim, seed, device=device)


def split_scale(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply queries and keys (..., D) with the root of |scale|, in the accumulation dtype.

    Returns:
        The queries, which also take the sign of the scale; the keys; and the log factor -|k|^2/2 (...) of the keys.
    """
    acc_dtype, root = accumulation_dtype(query.dtype), abs(scale) ** 0.5
    query, key = query.to(acc_dtype) * (root if scale >= 0 else -root), key.to(acc_dtype) * root
    return query, key, -0.5 * key.square().sum(-1)


def key_state(key: Tensor, value: Tensor, features: Tensor, bias: Tensor) -> Partial:
    """The sums over the keys of each of T blocks: features that attend to keys.

    Args:
        key: (BH, T, N, D).
        value: (BH, T, N, Dv).
        features: (F, D).
        bias: (BH, T, 1, N), the log factors of the keys, -inf for masked keys.

    Returns:
        Partial of out (BH, T, F, Dv) = M and lse (BH, T, F) = b.
    """
    directions = features.to(key.dtype).expand(key.shape[0], key.shape[1], -1, -1)
    return partial_attention(directions, key, value, bias, scale=1.0)


def query_state(query: Tensor, state: Partial, features: Tensor, dropout_p: float = 0.0) -> Partial:
    """The output of queries for the sums over keys: queries that attend to features.

    Args:
        query: (BH, T, N, D).
        state: out (BH, T, F, Dv) and lse (BH, T, F), from `key_state`.
        features: (F, D).
        dropout_p: probability of dropping the weight of a feature.

    Returns:
        Partial of out (BH, T, N, Dv) and lse (BH, T, N). The lse lacks the factor of the query, `query_factor`, which
        cancels unless the partial is merged with another.
    """
    directions = features.to(query.dtype).expand(query.shape[0], state.out.shape[1], -1, -1)
    return partial_attention(query, directions, state.out, state.lse.unsqueeze(2), scale=1.0, dropout_p=dropout_p)


def merge_blocks(state: Partial) -> Partial:
    """The merge of all blocks of a state (BH, T, F, .), as one block: out (BH, 1, F, Dv) and lse (BH, 1, F).

    The lse of features without a key is not -inf but finite, so that this takes few kernels.
    """
    lse = state.lse.clamp(min=-1e30)
    weights = lse.softmax(1).unsqueeze(-1)
    return Partial((state.out * weights).sum(1, keepdim=True), lse.logsumexp(1, keepdim=True))


def query_factor(query: Tensor, num_features: int) -> Tensor:
    """The log factor -|q|^2/2 - log F of queries (..., D), which the lse of `query_state` lacks: (...)."""
    return -0.5 * query.square().sum(-1) - math.log(num_features)


def states_before(state: Partial) -> Partial:
    """For each block t of a state (BH, T, F, .), the merge of the blocks 0 .. t-1, which alone determine it."""
    if backend(state.lse) != "cpu":
        return merge_other_blocks(state, earlier_only=True)
    if _needs_functional_form(state):
        return prefix_merge(state, 1)
    # Block by block in one buffer. The doubling of `prefix_merge` would pass over the whole state log2(T) times.
    outs, lses = state
    total = torch.logcumsumexp(lses, 1)
    before = torch.cat((torch.full_like(total[:, :1], -torch.inf), total[:, :-1]), 1)
    kept, added = (exp_(x - safe_row_max(total)).unsqueeze(-1) for x in (before, lses))
    out = torch.empty_like(outs)
    out[:, 0] = 0.0
    for t in range(outs.shape[1] - 1):
        torch.mul(out[:, t], kept[:, t], out=out[:, t + 1]).addcmul_(outs[:, t], added[:, t])
    return Partial(out, before)


def states_elsewhere(state: Partial) -> Partial:
    """For each block t of a state (BH, T, F, .), the merge of all other blocks."""
    if backend(state.lse) != "cpu":
        return merge_other_blocks(state, earlier_only=False)
    before = states_before(state)
    if _needs_functional_form(state):
        after = prefix_merge(Partial(*(x.flip(1) for x in state)), 1)
        return merge(before, Partial(*(x.flip(1) for x in after)))
    # The sums over later blocks are computed from the last block on, in a buffer of one block, and are added to the
    # sums over earlier blocks.
    outs, lses = state
    out, total = before.out, torch.logcumsumexp(lses.flip(1), 1).flip(1)
    after_lse = torch.cat((total[:, 1:], torch.full_like(total[:, :1], -torch.inf)), 1)
    lse = torch.logaddexp(before.lse, after_lse)
    kept, added = (exp_(x - safe_row_max(total)).unsqueeze(-1) for x in (after_lse, lses))
    first, second = (exp_(x - safe_row_max(lse)).unsqueeze(-1) for x in (before.lse, after_lse))
    running = torch.zeros_like(outs[:, 0])
    for t in reversed(range(outs.shape[1])):
        out[:, t].mul_(first[:, t]).addcmul_(running, second[:, t])
        running.mul_(kept[:, t]).addcmul_(outs[:, t], added[:, t])
    return Partial(out, lse)


def _needs_functional_form(state: Partial) -> bool:
    """Whether in-place updates are impossible: with a gradient or with `torch.compile`."""
    return is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in state))
