"""Triton kernels for attention of blocks of queries to a range or a window of keys and to a list of keys.

A program of the forward computes some queries of one block with all keys of the block. It reads queries, keys and
values where they are, so that nothing is gathered in memory. The softmax is online (Milakov & Gimelshein 2018).

The backward computes the weights anew from the lse, as in FlashAttention-2 (Dao 2023), in two kernels. The first one
has the programs of the forward. It computes the gradients of the queries and of what is listed. Several blocks list the
same key, so it adds the gradients of listed keys and values atomically. Each program of the second kernel has some keys
and all queries in whose range or window one of them may be. It adds nothing atomically.

Products have operands of the inputs' dtype and float32 sums. Scores and log-weights are exponents of two. A tensor that
a call does not have is None, and so are `left` and `right` without a window.

`hf_efficient_attn.ops.backends.backend` documents the tensors.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# Sizes change with the lengths, and a kernel is not compiled anew for each.
_SIZES = [
    "q_len", "kv_len", "block_q", "num_blocks", "chunks", "range_len", "list_size", "mask_stride", "left", "right",
]  # fmt: skip


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if _INTERPRETED:  # Triton's interpreter does not compute products of bfloat16 numbers correctly.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


# Whether Triton was imported to interpret its kernels on the CPU.
_INTERPRETED = tl.constexpr(not isinstance(_dot, triton.JITFunction))


@triton.jit
def _load_rows(matrix, row, exists, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load rows of a matrix (., DIM): (., PADDED), 0 for rows that do not exist."""
    dims = tl.arange(0, PADDED)
    exists = exists[:, None]
    if DIM < PADDED:
        exists = exists & (dims < DIM)
    return tl.load(matrix + row[:, None] * DIM + dims, mask=exists, other=0.0)


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
def _queries_of_program(order, q_len, block_q, num_blocks, chunks, BLOCK_M: tl.constexpr):
    """Find a program's head, its block among the blocks of all heads, and the positions of its existing queries.

    The last two results are the first sorted index of the queries, and the one after the last.
    """
    program = tl.program_id(0)
    block = (program // chunks).to(tl.int64)
    head = block // num_blocks
    of_block = (block % num_blocks).to(tl.int32) * block_q
    first = of_block + (program % chunks) * BLOCK_M
    last = tl.minimum(tl.minimum(first + BLOCK_M, of_block + block_q), q_len)
    position = first + tl.arange(0, BLOCK_M)
    exists = position < last
    if order is not None:
        position = tl.load(order + head * q_len + position, mask=exists, other=0).to(tl.int32)
    return head, block, position, exists, first, last


@triton.jit
def _bounds(start, num_listed, block, first, last, kv_len, range_len, list_size, left, right, IS_LIST: tl.constexpr):
    """Find the first entry of a program's list, or sorted index of its range or windows, and the one after the last."""
    if IS_LIST:
        low = 0
        high = list_size
        if num_listed is not None:
            high = tl.load(num_listed + block).to(tl.int32)
    elif start is not None:
        low = tl.load(start + block).to(tl.int32)
        high = tl.minimum(low + range_len, kv_len)
    else:
        low = tl.maximum(first - left, 0)
        high = tl.minimum(last + right, kv_len)
    return low, high


@triton.jit
def _sorted_keys(index, exists, head, key_order, key_mask, kv_len, mask_stride):
    """Load the positions of the keys at sorted indices, and which of them are valid."""
    positions = index
    valid = exists
    if key_order is not None:
        positions = tl.load(key_order + head * kv_len + index, mask=exists, other=0).to(tl.int32)
    if key_mask is not None:
        valid = valid & (tl.load(key_mask + head * mask_stride + index, mask=exists, other=0) != 0)
    return positions, valid


@triton.jit
def _in_window(position, key_position, left, right):
    distance = key_position[None, :] - position[:, None]
    return (distance >= -left) & (distance <= right)


@triton.jit
def _keys_of_block(
    entry, high, head, block, position, start, key_order, key_mask, listed, log_weight, kv_len, list_size,
    mask_stride, left, right, IS_LIST: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Load the rows of keys, which of them are used, and their bias (1 or BLOCK_M, BLOCK_N).

    They are the keys of some entries of the list of a block, or at some sorted indices of its range or window.
    """
    exists = entry < high
    if IS_LIST:
        weight = tl.load(log_weight + block * list_size + entry, mask=exists, other=float("-inf")) * _LOG2_E
        positions = tl.load(listed + block * list_size + entry, mask=exists, other=0).to(tl.int32)
        used = weight > float("-inf")
        bias = weight[None, :]
        if left is not None and start is None:  # a key of the window counts once
            bias = tl.where(_in_window(position, positions, left, right), float("-inf"), bias)
        if IS_CAUSAL:
            bias = tl.where(positions[None, :] <= position[:, None], bias, float("-inf"))
    else:
        positions, used = _sorted_keys(entry, exists, head, key_order, key_mask, kv_len, mask_stride)
        seen = used[None, :]
        if left is not None:
            seen = seen & _in_window(position, positions, left, right)
        bias = tl.where(seen, 0.0, float("-inf"))
    return head * kv_len + positions, used, bias


@triton.jit
def _add_scores(scores, values, row_max, total, sums, PRECISION: tl.constexpr):
    """Add keys to the maximum of the scores of each query, the sum of its weights, and that of its weighted values."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))  # (BLOCK_M,)
    # -inf, the maximum without any key, cannot be subtracted.
    finite = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - finite[:, None])  # (BLOCK_M, BLOCK_N)
    kept = tl.exp2(row_max - finite)
    sums = sums * kept[:, None] + _dot(weights.to(values.dtype), values, PRECISION)  # (BLOCK_M, Dv)
    return new_max, total * kept + tl.sum(weights, 1), sums


@triton.jit(do_not_specialize=_SIZES)
def block_forward(
    query, key, value, start, key_order, key_mask, listed, log_weight, num_listed, order, out, lse, scale, q_len,
    kv_len, block_q, num_blocks, chunks, range_len, list_size, mask_stride, left, right, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of some queries of a block."""
    head, block, position, exists, first, last = _queries_of_program(order, q_len, block_q, num_blocks, chunks, BLOCK_M)
    row = head * q_len + position
    queries = _load_rows(query, row, exists, DIM, PADDED).to(key.dtype.element_ty)
    scale = scale * _LOG2_E
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, PADDED_V), tl.float32)
    for is_list in tl.static_range(2):  # first the keys of a range or window
        if (listed is not None) if is_list else (start is not None or left is not None):
            low, high = _bounds(
                start, num_listed, block, first, last, kv_len, range_len, list_size, left, right, is_list
            )
            for at in range(low, high, BLOCK_N):
                own, used, bias = _keys_of_block(
                    at + tl.arange(0, BLOCK_N), high, head, block, position, start, key_order, key_mask, listed,
                    log_weight, kv_len, list_size, mask_stride, left, right, is_list, IS_CAUSAL,
                )  # fmt: skip
                keys = _load_rows(key, own, used, DIM, PADDED)
                values = _load_rows(value, own, used, VALUE_DIM, PADDED_V)
                scores = _dot(queries, tl.trans(keys), PRECISION) * scale + bias  # (BLOCK_M, BLOCK_N)
                row_max, total, sums = _add_scores(scores, values, row_max, total, sums, PRECISION)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(lse + row, tl.where(empty, float("-inf"), (row_max + tl.log2(total)) * _LN_2), exists)
    _store_rows(out, row, exists, sums / total[:, None], VALUE_DIM, PADDED_V)


@triton.jit
def _pair_gradients(queries, keys, values, bias, own_lse, grad, delta, scale, PRECISION: tl.constexpr):
    """Compute the weights of pairs, P = exp(scores - lse), and the gradients of their scores, (BLOCK_M, BLOCK_N) each.

    d scores = P * (grad_out . v_j - delta) with delta = grad_out . out - grad_lse.
    """
    scores = _dot(queries, tl.trans(keys), PRECISION) * (scale * _LOG2_E) + bias
    weights = tl.exp2(scores - own_lse[:, None])
    return weights, weights * (_dot(grad, tl.trans(values), PRECISION) - delta[:, None])


@triton.jit
def _load_lse(lse, row, exists):
    """Load the lse as exponents of two, inf for a query without any key, whose weights are then 0."""
    own_lse = tl.load(lse + row, mask=exists, other=float("-inf"))
    return tl.where(own_lse == float("-inf"), float("inf"), own_lse * _LOG2_E)


@triton.jit(do_not_specialize=_SIZES)
def block_query_gradients(
    query, key, value, start, key_order, key_mask, listed, log_weight, num_listed, order, out, lse, grad_out, grad_lse,
    grad_query, delta, grad_key, grad_value, grad_log_weight, scale, q_len, kv_len, block_q, num_blocks, chunks,
    range_len, list_size, mask_stride, left, right, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of some queries of a block, delta, and the sums of the gradients of what is listed."""
    head, block, position, exists, first, last = _queries_of_program(order, q_len, block_q, num_blocks, chunks, BLOCK_M)
    row = head * q_len + position
    queries = _load_rows(query, row, exists, DIM, PADDED).to(key.dtype.element_ty)
    grad = _load_rows(grad_out, row, exists, VALUE_DIM, PADDED_V)
    outs = _load_rows(out, row, exists, VALUE_DIM, PADDED_V)
    own_delta = tl.sum(grad.to(tl.float32) * outs.to(tl.float32), 1)
    if grad_lse is not None:
        own_delta -= tl.load(grad_lse + row, mask=exists, other=0.0)
    tl.store(delta + row, own_delta, exists)
    own_lse = _load_lse(lse, row, exists)
    sums = tl.zeros((BLOCK_M, PADDED), tl.float32)
    for is_list in tl.static_range(2):  # first the keys of a range or window
        if (listed is not None) if is_list else (start is not None or left is not None):
            low, high = _bounds(
                start, num_listed, block, first, last, kv_len, range_len, list_size, left, right, is_list
            )
            for at in range(low, high, BLOCK_N):
                entry = at + tl.arange(0, BLOCK_N)
                own, used, bias = _keys_of_block(
                    entry, high, head, block, position, start, key_order, key_mask, listed, log_weight, kv_len,
                    list_size, mask_stride, left, right, is_list, IS_CAUSAL,
                )  # fmt: skip
                keys = _load_rows(key, own, used, DIM, PADDED)
                values = _load_rows(value, own, used, VALUE_DIM, PADDED_V)
                weights, scores = _pair_gradients(
                    queries, keys, values, bias, own_lse, grad, own_delta, scale, PRECISION
                )
                if is_list:
                    some = _dot(tl.trans(weights.to(grad.dtype)), grad, PRECISION)  # (BLOCK_N, Dv)
                    _add_to_rows(grad_value, own, used, some, VALUE_DIM, PADDED_V)
                    if grad_log_weight is not None:
                        of_entry = grad_log_weight + block * list_size + entry
                        tl.atomic_add(of_entry, tl.sum(scores, 0), used, sem="relaxed")
                    some = _dot(tl.trans(scores.to(keys.dtype)), queries, PRECISION) * scale  # (BLOCK_N, D)
                    _add_to_rows(grad_key, own, used, some, DIM, PADDED)
                sums += _dot(scores.to(keys.dtype), keys, PRECISION)  # (BLOCK_M, D)
    _store_rows(grad_query, row, exists, sums * scale, DIM, PADDED)


@triton.jit
def _queries_of_keys(start, head, first, size, q_len, block_q, num_blocks, range_len, left, right):
    """Find the first sorted index of the queries that may see keys from the index `first` on, and the one after."""
    if start is None:
        low = tl.maximum(first - right, 0)
        high = first + size + left
    else:
        low = num_blocks
        high = 0
        for at in range(0, num_blocks, 256):
            block = at + tl.arange(0, 256)
            begin = tl.load(start + head * num_blocks + block, mask=block < num_blocks, other=0).to(tl.int32)
            sees = (block < num_blocks) & (begin < first + size) & (begin + range_len > first)
            low = tl.minimum(low, tl.min(tl.where(sees, block, num_blocks), 0))
            high = tl.maximum(high, tl.max(tl.where(sees, block + 1, 0), 0))
        low *= block_q
        high *= block_q
    return low, tl.minimum(high, q_len)


@triton.jit(do_not_specialize=_SIZES)
def block_key_gradients(
    query, key, value, start, key_order, key_mask, order, lse, grad_out, delta, listed_grad_key, listed_grad_value,
    grad_key, grad_value, scale, q_len, kv_len, block_q, num_blocks, chunks, range_len, mask_stride, left, right,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of some keys and values, that of what is listed included."""
    program = tl.program_id(0)
    head = (program // chunks).to(tl.int64)
    first = (program % chunks) * BLOCK_N
    index = first + tl.arange(0, BLOCK_N)
    exists = index < kv_len
    positions, used = _sorted_keys(index, exists, head, key_order, key_mask, kv_len, mask_stride)
    own = head * kv_len + positions
    keys = _load_rows(key, own, used, DIM, PADDED)
    values = _load_rows(value, own, used, VALUE_DIM, PADDED_V)
    key_sums = tl.zeros((BLOCK_N, PADDED), tl.float32)
    value_sums = tl.zeros((BLOCK_N, PADDED_V), tl.float32)
    low, high = _queries_of_keys(start, head, first, BLOCK_N, q_len, block_q, num_blocks, range_len, left, right)
    for at in range(low, high, BLOCK_M):
        position = at + tl.arange(0, BLOCK_M)
        there = position < high
        seen = used[None, :] & there[:, None]
        if start is not None:
            begin = tl.load(start + head * num_blocks + position // block_q, mask=there, other=0).to(tl.int32)
            seen = seen & (index[None, :] >= begin[:, None]) & (index[None, :] < begin[:, None] + range_len)
        if order is not None:
            position = tl.load(order + head * q_len + position, mask=there, other=0).to(tl.int32)
        if left is not None:
            seen = seen & _in_window(position, positions, left, right)
        row = head * q_len + position
        queries = _load_rows(query, row, there, DIM, PADDED).to(keys.dtype)
        grad = _load_rows(grad_out, row, there, VALUE_DIM, PADDED_V)
        own_delta = tl.load(delta + row, mask=there, other=0.0)
        bias = tl.where(seen, 0.0, float("-inf"))
        weights, scores = _pair_gradients(
            queries, keys, values, bias, _load_lse(lse, row, there), grad, own_delta, scale, PRECISION
        )
        value_sums += _dot(tl.trans(weights.to(grad.dtype)), grad, PRECISION)  # (BLOCK_N, Dv)
        key_sums += _dot(tl.trans(scores.to(queries.dtype)), queries, PRECISION)  # (BLOCK_N, D)
    key_sums *= scale
    if listed_grad_key is not None:
        key_sums += _load_rows(listed_grad_key, own, exists, DIM, PADDED)
        value_sums += _load_rows(listed_grad_value, own, exists, VALUE_DIM, PADDED_V)
    _store_rows(grad_key, own, exists, key_sums, DIM, PADDED)
    _store_rows(grad_value, own, exists, value_sums, VALUE_DIM, PADDED_V)
