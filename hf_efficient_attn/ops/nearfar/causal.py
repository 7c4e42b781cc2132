"""Near keys exactly, and landmarks for all other keys: the strictly causal form of `nearfar`.

A query attends to

- its own block and the block before it, exactly;
- the keys before them through clusters of the keys of finished chunks (`hf_efficient_attn.ops.nearfar.chunks`), to at
  most three chunks of each level. A landmark stands for a cluster;
- exactly, in place of their landmarks, to clusters that it chooses on its own: those whose landmarks may miss most.
  What a landmark may miss is its weight times a margin, which grows with the spread of the scores in the cluster. A
  cluster is chosen if this is more than 1 / `MOST` of the sum over all clusters, so that fewer than `MOST` are
  chosen, and more than `_LEAST` of all that the query attends to.

Nothing depends on later tokens, on other queries, or on the length of the sequence.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from hf_efficient_attn.ops.attend import Partial, attend, merge, output_of
from hf_efficient_attn.ops.backends import CLUSTER_BACKENDS
from hf_efficient_attn.ops.backends.backend import ClusterCall, ClusterRule
from hf_efficient_attn.ops.backends.devices import runs_block_kernels
from hf_efficient_attn.ops.exact import dense_softmax, mask_bias
from hf_efficient_attn.ops.index import ceil_div, constant, pad_to_blocks, take
from hf_efficient_attn.ops.nearfar.chunks import (
    BASE,
    GROWTH,
    LARGEST_SPREAD,
    LEAST_SPREAD,
    WEIGHTED,
    CausalNearFarOptions,
    Columns,
    Level,
    QueryBlocks,
    cluster_index,
    landmarks_naive,
    level_sizes,
    levels_of,
    make_clusters,
    members_of,
    query_blocks,
)
from hf_efficient_attn.ops.nearfar.pairs import Pairs, attend_to_pairs
from hf_efficient_attn.ops.slices import slice_size, sliced, spans_together

MOST = 48
_LEAST = 0.005
# Landmarks whose weights sum to less than this share of all weights times margins do not count. The gradient of a
# quotient by less would overflow.
_LEAST_NUMBER = 1e-30
# Numbers are first compared with a bound by the maxima of so many.
COMPARED = 8


def causal_nearfar_attention(query: Tensor, key: Tensor, value: Tensor, options: CausalNearFarOptions) -> Tensor:
    """Compute causal attention to near keys exactly, and to all other keys through landmarks.

    Gradients flow through keys, values and weights, with all choices fixed.

    Args:
        query: (BH, N, D), valid tokens first.
        key: (BH, N, D).
        value: (BH, N, Dv).
        options: see `CausalNearFarOptions`.

    Returns:
        (BH, N, Dv), and `with_lse` one more column. The outputs before `first_query` mean nothing.
    """
    levels = levels_of(query.shape[1], options)

    def some_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not levels:
            return output_of(_window(query, key, value, options), options.with_lse)
        index = cluster_index(query, key, levels)
        blocks = query_blocks(query, options.block_size, options.scale)
        given = query, key, value, index, *blocks, level_sizes(levels, query.device)
        rule = ClusterRule(BASE, WEIGHTED, GROWTH, LEAST_SPREAD, LARGEST_SPREAD, MOST, _LEAST)
        call = ClusterCall(*given, options.block_size, levels, rule, options.scale, options.first_query)
        return output_of(_attend(call, options.dropout_p), options.with_lse)

    size = slice_size(query.shape[1] * max(query.shape[2], value.shape[2]), query.device)
    with torch.autocast(query.device.type, enabled=False):
        out = sliced(some_heads, query, key, value, size=size, draws=options.dropout_p > 0.0)
    return out if options.with_lse else out.to(value.dtype)


def _attend(call: ClusterCall, dropout_p: float) -> Partial:
    for backend in CLUSTER_BACKENDS if runs_block_kernels(call.query.device) and dropout_p == 0.0 else ():
        if backend.applies(call, _plain):
            return backend.attend(call)
    return _plain(call, dropout_p)


def _plain(call: ClusterCall, dropout_p: float = 0.0) -> Partial:
    """Compute a call by PyTorch's operations."""
    query, key, value = call[:3]
    levels = tuple(Level(*level) for level in call.levels)
    options = CausalNearFarOptions(call.block_size, levels[0].leaf, call.scale, dropout_p, first_query=call.first_query)
    near = _window(query, key, value, options)
    blocks = QueryBlocks(call.block_mean, call.block_root)
    members = members_of(call.members, query.shape[1], levels)
    past = []
    for _, same in itertools.groupby(zip(levels, members, strict=True), lambda pair: pair[0].leaf):
        equal, own = zip(*same, strict=True)
        past.append(make_clusters(key, value, equal, own, blocks, call.block_size))
    exact_query = query.to(near.lse.dtype) * call.scale
    center, bias, mean = (torch.cat(x, 1) for x in zip(*(clusters.columns for clusters in past), strict=True))
    last = (0, 0, 0, 1)  # a landmark without weight
    table = Columns(pad(center, last), pad(bias, last, value=-torch.inf), pad(mean, last))
    far, pairs = _landmarks(exact_query, near.lse, table, levels, call.first_query, dropout_p)
    parts = [far, near]  # the result has the dtype of the first
    start = 0
    for clusters in past:
        parts.append(attend_to_pairs(query, clusters, pairs.of(start, clusters.key.shape[1]), call.scale, dropout_p))
        start += clusters.key.shape[1]
    return merge(*parts)


def _window(query: Tensor, key: Tensor, value: Tensor, options: CausalNearFarOptions) -> Partial:
    """Compute attention of queries (BH, N, D) to their own block and the block before it."""
    length = query.shape[1]
    size = min(options.block_size, length)
    block = torch.ones(size, size, dtype=torch.bool, device=query.device)
    call: dict[str, Any] = {"scale": options.scale, "dropout_p": options.dropout_p}
    skipped = options.first_query // size * size
    parts = []
    if not skipped:
        own_query, own_key, own_value = (x[:, None, :size] for x in (query, key, value))
        causal = mask_bias(block.tril(), query.dtype)[None, None]  # (1, 1, size, size)
        parts.append(attend(own_query, own_key, own_value, causal, **call))
    start = skipped or size
    if length > start:
        own = (pad_to_blocks(x[:, start - size :], size).flatten(1, 2) for x in (key, value))  # (BH, (T + 1) size, .)
        own_key, own_value = (x.unfold(1, 2 * size, size).mT for x in own)  # (BH, T, 2 size, .)
        causal = mask_bias(torch.cat((block, block.tril()), 1), query.dtype)[None, None]  # (1, 1, size, 2 size)
        parts.append(attend(pad_to_blocks(query[:, start:], size), own_key, own_value, causal, **call))
    outs, lses = zip(*parts, strict=True)
    out, lse = (torch.cat([x.flatten(1, 2) for x in part], 1)[:, : length - skipped] for part in (outs, lses))
    return Partial(pad(out, (0, 0, skipped, 0)), pad(lse, (skipped, 0)))


def _landmarks(
    query: Tensor, window_lse: Tensor, table: Columns, levels: tuple[Level, ...], first_query: int, dropout_p: float
) -> tuple[Partial, Pairs]:
    """Compute attention of queries (BH, N, D), which are times the scale, to landmarks, and choose clusters."""
    batch_heads, length, _ = query.shape
    block = levels[0].chunk
    starts = tuple(itertools.accumulate((length // chunk * (chunk // leaf) for chunk, leaf in levels), initial=0))
    # A span of queries begins a block after chunks of the first level end.
    span = BASE * block
    spans = [pad_to_blocks(x[:, block:], span) for x in (query, window_lse.unsqueeze(2))]  # (BH, T, span, .)
    num_spans = spans[0].shape[1]
    width = sum((BASE - 1) * (chunk // leaf) for chunk, leaf in levels)
    step = spans_together(batch_heads * span * width, query.device)
    first = max(0, first_query - block) // span
    begin = block + first * span
    outs = []
    found = []
    for start in range(first, num_spans, step):
        seen = _seen(start, min(step, num_spans - start), levels, starts, query.device)  # (t, G)
        queries, lse = (x[:, start : start + step].flatten(0, 1) for x in spans)
        columns = Columns(*(take(x, seen.expand(batch_heads, -1, -1)).flatten(0, 1) for x in table))
        hidden = _not_ended(levels[0].chunk // levels[0].leaf, query.device)
        out, (row, place, column) = attend_to_landmarks(queries, lse, columns, hidden, dropout_p)
        outs.append(out.view(batch_heads, -1, out.shape[2]))
        head = row.div(len(seen), rounding_mode="floor")
        part = row - head * len(seen)
        position = place + (part + start) * span + block
        pairs = Pairs(head * length + position, seen[part, column])
        if (start + len(seen)) * span + block > length:  # the last span ends with padding
            exists = (position < length).nonzero()[:, 0]
            pairs = Pairs(*(x[exists] for x in pairs))
        found.append(pairs)
    out, lse = torch.cat(outs, 1)[:, : length - begin].split((table.mean.shape[2] - 1, 1), 2)
    far = Partial(pad(out, (0, 0, begin, 0)), pad(lse.squeeze(2), (begin, 0), value=-torch.inf))
    return far, Pairs(*(torch.cat(x) for x in zip(*found, strict=True)))


@constant
def _seen(start: int, count: int, levels: tuple[Level, ...], starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the clusters that some query of each of `count` spans sees, int64 (count, G).

    A level's clusters begin at its number of `starts`. The last number is the place of a landmark without weight, which
    fills the columns up to a multiple of `COMPARED`, and is always the last one. The clusters of the first level are
    in the first columns.
    """
    rows = []
    for span in range(start, start + count):
        row: list[int] = []
        for (chunk, leaf), first, end in zip(levels, starts, starts[1:], strict=False):
            ended = BASE * span * levels[0].chunk // chunk  # chunks that have ended a block before the span
            last = ended if row else ended + BASE - 1
            clusters = chunk // leaf
            low = first + ended // BASE * BASE * clusters
            row += [place if place < end else starts[-1] for place in range(low, first + last * clusters)]
        rows.append(row)
    width = ceil_div(max(map(len, rows)) + 1, COMPARED) * COMPARED
    return torch.tensor([row + [starts[-1]] * (width - len(row)) for row in rows], device=device)


@constant
def _not_ended(clusters: int, device: torch.device) -> Tensor:
    """Return which clusters of the first level each block of a span does not see yet: bool (BASE, 1, columns)."""
    chunk = torch.arange((BASE - 1) * clusters, device=device).div(clusters, rounding_mode="floor")
    return (chunk >= torch.arange(BASE, device=device)[:, None])[:, None]


def attend_to_landmarks(
    query: Tensor, window_lse: Tensor, columns: Columns, hidden: Tensor | None, dropout_p: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Compute attention of the queries of spans to landmarks, and choose clusters in place of landmarks.

    Args:
        query: (R, span, D).
        window_lse: (R, span, 1), the lse of the windows.
        columns: the G landmarks that each span sees. The last one has no weight: its place is for the window.
        hidden: bool (BASE, 1, C), which of the first columns the blocks of a span do not see, or None.
        dropout_p: the probability of dropping a weight.

    Returns:
        Output and lse side by side (R, span, Dv + 1); and the row, query and column of all choices, int64 (P,) each.
    """
    score = torch.bmm(query, columns.center.mT).add_(columns.bias.mT)  # (R, span, G)
    if hidden is not None:
        score.view(len(score), BASE, -1, score.shape[2])[..., : hidden.shape[2]].masked_fill_(hidden, -torch.inf)
    score[..., -1:] = window_lse
    weight = score.softmax(2)
    near = weight[..., -1:]
    total = score.amax(2, keepdim=True) - weight.amax(2, keepdim=True).log()
    with torch.no_grad():
        choice = _above(weight, ((1.0 - near) / MOST).clamp(min=_LEAST))
        row, place, column = choice
        index = (row * weight.shape[1] + place) * weight.shape[2] + column
    far = weight.flatten().index_fill(0, index, 0.0).view_as(weight)  # the last column has no value
    sums, number = torch.bmm(far, columns.mean).split((columns.mean.shape[2] - 1, 1), 2)
    if dropout_p > 0.0:
        sums = torch.bmm(dropout(far, dropout_p), columns.mean[..., :-1])
    empty = number <= _LEAST_NUMBER
    number = number.masked_fill(empty, 1.0)
    lse = (total + number.log()).masked_fill(empty, -torch.inf)
    return torch.cat((sums / number, lse), 2), choice


def _above(x: Tensor, bound: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the numbers of x (R, n, m), except the last of m, above the bounds (R, n, 1): three indices, int64 (P,)."""
    parts = x.unflatten(2, (COMPARED, -1))
    width = parts.shape[3]
    row, place, column = (parts.amax(2) > bound).nonzero().unbind(1)
    some = parts.transpose(2, 3)[row, place, column] > bound[row, place]  # (P', COMPARED)
    some[:, -1] &= column < width - 1
    which, step = some.nonzero().unbind(1)
    return row[which], place[which], column[which] + step * width


def causal_nearfar_naive(query: Tensor, key: Tensor, value: Tensor, options: CausalNearFarOptions) -> Tensor:
    """Compute `causal_nearfar_attention` in the readable form, by dense float64 matrices of one head after another.

    It makes the same choices: (BH, N, D), (BH, N, D), (BH, N, Dv) -> float64 (BH, N, Dv).
    """
    levels = levels_of(query.shape[1], options)
    index = []
    if levels:
        index = members_of(cluster_index(query, key, levels), query.shape[1], levels)
    heads = zip(query.double() * options.scale, key.double(), value.double(), strict=True)
    outs = []
    for head, (q, k, v) in enumerate(heads):
        outs.append(_naive_head(q, k, v, levels, [x[head] for x in index], options))
    return torch.stack(outs)


def _naive_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    levels: tuple[Level, ...],
    index: list[Tensor],
    options: CausalNearFarOptions,
) -> Tensor:
    """Compute the output (N, Dv) of a head with clusters int64 (M, leaf) of each level."""
    block_size = options.block_size
    position = torch.arange(len(query), device=query.device)
    block = position // block_size
    exact = query @ key.mT  # (N, N)
    is_exact = block >= block[:, None] - 1
    is_later = position > position[:, None]
    bounds, scores, values = [], [], []
    for level, members in zip(levels, index, strict=True):
        center, log_weight, mean, margin = landmarks_naive(query, key, value, level, members, block_size)
        chunk = torch.arange(len(members), device=query.device) * level.leaf // level.chunk  # of each cluster
        ended = ((block - 1) * block_size // level.chunk)[:, None]  # chunks that a query may see
        is_seen = (chunk < ended) & (chunk // BASE == ended // BASE)
        score = (query @ center.mT + log_weight).masked_fill(~is_seen, -torch.inf)  # (N, M)
        scores.append(score)
        bounds.append(score + margin)
        values.append(mean)
    near = exact.masked_fill(~is_exact | is_later, -torch.inf).logsumexp(1, keepdim=True)  # (N, 1)
    share = torch.cat([near, *bounds], 1).softmax(1)
    is_chosen = share[:, 1:] > ((1.0 - share[:, :1]) / MOST).clamp(min=_LEAST)  # (N, all M)
    for members, own in zip(index, is_chosen.split([len(x) for x in index], 1), strict=True):
        keys = own.repeat_interleave(members.shape[1], 1)  # (N, M leaf)
        is_exact = is_exact | torch.zeros_like(is_exact).scatter(1, members.flatten().expand(len(query), -1), keys)
    exact = exact.masked_fill(~is_exact | is_later, -torch.inf)
    far = torch.cat([exact[:, :0], *scores], 1).masked_fill(is_chosen, -torch.inf)
    return dense_softmax(torch.cat((exact, far), 1), torch.cat([value, *values]), with_lse=options.with_lse)
