"""The dtype of matrix products: half precision where the machine multiplies it fast, float32 elsewhere.

A product of bfloat16 tensors has a bfloat16 result on the CPU, although it is summed in float32. So sums over many
tokens are computed in parts, which are added in float32, and scores before an exponential stay in float32.
"""

import math

import torch
from torch import Tensor

# exp(x) = 2^(x LOG2_E): on the CPU powers of two take a fraction of the time of those of e.
LOG2_E = 1.0 / math.log(2.0)

# Read once, so that `torch.compile` meets a constant.
_CPU_HAS_BFLOAT16 = bool(
    torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    and torch.cpu._is_avx512_bf16_supported()
)
_CPU_HAS_MATRIX_UNITS = _CPU_HAS_BFLOAT16 and torch.cpu._is_amx_tile_supported()


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has fast products of bfloat16 tensors: accelerators, and CPUs with AVX512-BF16 or AMX."""
    return device.type != "cpu" or (_CPU_HAS_BFLOAT16 and bool(torch.backends.mkldnn.enabled))


def has_matrix_units() -> bool:
    """Whether the CPU has units for tiles of bfloat16 matrices (AMX).

    Without them, attention in bfloat16 by the fused kernel for the CPU takes as long as in float32.
    """
    return _CPU_HAS_MATRIX_UNITS


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products of `x` run.

    On an accelerator it is that of `x`. On the CPU it is bfloat16 for bfloat16 tensors if the processor multiplies them
    (AVX512-BF16, AMX), and also for float32 tensors after `torch.set_float32_matmul_precision("medium")`. Otherwise
    half precision runs in float32, since float16 products of the CPU are slow.
    """
    if x.dtype == torch.float64 or x.device.type != "cpu":
        return x.dtype
    if not multiplies_bfloat16(x.device):
        return torch.float32
    wants_half = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and _medium_precision())
    return torch.bfloat16 if wants_half else torch.float32


def sum_dtype(x: Tensor) -> torch.dtype:
    """`product_dtype` for sums over all tokens. They can exceed the range of float16, so float32 takes its place."""
    dtype = product_dtype(x)
    return torch.float32 if dtype == torch.float16 else dtype


def attention_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the operands of softmax attention, whose scores and sums are float32 in any case.

    It is `product_dtype`, but float32 on processors on which the fused kernel gains nothing from bfloat16.
    """
    dtype = product_dtype(x)
    is_slow = x.device.type == "cpu" and dtype == torch.bfloat16 and not has_matrix_units()
    return torch.float32 if is_slow else dtype


def _medium_precision() -> bool:
    return torch.get_float32_matmul_precision() == "medium"


# A graph contains the result and is traced again if it changes. This is `torch.compiler.assume_constant_result`, which
# would import the compiler here.
vars(_medium_precision)["_dynamo_marked_constant"] = True
