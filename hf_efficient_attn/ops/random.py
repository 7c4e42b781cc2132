"""Random numbers that depend on nothing but a seed and an index.

Random numbers are hashes of a counter instead of draws from a generator. So a seed gives the same numbers on every
device, inside `torch.compile` and in any order of calls, and the global random state is never touched. The hash is the
finalizer of MurmurHash3 (Appleby, public domain), applied twice. The numbers of an integer seed are kept for the next
call (`constant`), so they must not be modified.

Engines that split a layer's heads over processes call attention with some of the heads. What is drawn for a head
depends on its number among all heads of the layer, so that it does not depend on the number of processes. The seed of
such a call is a `HeadSeed`, which knows these numbers.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.tokens import constant, integers

_MASK = 0xFFFFFFFF
# Longer results are not kept.
_KEPT_NUMEL = 1 << 18

_Bits = TypeVar("_Bits", int, Tensor)


class HeadSlice(NamedTuple):
    """The heads of a layer that a process holds: consecutive ones.

    Attributes:
        first: the number of the first of them.
        total: how many heads the layer has in all processes together.
    """

    first: int
    total: int

    def check(self, num_heads: int) -> None:
        """Check that `num_heads` heads from the first one on exist.

        Raises:
            UnsupportedAttentionError: they do not.
        """
        if self.first < 0 or self.first + num_heads > self.total:
            raise UnsupportedAttentionError(
                f"{num_heads} heads from head {self.first} on are not among the {self.total} heads of the layer: give "
                "the number of the first head, and of all heads in all processes"
            )


class HeadSeed(NamedTuple):
    """The seed of a call that has some heads of a layer.

    Attributes:
        value: the seed of the layer.
        heads: the heads of the call.
    """

    value: int | Tensor
    heads: HeadSlice


# A plain seed is that of a call with all heads of a layer.
Seed: TypeAlias = int | Tensor | HeadSeed


def seed_value(seed: Seed) -> int | Tensor:
    """The seed of the layer."""
    return seed.value if isinstance(seed, HeadSeed) else seed


def head_slice(seed: Seed, num_heads: int) -> HeadSlice:
    """The numbers of the `num_heads` heads of a call with this seed."""
    return seed.heads if isinstance(seed, HeadSeed) else HeadSlice(0, num_heads)


def seed_for_operator(seed: Seed, num_heads: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """The seed as arguments of an operator of `torch.library`: the value and the numbers of a `HeadSlice`."""
    return torch.as_tensor(seed_value(seed), device=device), list(head_slice(seed, num_heads))


def _mix(x: _Bits) -> _Bits:
    """32 well-mixed bits of an integer, or of every int64 number of a tensor."""
    x = x & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


def uniform(shape: tuple[int, ...], seed: Seed, stream: int, device: torch.device) -> Tensor:
    """Float64 numbers, uniform in the open interval (0, 1). `stream` distinguishes the uses of one seed."""
    return _drawn(_uniform, shape, seed_value(seed), stream, device)


def _drawn(
    draw: Callable[..., Tensor], shape: tuple[int, ...], seed: int | Tensor, stream: int, device: torch.device
) -> Tensor:
    is_short = math.prod(shape) <= _KEPT_NUMEL
    return constant(draw, shape, seed, stream, device=device) if is_short else draw(shape, seed, stream, device)


def _uniform(shape: tuple[int, ...], seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    count = math.prod(shape)
    counters = constant(_counters, count, device=device) if count <= _KEPT_NUMEL else _counters(count, device)
    start: Any = seed * 0x9E3779B1 + stream * 0x7F4A7C15  # an integer is mixed on the host
    bits = _mix(counters + _mix(_mix(start) + stream + 1))
    numbers: Tensor = (bits.to(torch.float64) + 0.5) / 2.0**32
    return numbers.reshape(shape)


def _counters(count: int, device: torch.device) -> Tensor:
    return _mix(integers(count, device) + 1)


def normal(shape: tuple[int, ...], seed: Seed, stream: int, device: torch.device) -> Tensor:
    """Float64 numbers, independent and standard normal (Box-Muller)."""
    return _drawn(_normal, shape, seed_value(seed), stream, device)


def _normal(shape: tuple[int, ...], seed: int | Tensor, stream: int, device: torch.device) -> Tensor:
    radius = (-2.0 * _uniform(shape, seed, 2 * stream + 101, device).log()).sqrt()
    return radius * (2.0 * math.pi * _uniform(shape, seed, 2 * stream + 102, device)).cos()


def offsets(num_heads: int, seed: Seed, stream: int, device: torch.device) -> Tensor:
    """A float64 offset in (0, 1) for each head, (H,). All sequences of a batch use the same ones.

    The offsets are multiples of the golden ratio modulo 1, so that no two heads sample alike.
    """
    return constant(_offsets, num_heads, seed, stream, device=device)


def _offsets(num_heads: int, seed: Seed, stream: int, device: torch.device) -> Tensor:
    head = torch.arange(num_heads, device=device, dtype=torch.float64) + head_slice(seed, num_heads).first
    return (uniform((1,), seed, stream, device) + head * 0.6180339887498949).frac()


def uniform_of_heads(count: int, num_heads: int, seed: Seed, stream: int, device: torch.device) -> Tensor:
    """`uniform` numbers (count, H), in which a head has the same whichever heads a process holds."""
    first, total = head_slice(seed, num_heads)
    return uniform((count, total), seed, stream, device)[:, first : first + num_heads]
