"""Angular locality-sensitive hashing with blocks of equal size (Zandieh et al. 2023, Appendix A).

Definition A.1: bit b of a hash is the side of the b-th random hyperplane. Lemma A.2: the codes are put in an order in
which neighbours differ in one bit, the reflected Gray code, so that neighbouring codes are neighbouring cells of space.
Definition A.3: points are sorted by the position of their code in that order and cut into blocks of equal size.
"""

import torch
from torch import Tensor

from hf_efficient_attn.ops.random import normal


def hyperplanes(width: int, num_hashes: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """Normals of the random hyperplanes: (width, num_hashes), float64, standard normal."""
    return normal((width, num_hashes), seed, 1, device)


def gray_rank(bits: Tensor) -> Tensor:
    """Position of every code in the order of Lemma A.2.

    The lemma's order appends the new bit at the end and runs backwards through the second half, so that the last bit is
    the most significant one of the position, and bit b of the position is the parity of the code's bits b, b+1, ...

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
    """Gray position of the cell of every vector: x (..., D), planes (D, r) -> int64 (...). No gradient flows."""
    # Planes times tokens: three times as fast as tokens times planes, a product of few columns.
    sides = planes.t().to(x.dtype) @ x.detach().transpose(-1, -2) > 0
    return gray_rank(sides.transpose(-1, -2))


def sort_by_hash(codes: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Stable order of the tokens of each row by code, those that are not there behind all others.

    Args:
        codes: int64 (A, N).
        mask: bool (A, N), True = is there.

    Returns:
        the order (A, N), and the codes in that order, where those not there have the largest integer.
    """
    if mask is not None:
        codes = codes.masked_fill(~mask, torch.iinfo(codes.dtype).max)
    codes, order = torch.sort(codes, dim=1, stable=True)
    return order, codes
