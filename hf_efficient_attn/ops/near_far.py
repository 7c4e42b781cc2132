"""A near field of blocks and a far field of sampled columns, bidirectional.

Every tile of queries attends exactly to one run of `block_size` keys (its near field: in the order of a hash, or in
that of the positions) and to sampled columns, those that are not in that run; the two are one softmax. `Near` and `Far`
say which they are; they are made without gradient, and the readable form in `dense_log_weights` is made from the same
one.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, inverse, pad_to_blocks, take, valid_first
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.hashing import angular_hash, hyperplanes, sort_by_hash
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention
from hf_efficient_attn.ops.random import offsets, uniform
from hf_efficient_attn.ops.sampling import (
    inclusion_probabilities,
    independent_sample,
    operator_norm_squared,
    stratified_ranks,
    systematic_sample,
)
from hf_efficient_attn.ops.tiles import attend_grouped, use_grouped

_NORM_ROWS = 1024
# Tiles of a head take turns around the circle by the plastic ratio; heads do by the golden one.
_TURN = 0.7548776662466927
# Tiles at a time, of a near field whose entries are computed for themselves.
_TILES = 16


class Near(NamedTuple):
    """Which run of keys each tile of queries sees.

    query_order: (A, Nq), the query at each place, or None where places are positions.
    key_order: (A, Nk), the key at each place, valid keys first, or None.
    start: (A, T), the place at which the run of tile t begins.
    rows: queries a tile. span: keys a run.
    count: (A, 1), how many keys are there (all stand at the first places), or an integer.
    queries: the same of the queries, whose own absence is known only where they are the same tokens as the keys.
    """

    query_order: Tensor | None
    key_order: Tensor | None
    start: Tensor
    rows: int
    span: int
    count: Tensor | int
    queries: Tensor | int


class Far(NamedTuple):
    """Sampled columns: place (A, S, m) in the order of the keys, log_weight (A, S, m), -inf in an empty slot.

    S is the number of tiles, or 1 where all share one sample.
    """

    place: Tensor
    log_weight: Tensor


def plan_window(length: int, columns: int, span: int, mask: Tensor | None, heads: int, device: torch.device) -> Near:
    """Runs of `span` keys centred on tiles of span / 2 queries, moved inwards at the ends; places are positions.

    A mask (A, Nk) takes out the places of the keys that are not there, and of the queries too where they are the same
    tokens (as many queries as keys).
    """
    rows = max(1, span // 2)
    tiles = ceil_div(length, rows)
    first = torch.arange(tiles, device=device) * rows - (span - rows) // 2
    if mask is None:
        start = first.clamp(0, columns - span).expand(heads, -1)
        return Near(None, None, start, rows, span, columns, length)
    count = mask.sum(1, keepdim=True)
    order = valid_first(mask)
    start = torch.minimum(first.clamp(min=0), (count - span).clamp(min=0))
    if length == columns:
        return Near(order, order, start, rows, span, count, count)
    return Near(None, order, start, rows, span, count, length)


def plan_lsh(query: Tensor, key: Tensor, span: int, mask: Tensor | None, num_hashes: int, seed) -> Near:
    """Runs of `span` keys in hash order for tiles of `span` queries in hash order (Zandieh et al. 2023, Appendix A).

    Queries and keys are sorted alike (Definition A.3) and the queries cut into equal blocks. The paper pairs the b-th
    block of queries with the b-th of keys, which is off wherever the two are distributed differently over the cells;
    here a block of queries gets the run of keys around the place that its middle query would have among the keys.
    """
    length, columns = query.shape[1], key.shape[1]
    planes = hyperplanes(query.shape[2], num_hashes, seed, query.device)
    query_mask = mask if length == columns else None
    query_order, query_codes = sort_by_hash(angular_hash(query, planes), query_mask)
    key_order, key_codes = sort_by_hash(angular_hash(key, planes), mask)
    count = columns if mask is None else mask.sum(1, keepdim=True)
    queries = length if query_mask is None else count
    tiles = ceil_div(length, span)
    middle = (torch.arange(tiles, device=query.device) * span + span // 2).expand(query.shape[0], -1)
    last = queries - 1
    middle = middle.clamp(max=last) if isinstance(last, int) else torch.minimum(middle, last.clamp(min=0))
    code = query_codes.gather(1, middle)

    def bounds(codes):
        return torch.searchsorted(codes, code), torch.searchsorted(codes, code, right=True)

    # Within a cell the tile stands among the keys of the cell where it stands among its queries.
    (query_low, query_high), (key_low, key_high) = bounds(query_codes), bounds(key_codes)
    part = (2 * (middle - query_low) + 1) * (key_high - key_low) // (2 * (query_high - query_low)).clamp(min=1)
    centre = key_low + part
    start = (centre - span // 2).clamp(min=0)
    limit = count - span
    start = start.clamp(max=limit) if isinstance(limit, int) else torch.minimum(start, limit.clamp(min=0))
    return Near(query_order, key_order, start, span, span, count, queries)


def query_groups(near: Near, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Runs of neighbouring tiles, equally many up to one: the first query of each, how many there are, and the tiles'.

    Returns:
        start and count, int64 (A, G), in places of the queries, and the group of each tile, int64 (A, T). Where there
        are fewer tiles than groups some groups are empty.
    """
    heads, tiles = near.start.shape
    device = near.start.device
    queries = torch.as_tensor(near.queries, device=device).expand(heads, 1)
    there = (queries + near.rows - 1) // near.rows
    first = (torch.arange(groups + 1, device=device) * there + groups - 1) // groups
    first = torch.minimum(first * near.rows, queries)
    tile = torch.arange(tiles, device=device)
    # Tiles of no query that is there are computed in vain.
    group = (tile * groups // there.clamp(min=1)).clamp(max=groups - 1)
    return first[:, :-1], first[:, 1:] - first[:, :-1], group


def probe_scores(
    query, key, near: Near, mask, scale: float, num_probes: int, offset: Tensor, groups: int = 1
) -> Tensor:
    """Squared norms of the residual's columns, estimated from the exact rows of some queries of each group of tiles.

    Column j of D^-1 A_res (Eq. 10 of Zandieh et al. 2023) is summed over `num_probes` queries in all, one from each of
    as many equal strata of its group; what the near field of a query holds counts 0. The norms of a group are those
    that the matrix would have if all queries were like the group's.

    Returns:
        (A, G, Nk), in the order of the positions.
    """
    wide, each = accumulation_dtype(query.dtype), ceil_div(num_probes, groups)
    first, count, _ = query_groups(near, groups)
    place = stratified_ranks(each, count.unsqueeze(2), offset.reshape(-1, 1, 1)) + first.unsqueeze(2)
    last = torch.as_tensor(near.queries - 1, device=place.device).clamp(min=0)
    place = torch.minimum(place.flatten(1), last)
    start = near.start.gather(1, place // near.rows)
    if near.query_order is not None:
        place = near.query_order.gather(1, place)
    scores = (take(query, place).to(wide) * scale) @ key.to(wide).transpose(1, 2)
    if mask is not None:
        scores = scores + mask_bias(mask, wide)[:, None]
    # Only a row with no key at all gives NaN; it has no column to score.
    weights = scores.softmax(-1)
    weights = weights if mask is None else weights.nan_to_num(0.0)
    held = start[:, :, None] + torch.arange(near.span, device=key.device)
    if near.key_order is not None:
        held = near.key_order.gather(1, held.flatten(1)).view_as(held)
    weights = weights.scatter_(2, held, 0.0)
    norms = weights.square_().unflatten(1, (groups, each)).sum(2)
    queries = near.queries if isinstance(near.queries, int) else near.queries.unsqueeze(2).double()
    share = queries / each
    return norms * (share if isinstance(share, float) else share.to(wide))


def balanced(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Float64 queries and keys whose products are the scores, the scale shared by both."""
    root = math.sqrt(abs(scale))
    return query.double() * math.copysign(root, scale), key.double() * root


def density_scores(norms, query, key, near: Near, mask, scale: float, seed) -> Tensor:
    """Squared norms of the residual's columns from estimates of those of D^-1 A (Zandieh et al. 2023, Eq. 10-11).

    From each column's estimate what lies in the near field is taken away (Algorithm 3, line 3), and no less than 0 is
    left. Each head is a problem of its own, on the tokens that are there.

    Args:
        norms: norms(queries (Nq, D), keys (Nk, D), seed) -> log of the squared column norms (Nk,) and of the row sums
            (Nq,), float64, of what `balanced` gives.

    Returns:
        (A, Nk), in the order of the positions.
    """
    out = torch.zeros(key.shape[:2], dtype=torch.float64, device=key.device)
    held = near.start[:, :, None] + torch.arange(near.span, device=key.device)
    number = torch.arange(query.shape[1], device=key.device)
    for a in range(key.shape[0]):
        there = torch.ones_like(out[a], dtype=torch.bool) if mask is None else mask[a]
        own = there if query.shape[1] == key.shape[1] else torch.ones_like(number, dtype=torch.bool)
        if not there.any():
            continue
        queries, keys = balanced(query[a].masked_fill(~own[:, None], 0.0), key[a], scale)
        log_norms, log_sums = norms(queries[own], keys[there], seed)
        logs = torch.full_like(queries[:, 0], -torch.inf).masked_scatter(own, -2.0 * log_sums)
        place = number if near.query_order is None else near.query_order[a]
        index = held[a] if near.key_order is None else near.key_order[a][held[a]]
        rows = torch.nn.functional.pad(place, (0, index.shape[0] * near.rows - len(place)), value=-1)
        rows, near_norms = rows.view(-1, near.rows), torch.zeros_like(out[a])
        for some, columns in zip(rows.split(_TILES), index.split(_TILES), strict=True):
            weight = logs[some].masked_fill(some < 0, -torch.inf)
            pairs = 2.0 * queries[some] @ keys[columns].transpose(1, 2) + weight[:, :, None]
            near_norms.index_add_(0, columns.flatten(), pairs.exp().sum(1).flatten())
        out[a, there] = (log_norms.exp() - near_norms[there]).clamp(min=0.0)
    return out.to(accumulation_dtype(query.dtype))


def sampled_norm_squared(value: Tensor, near: Near) -> Tensor:
    """|V|_op^2 by the power method on 1,024 values spread evenly over the places, (A, 1).

    It only balances two terms of a sampling distribution; all rows would take as long as all probes together. As many
    are taken from few keys, so that padding changes nothing.
    """
    half = torch.full((value.shape[0], 1), 0.5, dtype=torch.float64, device=value.device)
    place = stratified_ranks(_NORM_ROWS, near.count, half)
    index = place if near.key_order is None else near.key_order.gather(1, place)
    return operator_norm_squared(take(value, index).to(accumulation_dtype(value.dtype))) * (near.count / _NORM_ROWS)


def sampling_scores(kind, query, key, value, near: Near, mask, scale, num_probes, offset, seed=0, groups=1) -> Tensor:
    """Unnormalised sampling probabilities of the columns, (A, G, Nk) in the order of the places; 0 for absent keys.

    kind: "uniform"; "value_norm", |v_j|^2; "probe", estimated squared column norm of D^-1 A_res + gamma |v_j|^2 with
    gamma = 1 / |V|_op^2 (Algorithm 1, lines 2 and 5, and Algorithm 3, line 3, of Zandieh et al. 2023), for each of
    `groups` groups of queries; or the function of `density_scores`, whose norms then take the place of those of the
    probes. G is 1 for all but the probes.
    """
    wide = accumulation_dtype(value.dtype)
    if kind == "uniform":
        scores = torch.ones(key.shape[0], 1, key.shape[1], dtype=wide, device=key.device)
    else:
        squares = torch.linalg.vector_norm(value, dim=-1, dtype=wide).square().unsqueeze(1)
        if kind == "value_norm":
            scores = squares
        else:
            gamma = 1.0 / sampled_norm_squared(value, near).clamp(min=torch.finfo(wide).tiny)
            if kind == "probe":
                norms = probe_scores(query, key, near, mask, scale, num_probes, offset, groups)
            else:
                norms = density_scores(kind, query, key, near, mask, scale, seed).unsqueeze(1)
            scores = torch.addcmul(norms, squares, gamma.unsqueeze(2))
        # A column of zero norm could still hold weight in the denominator: every key keeps some chance.
        count = near.count if isinstance(near.count, int) else near.count.clamp(min=1).unsqueeze(2)
        scores = scores + (scores.sum(2, keepdim=True) * (1e-6 / count) + torch.finfo(wide).tiny)
    if near.key_order is not None:
        scores = scores.gather(2, near.key_order.unsqueeze(1).expand(-1, scores.shape[1], -1))
    if mask is not None:
        places = torch.arange(key.shape[1], device=key.device)
        scores = scores.masked_fill((places >= near.count).unsqueeze(1), 0.0)
    return scores


def plan_far(
    scores: Tensor, num_samples: int, offset: Tensor, seed, independent: bool = False, group: Tensor | None = None
) -> Far:
    """Draw columns: systematic without replacement, or independently as in the paper's Algorithm 1.

    Args:
        scores: (A, G, N).
        offset: (A, S), float64 in (0, 1), where sample s of a row begins.
        group: int64 (A, S), the scores that it is drawn by; None where G is 1.
    """
    if independent:
        numbers = uniform((num_samples,), seed, 3, scores.device) + offset.unsqueeze(2)
        place, log_weight, _ = independent_sample(scores, num_samples, numbers.frac(), group)
    else:
        chances = inclusion_probabilities(scores.flatten(0, 1), num_samples).view(scores.shape)
        place, log_weight, _ = systematic_sample(chances, num_samples, offset, group)
    return Far(place, log_weight.to(accumulation_dtype(scores.dtype)))


def plan_small_rows(near: Near, scores: Tensor, small: Tensor) -> tuple[Near, Tensor]:
    """Make rows (A, 1) whose keys fit into one run and the columns exact, as they are in a batch without padding.

    There every tile gets the last run of keys, and the keys before it are the only ones with a score, so that all of
    them become columns of weight 1.
    """
    rest = (near.count - near.span).clamp(min=0)
    start = torch.where(small, rest, near.start)
    places = torch.arange(scores.shape[2], device=scores.device)
    rest = (places < rest).to(scores.dtype).unsqueeze(1)
    return near._replace(start=start), torch.where(small.unsqueeze(2), rest, scores)


def make_plan(query, key, value, mask, *, near_field, block_size, num_samples, num_hashes, scores, num_probes,
              independent, scale, seed, batch, groups=1, shared=False) -> tuple[Near, Far]:  # fmt: skip
    """Near and far field of (A, N, D) inputs, A = `batch` rows of heads. No gradient.

    Each tile draws its own columns, by the scores of its own of `groups` groups of tiles; `shared` makes it one draw
    for all, by the scores of all.
    """
    with torch.no_grad():
        heads = query.shape[0] // batch
        if near_field == "lsh":
            near = plan_lsh(query, key, block_size, mask, num_hashes, seed)
        else:
            near = plan_window(query.shape[1], key.shape[1], block_size, mask, query.shape[0], query.device)
        probe_offset, draw_offset = (offsets(heads, seed, stream, query.device).repeat(batch) for stream in (11, 12))
        groups = 1 if shared or scores != "probe" else min(groups, num_probes)
        weights = sampling_scores(scores, query, key, value, near, mask, scale, num_probes, probe_offset, seed, groups)
        small = None
        if mask is not None:
            small = near.count <= near.span + num_samples
            near, weights = plan_small_rows(near, weights, small)
        group, draw_offset = None, draw_offset.unsqueeze(1)
        if not shared:
            draw_offset = (draw_offset + _TURN * torch.arange(near.start.shape[1], device=query.device)).frac()
            group = None if groups == 1 else query_groups(near, groups)[2]
        far = plan_far(weights, num_samples, draw_offset, seed, independent, group)
        if small is not None and independent:
            # Only a draw without replacement takes every column that is left.
            whole = plan_far(weights, num_samples, draw_offset, seed, group=group)
            far = Far(*(torch.where(small.unsqueeze(2), *pair) for pair in zip(whole, far, strict=True)))
        return near, far


def near_far_attention(query, key, value, near: Near, far: Far, *, scale: float, dropout_p: float = 0.0) -> Tensor:
    """The attention of a plan: query (A, Nq, D), key (A, Nk, D), value (A, Nk, Dv) -> (A, Nq, Dv).

    Both fields are laid side by side as the keys of one tile, with the columns' log-weights as bias: one softmax over
    the two is the merge of their partials, and one long product is faster than two short ones and a merge.
    """
    wide = accumulation_dtype(query.dtype)
    run = near.start[:, :, None] + torch.arange(near.span, device=query.device)
    columns = far.place.expand(-1, run.shape[1], -1)
    distance = columns - near.start[:, :, None]
    inside = (distance >= 0) & (distance < near.span)
    far_bias = far.log_weight.to(wide).masked_fill(inside, -torch.inf)
    near_bias = torch.zeros(run.shape, dtype=wide, device=query.device)
    if not isinstance(near.count, int):
        near_bias = near_bias.masked_fill_(run >= near.count[:, :, None], -torch.inf)
    index = torch.cat((run, columns), 2)
    if near.key_order is not None:
        index = near.key_order.gather(1, index.flatten(1)).view_as(index)
    bias = torch.cat((near_bias, far_bias), 2)[:, :, None]
    place = None if near.query_order is None else inverse(near.query_order)

    def some_heads(query, key, value, order, place, index, bias, out=None):
        options = {"scale": scale, "dropout_p": dropout_p, "order": order, "place": place, "out": out}
        return gathered_attention(query, key, value, index, bias, near.rows, **options)

    result = (query.shape[1], value.shape[2], value.dtype)
    return chunked_over_heads(some_heads, query, key, value, near.query_order, place, index, bias, result=result)


def gathered_attention(
    query, key, value, index, bias, rows: int, *, scale: float, dropout_p: float = 0.0, order=None, place=None, out=None
) -> Tensor:
    """Tiles of `rows` queries, each to the keys that an index names.

    Args:
        query: (A, N, D); key, value: (A, Nk, .).
        index: (A, T, K), the keys of each tile. bias: (A, T, 1, K), added to the scores.
        order: (A, N), the queries in the order in which they are cut into tiles; place (A, N) is its inverse.
        out: (A, N, Dv) to write into, or None.

    Returns:
        (A, N, Dv) in the order of the queries as given.
    """
    if not dropout_p and use_grouped(query, key, value):
        return _grouped_heads(query, key, value, order, place, index, bias, rows, scale, out)
    tiles = pad_to_blocks(query if order is None else take(query, order), rows)
    got = partial_attention(tiles, take(key, index), take(value, index), bias, scale=scale, dropout_p=dropout_p).out
    got = got.flatten(1, 2)
    if place is not None:
        return take(got, place, out)
    got = got[:, : query.shape[1]]
    return got if out is None else out.copy_(got)


def _grouped_heads(query, key, value, order, place, index, bias, rows: int, scale: float, out) -> Tensor:
    """The same for a few heads by `attend_grouped`, with the queries gathered in the layout that it wants."""
    heads, length, tiles = query.shape[0], query.shape[1], index.shape[1]
    missing = tiles * rows - length
    if order is None:
        order = torch.arange(length, device=query.device).expand(heads, -1)
    # Rows that fill up the last tile are any query, computed in vain.
    order = torch.nn.functional.pad(order, (0, missing)) if missing else order
    first = torch.arange(heads, device=query.device)[:, None]
    order = (order + first * length).view(heads * tiles, rows).t()
    index = (index.flatten(1) + first * key.shape[1]).view(heads * tiles, -1)
    flat = (x.reshape(-1, x.shape[2]) for x in (query, key, value))
    got = attend_grouped(*flat, order, index, bias.flatten(0, 1).squeeze(1), scale=scale).flatten(0, 1)
    # Place t * rows + r of a head is now row r * (all tiles) + (its tile).
    place = torch.arange(length, device=query.device).expand(heads, -1) if place is None else place
    place = place % rows * (heads * tiles) + place // rows + first * tiles
    out = value.new_empty(heads, length, value.shape[2]) if out is None else out
    torch.index_select(got, 0, place.flatten(), out=out.view(-1, value.shape[2]))
    return out


def dense_log_weights(near: Near, far: Far, length: int, columns: int) -> Tensor:
    """The readable form: for every head the (Nq, Nk) matrix of what is added to the scores before the softmax.

    0 for a pair of the near field, -log(chance) for a sampled column that is not in it, -inf elsewhere.
    """
    device = near.start.device
    weights = torch.full((near.start.shape[0], length, columns), -torch.inf, dtype=torch.float64, device=device)
    for a in range(weights.shape[0]):
        keys = torch.arange(columns, device=device) if near.key_order is None else near.key_order[a]
        queries = torch.arange(length, device=device) if near.query_order is None else near.query_order[a]
        count = near.count if isinstance(near.count, int) else int(near.count[a])
        for t, start in enumerate(near.start[a].tolist()):
            rows = queries[t * near.rows : (t + 1) * near.rows, None]
            sample = min(t, far.place.shape[1] - 1)
            for place, log_weight in zip(*(x[a, sample].tolist() for x in far), strict=True):
                # logaddexp: the independent draw may pick a column twice.
                old = weights[a, rows, keys[place]]
                weights[a, rows, keys[place]] = torch.logaddexp(old, torch.full_like(old, log_weight))
            weights[a, rows, keys[start : min(start + near.span, count)]] = 0.0
    return weights


def dense_attention(query, key, value, log_weights: Tensor, *, scale: float) -> Tensor:
    """softmax(scale * query key^T + log_weights) value with dense float64 matrices; empty rows are 0."""
    scores = query.double() @ key.double().transpose(1, 2) * scale + log_weights
    return (scores.softmax(-1).nan_to_num(0.0) @ value.double()).to(value.dtype)
