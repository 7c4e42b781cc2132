"""Random features of the softmax kernel (Choromanski et al. 2021, FAVOR+), in the log domain.

exp(q . k) = E_w [exp(w . q - |q|^2/2) exp(w . k - |k|^2/2)]. With F features w_f the sums over the keys,

    b_f = log sum_j exp(w_f . k_j - |k_j|^2/2),   M_f = the average of v_j by those weights,

are the `Partial` of features attending to keys, and the output of a query is the softmax over features of w_f . q +
b_f, applied to M_f: a second attention. So each of the two maxima that keep it from overflowing is taken per feature
and per query, never over queries and keys of a sequence at once, and no epsilon is added anywhere.
"""

import torch
from torch import Tensor

from hf_efficient_attn.ops.partial import Partial, attend
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


def key_state(key: Tensor, value: Tensor, features: Tensor, bias: Tensor) -> Partial:
    """Features attending to keys: key (A, T, N, D), value (A, T, N, Dv), features (F, D), bias (A, T, 1, N).

    Returns:
        Partial of out (A, T, F, Dv) = M and lse (A, T, F) = b.
    """
    rows = features.to(key.dtype).expand(key.shape[0], key.shape[1], -1, -1)
    return attend(rows, key, value, bias, scale=1.0)


def read_state(query: Tensor, state: Partial, features: Tensor, dropout_p: float = 0.0) -> Partial:
    """Queries attending to features: query (A, T, N, D), state of (A, T, F, .) -> Partial (A, T, N, .).

    The lse leaves out the query's own factor, -|q|^2/2 - log F, which cancels wherever it is not merged with others.
    """
    rows = features.to(query.dtype).expand(query.shape[0], state.out.shape[1], -1, -1)
    return attend(query, rows, state.out, state.lse.unsqueeze(2), scale=1.0, dropout_p=dropout_p)
