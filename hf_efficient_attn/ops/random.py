"""Random numbers as a pure function of a seed.

They are hashes of a counter instead of draws from a generator. So a seed gives the same numbers on every device, inside
`torch.compile` and in any order of calls, and the global random state is never touched. The hash is the finalizer of
MurmurHash3 (Appleby, public domain), applied twice.
"""

import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """32 well-mixed bits of every int64 counter."""
    x = x & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed from the global generator of `device`, as training does: an int64 scalar tensor."""
    return torch.randint(2**31 - 1, (), device=device)


def uniform(shape: tuple[int, ...], seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    """Float64 numbers, uniform in the open interval (0, 1). `stream` distinguishes the uses of one seed."""
    counter = torch.arange(math.prod(shape), device=device, dtype=torch.int64)
    start = torch.as_tensor(seed, device=device).to(torch.int64) * 0x9E3779B1 + stream * 0x7F4A7C15
    bits = _mix(_mix(counter + 1) + _mix(_mix(start) + stream + 1))
    return ((bits.to(torch.float64) + 0.5) / 2.0**32).reshape(shape)


def normal(shape: tuple[int, ...], seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    """Float64 numbers, independent and standard normal (Box-Muller)."""
    radius = (-2.0 * uniform(shape, seed, 2 * stream + 101, device).log()).sqrt()
    return radius * (2.0 * math.pi * uniform(shape, seed, 2 * stream + 102, device)).cos()


def offsets(num_heads: int, seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    """A float64 offset in (0, 1) for each head, (H,). All sequences of a batch use the same ones.

    The offsets are multiples of the golden ratio modulo 1, so that no two heads sample alike.
    """
    turn = torch.arange(num_heads, device=device, dtype=torch.float64) * 0.6180339887498949
    return (uniform((1,), seed, stream, device) + turn).frac()
