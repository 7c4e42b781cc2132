"""What devices can do, and the dtypes that follow from it.

float64 serves where float32 is too coarse. Some devices have no float64. There random numbers come from the CPU
(`from_float64`), and so do results that wait for values of the device in any case (`in_float64`). Everything else has
float32 (`wide_dtype`), also where a docstring says float64.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over numbers of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert numbers that are no averages of values, and so can exceed the range of float16."""
    largest = torch.finfo(dtype).max
    return (x.clamp(-largest, largest) if dtype == torch.float16 else x).to(dtype)


# On Intel's processors AVX512-BF16 without AMX takes 1.8 times the time of float32 (torch 2.13).
_CPU_HAS_BFLOAT16 = bool(
    torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    and torch.cpu._is_avx512_bf16_supported()
    and (torch.cpu._is_amx_tile_supported() or "Intel" not in str(getattr(torch.cpu, "get_capabilities", dict)()))
)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has fast products of bfloat16 tensors: accelerators, AMD's CPUs with AVX512-BF16, and AMX."""
    return device.type != "cpu" or (_CPU_HAS_BFLOAT16 and bool(torch.backends.mkldnn.enabled))


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which products of `x` run.

    On an accelerator it is the dtype of `x`. On the CPU it is bfloat16 for bfloat16 tensors if the processor multiplies
    them fast, and also for float32 tensors after `torch.set_float32_matmul_precision("medium")`.
    Otherwise half precision runs in float32, since float16 products of the CPU are slow.
    """
    if x.dtype == torch.float64 or x.device.type != "cpu":
        return x.dtype
    if not multiplies_bfloat16(x.device):
        return torch.float32
    wants_half = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and _medium_precision())
    return torch.bfloat16 if wants_half else torch.float32


def reads_next_rows(x: Tensor) -> bool:
    """Whether NaN in a row of a left factor can reach the row before it in a product.

    oneDNN's kernels for AMX read whole tiles in bfloat16, and multiply what follows a row by 0.
    """
    return x.device.type == "cpu" and product_dtype(x) == torch.bfloat16


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums over all tokens: `product_dtype`, but float32 for float16, whose range they can exceed."""
    dtype = product_dtype(x)
    return torch.float32 if dtype == torch.float16 else dtype


def planning_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products that only plan: that of `x`, but `sum_dtype` for half precision."""
    return sum_dtype(x) if x.dtype.itemsize == 2 else x.dtype


def precise_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with weights that bfloat16 would round too much.

    For bfloat16 on an accelerator this is float16, which has three more bits. Otherwise it is the accumulation dtype.
    """
    return torch.float16 if x.device.type != "cpu" and x.dtype == torch.bfloat16 else accumulation_dtype(x.dtype)


def _medium_precision() -> bool:
    return torch.get_float32_matmul_precision() == "medium"


# A graph contains the result, and PyTorch traces the graph again if the result changes. This line does the same as
# `torch.compiler.assume_constant_result`, which would import the compiler here.
vars(_medium_precision)["_dynamo_marked_constant"] = True
# The kinds of devices that have no float64.
WITHOUT_FLOAT64 = ("mps",)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device that has no float64."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def runs_block_kernels(device: torch.device) -> bool:
    """Whether a backend of block attention may take a device. On a CPU no call has to ask them."""
    return device.type != "cpu"


def adds_by_index(device: torch.device) -> bool:
    """Whether sums of clusters take less time by index than by products: on an accelerator atomic additions wait."""
    return device.type == "cpu"


def coarse_dtype(x: Tensor) -> torch.dtype:
    """Return a dtype for numbers that only compare tokens: on an accelerator bfloat16 for half precision.

    Its range is that of float32, and half as many bytes are moved.
    """
    is_half = x.device.type != "cpu" and x.dtype.itemsize == 2
    return torch.bfloat16 if is_half else accumulation_dtype(x.dtype)


def joined(x: Tensor) -> Tensor:
    """Return tokens (BH, N, D) one head after another: on a CPU each choice of tokens would copy all of them first."""
    return x.contiguous() if x.device.type == "cpu" else x


def halved(x: Tensor) -> Tensor:
    """Put the smaller half of each row of x (R, N), for an even N, before the larger half: int64 (R, N).

    The order within a half is arbitrary. On a CPU this takes a third of the time of a sort.
    """
    if x.device.type != "cpu":
        return x.sort(dim=1, stable=True)[1]
    half = x.shape[1] // 2
    larger = x.topk(half, dim=1, sorted=False)[1]
    is_smaller = torch.ones_like(x, dtype=torch.bool).scatter_(1, larger, False)
    return torch.cat((is_smaller.nonzero()[:, 1].view(-1, half), larger), 1)


def may_hold(condition: Tensor) -> bool:
    """Whether a condition is True anywhere. On an accelerator, which the call would wait for, it may be."""
    return condition.device.type != "cpu" or bool(condition.any())


def at_most(number: Tensor, bound: int) -> int:
    """Return the number in a tensor, or, on an accelerator, which the call would wait for, a bound of it."""
    return int(number) if number.device.type == "cpu" else bound


def index_of_max(scores: Tensor) -> Tensor:
    """Return the index of the largest number of each row: (..., n) -> int64 (...). It overwrites the scores.

    On a CPU the index replaces the last bits of each number, so that the maximum contains the index. This takes a
    quarter of the time of `argmax`. Numbers that differ in these bits only count as equal.
    """
    if scores.device.type != "cpu":
        return scores.max(-1)[1]
    integer = torch.int64 if scores.dtype == torch.float64 else torch.int32
    count = scores.shape[-1]
    bits = (1 << (count - 1).bit_length()) - 1
    scores.view(integer).bitwise_and_(~bits).bitwise_or_(torch.arange(count, dtype=integer, device=scores.device))
    return scores.amax(-1).view(integer).bitwise_and(bits).long()


_CPU = torch.device("cpu")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def widened(x: Tensor) -> Tensor:
    """Convert a tensor to `wide_dtype`."""
    return x.to(wide_dtype(x.device))


def float64_device(device: torch.device) -> torch.device:
    """Return the device that computes float64 numbers for a device: itself, or the CPU if it has no float64."""
    return device if wide_dtype(device) == torch.float64 else _CPU


def from_float64(make: _Function) -> _Function:
    """Decorate a function that makes float64 numbers on the device of its first argument, such as `Draws`.

    For a device without float64 it makes them on the CPU, and they are rounded to float32 towards 0. So a seed has the
    same numbers on every device up to rounding, and numbers below 1 stay below 1.
    """

    @functools.wraps(make)
    def call(first: Any, *arguments: Any, **named: Any) -> Tensor:
        numbers: Tensor = make(first._replace(device=float64_device(first.device)), *arguments, **named)
        if wide_dtype(first.device) == torch.float64:
            return numbers
        near = numbers.to(torch.float32)
        near = torch.where(near.abs() > numbers.abs(), near.nextafter(torch.zeros_like(near)), near)
        return near.to(first.device)

    return cast(_Function, call)


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
