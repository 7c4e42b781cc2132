"""Launches of Triton kernels, and the check of a kernel on its first use.

A backend with kernels has two modules: one for its calls, which imports no Triton, and one for the kernels, whose name
begins with `triton_`. It describes each launch as a `Launch` and asks `takes` and `passes_check` before. With
HEA_KERNELS=plain in the environment no kernel is used. With TRITON_INTERPRET=1 before the first import of Triton, the
kernels run on the CPU.
"""

import importlib.util
import os
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import warn

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
    module: str  # the name of the module in this package, which needs Triton
    grid: int  # the number of programs
    tile: Tile
    # Contiguous tensors, numbers, and None for a tensor that is not given, by the names of the parameters.
    arguments: Mapping[str, Tensor | float | None]
    constants: Mapping[str, Any]  # the parameters that the kernel is compiled for

    @property
    def kernel(self) -> Any:
        """The kernel, whose module is imported here because Triton is no dependency."""
        return getattr(importlib.import_module(f"{__package__}.{self.module}"), self.name)


def launch(call: Launch) -> None:
    """Run a kernel. A grid of no programs runs nothing."""
    if not call.grid:
        return
    first = next(x for x in call.arguments.values() if isinstance(x, Tensor))
    with torch.cuda.device_of(first):
        call.kernel[(call.grid,)](
            **call.arguments, **call.constants, num_warps=call.tile.num_warps, num_stages=call.tile.num_stages
        )


def padded(dim: int) -> int:
    """Return the number of dimensions that a kernel holds for a query, key or value: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def width(*dims: int) -> int:
    """Return the number of dimensions of the widest tensor that a kernel holds, at least 64, for tables of tiles."""
    return max(64, padded(max(dims)))


def sizes(dim: int, value_dim: int, tile: Tile | None = None) -> dict[str, int]:
    """Return the constants of a kernel for D or F = `dim` and Dv = `value_dim`, and for a tile if it has one."""
    blocks = {} if tile is None else {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    return {"DIM": dim, "PADDED": padded(dim), "VALUE_DIM": value_dim, "PADDED_V": padded(value_dim), **blocks}


def float32_precision() -> str:
    """Return the precision of products of float32 numbers that PyTorch's settings allow."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


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
                warn(
                    f"the Triton kernels for {name} are left out on {device}, and other kernels compute their calls, "
                    f"since their check failed for {form}: {type(error).__name__}: {error}"
                )
    return _results[key]


def numbers(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, phase: float) -> Tensor:
    """Return numbers between -1 and 1 for a check: a function of the arguments, without a generator."""
    count = torch.Size(shape).numel()
    index = torch.arange(count, dtype=torch.float32, device=device)
    return (index * (1.0 + phase) + phase).sin().view(shape).to(dtype)


def check_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise an error if tensors differ by more than `tolerance` of the largest number."""
    same = found == expected  # as the lse -inf of a query without a key
    size = expected.masked_fill(same, 0.0).abs().amax().clamp(min=1.0)
    error = ((found.double() - expected.double()).masked_fill(same, 0.0).abs().amax() / size).item()
    if not error <= tolerance:
        raise ArithmeticError(
            f"a result differs by {error:.1e} from that of the plain form; {tolerance:.1e} is allowed"
        )
