"""Random numbers as a pure function of a seed.

They are hashes of a counter instead of draws from a generator. So a seed gives the same numbers on every device, inside
`torch.compile` and in any order of calls, and the global random state is never touched. The hash is the finalizer of
MurmurHash3 (Appleby, public domain), applied twice.

The numbers of an integer seed are kept for the next call (`hf_efficient_attn.ops.constants`), so they must not be
modified.
"""

import math
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_efficient_attn.ops.constants import constant, integers
from hf_efficient_attn.ops.heads import head_slice

_MASK = 0xFFFFFFFF
# Longer results are not kept.
_KEPT_NUMEL = 1 << 18

_Bits = TypeVar("_Bits", int, Tensor)


def _mix(x: _Bits) -> _Bits:
    """32 well-mixed bits of an integer, or of every int64 number of a tensor."""
    x = x & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed from the global generator of `device`, as training does: an int64 scalar tensor."""
    return torch.randint(2**31 - 1, (), device=device)


def uniform(shape: tuple[int, ...], seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    """Float64 numbers, uniform in the open interval (0, 1). `stream` distinguishes the uses of one seed."""
    if isinstance(seed, int) and math.prod(shape) <= _KEPT_NUMEL:
        return constant(_uniform, shape, seed, stream, device=device)
    return _uniform(shape, seed, stream, device)


def _uniform(shape: tuple[int, ...], seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    count = math.prod(shape)
    counters = constant(_counters, count, device=device) if count <= _KEPT_NUMEL else _counters(count, device)
    start: Any = seed * 0x9E3779B1 + stream * 0x7F4A7C15  # an integer is mixed on the host
    bits = _mix(counters + _mix(_mix(start) + stream + 1))
    numbers: Tensor = (bits.to(torch.float64) + 0.5) / 2.0**32
    return numbers.reshape(shape)


def _counters(count: int, device: torch.device) -> Tensor:
    return _mix(integers(count, device) + 1)


def normal(shape: tuple[int, ...], seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    """Float64 numbers, independent and standard normal (Box-Muller)."""
    if isinstance(seed, int) and math.prod(shape) <= _KEPT_NUMEL:
        return constant(_normal, shape, seed, stream, device=device)
    return _normal(shape, seed, stream, device)


def _normal(shape: tuple[int, ...], seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    radius = (-2.0 * _uniform(shape, seed, 2 * stream + 101, device).log()).sqrt()
    return radius * (2.0 * math.pi * _uniform(shape, seed, 2 * stream + 102, device)).cos()


def offsets(num_heads: int, seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    """A float64 offset in (0, 1) for each head, (H,). All sequences of a batch use the same ones.

    The offsets are multiples of the golden ratio modulo 1, so that no two heads sample alike. Heads are numbered as
    `head_slice` says.
    """
    if isinstance(seed, int):
        return constant(_offsets, num_heads, seed, stream, device=device)
    return _offsets(num_heads, seed, stream, device)


def _offsets(num_heads: int, seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    head = torch.arange(num_heads, device=device, dtype=torch.float64) + head_slice(num_heads).first
    return (uniform((1,), seed, stream, device) + head * 0.6180339887498949).frac()


def uniform_of_heads(count: int, num_heads: int, seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    """`uniform` numbers (count, H), in which a head has the same whichever heads a process holds; see `head_slice`."""
    first, total = head_slice(num_heads)
    return uniform((count, total), seed, stream, device)[:, first : first + num_heads]
