"""Angular locality-sensitive hashing with blocks of equal size (Zandieh et al. 2023, Appendix A).

Definition A.1: bit b of a code tells on which side of the b-th random hyperplane a vector lies. Lemma A.2: the codes
are put in the order of the reflected Gray code, in which neighbors differ in one bit, so that neighboring codes are
neighboring cells of space. Definition A.3: the tokens are sorted by the rank of their code in that order and cut into
blocks of equal size.
"""

import torch
from torch import Tensor

from hf_efficient_attn.ops.random import normal


def hyperplanes(head_dim: int, num_hashes: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """Normals of random hyperplanes: (D, num_hashes), float64, standard normal."""
    return normal((head_dim, num_hashes), seed, 1, device)


def gray_rank(bits: Tensor) -> Tensor:
    """The rank of every code in the order of Lemma A.2.

    In this order the new bit is appended at the end, and the second half is reversed. So the last bit is the most
    significant one of the rank, and bit b of the rank is the parity of the bits b, b+1, ... of the code.

    Args:
        bits: bool (..., r), r at most 62.

    Returns:
        int64 (...), from 0 to 2**r - 1.
    """
    parity = torch.zeros_like(bits[..., 0])
    rank = torch.zeros(parity.shape, dtype=torch.int64, device=bits.device)
    for b, bit in reversed(list(enumerate(bits.unbind(-1)))):
        parity = parity ^ bit
        rank.add_(parity, alpha=1 << b)
    return rank


def angular_hash(x: Tensor, planes: Tensor) -> Tensor:
    """Gray rank of the cell of every vector, without a gradient: x (..., N, D), planes (D, r) -> int64 (..., N)."""
    # The product of planes and tokens is three times as fast as that of tokens and planes, which has few columns.
    sides = planes.t().to(x.dtype) @ x.detach().transpose(-1, -2) > 0
    return gray_rank(sides.transpose(-1, -2))


def sort_by_hash(codes: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sort tokens by code, masked ones last. The sort is stable.

    Args:
        codes: int64 (..., N).
        key_mask: bool, broadcastable to (..., N), True for valid tokens, or None.

    Returns:
        The order (..., N), and the codes in that order. The codes of masked tokens are the largest integer.
    """
    if key_mask is not None:
        codes = codes.masked_fill(~key_mask, torch.iinfo(codes.dtype).max)
    codes, order = torch.sort(codes, dim=-1, stable=True)
    return order, codes


def matching_block_starts(
    query_codes: Tensor,
    key_codes: Tensor,
    num_queries: Tensor | int,
    num_keys: Tensor | int,
    block_q: int,
    block_k: int,
) -> Tensor:
    """For each block of sorted queries the sorted index at which its block of keys starts.

    The papers have one set of vectors or assume that queries and keys are distributed alike, and pair the b-th block of
    queries with the b-th block of keys. Two sets may be distributed differently over the cells of the hash. So here the
    block of keys is centered on the sorted index that the middle query of the block would have among the keys. Within a
    cell this is the same share of the keys as of the queries.

    Args:
        query_codes: int64 (..., Nq), sorted.
        key_codes: int64 (..., Nk), sorted.
        num_queries: number of valid queries, an integer or int64 broadcastable to (..., 1).
        num_keys: number of valid keys, likewise.
        block_q: queries of a block.
        block_k: keys of a block.

    Returns:
        int64 (..., T) for T blocks of queries. A block of keys ends before `num_keys` if there are at least `block_k`.
    """
    num_queries, num_keys = (torch.as_tensor(n, device=key_codes.device) for n in (num_queries, num_keys))
    middle = torch.arange(block_q // 2, query_codes.shape[-1] + block_q // 2, block_q, device=key_codes.device)
    middle = torch.minimum(middle, (num_queries - 1).clamp(min=0)).expand(*query_codes.shape[:-1], -1).contiguous()
    code = query_codes.gather(-1, middle)
    query_low, key_low = (torch.searchsorted(codes, code) for codes in (query_codes, key_codes))
    query_high, key_high = (torch.searchsorted(codes, code, right=True) for codes in (query_codes, key_codes))
    offset = (2 * (middle - query_low) + 1) * (key_high - key_low) // (2 * (query_high - query_low)).clamp(min=1)
    return torch.minimum((key_low + offset - block_k // 2).clamp(min=0), (num_keys - block_k).clamp(min=0))
