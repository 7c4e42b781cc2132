"""float64 where float32 is too coarse, and what replaces it on devices that have no float64.

There random numbers come from the CPU (`from_float64`), and so do results that wait for values of the device in any
case (`in_float64`). Everything else has float32 (`wide_dtype`), also where a docstring says float64.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hf_efficient_attn.ops.backends.devices import wide_dtype

_CPU = torch.device("cpu")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def widened(x: Tensor) -> Tensor:
    """Convert a tensor to `wide_dtype`."""
    return x.to(wide_dtype(x.device))


def float64_device(device: torch.device) -> torch.device:
    """Return the device that computes float64 numbers for a device: itself, or the CPU if it has no float64."""
    return device if wide_dtype(device) == torch.float64 else _CPU


def from_float64(make: _Function) -> _Function:
    """Decorate a function that makes float64 numbers, and whose last argument is the device of the result.

    For a device without float64 it makes them on the CPU, and they are rounded to float32 towards 0. So a seed has the
    same numbers on every device up to rounding, and numbers below 1 stay below 1.
    """

    @functools.wraps(make)
    def call(*arguments: Any, **named: Any) -> Tensor:
        device = named["device"] if "device" in named else arguments[-1]
        if wide_dtype(device) == torch.float64:
            numbers: Tensor = make(*arguments, **named)
            return numbers
        given = (arguments, named | {"device": _CPU}) if "device" in named else ((*arguments[:-1], _CPU), named)
        return _rounded(make(*given[0], **given[1])).to(device)

    return cast(_Function, call)


def _rounded(x: Tensor) -> Tensor:
    near = x.to(torch.float32)
    return torch.where(near.abs() > x.abs(), near.nextafter(torch.zeros_like(near)), near)


def in_float64(function: _Function) -> _Function:
    """Decorate a function, or a generator, of tensors that computes in float64.

    If the device of its first tensor has no float64, it gets all tensors on the CPU, and its results are moved to the
    device, as float32 if they are float64.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        first = next((x for x in pytree.tree_leaves((arguments, named)) if isinstance(x, Tensor)), None)
        if first is None or wide_dtype(first.device) == torch.float64:
            return function(*arguments, **named)
        arguments, named = pytree.tree_map_only(Tensor, lambda x: x.to(_CPU), (arguments, named))
        if inspect.isgeneratorfunction(function):
            return (_moved(found, first.device) for found in function(*arguments, **named))
        return _moved(function(*arguments, **named), first.device)

    return cast(_Function, call)


def _moved(found: Any, device: torch.device) -> Any:
    def move(x: Tensor) -> Tensor:
        return (x.to(torch.float32) if x.dtype == torch.float64 else x).to(device)

    return pytree.tree_map_only(Tensor, move, found)
