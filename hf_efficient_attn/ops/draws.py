"""Random numbers from a seed, a stream and an index.

They are hashes of a counter instead of draws from a generator: a seed gives the same numbers on every device, inside
`torch.compile` and in any order of calls, and the global random state is never touched. The hash is the finalizer of
MurmurHash3 (Appleby, public domain), applied twice. The numbers of an integer seed are kept (`constant`), so they must
not be modified.
"""

import math
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends.devices import from_float64
from hf_efficient_attn.ops.index import constant, integers
from hf_efficient_attn.ops.shards import HeadSeed, Seed, head_slice

_MASK = 0xFFFFFFFF
_Bits = TypeVar("_Bits", int, Tensor)


def seed_value(seed: Seed) -> int | Tensor:
    """Return the seed of the layer."""
    return seed.value if isinstance(seed, HeadSeed) else seed


def draw_sizes(count: int, first: int, factor: int, largest: int) -> list[int]:
    """Return the number of points of each draw: `first`, then `factor` times all before it, at most `largest`."""
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(min(largest, max(first, factor * sum(sizes)), count - sum(sizes)))
    return sizes


class Draws(NamedTuple):
    """The random numbers of a seed, on a device. A `stream` tells the uses of one seed apart."""

    seed: Seed  # the seed
    device: torch.device  # the device of the numbers

    @property
    def value(self) -> int | Tensor:
        """The seed of the layer."""
        return seed_value(self.seed)

    @constant
    @from_float64
    def uniform(self, shape: tuple[int, ...], stream: int) -> Tensor:
        """Draw numbers of `wide_dtype`, uniform in the open interval (0, 1)."""
        return _uniform(self, shape, stream)

    @constant
    @from_float64
    def normal(self, shape: tuple[int, ...], stream: int) -> Tensor:
        """Draw independent standard normal numbers of `wide_dtype` (Box-Muller)."""
        radius = (-2.0 * _uniform(self, shape, 2 * stream + 101).log()).sqrt()
        return radius * (2.0 * math.pi * _uniform(self, shape, 2 * stream + 102)).cos()

    @constant
    @from_float64
    def offsets(self, num_heads: int, stream: int) -> Tensor:
        """Draw an offset in (0, 1) of `wide_dtype` for each head, (H,). All sequences of a batch use the same offsets.

        The offsets are multiples of the golden ratio modulo 1, so that no two heads sample alike.
        """
        head = torch.arange(num_heads, device=self.device, dtype=torch.float64)  # (H,)
        head = head + head_slice(self.seed, num_heads).first
        return (self.uniform((1,), stream) + head * 0.6180339887498949).frac()

    def uniform_of_heads(self, count: int, num_heads: int, stream: int) -> Tensor:
        """Draw `uniform` numbers (count, H). A head gets the same numbers whichever heads a process holds."""
        first, total = head_slice(self.seed, num_heads)
        return self.uniform((count, total), stream)[:, first : first + num_heads]


def uniform(shape: tuple[int, ...], seed: Seed, stream: int, device: torch.device) -> Tensor:
    """`Draws.uniform`, for methods in files of users."""
    return Draws(seed, device).uniform(shape, stream)


def normal(shape: tuple[int, ...], seed: Seed, stream: int, device: torch.device) -> Tensor:
    """`Draws.normal`, for methods in files of users."""
    return Draws(seed, device).normal(shape, stream)


def _uniform(draws: Draws, shape: tuple[int, ...], stream: int) -> Tensor:
    start: Any = draws.value * 0x9E3779B1 + stream * 0x7F4A7C15  # an integer is mixed on the host
    bits = _mix(_mix(integers(math.prod(shape), draws.device) + 1) + _mix(_mix(start) + stream + 1))
    numbers: Tensor = (bits.to(torch.float64) + 0.5) / 2.0**32
    return numbers.reshape(shape)


def _mix(x: _Bits) -> _Bits:
    """Mix the bits of an integer, or of every int64 number of a tensor, into 32 bits."""
    x = x & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)
