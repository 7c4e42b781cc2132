"""Triton kernels for linear attention. Features exist in registers only.

`linear_state` adds up phi(k) v^T and phi(k) over segments of the keys. Each program of `linear_output` computes the
features of a segment of the queries. They read the state of all keys, or in the causal form the state before the
segment, and then the keys of the segment.

The backward has the same parts. With features phi of queries and psi of keys, divided by the sum of the weights of the
query, the gradient of phi_i is the sum of psi_j (v_j . g_i + c_i) over the keys j of query i, with g = grad_out and
c = grad_lse - out . grad_out. The gradients of psi_j and v_j are the sums of phi_i (v_j . g_i + c_i) and
(phi_i . psi_j) g_i over the queries of key j. Their state is that of queries with g as values and c as weights. The
causal scan of queries has the reverse order.

Operands of products are in bfloat16, or in float32: "tf32" for inputs in float16, whose range the sums exceed, and
"tf32x3". Everything else is in float32. `hf_efficient_attn.ops.backends.linear_attention` documents the arguments.
"""

import math

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
# The limits of `hf_efficient_attn.ops.features`: of a sum of weights, of learned features and of their logs.
_LEAST_TOTAL = tl.constexpr(2.0**-100.8)
_LEAST = tl.constexpr(1e-12)
_LEAST_LOG = tl.constexpr(-27.0)
_LARGEST_LOG = tl.constexpr(60.0)
_LEAST_FEATURE = tl.constexpr(1.01 * math.exp(-27.0))
_LARGEST_FEATURE = tl.constexpr(0.99 * math.exp(60.0))
# Sizes change with the lengths, and a kernel is not compiled anew for each.
_SIZES = ["length", "segment", "segments", "distance"]


@triton.jit
def _exp(x):
    return tl.exp2(x * _LOG2_E)


@triton.jit
def _rounded(x, PRECISION: tl.constexpr):
    return x.to(tl.bfloat16 if PRECISION == "bf16" else tl.float32)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    a = _rounded(a, PRECISION)
    b = _rounded(b, PRECISION)
    if PRECISION != "bf16":
        return tl.dot(a, b, input_precision=PRECISION)
    if _INTERPRETED:  # Triton's interpreter does not compute products of bfloat16 numbers correctly.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b)


# Whether Triton was imported to interpret its kernels on the CPU.
_INTERPRETED = tl.constexpr(not isinstance(_dot, triton.JITFunction))


@triton.jit
def _load(matrix, base, row, exists, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load rows of a matrix (., DIM), counted from `base`: (., PADDED), 0 for rows that do not exist."""
    dims = tl.arange(0, PADDED)
    mask = exists[:, None] if DIM == PADDED else exists[:, None] & (dims < DIM)
    return tl.load(matrix + base * DIM + (row[:, None] * DIM + dims), mask=mask, other=0.0)


@triton.jit
def _store(matrix, base, row, exists, x, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store x (., PADDED) in rows of a matrix (., DIM), except rows that do not exist."""
    dims = tl.arange(0, PADDED)
    pointer = matrix + base * DIM + (row[:, None] * DIM + dims)
    tl.store(pointer, x.to(matrix.dtype.element_ty), exists[:, None] & (dims < DIM))


@triton.jit
def _rows(entry, base, length, key_mask, IS_REVERSED: tl.constexpr):
    """Find the positions of tokens by their number in the scan, which of them exist, and which are valid."""
    exists = (entry >= 0) & (entry < length)
    row = length - 1 - entry if IS_REVERSED else entry
    valid = exists
    if key_mask is not None:
        valid = exists & (tl.load(key_mask + base + row, mask=exists, other=0) != 0)
    return row, exists, valid


@triton.jit
def _features(x, IS_QUERY: tl.constexpr, FEATURES: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Compute features (., PADDED) of tokens, and the logs of the factors of queries."""
    exists = tl.arange(0, PADDED)[None, :] < DIM
    x = tl.where(exists, x, float("-inf"))
    log = tl.max(x, 1)
    if FEATURES == "elu":
        log = tl.minimum(log, 0.0) if IS_QUERY else tl.zeros_like(log)
        phi = tl.maximum(x, 0.0) + _exp(tl.minimum(x, 0.0) - log[:, None])
    elif FEATURES == "t2r":
        log = tl.zeros_like(log)
        phi = tl.maximum(x, _LEAST)
    elif FEATURES == "exp" and not IS_QUERY:
        log = tl.zeros_like(log)
        phi = _exp(tl.minimum(tl.maximum(x, _LEAST_LOG), _LARGEST_LOG))
    else:
        phi = _exp(x - log[:, None])
        total = tl.sum(phi, 1)
        phi = tl.maximum(phi / total[:, None], _LEAST)
        log = log + tl.log(total) if FEATURES == "exp" else tl.zeros_like(log)
    return tl.where(exists, phi, 0.0), log


@triton.jit
def _gradient(grad, grad_log, phi, IS_QUERY: tl.constexpr, FEATURES: tl.constexpr):
    """Compute the gradient of tokens from those of their features and of the logs of their factors."""
    phi = phi.to(tl.float32)
    if FEATURES == "elu":
        grad *= tl.minimum(phi, 1.0)
    elif FEATURES == "t2r":
        grad = tl.where(phi > _LEAST * 1.01, grad, 0.0)
    elif FEATURES == "exp" and not IS_QUERY:  # 0 for limited features, which may be rounded
        grad = tl.where((phi > _LEAST_FEATURE) & (phi < _LARGEST_FEATURE), grad * phi, 0.0)
    else:
        grad = phi * (grad - tl.sum(grad * phi, 1)[:, None])
        if FEATURES == "exp":
            grad += phi * grad_log[:, None]
    return grad


@triton.jit
def _sources(
    token, vector, key_mask, lse, factor, base, entry, length, FEATURES: tl.constexpr, IS_REVERSED: tl.constexpr,
    PRECISION: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
):  # fmt: skip
    """Load keys and values, or queries (with an lse) and gradients: features, vectors, rows, and which are valid."""
    row, _exists, valid = _rows(entry, base, length, key_mask, IS_REVERSED)
    x = _load(token, base, row, valid, DIM, PADDED).to(tl.float32)
    if lse is None:
        phi, log = _features(x, False, FEATURES, DIM, PADDED)
    else:
        phi, log = _features(x * factor, True, FEATURES, DIM, PADDED)
        phi *= _inverse(log, tl.load(lse + base + row, mask=valid, other=float("-inf")))[:, None]
    phi = _rounded(tl.where(valid[:, None], phi, 0.0), PRECISION)
    return phi, _load(vector, base, row, valid, VALUE_DIM, PADDED_V), row, valid


@triton.jit
def _inverse(log, lse):
    """Compute the factor that divides the features of queries by the sums of their weights; 0 without weights."""
    return tl.where(lse == float("-inf"), 0.0, _exp(log - lse))


@triton.jit(do_not_specialize=_SIZES)
def linear_state(
    token, vector, key_mask, lse, weight, state, factor, length, segment, segments, distance, IS_CAUSAL: tl.constexpr,
    IS_REVERSED: tl.constexpr, FEATURES: tl.constexpr, PRECISION: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add up the tokens of a segment, or in the causal form of the segment before it."""
    program = tl.program_id(0).to(tl.int64)
    base = program // segments * length
    first = (program % segments).to(tl.int32) * segment
    if IS_CAUSAL:
        first -= segment
    sums = tl.zeros((PADDED, PADDED_V), tl.float32)
    norm = tl.zeros((PADDED,), tl.float32)
    for at in range(tl.maximum(first, 0), tl.minimum(first + segment, length), BLOCK_N):
        phi, vectors, row, valid = _sources(
            token, vector, key_mask, lse, factor, base, at + tl.arange(0, BLOCK_N) - distance, length, FEATURES,
            IS_REVERSED, PRECISION, DIM, VALUE_DIM, PADDED, PADDED_V,
        )  # fmt: skip
        sums += _dot(tl.trans(phi), vectors, PRECISION)
        weights = phi.to(tl.float32)
        if weight is not None:
            weights *= tl.load(weight + base + row, mask=valid, other=0.0)[:, None]
        norm += tl.sum(weights, 0)
    dims = tl.arange(0, PADDED)
    state += program * (DIM * (VALUE_DIM + 1))
    _store(state, 0, dims, dims < DIM, sums, VALUE_DIM, PADDED_V)
    tl.store(state + DIM * VALUE_DIM + dims, norm, dims < DIM)


@triton.jit
def _segment_of_program(
    state, length, segment, segments, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
):  # fmt: skip
    """Find the rows before a program's head and the tokens of its segment, and load their state."""
    program = tl.program_id(0).to(tl.int64)
    head = program // segments
    first = (program % segments).to(tl.int32) * segment
    dims = tl.arange(0, PADDED)
    state += (program if IS_CAUSAL else head) * (DIM * (VALUE_DIM + 1))
    sums = _rounded(_load(state, 0, dims, dims < DIM, VALUE_DIM, PADDED_V), PRECISION)
    norm = tl.load(state + DIM * VALUE_DIM + dims, mask=dims < DIM, other=0.0)
    return head * length, first, tl.minimum(first + segment, length), sums, norm


@triton.jit(do_not_specialize=_SIZES)
def linear_output(
    query, key, value, key_mask, state, out, lse, factor, length, segment, segments, distance,
    IS_CAUSAL: tl.constexpr, IS_REVERSED: tl.constexpr, FEATURES: tl.constexpr, PRECISION: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the output and the lse of a segment of the queries."""
    base, first, end, sums, norm = _segment_of_program(
        state, length, segment, segments, IS_CAUSAL, PRECISION, DIM, VALUE_DIM, PADDED, PADDED_V
    )
    for start in range(first, end, BLOCK_M):
        entry = start + tl.arange(0, BLOCK_M)
        row, exists, _ = _rows(entry, base, length, None, IS_REVERSED)
        queries = _load(query, base, row, exists, DIM, PADDED).to(tl.float32) * factor
        phi, log = _features(queries, True, FEATURES, DIM, PADDED)
        phi = _rounded(phi, PRECISION)
        acc = _dot(phi, sums, PRECISION)  # (BLOCK_M, PADDED_V)
        total = tl.sum(phi.to(tl.float32) * norm[None, :], 1)
        if IS_CAUSAL:
            for at in range(first, tl.minimum(start + BLOCK_M, end), BLOCK_N):
                own = at + tl.arange(0, BLOCK_N)
                psi, values, _row, _valid = _sources(
                    key, value, key_mask, None, 1.0, base, own - distance, length, FEATURES, IS_REVERSED, PRECISION,
                    DIM, VALUE_DIM, PADDED, PADDED_V,
                )  # fmt: skip
                pairs = tl.where(own[None, :] <= entry[:, None], _dot(phi, tl.trans(psi), PRECISION), 0.0)
                pairs = _rounded(pairs, PRECISION)
                acc += _dot(pairs, values, PRECISION)
                total += tl.sum(pairs.to(tl.float32), 1)
        empty = total < _LEAST_TOTAL
        total = tl.where(empty, float("inf"), total)
        tl.store(lse + base + row, tl.where(empty, float("-inf"), tl.log(total) + log), exists)
        _store(out, base, row, exists, acc / total[:, None], VALUE_DIM, PADDED_V)


@triton.jit(do_not_specialize=_SIZES)
def linear_query_gradient(
    query, key, value, key_mask, state, out, lse, grad_out, grad_lse, weight, grad_query, factor, length, segment,
    segments, distance, IS_CAUSAL: tl.constexpr, IS_REVERSED: tl.constexpr, FEATURES: tl.constexpr,
    PRECISION: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a segment of the queries, and their weights c."""
    base, first, end, sums, norm = _segment_of_program(
        state, length, segment, segments, IS_CAUSAL, PRECISION, DIM, VALUE_DIM, PADDED, PADDED_V
    )
    for start in range(first, end, BLOCK_M):
        entry = start + tl.arange(0, BLOCK_M)
        row, exists, _ = _rows(entry, base, length, None, IS_REVERSED)
        queries = _load(query, base, row, exists, DIM, PADDED).to(tl.float32) * factor
        phi, log = _features(queries, True, FEATURES, DIM, PADDED)
        own_lse = tl.load(lse + base + row, mask=exists, other=float("-inf"))
        inverse = _inverse(log, own_lse)
        grads = _load(grad_out, base, row, exists, VALUE_DIM, PADDED_V)
        grad = _dot(grads, tl.trans(sums), PRECISION)  # (BLOCK_M, PADDED)
        if IS_CAUSAL:
            outs = _load(out, base, row, exists, VALUE_DIM, PADDED_V)
            weights = -tl.sum(outs.to(tl.float32) * grads.to(tl.float32), 1)
        else:  # the same without reading the output
            weights = -tl.sum(phi * grad, 1) * inverse
        of_lse = tl.zeros_like(weights)
        if grad_lse is not None:
            of_lse = tl.load(grad_lse + base + row, mask=own_lse > float("-inf"), other=0.0)
        weights += of_lse
        tl.store(weight + base + row, weights, exists)
        grad += weights[:, None] * norm[None, :]
        if IS_CAUSAL:
            for at in range(first, tl.minimum(start + BLOCK_M, end), BLOCK_N):
                own = at + tl.arange(0, BLOCK_N)
                psi, values, _row, _valid = _sources(
                    key, value, key_mask, None, 1.0, base, own - distance, length, FEATURES, IS_REVERSED, PRECISION,
                    DIM, VALUE_DIM, PADDED, PADDED_V,
                )  # fmt: skip
                pairs = _dot(grads, tl.trans(values), PRECISION) + weights[:, None]
                grad += _dot(tl.where(own[None, :] <= entry[:, None], pairs, 0.0), psi, PRECISION)
        grad = _gradient(grad * inverse[:, None], of_lse, phi, True, FEATURES) * factor
        _store(grad_query, base, row, exists, grad, DIM, PADDED)


@triton.jit(do_not_specialize=_SIZES)
def linear_key_gradient(
    query, key, value, key_mask, state, lse, grad_out, weight, grad_key, grad_value, factor, length, segment, segments,
    distance, IS_CAUSAL: tl.constexpr, IS_REVERSED: tl.constexpr, FEATURES: tl.constexpr, PRECISION: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a segment of the keys and values."""
    base, first, end, sums, norm = _segment_of_program(
        state, length, segment, segments, IS_CAUSAL, PRECISION, DIM, VALUE_DIM, PADDED, PADDED_V
    )
    for start in range(first, end, BLOCK_M):
        entry = start + tl.arange(0, BLOCK_M)
        row, exists, valid = _rows(entry, base, length, key_mask, IS_REVERSED)
        keys = _load(key, base, row, valid, DIM, PADDED).to(tl.float32)
        psi, _log = _features(keys, False, FEATURES, DIM, PADDED)
        psi = _rounded(psi, PRECISION)
        values = _load(value, base, row, valid, VALUE_DIM, PADDED_V)
        grad = _dot(values, tl.trans(sums), PRECISION) + norm[None, :]  # (BLOCK_M, PADDED)
        of_values = _dot(psi, sums, PRECISION)  # (BLOCK_M, PADDED_V)
        if IS_CAUSAL:
            for at in range(first, tl.minimum(start + BLOCK_M, end), BLOCK_N):
                own = at + tl.arange(0, BLOCK_N)
                phi, grads, others, used = _sources(
                    query, grad_out, None, lse, factor, base, own - distance, length, FEATURES, IS_REVERSED, PRECISION,
                    DIM, VALUE_DIM, PADDED, PADDED_V,
                )  # fmt: skip
                seen = own[None, :] <= entry[:, None]
                pairs = _dot(values, tl.trans(grads), PRECISION)
                pairs += tl.load(weight + base + others, mask=used, other=0.0)[None, :]
                grad += _dot(tl.where(seen, pairs, 0.0), phi, PRECISION)
                of_values += _dot(tl.where(seen, _dot(psi, tl.trans(phi), PRECISION), 0.0), grads, PRECISION)
        grad = _gradient(grad, None, psi, False, FEATURES)
        _store(grad_key, base, row, exists, tl.where(valid[:, None], grad, 0.0), DIM, PADDED)
        _store(grad_value, base, row, exists, tl.where(valid[:, None], of_values, 0.0), VALUE_DIM, PADDED_V)
