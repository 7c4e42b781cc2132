"""Random numbers as a pure function of a seed.

A counter is hashed instead of a generator being advanced: the same seed gives the same numbers on every device, inside
`torch.compile`, and in whatever order they are asked for, and the global random state is never touched. The mixer is
the finaliser of MurmurHash3 (Appleby, public domain), applied twice.
"""

import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """32 well-mixed bits of every int64 counter in `x`."""
    x = x & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


def draw_seed(device: torch.device) -> Tensor:
    """A fresh seed from the global generator of `device`, as a scalar tensor: what training uses."""
    return torch.randint(2**31 - 1, (), device=device)


def uniform(shape: tuple[int, ...], seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    """Uniform numbers in the open interval (0, 1), float64 of `shape`; `stream` tells uses of one seed apart."""
    counter = torch.arange(math.prod(shape), device=device, dtype=torch.int64)
    start = torch.as_tensor(seed, device=device).to(torch.int64) * 0x9E3779B1 + stream * 0x7F4A7C15
    bits = _mix(_mix(counter + 1) + _mix(_mix(start) + stream + 1))
    return ((bits.to(torch.float64) + 0.5) / 2.0**32).reshape(shape)


def normal(shape: tuple[int, ...], seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    """Independent standard normal numbers of `shape`, float64 (Box-Muller)."""
    radius = (-2.0 * uniform(shape, seed, 2 * stream + 101, device).log()).sqrt()
    return radius * (2.0 * math.pi * uniform(shape, seed, 2 * stream + 102, device)).cos()


def offsets(heads: int, seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    """One offset in (0, 1) for each of `heads` heads, float64 (heads,): the same for every row of a batch.

    Heads take turns around the circle by the golden ratio, so that no two of them sample alike.
    """
    turn = torch.arange(heads, device=device, dtype=torch.float64) * 0.6180339887498949
    return (uniform((1,), seed, stream, device) + turn).frac()
