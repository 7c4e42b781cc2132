"""Rounds of locality-sensitive hashing (Kitaev, Kaiser, Levskaya, ICLR 2020, section 2): plan, attention, dense form.

In every round the queries and the keys are sorted by the bucket of a new random hash. A tile of queries that follow
each other in the order of a round attends to one run of keys in the same order; the rounds are merged. `Rounds` says
which tiles see which runs; it is made without gradient, and the dense form is made from the same one.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, inverse, take, valid_first
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, merge, partial_attention
from hf_efficient_attn.ops.random import normal

_STREAM = 45
# So far below any score that its exponential is 0, and not infinite: the product of infinity and 0 is not a number.
_CLOSED = 1e30


class Rounds(NamedTuple):
    """Which run of keys each tile of queries sees in each of S rounds.

    query_order: (A, S, Nq), the query at each place of a round; tile t holds the places from t * rows on.
    key_order: (A, S, Nk), the key at each place, valid keys first.
    start: (A, S, T), the place at which the run of tile t begins.
    rows: queries a tile. span: keys a run.
    count: (A, 1), how many keys are there (all stand at the first places), or None where all are.
    """

    query_order: Tensor
    key_order: Tensor
    start: Tensor
    rows: int
    span: int
    count: Tensor | None


def rotations(columns: int, size: int, rounds: int, width: int, seed, device: torch.device) -> Tensor:
    """The random directions of every round for up to `columns` keys: (h, rounds, 2, width), float64, standard normal.

    Fewer keys take the first of them: see `bucket_halves`.
    """
    most = math.isqrt(ceil_div(columns, 2 * size) - 1) + 1
    return normal((most, rounds, 2, width), seed, _STREAM, device)


def bucket_halves(count: Tensor, size: int, most: int) -> tuple[Tensor, Tensor]:
    """Halves of the two factors of the number of buckets for `count` keys: int64 of its shape, from 1 to `most`.

    There are about 2 count / size buckets, so that one holds half a chunk of `size` tokens on average (the paper's
    m = 2 l / n_buckets). The first half is the least h with 2h * 2h buckets enough, the second the least that is enough
    with the first.
    """
    smaller = torch.arange(1, most, device=count.device)
    first = 1 + (2 * size * smaller * smaller < count.unsqueeze(-1)).sum(-1)
    second = (count + (2 * size * first - 1)) // (2 * size * first)
    return first, second.clamp(min=1)


def bucket_codes(x: Tensor, turns: Tensor, halves: tuple[Tensor, Tensor], centre: Tensor | None = None) -> Tensor:
    """Buckets of every token in every round: x (A, N, D), turns (h, S, 2, D), halves (A or 1, 1) -> int64 (A, S, N).

    The hash is that of x - centre, with centre (A, D) or None.

    A bucket is a pair of hashes argmax([xR; -xR]), with R the first directions of each factor: one hash of as many
    buckets costs their number times N, which is quadratic where chunks are of constant size.
    """
    most, rounds, factors, width = turns.shape
    wide = accumulation_dtype(x.dtype)
    half = torch.stack([h.flatten() for h in halves], 1)
    used = torch.arange(most, device=x.device)[:, None] < half[:, None]
    # A direction that is not used gives 0, which is never the largest in size.
    turns = (turns * used[:, :, None, :, None]).permute(0, 2, 3, 1, 4).reshape(len(half), -1, width)
    turns = turns.to(wide)
    turned = turns @ x.detach().to(wide).transpose(1, 2)
    if centre is not None:  # taken from the products, of which there are fewer
        turned -= turns @ centre.unsqueeze(2)
    turned = turned.view(x.shape[0], rounds, factors, most, x.shape[1])
    # The largest in size, one direction after another: several times as fast as a maximum with its index.
    largest, *others = turned.abs().unbind(3)
    index = torch.zeros_like(largest, dtype=torch.int16)
    for h, other in enumerate(others, 1):
        index = torch.maximum(index, (other > largest).to(torch.int16).mul_(h))
        largest = torch.maximum(largest, other)
    index = index.long()
    bucket = index + (turned.gather(3, index.unsqueeze(3)).squeeze(3) < 0) * half[:, None, :, None]
    return bucket[:, :, 0] * (2 * half[:, 1, None, None]) + bucket[:, :, 1]


def run_starts(query_codes: Tensor, key_codes: Tensor, queries, keys, tiles: int, rows: int, span: int) -> Tensor:
    """The place at which the run of each tile begins: centred where its middle query would stand among the keys.

    The paper has one set of vectors, where chunk b of the queries is chunk b of the keys. Two sets are distributed
    differently over the buckets: within a bucket a tile stands among its keys where it stands among its queries.

    Args:
        query_codes, key_codes: (A, S, N), sorted.
        queries, keys: how many of them are there, (A, 1) or integers.

    Returns:
        int64 (A, S, tiles); a run ends before `keys` if `keys` is at least `span`.
    """
    queries, keys = (torch.as_tensor(n, device=key_codes.device).view(-1, 1, 1) for n in (queries, keys))
    middle = torch.arange(tiles, device=key_codes.device) * rows + rows // 2
    middle = torch.minimum(middle, (queries - 1).clamp(min=0)).expand(*query_codes.shape[:2], -1).contiguous()
    code = query_codes.gather(2, middle)

    def bounds(codes):
        return torch.searchsorted(codes, code), torch.searchsorted(codes, code, right=True)

    (query_low, query_high), (key_low, key_high) = bounds(query_codes), bounds(key_codes)
    part = (2 * (middle - query_low) + 1) * (key_high - key_low) // (2 * (query_high - query_low)).clamp(min=1)
    return torch.minimum((key_low + part - span // 2).clamp(min=0), (keys - span).clamp(min=0))


def sort_codes(codes: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Order and sorted codes of each round, tokens that are not there behind: (A, S, N), mask (A, N)."""
    if mask is not None:
        codes = codes.masked_fill(~mask[:, None], torch.iinfo(codes.dtype).max)
    codes, order = torch.sort(codes, dim=2, stable=True)
    return order, codes


def plan_rounds(query, key, mask, *, size: int, rounds: int, seed) -> Rounds:
    """Chunks of `size` queries, each to the 2 * size keys around its middle: its own chunk, and half of each beside it.

    Keys that are not the queries are hashed without their mean: no softmax changes with a vector that all keys have in
    common, but a large one puts them all in one bucket.

    Rows of a batch with no more keys than all runs hold together (and all rows, where there are no more keys) are made
    exact: their runs lie side by side in one order.

    Args:
        query: (A, Nq, D); key: (A, Nk, D), which may be the same tensor; if not, 0 where the mask is False.
        mask: bool (A, Nk) or None; it is that of the queries too where they are as many as the keys.
    """
    with torch.no_grad():
        (heads, length, width), columns, span = query.shape, key.shape[1], 2 * size
        tiles = ceil_div(length, size)
        if mask is None and columns <= rounds * span:
            mask = torch.ones(heads, columns, dtype=torch.bool, device=key.device)
        own = mask if length == columns else None
        count = torch.full((1, 1), columns, device=key.device) if mask is None else mask.sum(1, keepdim=True)
        turns = rotations(columns, size, rounds, width, seed, key.device)
        halves = bucket_halves(count, size, len(turns))
        if query is key:
            key_order, key_codes = query_order, query_codes = sort_codes(bucket_codes(key, turns, halves), mask)
        else:
            centre = key.sum(1, dtype=accumulation_dtype(key.dtype)) / count.clamp(min=1)
            key_order, key_codes = sort_codes(bucket_codes(key, turns, halves, centre), mask)
            query_order, query_codes = sort_codes(bucket_codes(query, turns, halves), own)
        queries = length if own is None else count
        start = run_starts(query_codes, key_codes, queries, count, tiles, size, span)
        if mask is None:
            return Rounds(query_order, key_order, start, size, span, None)
        small = (count <= rounds * span)[:, :, None]
        beside = torch.arange(rounds, device=key.device)[:, None] * span
        key_order = torch.where(small, valid_first(mask)[:, None], key_order)
        return Rounds(query_order, key_order, torch.where(small, beside, start), size, span, count)


def rounds_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: Rounds, *, others: bool, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """The attention of a plan: query (A, Nq, D), key (A, Nk, D), value (A, Nk, Dv) -> (A, Nq, Dv).

    A pair that several rounds hold counts in the first of them only. The paper gives it the weight 1 / N_ij in each of
    its N_ij rounds (Eq. 6-7), which comes to the same sum; this way the first round needs no bias, and dropout falls
    once on a pair.

    Args:
        others: a token attends to itself only where it has no other key (Nq = Nk).
    """
    query_place, key_place = (inverse(x.flatten(0, 1)).view_as(x) for x in (plan.query_order, plan.key_order))
    # Where the run begins that each query sees in each round.
    begin = plan.start.gather(2, query_place // plan.rows)

    def some_heads(query, key, value, query_order, query_place, key_order, key_place, start, begin, count):
        tiles = start.shape[2]
        fill = tiles * plan.rows - query.shape[1]
        partials = []
        for s in range(start.shape[1]):
            # Rows that fill up the last tile are any query, computed in vain.
            asked = pad(query_order[:, s], (0, fill)).unflatten(1, (tiles, plan.rows))
            place = start[:, s, :, None] + torch.arange(plan.span, device=query.device)
            seen = key_order[:, s].gather(1, place.clamp(max=key.shape[1] - 1).flatten(1)).view_as(place)
            absent = None if count is None else place >= count[:, :, None]
            earlier = []
            for t in range(s):
                # Round t holds a pair where |2 * (place of the key) - centre of the query's run| < span.
                there = key_place[:, t].gather(1, seen.flatten(1)).view_as(seen)
                first = begin[:, t].gather(1, asked.flatten(1)).view_as(asked)
                earlier.append((2 * there, 2 * first + (plan.span - 1)))
            bias = _round_bias(query.dtype, asked, seen, absent, earlier, plan.span, others)
            rows = (take(x, index) for x, index in ((query, asked), (key, seen), (value, seen)))
            part = partial_attention(*rows, bias, scale=scale, dropout_p=dropout_p)
            back = query_place[:, s]
            partials.append(Partial(take(part.out.flatten(1, 2), back), part.lse.flatten(1).gather(1, back)))
        out, lse = merge(*partials)
        return torch.where((lse == -torch.inf).unsqueeze(-1), value, out) if others else out

    orders = (plan.query_order, query_place, plan.key_order, key_place, plan.start, begin)
    return chunked_over_heads(some_heads, query, key, value, *orders, plan.count)


def _round_bias(dtype: torch.dtype, asked, seen, absent, earlier, span: int, others: bool) -> Tensor | None:
    """-inf for the pairs of a round that are not there, (A, T, rows or 1, span), or None where all count.

    Those that an earlier round holds get -`_CLOSED`: nothing beside what their query has in that round.

    asked: (A, T, rows), the queries. seen: (A, T, span), the keys. absent: (A, T, span) bool or None. earlier: for each
    earlier round twice the places of these keys (A, T, span) and twice the middles of these queries' runs (A, T, rows).
    """
    wide, bias = accumulation_dtype(dtype), None
    for there, centre in earlier:
        # Both are even but for the 1 in the centre: within the run their distance is at most span - 1, else span + 1.
        gap = (there.to(wide)[:, :, None] - centre.to(wide)[:, :, :, None]).abs_()
        # Passes over one buffer, several times as fast as a fill by a mask.
        closed = gap.clamp_(span - 1, span).sub_(span).mul_(_CLOSED)
        bias = closed if bias is None else bias.add_(closed)
    if others:
        itself = mask_bias(seen[:, :, None] != asked[:, :, :, None], dtype)
        bias = itself if bias is None else bias.add_(itself)
    if absent is not None:
        absent = mask_bias(~absent[:, :, None], dtype)
        bias = absent if bias is None else bias.add_(absent)
    return bias


def dense_pairs(plan: Rounds) -> Tensor:
    """The readable form: bool (A, Nq, Nk), True where any round holds the pair."""
    (heads, rounds, length), columns = plan.query_order.shape, plan.key_order.shape[2]
    pairs = torch.zeros(heads, length, columns, dtype=torch.bool, device=plan.query_order.device)
    for a in range(heads):
        count = columns if plan.count is None else int(plan.count[a])
        for s in range(rounds):
            for t, start in enumerate(plan.start[a, s].tolist()):
                queries = plan.query_order[a, s, t * plan.rows : (t + 1) * plan.rows]
                keys = plan.key_order[a, s, start : min(start + plan.span, count)]
                pairs[a, queries[:, None], keys] = True
    return pairs
