"""Triton kernels of a round of kernel halving.

The first kernel computes the differences between the pairs of every bucket, from tokens that it reads by index. A
program of the second one decides the pairs of a bucket one after the other. It holds the error of all pairs in
registers, and adds a row of the differences to it after every decision.

Only `hf_efficient_attn.ops.batched_thinning` imports this module, and only for tensors that it computes by Triton. With
TRITON_INTERPRET=1 in the environment before the first import of Triton, the kernels run on the CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.triton_gather_attend import _INTERPRETED, _device, _dot, _strides

# The smallest square of the size of a decision.
_TINY = tl.constexpr(1e-36)
# Exponents of float32 numbers, and those of which the powers and their reciprocals are normal numbers.
_EXPONENT, _LEAST_EXPONENT, _MOST_EXPONENT = (tl.constexpr(x << 23) for x in (255, 1, 253))


# Constants of the hash of `hf_efficient_attn.ops.random`.
_MASK = tl.constexpr(0xFFFFFFFF)
_FACTORS = tl.constexpr((0x85EBCA6B, 0xC2B2AE35))
_SEED_FACTOR, _STREAM_FACTOR = tl.constexpr(0x9E3779B1), 0x7F4A7C15


@triton.jit
def _mix(x):
    """`random._mix` of int64 numbers."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * _FACTORS[0]) & _MASK
    x = ((x ^ (x >> 13)) * _FACTORS[1]) & _MASK
    return x ^ (x >> 16)


@triton.jit
def _uniform(seed, stream, mixed_stream, counter):
    """`random.uniform` for a stream, `mixed_stream` being its part of the start, and some int64 counters from 1 on."""
    start = _mix(tl.load(seed).to(tl.int64) * _SEED_FACTOR + mixed_stream)
    bits = _mix(_mix(counter) + _mix(start + stream + 1))
    return (bits.to(tl.float64) + 0.5) / 4294967296.0


@triton.jit
def _tokens_of_pairs(index, plan, pair, exists, plan_part):
    """The two tokens of some pairs, and how many tokens each represents.

    A place without a token holds the other token of its pair.
    """
    first = tl.load(plan + pair, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(plan + plan_part + pair, mask=exists, other=0.0).to(tl.float32)
    one = tl.load(index + 2 * pair, mask=exists, other=0)
    other = tl.load(index + 2 * pair + 1, mask=exists, other=0)
    return tl.where(first > 0.0, one, other), tl.where(second > 0.0, other, one), first, second


@triton.jit
def _products(
    rows, row, left, right, factor, DIM: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr
):
    """The products of some rows of a matrix with others: (BLOCK, BLOCK). The rows are multiplied by a power of two."""
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, DIM, STEP):
        dims = start + tl.arange(0, STEP)
        one = tl.load(rows + left[:, None] * row + dims, mask=dims < DIM, other=0.0)
        other = tl.load(rows + right[:, None] * row + dims, mask=dims < DIM, other=0.0)
        one = (one.to(tl.float32) * factor).to(rows.dtype.element_ty)
        other = (other.to(tl.float32) * factor).to(rows.dtype.element_ty)
        sums += _dot(one, tl.trans(other), "ieee", UPCAST)
    return sums


@triton.jit
def _kernel_of_tokens(
    key,
    value,
    left,
    right,
    key_row,
    value_row,
    scale,
    shift,
    factor,
    square,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    scores = _products(key, key_row, left, right, 1.0, HEAD_DIM, STEP, BLOCK, UPCAST)
    values = _products(value, value_row, left, right, factor, VALUE_DIM, STEP, BLOCK, UPCAST)
    return tl.exp(scores * scale - shift) * (values + square)


@triton.jit
def _difference_kernel(
    key,
    value,
    index,
    plan,
    norm,
    largest,
    difference,
    key_head,
    key_row,
    value_head,
    value_row,
    index_head,
    plan_part,
    plan_head,
    scale,
    num_pairs,
    bucket,
    num_buckets,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # The differences are symmetric, and only those with later pairs are read.
    if tl.program_id(2) >= tl.program_id(1):
        program = tl.program_id(0).to(tl.int64)
        head = program // num_buckets
        start = (program % num_buckets) * bucket
        key, value, index, plan = (
            key + head * key_head,
            value + head * value_head,
            index + head * index_head,
            plan + head * plan_head,
        )
        row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        exists = (row < bucket) & (start + row < num_pairs)
        left_one, left_other, _, _ = _tokens_of_pairs(index, plan, start + row, exists, plan_part)
        exists = (column < bucket) & (start + column < num_pairs)
        right_one, right_other, _, _ = _tokens_of_pairs(index, plan, start + column, exists, plan_part)
        # The largest value is 1 to 2 after a multiplication by a power of two, which is exact.
        most = tl.load(largest + head)
        power = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) & _EXPONENT, _LEAST_EXPONENT), _MOST_EXPONENT)
        factor = 1.0 / power.to(tl.float32, bitcast=True)
        square = (most * factor) * (most * factor)
        longest = tl.load(norm + head)
        shift = longest * longest * scale
        one = _kernel_of_tokens(
            key, value, left_one, right_one, key_row, value_row, scale, shift, factor, square,
            HEAD_DIM, VALUE_DIM, STEP, BLOCK, UPCAST,
        ) - _kernel_of_tokens(
            key, value, left_other, right_one, key_row, value_row, scale, shift, factor, square,
            HEAD_DIM, VALUE_DIM, STEP, BLOCK, UPCAST,
        )  # fmt: skip
        other = _kernel_of_tokens(
            key, value, left_one, right_other, key_row, value_row, scale, shift, factor, square,
            HEAD_DIM, VALUE_DIM, STEP, BLOCK, UPCAST,
        ) - _kernel_of_tokens(
            key, value, left_other, right_other, key_row, value_row, scale, shift, factor, square,
            HEAD_DIM, VALUE_DIM, STEP, BLOCK, UPCAST,
        )  # fmt: skip
        place = difference + program * bucket * bucket + row[:, None] * bucket + column
        tl.store(place, one - other, (row < bucket)[:, None] & (column < bucket))


@triton.jit
def _maximum(x, y):
    return tl.maximum(x, y)


@triton.jit
def _decision_kernel(
    index,
    plan,
    seed,
    difference,
    kept,
    index_head,
    plan_part,
    plan_head,
    stream,
    mixed_stream,
    first_number,
    num_heads,
    total_heads,
    num_pairs,
    bucket,
    num_buckets,
    BUCKET: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    head = program // num_buckets
    place = tl.arange(0, BUCKET)
    pair = (program % num_buckets) * bucket + place
    exists = (place < bucket) & (pair < num_pairs)
    plan += head * plan_head
    one, other, first, second = _tokens_of_pairs(index + head * index_head, plan, pair, exists, plan_part)
    lean = tl.load(plan + 2 * plan_part + pair, mask=exists, other=0.0)
    margin = tl.load(plan + 3 * plan_part + pair, mask=exists, other=0.0)
    least = tl.load(plan + 4 * plan_part + pair, mask=exists, other=0.0).to(tl.float32)
    number = _uniform(seed, stream, mixed_stream, first_number + pair * total_heads + head % num_heads + 1)
    lean = (lean - 2.0 * margin * number).to(tl.float32)
    difference += program * bucket * bucket
    square = tl.load(difference + place * (bucket + 1), mask=place < bucket, other=0.0)
    size = tl.maximum(square * tl.associative_scan(square * least, 0, _maximum), _TINY)
    # The second token of a pair is kept where the error is not positive. It no longer changes after the decision.
    error = tl.sqrt(size) * lean
    row = tl.load(difference + place, mask=(place > 0) & (place < bucket), other=0.0)
    for i in range(bucket):
        later = (place > i + 1) & (place < bucket)
        next_row = tl.load(difference + (i + 1) * bucket + place, mask=later, other=0.0)
        step = tl.sum(tl.where(place == i, tl.where(error <= 0.0, first, -second), 0.0), 0)
        error += row * step
        row = next_row
    tl.store(kept + head * num_pairs + pair, tl.where(error <= 0.0, other, one), exists)


def halve_round(
    key: Tensor,
    value: Tensor,
    index: Tensor,
    plan: Tensor,
    seed: Tensor,
    norm: Tensor,
    largest: Tensor,
    stream: int,
    first_number: int,
    num_heads: int,
    total_heads: int,
    num_pairs: int,
    bucket: int,
    scale: float,
) -> Tensor:
    """The tokens that are left; see `hf_efficient_attn.ops.batched_thinning.halve_round`."""
    batch_heads, num_buckets = len(key), ceil_div(num_pairs, bucket)
    kept = torch.empty(batch_heads, num_pairs, dtype=torch.int64, device=key.device)
    difference = torch.empty(batch_heads * num_buckets, bucket, bucket, dtype=torch.float32, device=key.device)
    rows, strides = _strides(key, value)
    plan_strides = plan.stride(0), plan.stride(1) if plan.shape[1] > 1 else 0
    read = index.stride(0) if len(index) > 1 else 0, *plan_strides
    sizes = num_pairs, bucket, num_buckets
    numbers = stream, stream * _STREAM_FACTOR & 0xFFFFFFFF, first_number, num_heads, total_heads
    itemsize = max(x.element_size() for x in rows)
    block, warps = block_of(bucket), warps_of(bucket, itemsize)
    constants = {
        "HEAD_DIM": key.shape[2],
        "VALUE_DIM": value.shape[2],
        "STEP": step_of(itemsize),
        "BLOCK": block,
        "UPCAST": _INTERPRETED and torch.bfloat16 in (key.dtype, value.dtype),
        "num_warps": warps[0],
        "num_stages": 1,
    }
    tiles = ceil_div(bucket, block)
    with _device(key):
        _difference_kernel[batch_heads * num_buckets, tiles, tiles](
            *rows, index, plan, norm, largest, difference, *strides, *read, abs(scale), *sizes, **constants
        )
        _decision_kernel[(batch_heads * num_buckets,)](
            index, plan, seed, difference, kept, *read, *numbers, *sizes,
            BUCKET=triton.next_power_of_2(bucket), num_warps=warps[1],
        )  # fmt: skip
    return kept


def step_of(itemsize: int) -> int:
    """How many dimensions of keys and values are multiplied at a time, for numbers of so many bytes."""
    return 16 if itemsize == 4 else 64


def block_of(bucket: int) -> int:
    """The rows and columns of the differences that a program computes."""
    return 16 if bucket <= 16 else 32


def warps_of(bucket: int, itemsize: int) -> tuple[int, int]:
    """The warps of 32 threads of a program of the two kernels."""
    return 1 if bucket <= 16 and itemsize < 4 else 4, max(1, triton.next_power_of_2(bucket) // 256)
