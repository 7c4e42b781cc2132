"""A near field of blocks and a far field of sampled columns that never look ahead.

Queries are cut into blocks by position. Block t attends causally to itself and to block t-1, exactly. The completed
blocks before those, 0 .. t-2, are split into aligned segments of 1, 2, 4, ... blocks by the binary digits of t-1;
each segment has one weighted sample of its keys, drawn once from what stands in the segment alone, and shared by all
blocks to which it belongs. So nothing that a query meets was ever chosen by what follows it, and its output does not
even depend on how long the sequence is. These are the off-diagonal squares of HyperAttention's causal recursion (Han
et al. 2023, Algorithm 4), without its sorting of a square's queries among themselves, which lets later queries move
earlier ones.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, inverse, pad_to_blocks, take
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.hashing import angular_hash, hyperplanes, sort_by_hash
from hf_efficient_attn.ops.near_far import balanced, plan_far
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, partial_attention
from hf_efficient_attn.ops.random import offsets
from hf_efficient_attn.ops.sampling import largest_eigenvalue, stratified_ranks


class Segments(NamedTuple):
    """The segments of 2**level blocks: segment j begins at 2 j 2**level blocks, and serves the blocks whose completed
    part reaches over it, which are the 2**level blocks behind the one after it.

    index: (A, J, m), the sampled keys, counted from the segment's first. log_weight: (A, J, m).
    order: (A, J, L), the keys of each segment in the order of a hash, or None where the near field is the window alone.
    run: (A, J, L), for each query that the segment serves the number of its run of `width` keys in that order, or None.
    width: keys a run.
    """

    level: int
    index: Tensor
    log_weight: Tensor
    order: Tensor | None = None
    run: Tensor | None = None
    width: int = 0


def left_intervals(x: Tensor, pairs: int, span: int) -> Tensor:
    """The left segments of the first `pairs` pairs of `span` tokens each: (A, N, ...) -> view (A, pairs, span, ...)."""
    view = x.unfold(1, span, 2 * span)[:, :pairs]
    return view.movedim(-1, 2)


def interval_scores(kind, query, key, squares, gram, scale: float, num_probes: int, offset: Tensor, seed=0) -> Tensor:
    """Unnormalised sampling probabilities of the keys of segments, from each segment's own queries.

    Args:
        kind: as in `near_far.column_scores`.
        query, key: (A, J, L, D), the tokens of J segments. squares: (A, J, L), |v_j|^2. gram: (A, J, Dv, Dv), V^T V.
        offset: (A, 1), see `stratified_ranks`.

    Returns:
        (A, J, L).
    """
    heads, pairs, length, _ = key.shape
    if callable(kind):
        # The norms of each segment's own softmax, head by head and segment by segment.
        norms = [
            kind(*balanced(q, k, scale), seed)[0] for q, k in zip(query.flatten(0, 1), key.flatten(0, 1), strict=True)
        ]
        norms = torch.stack(norms).view(heads, pairs, length).exp().to(squares.dtype)
        gamma = 1.0 / largest_eigenvalue(gram.flatten(0, 1)).clamp(min=torch.finfo(squares.dtype).tiny)
        squares = torch.addcmul(norms, squares, gamma.view(heads, pairs, 1))
    elif kind == "probe":
        place = stratified_ranks(num_probes, length, offset)
        place = place[:, None, :, None].expand(-1, pairs, -1, query.shape[3])
        probes = query.gather(2, place).to(squares.dtype) * scale
        weights = (probes @ key.transpose(2, 3).to(squares.dtype)).softmax(-1)
        gamma = 1.0 / largest_eigenvalue(gram.flatten(0, 1)).clamp(min=torch.finfo(squares.dtype).tiny)
        norms = weights.square_().sum(2) * (length / num_probes)
        squares = torch.addcmul(norms, squares, gamma.view(heads, pairs, 1))
    return squares + 1e-6 * squares.mean(2, keepdim=True) + torch.finfo(squares.dtype).tiny


def plan_intervals(query, key, value, *, size, num_samples, scores, num_probes, independent, scale, seed, batch,
                  num_hashes=0) -> list[Segments]:  # fmt: skip
    """Samples of all segments of blocks of `size` keys, num_samples / 2 columns each (or all keys, where fewer).

    With `num_hashes` also the order of the segments' keys by an angular hash, in runs of size / 2, and the run of each
    query: the one in which its own hash would stand, whatever the other queries are.
    """
    with torch.no_grad():
        heads, wide = query.shape[0], accumulation_dtype(value.dtype)
        # The queries of block t have t-1 completed blocks behind block t-1.
        completed = ceil_div(query.shape[1], size) - 2
        count, plans = min(num_samples, max(1, num_samples // 2)), []
        squares = torch.ones(value.shape[:2], dtype=wide, device=value.device)
        gram = torch.zeros(heads, max(completed, 0), 0, 0, dtype=wide, device=value.device)
        if scores != "uniform":
            squares = torch.linalg.vector_norm(value, dim=-1, dtype=wide).square()
        if (scores == "probe" or callable(scores)) and completed > 0:
            blocks = value[:, : completed * size].to(wide).unflatten(1, (completed, size))
            gram = blocks.transpose(2, 3) @ blocks
        for level in range(max(completed, 0).bit_length()):
            span = size << level
            pairs = ((completed >> level) + 1) >> 1
            if count >= span:
                index = torch.arange(span, device=key.device).expand(heads, pairs, -1)
                plans.append(Segments(level, index, torch.zeros_like(index, dtype=wide)))
                continue
            probe_offset, draw_offset = (
                offsets(heads // batch, seed, stream + 2 * level, key.device).repeat(batch).unsqueeze(1)
                for stream in (21, 22)
            )
            weights = interval_scores(
                scores,
                *(left_intervals(x, pairs, span) for x in (query, key, squares)),
                left_intervals(gram, pairs, 1 << level).sum(2),
                scale,
                num_probes,
                probe_offset,
                seed,
            )
            turns = draw_offset.expand(-1, pairs).flatten()
            far = plan_far(weights.flatten(0, 1).unsqueeze(1), count, turns.unsqueeze(1), seed, independent)
            shape = (heads, pairs, count)
            plan = Segments(level, far.place.view(shape), far.log_weight.view(shape))
            if num_hashes:
                planes = hyperplanes(key.shape[2], num_hashes, seed, key.device)
                plan = _plan_runs(plan, query[:, size:], key, span, max(1, size // 2), planes)
            plans.append(plan)
        return plans


def _served(rows: Tensor, pairs: int, span: int) -> Tensor:
    """The queries that each segment serves, out of those from block 1 on, 0 behind: (A, R, D) -> (A, J, span, D)."""
    missing = 2 * pairs * span - rows.shape[1]
    rows = pad(rows, (0, 0, 0, missing)) if missing > 0 else rows[:, : 2 * pairs * span]
    return rows.unflatten(1, (pairs, 2, span))[:, :, 1]


def _plan_runs(plan: Segments, rows: Tensor, key: Tensor, span: int, width: int, planes: Tensor) -> Segments:
    """Add the hash order of each segment's keys, and the run in which the hash of each query served would stand."""
    heads, pairs, _ = plan.index.shape
    order, codes = sort_by_hash(angular_hash(left_intervals(key, pairs, span), planes).flatten(0, 1))
    wanted = angular_hash(_served(rows, pairs, span), planes).flatten(0, 1)
    # In the middle of the cell's keys: a query knows its cell, but nothing of its place among other queries.
    low, high = torch.searchsorted(codes, wanted), torch.searchsorted(codes, wanted, right=True)
    run = ((low + high) // 2).clamp(max=span - 1) // width
    shape = (heads, pairs, span)
    return plan._replace(order=order.view(shape), run=run.view(shape), width=width)


def causal_near_far_attention(
    query, key, value, plans: list[Segments], *, size: int, exact: int, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Attention of a plan: (A, N, D), (A, N, D), (A, N, Dv) -> (A, N, Dv).

    The first `exact` positions, at most, are computed exactly, whatever the length; `exact` is at least `size`.
    """
    length, options = query.shape[1], {"scale": scale, "dropout_p": dropout_p}
    head = exact_attention(query[:, :exact], key[:, :exact], value[:, :exact], is_causal=True, **options)
    if length <= exact:
        return head

    def some_heads(query, key, value, *tensors):
        near = causal_block_partial(query, key, value, size, **options)
        parts = [(slice(None), near)]
        for i, plan in enumerate(plans):
            here = Segments(plan.level, *tensors[4 * i : 4 * i + 4], plan.width)
            attend_level = _far_parts if here.run is None else _run_and_far_parts
            parts += attend_level(query[:, size:], key, value, here, size, options)
        return merge_query_subsets(parts)[:, exact - size :]

    tensors = [x for plan in plans for x in plan[1:5]]
    return torch.cat((head, chunked_over_heads(some_heads, query, key, value, *tensors)), 1)


def causal_block_partial(query, key, value, size: int, *, scale: float, dropout_p: float = 0.0) -> Partial:
    """The queries from position `size` on, each to its own block up to itself and to all of the block before.

    Returns:
        Partial of out (A, N - size, Dv) and lse (A, N - size), blocks having `size` tokens.
    """
    length = query.shape[1]
    query = pad_to_blocks(query[:, size:], size)
    key, value = (pad_to_blocks(x, size) for x in (key, value))
    key, value = (torch.cat((x[:, :-1], x[:, 1:]), 2) for x in (key, value))
    seen = torch.ones(size, size, dtype=torch.bool, device=query.device)
    bias = mask_bias(torch.cat((seen, seen.tril()), 1), query.dtype)[None, None]
    part = partial_attention(query, key, value, bias, scale=scale, dropout_p=dropout_p)
    return Partial(*(x.flatten(1, 2)[:, : length - size] for x in part))


def _far_parts(query, key, value, plan: Segments, size: int, options) -> list[tuple[slice, Partial]]:
    """The columns of one level's segments, each for the queries that it serves: queries (A, R, D) from block 1 on."""
    pairs, span = plan.index.shape[1], size << plan.level
    first = (torch.arange(pairs, device=query.device) * 2 * span)[:, None]
    index = plan.index + first
    return interval_attention(query, take(key, index), take(value, index), plan.log_weight[:, :, None], span, options)


def interval_attention(query, keys, values, bias, span: int, options) -> list[tuple[slice, Partial]]:
    """The columns of the left segments of `span` tokens, each for the queries that it serves.

    Args:
        query: (A, R, D), the queries from block 1 on.
        keys, values: (A, J, m, .), the columns of each segment. bias: broadcastable to (A, J, 1, m).

    Returns:
        pairs of rows and their partial: the rows of all whole segments, as every second run of the level's span, and
        those of a last one that is cut off.
    """
    pairs = keys.shape[1]
    bias = bias.expand(-1, pairs, -1, -1)
    # In rows from block 1 on, segment j serves the rows (2j+1) span .. (2j+2) span - 1.
    whole, parts = query.shape[1] // (2 * span), []
    if whole:
        rows = query[:, : whole * 2 * span].unflatten(1, (whole, 2, span))[:, :, 1]
        part = partial_attention(rows, keys[:, :whole], values[:, :whole], bias[:, :whole], **options)
        parts.append((slice(0, whole * 2 * span), part))
    if whole < pairs:
        rows = slice((2 * whole + 1) * span, query.shape[1])
        part = partial_attention(query[:, None, rows], keys[:, whole:], values[:, whole:], bias[:, whole:], **options)
        parts.append((rows, part))
    return parts


def _run_and_far_parts(query, key, value, plan: Segments, size: int, options) -> list[tuple[slice, Partial]]:
    """`_far_parts` with a near field: each query also sees the run of keys to which its hash sends it.

    The queries of a run are gathered into tiles of their own, which then have one run of keys and the columns.
    """
    heads, pairs, _ = plan.index.shape
    span, width = size << plan.level, plan.width
    runs = ceil_div(span, width)
    rows, keys, values = (
        x.flatten(0, 1) for x in (_served(query, pairs, span), *(left_intervals(x, pairs, span) for x in (key, value)))
    )
    order, run, index, log_weight = (x.flatten(0, 1) for x in (plan.order, plan.run, plan.index, plan.log_weight))
    slot, tile_run = group_by_run(run, runs, width)
    tiles = tile_run.shape[1]
    source = torch.full((rows.shape[0], tiles * width), span, device=rows.device).scatter_(
        1, slot, torch.arange(span, device=rows.device).expand_as(slot)
    )
    grouped = take(pad(rows, (0, 0, 0, 1)), source).unflatten(1, (tiles, width))
    place = tile_run[:, :, None] * width + torch.arange(width, device=rows.device)
    near = order.gather(1, place.clamp(max=span - 1).flatten(1)).view_as(place)
    column_run = inverse(order).gather(1, index) // width
    far_bias = (
        log_weight[:, None].expand(-1, tiles, -1).masked_fill(column_run[:, None] == tile_run[:, :, None], -torch.inf)
    )
    bias = torch.cat((mask_bias(place < span, far_bias.dtype), far_bias), 2)[:, :, None]
    columns = torch.cat((near, index[:, None].expand(-1, tiles, -1)), 2)
    part = partial_attention(grouped, take(keys, columns), take(values, columns), bias, **options)
    out = take(part.out.flatten(1, 2), slot).unflatten(0, (heads, pairs))
    lse = part.lse.flatten(1, 2).gather(1, slot).unflatten(0, (heads, pairs))
    whole, parts = query.shape[1] // (2 * span), []
    if whole:
        parts.append((slice(0, whole * 2 * span), Partial(out[:, :whole], lse[:, :whole])))
    if whole < pairs:
        cut = slice((2 * whole + 1) * span, query.shape[1])
        left = query.shape[1] - cut.start
        parts.append((cut, Partial(out[:, whole:, :left], lse[:, whole:, :left])))
    return parts


def group_by_run(run: Tensor, runs: int, rows: int) -> tuple[Tensor, Tensor]:
    """Places for queries in tiles of `rows` that hold queries of one run each, as few tiles as a fixed shape allows.

    Where in its tile a query stands depends on the queries before it alone.

    Args:
        run: (S, L), the run of each query, below `runs`.

    Returns:
        slot (S, L), the place of each query among the tiles' rows, and tile_run (S, T), T = ceil(L / rows) + runs - 1.
    """
    tiles = ceil_div(run.shape[1], rows) + runs - 1
    sizes = torch.zeros(run.shape[0], runs, dtype=torch.int64, device=run.device)
    sizes = sizes.scatter_add_(1, run, torch.ones_like(run))
    needed = (sizes + rows - 1) // rows
    tile_ends = needed.cumsum(1)
    order = run.argsort(dim=1, stable=True)
    sorted_run = run.gather(1, order)
    rank = torch.arange(run.shape[1], device=run.device) - (sizes.cumsum(1) - sizes).gather(1, sorted_run)
    slot = (tile_ends - needed).gather(1, sorted_run) * rows + rank
    slot = torch.empty_like(slot).scatter_(1, order, slot)
    numbers = torch.arange(tiles, device=run.device).expand(run.shape[0], -1).contiguous()
    return slot, torch.searchsorted(tile_ends, numbers, right=True).clamp(max=runs - 1)


def _rows_of(x: Tensor, rows: slice, part: Tensor) -> Tensor:
    """The view of x (A, R, ...) that a part (A, R', ...), or (A, J, span, ...) of every second run, covers."""
    x = x[:, rows]
    if part.ndim == x.ndim:
        return x
    if part.shape[1] == 1 and part.shape[2] == x.shape[1]:
        return x[:, None]
    return x.unflatten(1, (part.shape[1], 2, part.shape[2]))[:, :, 1]


def merge_query_subsets(parts: list[tuple[slice, Partial]]) -> Tensor:
    """`merge` of partials that cover some of the rows each; the first one covers all: (A, R, Dv).

    In place on the rows of one output, since most parts cover half of it or less.
    """
    first = parts[0][1]
    lses = torch.full((len(parts), *first.lse.shape), -torch.inf, dtype=first.lse.dtype, device=first.lse.device)
    for i, (rows, part) in enumerate(parts):
        _rows_of(lses[i], rows, part.lse).copy_(part.lse)
    # Every query sees itself, so that no row is empty.
    weights = lses.softmax(0)
    out = first.out * weights[0].unsqueeze(-1)
    for i, (rows, part) in enumerate(parts[1:], 1):
        here = _rows_of(weights[i], rows, part.lse).unsqueeze(-1)
        _rows_of(out, rows, part.out).addcmul_(part.out.to(out.dtype), here)
    return out.to(first.out.dtype)


def dense_causal_log_weights(
    plans: list[Segments], length: int, size: int, exact: int, heads: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The readable form: for every head the (N, N) matrix of what is added to the scores before the softmax."""
    weights = torch.full((heads, length, length), -torch.inf, dtype=torch.float64, device=device)
    for i in range(length):
        block = i // size
        if i < exact:
            weights[:, i, : i + 1] = 0.0
            continue
        weights[:, i, max(0, block - 1) * size : i + 1] = 0.0
        done = block - 1
        for plan in plans:
            if done >= 0 and done >> plan.level & 1:
                pair, span = (done >> plan.level) // 2, size << plan.level
                first = 2 * pair * span
                for a in range(heads):
                    for at, weight in zip(plan.index[a, pair].tolist(), plan.log_weight[a, pair].tolist(), strict=True):
                        old = weights[a, i, first + at]
                        weights[a, i, first + at] = torch.logaddexp(old, torch.full_like(old, weight))
                    if plan.run is not None:
                        run = int(plan.run[a, pair, i - size - (2 * pair + 1) * span])
                        near = plan.order[a, pair, run * plan.width : (run + 1) * plan.width]
                        weights[a, i, first + near] = 0.0
    return weights
