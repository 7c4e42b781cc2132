"""Random features of the softmax kernel (Choromanski et al. 2021, FAVOR+), in the log domain.

exp(q . k) = E_w [exp(w . q - |q|^2/2) exp(w . k - |k|^2/2)]. With F features w_f the sums over the keys,

    b_f = log sum_j exp(w_f . k_j - |k_j|^2/2),   M_f = the average of v_j by those weights,

are the `Partial` of features attending to keys, and the output of a query is the softmax over features of w_f . q +
b_f, applied to M_f: a second attention. So each of the two maxima that keep it from overflowing is taken per feature
and per query, never over queries and keys of a sequence at once, and no epsilon is added anywhere.
"""

import functools

import torch
from torch import Tensor

from hf_efficient_attn.ops.partial import (
    Partial,
    accumulation_dtype,
    exp_,
    merge,
    partial_attention,
    prefix_merge,
    safe_row_max,
)
from hf_efficient_attn.ops.random import normal


def orthogonal_features(count: int, width: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """`count` Gaussian directions of `width` numbers, orthogonal within blocks of `width`: float64 (count, width).

    Each block is the Q of a Gaussian matrix (Haar distributed after the signs are fixed), each row's length that of an
    independent Gaussian vector, so that every row by itself is standard normal.
    """
    blocks = -(-count // width)
    q, r = torch.linalg.qr(normal((blocks, width, width), seed, 5, device))
    signs = r.diagonal(dim1=1, dim2=2).sign()
    rows = (q * signs[:, None, :]).transpose(1, 2).reshape(-1, width)[:count]
    return rows * normal((count, width), seed, 7, device).norm(dim=1, keepdim=True)


_cached_features = functools.lru_cache(maxsize=64)(orthogonal_features)


def softmax_features(count: int, width: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """`orthogonal_features`, kept for a seed that is a number, since QR costs more than a short attention."""
    if isinstance(seed, int) and not torch.compiler.is_compiling():
        with torch.no_grad():
            return _cached_features(count, width, seed, device)
    return orthogonal_features(count, width, seed, device)


def split_scale(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys (..., D) each times sqrt(|scale|) in the accumulator's type, and the log factor -|k|^2/2 (...).

    The sign of the scale goes to the queries.
    """
    wide, root = accumulation_dtype(query.dtype), abs(scale) ** 0.5
    query, key = query.to(wide) * (root if scale >= 0 else -root), key.to(wide) * root
    return query, key, -0.5 * key.square().sum(-1)


def key_state(key: Tensor, value: Tensor, features: Tensor, bias: Tensor) -> Partial:
    """Features attending to keys: key (A, T, N, D), value (A, T, N, Dv), features (F, D), bias (A, T, 1, N).

    Returns:
        Partial of out (A, T, F, Dv) = M and lse (A, T, F) = b.
    """
    rows = features.to(key.dtype).expand(key.shape[0], key.shape[1], -1, -1)
    return partial_attention(rows, key, value, bias, scale=1.0)


def query_state(query: Tensor, state: Partial, features: Tensor, dropout_p: float = 0.0) -> Partial:
    """Queries attending to features: query (A, T, N, D), state of (A, T, F, .) -> Partial (A, T, N, .).

    The lse leaves out the query's own factor, -|q|^2/2 - log F, which cancels wherever it is not merged with others.
    """
    rows = features.to(query.dtype).expand(query.shape[0], state.out.shape[1], -1, -1)
    return partial_attention(query, rows, state.out, state.lse.unsqueeze(2), scale=1.0, dropout_p=dropout_p)


def query_factor(query: Tensor, count: int) -> Tensor:
    """What the lse of `query_state` leaves out, (...) for queries (..., D) read by `count` features."""
    return -0.5 * query.square().sum(-1) - torch.tensor(float(count), dtype=query.dtype, device=query.device).log()


def states_before(state: Partial) -> Partial:
    """For each block t of states (A, T, F, .), the merge of those at 0 .. t-1; what stands there alone decides it."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in state)):
        return prefix_merge(state, 1)
    # Block by block in one buffer, since the doubling of `prefix_merge` walks over all of it log2(T) times.
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
    """For each block t of states (A, T, F, .), the merge of all the others."""
    before = states_before(state)
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in state)):
        after = prefix_merge(Partial(*(x.flip(1) for x in state)), 1)
        return merge(before, Partial(*(x.flip(1) for x in after)))
    # The sums over what is behind run backwards through one block's buffer, into those over what is before.
    outs, lses = state
    out, total = before.out, torch.logcumsumexp(lses.flip(1), 1).flip(1)
    after = torch.cat((total[:, 1:], torch.full_like(total[:, :1], -torch.inf)), 1)
    both = torch.logaddexp(before.lse, after)
    kept, added = (exp_(x - safe_row_max(total)).unsqueeze(-1) for x in (after, lses))
    first, second = (exp_(x - safe_row_max(both)).unsqueeze(-1) for x in (before.lse, after))
    running = torch.zeros_like(outs[:, 0])
    for t in reversed(range(outs.shape[1])):
        out[:, t].mul_(first[:, t]).addcmul_(running, second[:, t])
        running.mul_(kept[:, t]).addcmul_(outs[:, t], added[:, t])
    return Partial(out, both)
