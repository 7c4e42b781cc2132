"""Triton kernels for attention of blocks of queries to keys that are gathered by index.

A program computes some queries of one block with all keys of the block. Queries are read and outputs written in the
order of the plan, and keys are read by index, so that nothing is gathered in memory. The softmax is online (Milakov &
Gimelshein 2018). The backward computes the weights anew from the lse, as in FlashAttention-2 (Dao 2023). Several blocks
share a key, so it adds the gradients of keys and values atomically to float32 buffers. Products have operands of the
inputs' dtype and float32 sums.

Only `hf_efficient_attn.ops.backends.triton` imports this module, and only for tensors that it computes. With
TRITON_INTERPRET=1 in the environment before the first import of Triton, the kernels run on the CPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# Maps (whether the inputs have 4 bytes, the larger one of D and Dv padded) to the numbers of queries and keys that a
# program processes at a time in the forward and in the backward. Larger tiles spill registers.
_TILES = {
    (False, 64): ((128, 64), (128, 32)),
    (False, 128): ((128, 32), (64, 32)),
    (False, 256): ((64, 16), (32, 32)),
    (True, 64): ((64, 32), (32, 32)),
    (True, 128): ((64, 32), (16, 32)),
    (True, 256): ((16, 16), (16, 16)),
}


def tiling(block_q: int, dim: int, itemsize: int, backward: bool) -> tuple[int, int, int, int]:
    """Choose the numbers of queries and keys that a program processes at a time, of warps, and of stages.

    The programs fit into the 99 KiB of shared memory that all devices of compute capability 8.0 and later have, and in
    half precision into the registers.

    Args:
        block_q: queries of a block.
        dim: the larger one of D and Dv, at most 256.
        itemsize: bytes of a number of the inputs, at most 4.
        backward: for the backward kernel.
    """
    wide = itemsize == 4
    largest, block_n = _TILES[wide, max(64, triton.next_power_of_2(dim))][backward]
    block_m = min(largest, max(16, triton.next_power_of_2(block_q)))
    few_rows = not (wide or backward) and block_m < 128
    return block_m, block_n, 4 if few_rows else 8, 1 if backward else 3


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    # Triton's interpreter does not compute products of bfloat16 numbers correctly.
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _queries_of_program(order, q_len, block_q, num_blocks, chunks, BLOCK_M: tl.constexpr):
    """Find a program's head, its block among the blocks of all heads, and the rows of its existing queries."""
    program = tl.program_id(0)
    block = (program // chunks).to(tl.int64)
    head = block // num_blocks
    in_block = (program % chunks) * BLOCK_M + tl.arange(0, BLOCK_M)
    position = (block % num_blocks) * block_q + in_block
    exists = (in_block < block_q) & (position < q_len)
    return head, block, head * q_len + tl.load(order + head * q_len + position, mask=exists, other=0), exists


@triton.jit
def _load_rows(matrix, row, exists, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load rows of a matrix (., DIM): (., PADDED), 0 for rows that do not exist."""
    dims = tl.arange(0, PADDED)
    return tl.load(matrix + row[:, None] * DIM + dims, mask=exists[:, None] & (dims < DIM), other=0.0)


@triton.jit
def _store_rows(matrix, row, exists, x, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store x (., PADDED) in rows of a matrix (., DIM), except rows that do not exist."""
    dims = tl.arange(0, PADDED)
    tl.store(matrix + row[:, None] * DIM + dims, x.to(matrix.dtype.element_ty), exists[:, None] & (dims < DIM))


@triton.jit
def _add_to_rows(matrix, row, used, x, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Add x (., PADDED) to rows of a float32 matrix (., DIM), which other programs change at the same time."""
    dims = tl.arange(0, PADDED)
    tl.atomic_add(matrix + row[:, None] * DIM + dims, x, used[:, None] & (dims < DIM), sem="relaxed")


@triton.jit
def _keys_of_step(index, log_weight, entries, exists):
    """Load positions of keys, their log-weights as exponents of two, and which keys have a weight."""
    weight = tl.load(log_weight + entries, mask=exists, other=float("-inf")) * _LOG2_E
    return tl.load(index + entries, mask=exists, other=0).to(tl.int64), weight, weight > float("-inf")


@triton.jit
def _forward_kernel(
    query,
    key,
    value,
    index,
    log_weight,
    order,
    out,
    lse,
    scale,
    q_len,
    kv_len,
    block_q,
    num_blocks,
    num_keys,
    chunks,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head, block, row, exists = _queries_of_program(order, q_len, block_q, num_blocks, chunks, BLOCK_M)
    queries = _load_rows(query, row, exists, HEAD_DIM, PADDED_HEAD_DIM).to(key.dtype.element_ty)
    scale = scale * _LOG2_E
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, PADDED_VALUE_DIM), tl.float32)
    for start in range(0, num_keys, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        positions, weight, used = _keys_of_step(index, log_weight, block * num_keys + entry, entry < num_keys)
        keys = _load_rows(key, head * kv_len + positions, used, HEAD_DIM, PADDED_HEAD_DIM)
        values = _load_rows(value, head * kv_len + positions, used, VALUE_DIM, PADDED_VALUE_DIM)
        scores = _dot(queries, tl.trans(keys), PRECISION, UPCAST) * scale + weight[None, :]  # (BLOCK_M, BLOCK_N)
        new_max = tl.maximum(row_max, tl.max(scores, 1))  # (BLOCK_M,)
        # -inf, the maximum without any key, cannot be subtracted.
        finite = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - finite[:, None])  # (BLOCK_M, BLOCK_N)
        kept = tl.exp2(row_max - finite)
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None] + _dot(weights.to(values.dtype), values, PRECISION, UPCAST)  # (BLOCK_M, Dv)
        row_max = new_max
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(lse + row, tl.where(empty, float("-inf"), (row_max + tl.log2(total)) * _LN_2), exists)
    _store_rows(out, row, exists, sums / total[:, None], VALUE_DIM, PADDED_VALUE_DIM)


@triton.jit
def _backward_kernel(
    query,
    key,
    value,
    index,
    log_weight,
    order,
    out,
    lse,
    grad_out,
    grad_lse,
    grad_query,
    grad_key,
    grad_value,
    grad_log_weight,
    scale,
    q_len,
    kv_len,
    block_q,
    num_blocks,
    num_keys,
    chunks,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WITH_LOG_WEIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head, block, row, exists = _queries_of_program(order, q_len, block_q, num_blocks, chunks, BLOCK_M)
    queries = _load_rows(query, row, exists, HEAD_DIM, PADDED_HEAD_DIM).to(key.dtype.element_ty)
    grad = _load_rows(grad_out, row, exists, VALUE_DIM, PADDED_VALUE_DIM)
    outs = _load_rows(out, row, exists, VALUE_DIM, PADDED_VALUE_DIM)
    # d scores = P * (grad_out . v_j - grad_out . out + grad_lse) with P = exp(scores - lse). P = 0 without any key.
    delta = tl.sum(grad.to(tl.float32) * outs.to(tl.float32), 1) - tl.load(grad_lse + row, mask=exists, other=0.0)
    own_lse = tl.load(lse + row, mask=exists, other=float("-inf"))
    own_lse = tl.where(own_lse == float("-inf"), float("inf"), own_lse * _LOG2_E)
    sums = tl.zeros((BLOCK_M, PADDED_HEAD_DIM), tl.float32)
    for start in range(0, num_keys, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        entries = block * num_keys + entry
        positions, weight, used = _keys_of_step(index, log_weight, entries, entry < num_keys)
        keys = _load_rows(key, head * kv_len + positions, used, HEAD_DIM, PADDED_HEAD_DIM)
        values = _load_rows(value, head * kv_len + positions, used, VALUE_DIM, PADDED_VALUE_DIM)
        scores = _dot(queries, tl.trans(keys), PRECISION, UPCAST) * (scale * _LOG2_E) + weight[None, :]
        weights = tl.exp2(scores - own_lse[:, None])  # (BLOCK_M, BLOCK_N)
        own = head * kv_len + positions
        some = _dot(tl.trans(weights.to(grad.dtype)), grad, PRECISION, UPCAST)  # (BLOCK_N, Dv)
        _add_to_rows(grad_value, own, used, some, VALUE_DIM, PADDED_VALUE_DIM)
        grad_scores = weights * (_dot(grad, tl.trans(values), PRECISION, UPCAST) - delta[:, None])
        if WITH_LOG_WEIGHT:
            tl.atomic_add(grad_log_weight + entries, tl.sum(grad_scores, 0), used, sem="relaxed")
        rounded = grad_scores.to(keys.dtype)
        some = _dot(tl.trans(rounded), queries, PRECISION, UPCAST) * scale  # (BLOCK_N, D)
        _add_to_rows(grad_key, own, used, some, HEAD_DIM, PADDED_HEAD_DIM)
        sums += _dot(rounded, keys, PRECISION, UPCAST)  # (BLOCK_M, D)
    _store_rows(grad_query, row, exists, sums * scale, HEAD_DIM, PADDED_HEAD_DIM)


# Whether Triton was imported to interpret its kernels on the CPU.
_INTERPRETED = not isinstance(_forward_kernel, triton.JITFunction)


def _launch(kernel: Any, given: tuple[Any, ...], others: list[Tensor], **constants: bool) -> None:
    """Run a kernel on the arguments of `gather_attend` and more tensors, which are outputs in the forward."""
    query, key, value, index, log_weight, order, block_q, scale = given
    if order is None:
        order = torch.arange(query.shape[1], device=query.device).expand(query.shape[:2])
    batch_heads, num_blocks, num_keys = index.shape
    head_dim = query.shape[2]
    value_dim = value.shape[2]
    itemsize = max(x.element_size() for x in (key, value))
    tiles = tiling(block_q, max(head_dim, value_dim), itemsize, backward=kernel is _backward_kernel)
    chunks = -(-block_q // tiles[0])
    tensors = [x.contiguous() for x in (query, key, value, index, log_weight, order, *others)]
    sizes = scale, query.shape[1], key.shape[1], block_q, num_blocks, num_keys, chunks
    with torch.cuda.device_of(query):
        kernel[(batch_heads * num_blocks * chunks,)](
            *tensors,
            *sizes,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            PADDED_HEAD_DIM=max(16, triton.next_power_of_2(head_dim)),
            PADDED_VALUE_DIM=max(16, triton.next_power_of_2(value_dim)),
            BLOCK_M=tiles[0],
            BLOCK_N=tiles[1],
            PRECISION="tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
            UPCAST=_INTERPRETED and torch.bfloat16 in (key.dtype, value.dtype),
            num_warps=tiles[2],
            num_stages=tiles[3],
            **constants,
        )


def gather_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    log_weight: Tensor,
    order: Tensor | None,
    block_q: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute attention of blocks of queries to keys by index, and its lse, by one kernel. Differentiable.

    Args:
        query: (BH, Nq, D), not float64.
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        index: (BH, T, K), int32 or int64, the keys of each block.
        log_weight: float32 (BH, T, K), added to the scores; -inf for an unused entry, whose key is not read.
        order: (BH, Nq), int32 or int64, the order in which the queries are cut into blocks, or None.
        block_q: queries of a block, at least Nq / T.
        scale: factor of the scores.

    Returns:
        out (BH, Nq, Dv) in the dtype of `value` and lse float32 (BH, Nq), by position of the queries; 0 and -inf for
        queries without a key.
    """
    found: tuple[Tensor, Tensor] = _GatherAttend.apply(
        query, key, value, index, log_weight, order, block_q, float(scale)
    )
    return found


class _GatherAttend(torch.autograd.Function):
    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        query = given[0]
        value = given[2]
        out = value.new_empty(*query.shape[:2], value.shape[2])  # (BH, Nq, Dv)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        if lse.numel():
            _launch(_forward_kernel, given, [out, lse])
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.block_q, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        query, key, value, index = tensors[:4]
        with_log_weight = ctx.needs_input_grad[4]
        grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        grad_key, grad_value, grad_log_weight = (
            torch.zeros(shape, dtype=torch.float32, device=query.device)
            for shape in (key.shape, value.shape, index.shape if with_log_weight else 0)
        )
        if grad_query.numel():
            grads = [grad_query, grad_key, grad_value, grad_log_weight]
            others = [out, lse, grad_out, grad_lse, *grads]
            _launch(_backward_kernel, (*tensors, ctx.block_q, ctx.scale), others, WITH_LOG_WEIGHT=with_log_weight)
        both = grad_key.to(key.dtype), grad_value.to(value.dtype)
        return grad_query, *both, None, grad_log_weight if with_log_weight else None, None, None, None
