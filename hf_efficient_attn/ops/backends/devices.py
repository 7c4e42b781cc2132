"""What devices can do, and the dtypes that follow from it."""

import torch
from torch import Tensor

_CPU_HAS_BFLOAT16 = bool(
    torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    and torch.cpu._is_avx512_bf16_supported()
)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has fast products of bfloat16 tensors: accelerators, and CPUs with AVX512-BF16 or AMX."""
    return device.type != "cpu" or (_CPU_HAS_BFLOAT16 and bool(torch.backends.mkldnn.enabled))


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which products of `x` run.

    On an accelerator it is the dtype of `x`. On the CPU it is bfloat16 for bfloat16 tensors if the processor multiplies
    them (AVX512-BF16, AMX), and also for float32 tensors after `torch.set_float32_matmul_precision("medium")`.
    Otherwise half precision runs in float32, since float16 products of the CPU are slow.
    """
    if x.dtype == torch.float64 or x.device.type != "cpu":
        return x.dtype
    if not multiplies_bfloat16(x.device):
        return torch.float32
    wants_half = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and _medium_precision())
    return torch.bfloat16 if wants_half else torch.float32


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums over all tokens: `product_dtype`, but float32 for float16, whose range they can exceed."""
    dtype = product_dtype(x)
    return torch.float32 if dtype == torch.float16 else dtype


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
