"""Numbers that depend on nothing but a seed and an index, made once.

Random numbers are hashes of a counter instead of draws from a generator. So a seed gives the same numbers on every
device, inside `torch.compile` and in any order of calls, and the global random state is never touched. The hash is the
finalizer of MurmurHash3 (Appleby, public domain), applied twice. The numbers of an integer seed, and other tensors that
depend on nothing but numbers, such as an arange, are kept for the next call (`constant`), so they must not be modified.

Engines that split a layer's heads over processes call attention with some of the heads. What is drawn for a head
depends on its number among all heads of the layer, so that it does not depend on the number of processes. The seed of
such a call is a `HeadSeed`, which knows these numbers.
"""

import contextlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.export import replaced_in_graphs

# How many results are kept, and their bytes together.
_KEPT, _KEPT_BYTES = 512, 1 << 25


def _make(make: Callable[..., Tensor], *arguments: Any, device: torch.device) -> Tensor:
    return make(*arguments, device)


@replaced_in_graphs(_make)
def constant(make: Callable[..., Tensor], *arguments: Any, device: torch.device) -> Tensor:
    """The result of make(*arguments, device), which is kept for the next call with the same arguments.

    The last 512 results are kept, of at most 32 MiB together. Nothing is kept whose arguments contain a tensor, such as
    the seed of a call in training, and no tensor without memory of its own, such as one of a graph that is recorded or
    of a `torch.func` transform: it has no meaning after that.

    Args:
        make: a function without side effects. It is part of the key, so it must not be a new lambda in every call.
        *arguments: hashable, or tuples of such.
        device: of the result.

    Returns:
        A tensor without gradient, which must not be modified.
    """
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if is_fake or _contain_tensor(arguments):
        return make(*arguments, device)
    return _kept(make, arguments, device)


_results: OrderedDict[Hashable, Tensor] = OrderedDict()
_lock = threading.Lock()


def _kept(make: Callable[..., Tensor], arguments: tuple[Any, ...], device: torch.device) -> Tensor:
    key = make, arguments, device
    with _lock:
        if key in _results:
            _results.move_to_end(key)
            return _results[key]
    # An inference tensor could not be used in a later call with gradients.
    with torch.inference_mode(False), torch.no_grad():
        result = make(*arguments, device)
    if not _has_memory(result):
        return result
    with _lock:
        _results[key] = result
        size = sum(_bytes_of(x) for x in _results.values())
        while size > _KEPT_BYTES or len(_results) > _KEPT:
            size -= _bytes_of(_results.popitem(last=False)[1])
    return result


def _contain_tensor(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) or (isinstance(x, tuple) and _contain_tensor(x)) for x in arguments)


def _has_memory(x: Tensor) -> bool:
    """Whether a tensor is a plain one. A tensor that a `torch.func` transform has wrapped has no storage to be read."""
    try:
        return type(x) is Tensor and _bytes_of(x) >= 0
    except (NotImplementedError, RuntimeError):
        return False


def _bytes_of(x: Tensor) -> int:
    return x.untyped_storage().nbytes()


def integers(count: int, device: torch.device) -> Tensor:
    """0, 1, ..., count - 1: int64 (count,), kept if there are few."""
    return constant(_integers, count, device=device) if count <= 1 << 18 else _integers(count, device)


def _integers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


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


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed from the global generator of `device`, as training does: an int64 scalar tensor."""
    return torch.randint(2**31 - 1, (), device=device)


@contextlib.contextmanager
def with_draws_of(seed: Tensor | int | None, device: torch.device) -> Iterator[None]:
    """Within this context the global generators give the draws of the seed. Afterwards they go on as before.

    Nothing happens if the seed is None.
    """
    if seed is None:
        yield
        return
    # Tensors on an accelerator know its number. The CPU has none, and its state is always among those that are kept.
    with torch.random.fork_rng([] if device.index is None else [device], device_type=device.type):
        torch.manual_seed(int(seed))
        yield


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
