"""Triton kernels for features that are exponentials of random directions. Features exist in registers only.

Direction f attends to the keys: its values V_f are a mean with the weights exp(w_f . k_j - |scale| |k_j|^2 / 2), and
b_f is the log of their sum. Query i attends to the directions with the weights p_if of softmax(sign w_f . q_i + b_f).

With the gradient g_i of an output and c_i = out_i . g_i the gradients of V_f and b_f are G_f = sum_i p_if g_i and
G_f . V_f - sum_i p_if c_i. `direction_sums` computes these sums and those of the keys, over segments, and
`direction_gradient` the gradients of queries and of keys.

Directions are the sum of two numbers, unless products have the precision "tf32x3": rounded once, they would be other
features. Logs are to base 2.
"""

import triton
import triton.language as tl

from hf_efficient_attn.ops.backends.triton_linear_attention import _dot, _load, _rows, _store

_SIZES = ["length", "segment", "segments"]
_LEAST_LOG = tl.constexpr(-1e30)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _directions(
    directions, first, PRECISION: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Load some directions: their numbers, which of them exist, and both parts (BLOCK, PADDED)."""
    which = first + tl.arange(0, BLOCK)
    exists = which < COUNT
    high = _load(directions, 0, which, exists, DIM, PADDED)
    low = high
    if PRECISION != "tf32x3":
        low = _load(directions, COUNT, which, exists, DIM, PADDED)
    return which, exists, high, low


@triton.jit
def _products(a, b, rest, PRECISION: tl.constexpr):
    """Multiply a and the sum of b and rest."""
    return _dot(a, b, PRECISION) if PRECISION == "tf32x3" else _dot(a, b, PRECISION) + _dot(a, rest, PRECISION)


@triton.jit
def _log_factors(x, lse, half, row, valid):
    """Compute the logs of the factors of keys, -half |k|^2, or of queries, from their lse."""
    if lse is not None:
        return -tl.load(lse + row, mask=valid, other=float("inf"))
    x = x.to(tl.float32)
    return tl.where(valid, -half * tl.sum(x * x, 1), float("-inf"))


@triton.jit(do_not_specialize=_SIZES)
def direction_sums(
    token, vector, key_mask, lse, weight, directions, sums, norm, largest, factor, half, length, segment, segments,
    PRECISION: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr,
    PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add up vectors and weights of a segment of the tokens for some directions, relative to the largest log."""
    blocks: tl.constexpr = (COUNT + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0).to(tl.int64) // blocks
    of_block = (tl.program_id(0) % blocks) * BLOCK_M
    which, own, high, low = _directions(directions, of_block, PRECISION, COUNT, DIM, PADDED, BLOCK_M)
    base = program // segments * length
    first = (program % segments).to(tl.int32) * segment
    acc = tl.zeros((BLOCK_M, PADDED_V), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), _LEAST_LOG, tl.float32)
    for at in range(first, tl.minimum(first + segment, length), BLOCK_N):
        row, _exists, valid = _rows(at + tl.arange(0, BLOCK_N), base, length, key_mask, False)
        x = _load(token, base, row, valid, DIM, PADDED)
        logs = tl.trans(_products(x, tl.trans(high), tl.trans(low), PRECISION)) * factor
        logs += _log_factors(x, lse, half, base + row, valid)[None, :]
        now = tl.maximum(top, tl.max(logs, 1))
        phi = tl.exp2(logs - now[:, None])
        fade = tl.exp2(top - now)
        acc = acc * fade[:, None] + _dot(phi, _load(vector, base, row, valid, VALUE_DIM, PADDED_V), PRECISION)
        if weight is not None:
            phi *= tl.load(weight + base + row, mask=valid, other=0.0)[None, :]
        total = total * fade + tl.sum(phi, 1)
        top = now
    _store(sums, program * COUNT, which, own, acc, VALUE_DIM, PADDED_V)
    tl.store(norm + program * COUNT + which, total, own)
    tl.store(largest + program * COUNT + which, top, own)


@triton.jit
def _token_tile(length, BLOCK_M: tl.constexpr):
    """Find a program's head, the rows before it, its own rows, and which of them exist."""
    tiles = (length + BLOCK_M - 1) // BLOCK_M
    head = tl.program_id(0).to(tl.int64) // tiles
    row = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    return head, head * length, row, row < length


@triton.jit(do_not_specialize=_SIZES)
def direction_output(
    token, directions, values, log, out, lse, factor, length, PRECISION: tl.constexpr, COUNT: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the outputs and the lse of some queries: inf without a key."""
    head, base, row, exists = _token_tile(length, BLOCK_M)
    x = _load(token, base, row, exists, DIM, PADDED)
    acc = tl.zeros((BLOCK_M, PADDED_V), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), _LEAST_LOG, tl.float32)
    for at in range(0, COUNT, BLOCK_N):
        which, own, high, low = _directions(directions, at, PRECISION, COUNT, DIM, PADDED, BLOCK_N)
        of_direction = tl.load(log + head * COUNT + which, mask=own, other=float("-inf"))
        logs = _products(x, tl.trans(high), tl.trans(low), PRECISION) * factor + of_direction[None, :]
        now = tl.maximum(top, tl.max(logs, 1))
        phi = tl.exp2(logs - now[:, None])
        fade = tl.exp2(top - now)
        vectors = _load(values, head * COUNT, which, own, VALUE_DIM, PADDED_V)
        acc = acc * fade[:, None] + _dot(phi, vectors, PRECISION)
        total = total * fade + tl.sum(phi, 1)
        top = now
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(lse + base + row, tl.where(empty, float("inf"), top + tl.log2(total)), exists)
    _store(out, base, row, exists, acc / total[:, None], VALUE_DIM, PADDED_V)


@triton.jit(do_not_specialize=_SIZES)
def direction_gradient(
    token, vector, key_mask, lse, out, weight, directions, values, log, offset, grad_token, grad_vector, factor, half,
    length, PRECISION: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of some keys and values, or of queries, which have an lse, with their weights c."""
    head, base, row, exists = _token_tile(length, BLOCK_M)
    row, exists, valid = _rows(row, base, length, key_mask, False)
    x = _load(token, base, row, valid, DIM, PADDED)
    vectors = _load(vector, base, row, valid, VALUE_DIM, PADDED_V)
    of_token = _log_factors(x, lse, half, base + row, valid)
    weights = tl.zeros((BLOCK_M,), tl.float32)
    if out is not None:
        weights -= tl.sum(_load(out, base, row, exists, VALUE_DIM, PADDED_V).to(tl.float32) * vectors.to(tl.float32), 1)
        tl.store(weight + base + row, weights, exists)
    grad = tl.zeros((BLOCK_M, PADDED), tl.float32)
    grad_values = tl.zeros((BLOCK_M, PADDED_V), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for at in range(0, COUNT, BLOCK_N):
        which, own, high, low = _directions(directions, at, PRECISION, COUNT, DIM, PADDED, BLOCK_N)
        of_direction = tl.load(log + head * COUNT + which, mask=own, other=float("-inf"))
        logs = _products(x, tl.trans(high), tl.trans(low), PRECISION) * factor
        phi = tl.exp2(logs + of_token[:, None] + of_direction[None, :])
        others = _load(values, head * COUNT, which, own, VALUE_DIM, PADDED_V)
        grads = _dot(vectors, tl.trans(others), PRECISION) + weights[:, None]
        if offset is not None:
            grads += tl.load(offset + head * COUNT + which, mask=own, other=0.0)[None, :]
            grad_values += _dot(phi, others, PRECISION)
        grads *= phi
        grad += _dot(grads, high, PRECISION)
        total += tl.sum(grads, 1)
    grad = (grad * factor - x.to(tl.float32) * (2.0 * half * total)[:, None]) * _LN_2
    _store(grad_token, base, row, exists, tl.where(valid[:, None], grad, 0.0), DIM, PADDED)
    if grad_vector is not None:
        _store(grad_vector, base, row, exists, tl.where(valid[:, None], grad_values, 0.0), VALUE_DIM, PADDED_V)
