"""Angular locality-sensitive hashing with blocks of equal size (Zandieh et al. 2023, Appendix A).

Definition A.1: bit b of a code tells on which side of the b-th random hyperplane a vector lies. Lemma A.2: the codes
are put in the order of the reflected Gray code, in which neighbors differ in one bit, so that neighboring codes are
neighboring cells of space. Definition A.3: the tokens are sorted by the rank of their code in that order and cut into
blocks of equal size.
"""

import torch
from torch import Tensor

from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.random import Seed, normal


def hyperplanes(head_dim: int, num_hashes: int, seed: Seed, device: torch.device) -> Tensor:
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


def hash_keys(sides: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """What tokens are sorted by: the Gray rank of the cell plus position / N, which tells the tokens of a cell apart.

    Positions and N count the valid tokens. It takes few operations, since each of them is a kernel on an accelerator:
    (-1)^(bit b of the rank) is the product of the signs of the sides from b on.

    Args:
        sides: (BH, r, N), the products with the negated normals of the hyperplanes, the last hyperplane first.
        key_mask: bool (BH, N), True for valid tokens, or None. Masked tokens get inf.

    Returns:
        (BH, N), float32 if that holds all ranks and positions, else float64.
    """
    (batch_heads, num_hashes, length), device = sides.shape, sides.device
    dtype = torch.float32 if length <= 2.0 ** (24 - num_hashes) else torch.float64
    one, powers = (constant(make, num_hashes, dtype, device=device) for make in (_one, _powers))
    if key_mask is None:
        share = constant(_share, length, num_hashes, dtype, device=device)
    else:
        count = key_mask.cumsum(1).unsqueeze(1)
        share = (count - 1).to(dtype) / count[..., -1:].clamp(min=1) + (2.0**num_hashes - 1.0) / 2.0
    parity = torch.copysign(one, sides).cumprod(1, dtype=dtype)
    keys = torch.baddbmm(share, powers.expand(batch_heads, 1, -1), parity).squeeze(1)
    return keys if key_mask is None else keys.masked_fill(~key_mask, torch.inf)


def sort_by_same_hash(
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    num_hashes: int,
    seed: Seed,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Sort queries and keys by an angular hash with the same hyperplanes, without a gradient.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        query_mask: bool (BH, Nq), True for valid queries, or None.
        key_mask: bool (BH, Nk), likewise.
        num_hashes: hyperplanes of the hash.
        seed: seed of the hyperplanes.

    Returns:
        For the queries and for the keys: their `hash_keys` in ascending order, and the order (BH, N).
    """
    normals = negated_planes(query, num_hashes, seed)
    # The product of planes and tokens is three times as fast as that of tokens and planes, which has few columns.
    sides = [normals @ x.detach().mT for x in (query, key)]
    if query_mask is None and key_mask is None and query.shape[1] == key.shape[1]:
        values, order = hash_keys(torch.cat(sides)).sort(stable=True)
        (query_keys, keys), (query_order, key_order) = values.chunk(2), order.chunk(2)
        return (query_keys, query_order), (keys, key_order)
    query_keys, query_order = hash_keys(sides[0], query_mask).sort(stable=True)
    keys, key_order = hash_keys(sides[1], key_mask).sort(stable=True)
    return (query_keys, query_order), (keys, key_order)


def negated_planes(x: Tensor, num_hashes: int, seed: Seed) -> Tensor:
    """The hyperplanes for tokens (..., D) in their dtype, as `hash_keys` takes their products: (num_hashes, D)."""
    arguments = (x.shape[-1], num_hashes, seed, x.dtype)
    return constant(_last_first, *arguments, device=x.device)


def _one(num_hashes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, num_hashes, 1, dtype=dtype, device=device)


def _powers(num_hashes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-2^b / 2 from the last b to the first: (1, 1, r)."""
    return -(2.0 ** torch.arange(num_hashes - 2, -2, -1, dtype=dtype, device=device)).view(1, 1, -1)


def _share(length: int, num_hashes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Position / N, and the sum of 2^b / 2: (1, 1, N)."""
    share = torch.arange(length, device=device).to(dtype) / length
    return (share + (2.0**num_hashes - 1.0) / 2.0).view(1, 1, -1)


def _last_first(head_dim: int, num_hashes: int, seed: Seed, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The hyperplanes (r, D), the last one first, negated so that bit 1 has a negative sign."""
    return -hyperplanes(head_dim, num_hashes, seed, device).t().flip(0).to(dtype)


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
    middle = constant(block_middles, query_keys.shape[1], block_q, device=keys.device)
    if isinstance(num_queries, int):
        of_middle = query_keys.index_select(1, middle)
    else:
        middle = torch.minimum(middle, (num_queries - 1).clamp(min=0))
        of_middle = query_keys.gather(1, middle)
    start = torch.searchsorted(keys, of_middle) - block_k // 2
    if isinstance(num_keys, int):
        return start.clamp(0, num_keys - block_k)
    return torch.minimum(start.clamp(min=0), (num_keys - block_k).clamp(min=0))


def block_middles(q_len: int, block_q: int, device: torch.device) -> Tensor:
    """The middle of each block of queries, or the last query."""
    return torch.arange(block_q // 2, q_len + block_q // 2, block_q, device=device).clamp(max=q_len - 1)
