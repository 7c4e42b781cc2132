"""Angular locality-sensitive hashing with blocks of equal size (Zandieh et al. 2023, Appendix A).

Definition A.1: bit b of a code tells on which side of the b-th random hyperplane a vector lies. Lemma A.2: the codes
are put in the order of the reflected Gray code, in which neighbors differ in one bit, so that neighboring codes are
neighboring cells of space. Definition A.3: the tokens are sorted by the rank of their code in that order and cut into
blocks of equal size.

In the order of Lemma A.2 the new bit is appended at the end, and the second half is reversed. So the last bit is the
most significant one of the rank, and bit b of the rank is the parity of the bits b, b+1, ... of the code.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.random import Seed, constant, normal


class NearField(NamedTuple):
    """The block of keys of each of T blocks of queries.

    A sorted index counts the keys (or queries) in the order of the plan; a position counts them in the sequence.

    Attributes:
        query_order: int64 (BH, Nq), the query at each sorted index, or None if queries are in the order of positions.
        key_order: int64 (BH, Nk), the key at each sorted index, valid keys first, or None likewise.
        start: int64 (BH, T), the sorted index at which the block of keys starts.
        block_q: queries of a block.
        block_k: keys of a block.
        num_keys: number of valid keys, int64 (BH, 1) or an integer.
        num_queries: number of valid queries, likewise. Masked queries are known only if queries and keys are the same
            tokens.
    """

    query_order: Tensor | None
    key_order: Tensor | None
    start: Tensor
    block_q: int
    block_k: int
    num_keys: Tensor | int
    num_queries: Tensor | int


def hyperplanes(head_dim: int, num_hashes: int, seed: Seed, device: torch.device) -> Tensor:
    """Normals of random hyperplanes: (D, num_hashes), float64, standard normal."""
    return normal((head_dim, num_hashes), seed, 1, device)


def hash_keys(x: Tensor, num_hashes: int, seed: Seed, mask: Tensor | None = None) -> Tensor:
    """What tokens are sorted by: the Gray rank of the cell plus position / N, which tells the tokens of a cell apart.

    Positions and N count the valid tokens. Called without a gradient.

    Args:
        x: (BH, N, D).
        num_hashes: hyperplanes of the hash, r.
        seed: seed of the hyperplanes.
        mask: bool (BH, N), True for valid tokens, or None. Masked tokens get inf.

    Returns:
        (BH, N), float32 if that holds all ranks and positions, else float64.
    """
    length, device = x.shape[1], x.device
    dtype = torch.float32 if length <= 2.0 ** (24 - num_hashes) else torch.float64
    # The product of planes and tokens is three times as fast as that of tokens and planes, which has few columns.
    planes = constant(_last_first, x.shape[2], num_hashes, seed, x.dtype, device=device).expand(len(x), -1, -1)
    sides = torch.bmm(planes, x.mT)
    if mask is None:
        share = constant(_shares, length, num_hashes, dtype, device=device)
    else:
        count = mask.cumsum(1)
        share = (count - 1).to(dtype) / count[:, -1:].clamp(min=1) + (2.0**num_hashes - 1.0) / 2.0
        share = share.unsqueeze(1)
    # (-1)^(bit b of the rank) is the product of the signs of the sides from b on.
    parity = torch.copysign(torch.ones((), dtype=dtype, device=device), sides).cumprod(1, dtype=dtype)
    powers = constant(_powers, num_hashes, dtype, device=device).expand(len(x), -1, -1)
    keys = torch.baddbmm(share, powers, parity).squeeze(1)
    return keys if mask is None else keys.masked_fill_(~mask, torch.inf)


def _last_first(head_dim: int, num_hashes: int, seed: Seed, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The hyperplanes (r, D), the last one first, negated so that bit 1 has a negative sign."""
    return -hyperplanes(head_dim, num_hashes, seed, device).t().flip(0).to(dtype)


def _shares(length: int, num_hashes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Position / N, and the sum of 2^b / 2: (1, 1, N)."""
    share = torch.arange(length, device=device).to(dtype) / length
    return (share + (2.0**num_hashes - 1.0) / 2.0).view(1, 1, -1)


def _powers(num_hashes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-2^b / 2 from the last b to the first: (1, 1, r)."""
    return -(2.0 ** torch.arange(num_hashes - 2, -2, -1, dtype=dtype, device=device)).view(1, 1, -1)


def plan_lsh(
    query: Tensor,
    key: Tensor,
    block_size: int,
    key_mask: Tensor | None,
    num_hashes: int,
    seed: Seed,
    block_q: int | None = None,
) -> NearField:
    """Blocks of queries and blocks of keys in hash order, without a gradient.

    Queries and keys are sorted by the same hash (Definition A.3), and the queries are cut into equal blocks. The paper
    pairs the b-th block of queries with the b-th block of keys; see `block_starts` for the departure.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        block_size: keys of a block.
        key_mask: bool (BH, Nk), True for valid keys, or None. It also masks the queries if there are as many.
        num_hashes: hyperplanes of the hash.
        seed: seed of the hyperplanes.
        block_q: queries of a block; `block_size` by default.
    """
    q_len, kv_len, block_q = query.shape[1], key.shape[1], block_size if block_q is None else block_q
    query_mask = key_mask if q_len == kv_len else None
    query_keys, query_order = hash_keys(query, num_hashes, seed, query_mask).sort(stable=True)
    keys, key_order = hash_keys(key, num_hashes, seed, key_mask).sort(stable=True)
    num_keys = kv_len if key_mask is None else key_mask.sum(1, keepdim=True)
    num_queries = q_len if query_mask is None else num_keys
    start = block_starts(query_keys, keys, num_queries, num_keys, block_q, block_size)
    return NearField(query_order, key_order, start, block_q, block_size, num_keys, num_queries)


def block_starts(
    query_keys: Tensor,
    keys: Tensor,
    num_queries: Tensor | int,
    num_keys: Tensor | int,
    block_q: int,
    block_k: int,
) -> Tensor:
    """For each block of sorted queries the sorted index at which its block of keys starts.

    The papers have one set of vectors or assume that queries and keys are distributed alike, and pair the b-th block of
    queries with the b-th block of keys. Two sets may be distributed differently over the cells of the hash. So here the
    block of keys is centered on the sorted index that the middle query of the block would have among the keys.

    Args:
        query_keys: (BH, Nq), the sorted `hash_keys` of the queries.
        keys: (BH, Nk), those of the keys.
        num_queries: number of valid queries, an integer or int64 (BH, 1).
        num_keys: number of valid keys, likewise.
        block_q: queries of a block.
        block_k: keys of a block.

    Returns:
        int64 (BH, T) for T blocks of queries. A block of keys ends before `num_keys` if there are at least `block_k`.
    """
    (batch_heads, q_len), device = query_keys.shape, keys.device
    middle = torch.arange(block_q // 2, q_len + block_q // 2, block_q, device=device).expand(batch_heads, -1)
    of_middle = query_keys.gather(1, middle.clamp(max=num_queries - 1).clamp_(min=0))
    start = torch.searchsorted(keys, of_middle) - block_k // 2
    return start.clamp_(max=num_keys - block_k).clamp_(min=0)
