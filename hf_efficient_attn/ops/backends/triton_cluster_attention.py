"""Triton kernels for causal attention to near keys, landmarks of clusters, and clusters that each query chooses.

A program of `cluster_landmarks` makes the landmark of one cluster. A program of `cluster_attention` has some queries of
one block, which all see the same clusters. It attends to near keys, then sums what all landmarks may miss, and then
attends to landmarks. The keys of a cluster that one of its queries has chosen are read where they are, and count for
the queries that have chosen it. So no pairs of queries and clusters are stored or sorted.
"""

import triton
import triton.language as tl

from hf_efficient_attn.ops.backends.triton_block_attention import (
    _LN_2,
    _LOG2_E,
    _add_scores,
    _dot,
    _load_rows,
    _store_rows,
)

# Sizes change with the lengths, and a kernel is not compiled anew for each.
_SIZES = [
    "length", "clusters", "num_members", "num_blocks", "block_size", "num_levels", "base", "first_block", "chunks",
]  # fmt: skip


@triton.jit
def _sizes(levels, level):
    """Load the number of tokens of a chunk and of a cluster of a level."""
    return tl.load(levels + 2 * level), tl.load(levels + 2 * level + 1)


@triton.jit
def _rows_of_members(members, at, some, size, row, BLOCK_L: tl.constexpr):
    """Load the rows of some members of a cluster, and which exist. `row` is the first row of the head."""
    place = some + tl.arange(0, BLOCK_L)
    exists = place < size
    return row + tl.load(members + at + place, mask=exists, other=0), exists


@triton.jit
def _place_of_cluster(cluster, length, block_size, levels, num_levels):
    """Find the first member of a cluster, the number of its keys, and the last block of its chunk."""
    low = 0
    begin = 0
    at = 0
    own_size = 0
    of_block = 0
    for level in range(num_levels):
        chunk, size = _sizes(levels, level)
        place = cluster - low
        count = length // chunk
        is_own = (place >= 0) & (place < count * (chunk // size))
        at = tl.where(is_own, begin + place * size, at)
        own_size = tl.where(is_own, size, own_size)
        of_block = tl.where(is_own, (place * size // chunk + 1) * (chunk // block_size) - 1, of_block)
        low += count * (chunk // size)
        begin += count * chunk
    return at, own_size, of_block


@triton.jit(do_not_specialize=_SIZES)
def cluster_landmarks(
    key, value, members, block_mean, block_root, center, mean, log_weight, margin, length, clusters, num_members,
    num_blocks, block_size, levels, num_levels, weighted, growth, least_spread, largest_spread,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Compute the key, the value, the log weight and the margin of the landmark of a cluster."""
    program = tl.program_id(0)
    head = (program // clusters).to(tl.int64)
    cluster = program % clusters
    at, own_size, of_block = _place_of_cluster(cluster, length, block_size, levels, num_levels)
    first = head * num_members + at
    row = head * length
    dims = tl.arange(0, PADDED)
    of_block = (head * num_blocks + of_block) * DIM
    last = tl.load(block_mean + of_block + dims, mask=dims < DIM, other=0.0)
    root = tl.load(block_root + of_block + dims, mask=dims < DIM, other=0.0)
    # Keys are counted from the first one, so that sums of squares round little.
    origin = tl.load(key + (row + tl.load(members + first)) * DIM + dims, mask=dims < DIM, other=0.0)
    origin = origin.to(tl.float32)
    largest = float("-inf")
    total = 0.0
    weighted_sum = tl.zeros((PADDED,), tl.float32)
    value_sum = tl.zeros((PADDED_V,), tl.float32)
    key_sum = tl.zeros((PADDED,), tl.float32)
    squares = tl.zeros((PADDED,), tl.float32)
    for some in range(0, own_size, BLOCK_L):
        own, exists = _rows_of_members(members, first, some, own_size, row, BLOCK_L)
        keys = _load_rows(key, own, exists, DIM, PADDED)
        values = _load_rows(value, own, exists, VALUE_DIM, PADDED_V)
        keys = tl.where(exists[:, None], keys.to(tl.float32) - origin[None, :], 0.0)  # (BLOCK_L, D)
        score = tl.where(exists, tl.sum(keys * last[None, :], 1), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 0))
        kept = tl.exp2((largest - new_largest) * _LOG2_E)
        weight = tl.exp2((score - new_largest) * _LOG2_E)  # (BLOCK_L,)
        total = total * kept + tl.sum(weight, 0)
        weighted_sum = weighted_sum * kept + tl.sum(weight[:, None] * keys, 0)
        value_sum = value_sum * kept + tl.sum(weight[:, None] * values.to(tl.float32), 0)
        key_sum += tl.sum(keys, 0)
        squares += tl.sum(keys * keys, 0)
        largest = new_largest
    key_mean = key_sum / own_size
    variance = tl.maximum(squares / own_size - key_mean * key_mean, 0.0)
    spread = tl.sqrt(tl.sum(variance * root * root, 0))
    spread = tl.minimum(tl.maximum(spread, least_spread), largest_spread)
    tl.store(margin + program, tl.log2(spread) * _LN_2 + growth * spread)
    found = origin + key_mean + weighted * (weighted_sum / total - key_mean)
    found = found.to(center.dtype.element_ty)  # the weight is right for the rounded key
    shift = tl.sum((origin - found.to(tl.float32)) * last, 0)
    tl.store(log_weight + program, largest + tl.log2(total) * _LN_2 + shift)
    own = program.to(tl.int64)
    tl.store(center + own * DIM + dims, found, mask=dims < DIM)
    dims = tl.arange(0, PADDED_V)
    found = value_sum / total
    tl.store(mean + own * VALUE_DIM + dims, found.to(mean.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit
def _landmark_scores(
    queries, scale, center, log_weight, margin, head, clusters, at, high, DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute scores of landmarks (BLOCK_M, BLOCK_C), and these plus the margins, as exponents of two."""
    column = at + tl.arange(0, BLOCK_C)
    seen = column < high
    own = head * clusters + column
    weight = tl.load(log_weight + own, mask=seen, other=float("-inf"))
    missed = tl.load(margin + own, mask=seen, other=0.0)
    centers = _load_rows(center, own, seen, DIM, PADDED)
    score = (_dot(queries, tl.trans(centers), PRECISION) * scale + weight[None, :]) * _LOG2_E
    return column, own, seen, score, score + missed[None, :] * _LOG2_E


@triton.jit
def _attend_to_near_keys(
    queries, scale, position, key, value, row, past, last, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `past` on, up to the query: the maximum of scores, and sums as of `_add_scores`."""
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, PADDED_V), tl.float32)
    for at in range(past, last, BLOCK_N):
        own = at + tl.arange(0, BLOCK_N)
        keys = _load_rows(key, row + own, own < last, DIM, PADDED)
        values = _load_rows(value, row + own, own < last, VALUE_DIM, PADDED_V)
        score = _dot(queries, tl.trans(keys), PRECISION) * (scale * _LOG2_E)
        score = tl.where(own[None, :] <= position[:, None], score, float("-inf"))
        row_max, total, sums = _add_scores(score, values, row_max, total, sums, PRECISION)
    return row_max, total, sums


@triton.jit
def _log_of_bounds(
    queries, scale, near, center, log_weight, margin, head, length, clusters, past, levels, num_levels, base,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up what all landmarks that queries see may miss, and near keys: logs to the base of two (BLOCK_M,)."""
    largest = near
    total = tl.full((BLOCK_M,), 1.0, tl.float32)
    low = 0
    for level in range(num_levels):
        chunk, size = _sizes(levels, level)
        ended = past // chunk
        for at in range(low + ended // base * base * (chunk // size), low + ended * (chunk // size), BLOCK_C):
            _, _, _, _, bound = _landmark_scores(
                queries, scale, center, log_weight, margin, head, clusters, at, low + ended * (chunk // size), DIM,
                PADDED, BLOCK_C, PRECISION,
            )  # fmt: skip
            new_largest = tl.maximum(largest, tl.max(bound, 1))
            total = total * tl.exp2(largest - new_largest) + tl.sum(tl.exp2(bound - new_largest[:, None]), 1)
            largest = new_largest
        low += length // chunk * (chunk // size)
    return largest + tl.log2(total)


@triton.jit
def _attend_to_cluster(
    queries, scale, uses, members, first, size, key, value, row, row_max, total, sums, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of a cluster, for the queries that use it, bool (BLOCK_M,)."""
    for some in range(0, size, BLOCK_L):
        rows, exists = _rows_of_members(members, first, some, size, row, BLOCK_L)
        keys = _load_rows(key, rows, exists, DIM, PADDED)
        values = _load_rows(value, rows, exists, VALUE_DIM, PADDED_V)
        score = _dot(queries, tl.trans(keys), PRECISION) * (scale * _LOG2_E)
        score = tl.where(uses[:, None] & exists[None, :], score, float("-inf"))
        row_max, total, sums = _add_scores(score, values, row_max, total, sums, PRECISION)
    return row_max, total, sums


@triton.jit(do_not_specialize=_SIZES)
def cluster_attention(
    query, key, value, members, center, mean, log_weight, margin, out, lse, length, clusters, num_members, num_blocks,
    block_size, levels, num_levels, base, first_block, chunks, scale, most, least, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of some queries of a block."""
    number = tl.program_id(0) // chunks
    blocks = num_blocks - first_block
    head = (number // blocks).to(tl.int64)
    block = first_block + number % blocks
    first = block * block_size + (tl.program_id(0) % chunks) * BLOCK_M
    last = tl.minimum(tl.minimum(first + BLOCK_M, (block + 1) * block_size), length)
    position = first + tl.arange(0, BLOCK_M)
    exists = position < last
    row = head * length
    queries = _load_rows(query, row + position, exists, DIM, PADDED).to(key.dtype.element_ty)
    past = tl.maximum(block - 1, 0) * block_size  # the first near key
    row_max, total, sums = _attend_to_near_keys(
        queries, scale, position, key, value, row, past, last, DIM, VALUE_DIM, PADDED, PADDED_V,
        BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    near = row_max + tl.log2(total)
    bounds = _log_of_bounds(
        queries, scale, near, center, log_weight, margin, head, length, clusters, past, levels, num_levels, base, DIM,
        PADDED, BLOCK_M, BLOCK_C, PRECISION,
    )  # fmt: skip
    least_bound = bounds + tl.log2(tl.maximum((1.0 - tl.exp2(near - bounds)) / most, least))
    low = 0
    begin = head * num_members
    for level in range(num_levels):
        chunk, size = _sizes(levels, level)
        ended = past // chunk
        high = low + ended * (chunk // size)
        for at in range(low + ended // base * base * (chunk // size), high, BLOCK_C):
            column, own, seen, score, bound = _landmark_scores(
                queries, scale, center, log_weight, margin, head, clusters, at, high, DIM, PADDED, BLOCK_C,
                PRECISION,
            )  # fmt: skip
            chosen = (bound > least_bound[:, None]) & exists[:, None]
            values = _load_rows(mean, own, seen, VALUE_DIM, PADDED_V)
            score = tl.where(chosen, float("-inf"), score)
            row_max, total, sums = _add_scores(score, values, row_max, total, sums, PRECISION)
            left = tl.max(chosen.to(tl.int32), 0)  # (BLOCK_C,), whether some query has chosen a cluster
            while tl.max(left, 0) > 0:  # `range(tl.sum(left, 0))` fails in Triton 3.7 on Blackwell
                cluster = tl.min(tl.where(left > 0, column, high), 0)
                is_own = column == cluster
                left = tl.where(is_own, 0, left)
                uses = tl.max(tl.where(is_own[None, :], chosen.to(tl.int32), 0), 1) > 0  # (BLOCK_M,)
                row_max, total, sums = _attend_to_cluster(
                    queries, scale, uses, members, begin + (cluster - low) * size, size, key, value, row, row_max,
                    total, sums, DIM, VALUE_DIM, PADDED, PADDED_V, BLOCK_L, PRECISION,
                )  # fmt: skip
        low += length // chunk * (chunk // size)
        begin += length // chunk * chunk
    tl.store(lse + row + position, (row_max + tl.log2(total)) * _LN_2, exists)
    _store_rows(out, row + position, exists, sums / total[:, None], VALUE_DIM, PADDED_V)
