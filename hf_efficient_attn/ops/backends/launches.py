"""Launches of Triton kernels, and the check of a kernel on its first use.

A backend with kernels has two modules: one for its calls, which imports no Triton, and one for the kernels, whose name
begins with `triton_`. It describes each launch as a `Launch` and asks `takes` and `passes_check` before. With
HEA_KERNELS=plain in the environment no kernel is used.
"""

import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_IS_INSTALLED = importlib.util.find_spec("triton") is not None
# Kernels hold at most this many numbers of a query, key or value.
LARGEST_DIM = 256


class Tile(NamedTuple):
    """The numbers of rows and of columns that a program processes at a time, of warps, and of stages.

    Rows are queries, or the tokens of a program. Columns are keys, or the tokens that these read.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Launch(NamedTuple):
    """A launch of a Triton kernel."""

    name: str  # the name of the kernel in its module
    module: Callable[[], ModuleType]  # imports and returns the module of the kernel
    grid: int  # the number of programs
    # Contiguous tensors, numbers, and None for a tensor that is not given, by the names of the parameters.
    arguments: Mapping[str, Tensor | float | None]
    constants: Mapping[str, Any]  # the parameters that the kernel is compiled for
    num_warps: int  # warps of a program
    num_stages: int  # stages of the pipeline of its loops


def launch(call: Launch) -> None:
    """Run a kernel. A grid of no programs runs nothing."""
    if not call.grid:
        return
    kernel = getattr(call.module(), call.name)
    first = next(x for x in call.arguments.values() if isinstance(x, Tensor))
    with torch.cuda.device_of(first):
        kernel[(call.grid,)](**call.arguments, **call.constants, num_warps=call.num_warps, num_stages=call.num_stages)


def padded(dim: int) -> int:
    """Return the number of dimensions that a kernel holds for a query, key or value: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def takes(*tensors: Tensor) -> bool:
    """Whether Triton kernels may compute with these tensors (BH, N, .).

    They take up to 256 dimensions on CUDA devices of compute capability 8.0 and later and on ROCm, but no float64 and
    no transform of `torch.func`. They add some gradients in any order.
    """
    if not _IS_INSTALLED or not all(x.is_cuda and x.dtype != torch.float64 for x in tensors) or _are_left_out():
        return False
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if needs_grad and torch.are_deterministic_algorithms_enabled():
        return False
    if max(x.shape[-1] for x in tensors) > LARGEST_DIM:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(tensors[0].device) >= (8, 0)


def _are_left_out() -> bool:
    choice = os.environ.get("HEA_KERNELS", "")
    if choice not in ("", "plain"):
        raise ValueError(f"HEA_KERNELS={choice} in the environment: set it to plain, or do not set it")
    return choice == "plain"


_results: dict[Hashable, bool] = {}
_lock = threading.RLock()


def passes_check(name: str, device: torch.device, form: Hashable, check: Callable[[], None]) -> bool:
    """Whether kernels agree with the plain form on a small input. The check runs on their first use in a process.

    Args:
        name: a name of the kernels for the warning.
        device: the device of the call.
        form: what else the kernels are compiled for, such as the dtype and the numbers of dimensions.
        check: computes both forms, and raises an exception if the kernels fail or differ.
    """
    key = name, device, form
    if key in _results:
        return _results[key]
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False  # the check would wait for the device
    with _lock:
        if key not in _results:
            try:
                with torch.inference_mode(False), torch.enable_grad():
                    check()
                _results[key] = True
            except Exception as error:  # noqa: BLE001 (whatever a compiler or a driver raises)
                _results[key] = False
                warnings.warn(
                    f"the Triton kernels for {name} are left out on {device}, and other kernels compute their calls, "
                    f"since their check failed for {form}: {type(error).__name__}: {error}",
                    stacklevel=2,
                )
    return _results[key]


def numbers(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, phase: float) -> Tensor:
    """Return numbers between -1 and 1 for a check: a function of the arguments, without a generator."""
    count = torch.Size(shape).numel()
    index = torch.arange(count, dtype=torch.float32, device=device)
    return (index * (1.0 + phase) + phase).sin().view(shape).to(dtype)


def check_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise an error if tensors differ by more than `tolerance` of the largest number."""
    size = expected.abs().amax().clamp(min=1.0)
    error = ((found.double() - expected.double()).abs().amax() / size).item()
    if not error <= tolerance:
        raise ArithmeticError(
            f"a result differs by {error:.1e} from that of the plain form; {tolerance:.1e} is allowed"
        )
