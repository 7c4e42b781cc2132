"""Tensors that depend on nothing but numbers, such as an arange or the random numbers of a seed, made once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

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
