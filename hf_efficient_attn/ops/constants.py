"""Tensors that depend on nothing but numbers, such as an arange or the random numbers of a seed, made once."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def constant(make: Callable[..., Tensor], *arguments: Any, device: torch.device) -> Tensor:
    """The result of make(*arguments, device), which is kept for the next call with the same arguments.

    The last 256 results are kept. Nothing is kept while a graph is recorded, where tensors have no data.

    Args:
        make: a function without side effects. It is part of the key, so it must not be a new lambda in every call.
        *arguments: hashable.
        device: of the result.

    Returns:
        A tensor without gradient, which must not be modified.
    """
    if torch.compiler.is_compiling() or type(torch.empty(0, device=device)) is not Tensor:
        return make(*arguments, device)
    return _kept(make, arguments, device)


@functools.lru_cache(maxsize=256)
def _kept(make: Callable[..., Tensor], arguments: tuple[Any, ...], device: torch.device) -> Tensor:
    # An inference tensor could not be used in a later call with gradients.
    with torch.inference_mode(False), torch.no_grad():
        return make(*arguments, device)


def integers(count: int, device: torch.device) -> Tensor:
    """0, 1, ..., count - 1: int64 (count,), kept if there are few."""
    return constant(_integers, count, device=device) if count <= 1 << 18 else _integers(count, device)


def _integers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)
