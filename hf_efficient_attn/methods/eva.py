"""EVA (Zheng, Yuan, Wang, Kong: Efficient Attention via Control Variates, ICLR 2023).

A query sees the keys of its own window exactly, the set E of the paper, and one summary of every chunk P_c of the other
keys, all in one softmax. With queries and keys times sqrt(scale), and means over the tokens of a chunk that are there:

- the key of a summary is the mean key k~_c, its score q . k~_c;
- its value is the random-feature estimate beta^_c(omega_c) = sum_m xi(k_m, omega_c) v_m / sum_m xi(k_m, omega_c) over m
  in P_c, with xi(x, omega) = exp(omega . x - |x|^2 / 2);
- omega_c comes from the proposal N(mu_c, I) with mu_c = q~_c + k~_c, the chunk's mean query and mean key. With
  `proposal="learned"` mu_c = W_q q~_c + W_k k~_c, a pair of D x D matrices for each head that start as the identity.

Where this departs from the paper, and why:

- A summary's score has the log of the number of the chunk's keys added to it. The paper's exp(q . k~_c) counts a chunk
  as one key: attention to equal keys is then no mean. On activations of BERT (MiniLM, 512 tokens, window 64 and 64
  chunks) the error falls from .37 to .33, with 128 and 128 from .28 to .23.
- omega_c is drawn from the proposal also where nothing is trained; `proposal="mean"` takes mu_c. Neither is better
  everywhere: at 256 columns .238 (drawn) and .232 (mean) in MiniLM at 512 tokens, but .38 and .45 at 4,096, where a
  chunk has many keys. By default the proposal has no parameters of its own, since a checkpoint has none. The learned
  one has no bias and no normalisation, so that it starts as the other.
- Chunks lie within windows, or are runs of whole windows, and so never half in a window and half out of it. Where they
  are runs (more than window_size * num_landmarks tokens), the rest of the window's own run is summarised by runs of 1,
  2, 4, ... windows. A query thus sees window_size keys and num_landmarks summaries, and log2(N / (window_size *
  num_landmarks)) more in longer sequences.
- Queries that are not the keys' own tokens (the paper has as many in a window as keys): query i of m stands at place
  floor(i n / m) of the n keys and sees the window there exactly. The mean query of a chunk [a, b) is that of the
  queries from floor(a m / n) up to ceil(b m / n), of which there always is one. With m = n these are the chunk's own.
- Causal: the near field is the own block of window_size / 2 tokens up to the query, and the block before. The completed
  blocks before those are split into segments of 1, 2, 4, ... blocks as in `hf_efficient_attn.ops.causal`, each with
  num_landmarks / 2 summaries, made of tokens of the segment alone: a fixed grid of chunks would cost N^2 / chunk.

There is no switch by length. Up to window_size keys all of them are near, so that the output is exact by itself.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.registry import AttentionOptions, register_method
from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, inverse, take, valid_first
from hf_efficient_attn.ops.causal import causal_block_partial, interval_attention, left_intervals, merge_query_subsets
from hf_efficient_attn.ops.exact import exact_attention, exact_decode
from hf_efficient_attn.ops.near_far import gathered_attention
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import normal

# Streams of random numbers: of the chunks, and of the runs or segments of each level.
_CHUNKS = 40
_LEVELS = _CHUNKS + 1
# Learned parameters.
_MAPS = ("proposal_query", "proposal_key")


@dataclass(frozen=True, kw_only=True)
class EvaConfig(MethodConfig):
    """Hyperparameters of EVA. Up to window_size keys the output is exact."""

    method = "eva"
    title = "EVA"
    paper = "Zheng, Yuan, Wang, Kong, ICLR 2023"
    year = 2023
    causal = True
    rectangular = True
    learned_parameters = _MAPS
    summary = "a window exactly, and one control variate for each chunk of the other keys"

    window_size: int = option(128, "Keys that each query attends to exactly: the near field.", minimum=1)
    num_landmarks: int = option(128, "Chunks into which all keys are cut, each summarised by one key.", minimum=1)
    proposal: str = option(
        "normal",
        "'normal': omega of a chunk is drawn around its mean query plus its mean key. 'mean': it is that. 'learned': "
        "drawn around learned linear maps of the two.",
        choices=("normal", "mean", "learned"),
    )
    seed: int = option(0, "Seed of the draws of 'normal' and 'learned'.", minimum=0)

    def with_budget(self, columns: int) -> "EvaConfig":
        """Half the columns near, half of them summaries."""
        near = self.check_budget(columns, 2) // 2
        return dataclasses.replace(self, window_size=near, num_landmarks=columns - near)


def initial_parameters(
    config: EvaConfig, *, num_heads: int, head_dim: int, value_dim: int, max_length: int
) -> dict[str, Tensor]:
    """W_q and W_k (num_heads, head_dim, head_dim) of a learned proposal: the identity, so that conversion starts from q~ + k~."""
    if config.proposal != "learned":
        return {}
    return {name: torch.eye(head_dim).repeat(num_heads, 1, 1) for name in _MAPS}


def _maps(config: EvaConfig, query: Tensor, parameters: dict[str, Tensor] | None) -> list[Tensor | None]:
    """W_q and W_k (H, D, D) in the accumulator's type; None where the proposal is not learned."""
    heads, width = query.shape[1], query.shape[3]
    maps = [(parameters or {}).get(name) for name in _MAPS]
    learned = config.proposal == "learned"
    for name, x in zip(_MAPS, maps, strict=True):
        if learned != (x is not None) or (learned and tuple(x.shape) != (heads, width, width)):
            raise UnsupportedAttentionError(
                f"eva: {name} {None if x is None else tuple(x.shape)} does not suit proposal={config.proposal!r} and "
                f"{heads} heads of width {width}: 'learned' takes a tensor (heads, width, width), the others none"
            )
    return [x if x is None else x.to(accumulation_dtype(query.dtype)) for x in maps]


def summarise(query, key, value, there, noise, scale: float, maps=(None, None)) -> tuple[Tensor, Tensor]:
    """Mean key and estimated value of chunks.

    Args:
        query: (A, C, P, D), the queries of each chunk, or (A, C, D), their means.
        key, value: (A, C, P, .), the tokens of each chunk.
        there: bool (A or 1, C, P), which of the places hold a token of the chunk; None where all do.
        noise: (A, C, D), standard normal, or None for omega = mu.
        maps: (A, D, D) each, what the mean query and the mean key are multiplied with in mu; None: nothing.

    Returns:
        (A, C, D) and (A, C, Dv) in the accumulator's type; 0 where a chunk is empty.
    """
    wide, root = accumulation_dtype(key.dtype), abs(scale) ** 0.5
    query, key, value = (x.to(wide) for x in (query, key, value))
    mean_query, mean_key = query if query.ndim == 3 else _mean(query, there), _mean(key, there)
    of_query, of_key = (x if w is None else x @ w.mT for x, w in zip((mean_query, mean_key), maps, strict=True))
    omega = ((-of_query if scale < 0 else of_query) + of_key) * root
    omega = omega if noise is None else omega + noise.to(wide)
    # log xi(sqrt(scale) k, omega), the two terms in one product.
    logits = (key * (omega.unsqueeze(2) * root - key * (0.5 * root * root))).sum(-1)
    if there is not None:
        # Every token of an empty chunk is hidden by its count; equal logits keep the softmax and its gradient finite.
        logits = logits.masked_fill(~there, torch.finfo(wide).min)
        value = value.masked_fill(~there.unsqueeze(-1), 0.0)
    return mean_key, (logits.softmax(-1).unsqueeze(2) @ value).squeeze(2)


def _mean(x: Tensor, there: Tensor | None) -> Tensor:
    """Means over the tokens of chunks that are there: (A, C, P, D) -> (A, C, D)."""
    if there is None:
        return x.mean(2)
    return x.masked_fill(~there.unsqueeze(-1), 0.0).sum(2) / there.sum(2).clamp(min=1).unsqueeze(-1)


def _noise(config: EvaConfig, chunks: int, shape, seed, stream: int, query: Tensor) -> Tensor | None:
    """(B * H, chunks, D) for `shape` (B, H); a chunk's numbers depend on its place, not on how many there are."""
    if config.proposal == "mean":
        return None
    drawn = normal((chunks, shape[1], query.shape[-1]), seed, stream, query.device)
    return drawn.transpose(0, 1).repeat(shape[0], 1, 1)


def forward(
    config: EvaConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    query_mask: Tensor | str | None = "keys",
) -> Tensor:
    """Fast form; arguments as in `hf_efficient_attn.methods._shared.registry.register_method`.

    Args:
        query_mask: bool (B, Nq), which queries count and have an output, or None for all of them, where they are not
            the keys' own tokens. "keys": they are if there are as many of both; otherwise all of them count.
    """
    mask, is_causal, scale, dropout_p, seed, parameters = (
        options.key_mask,
        options.is_causal,
        options.scale,
        options.dropout_p,
        options.seed,
        options.parameters,
    )
    shape, length = query.shape[:2], query.shape[2]
    same = _same_tokens(query, key, query_mask)
    query_mask = _mask_of_queries(same, mask, query_mask)
    maps = [x if x is None else x.repeat(shape[0], 1, 1) for x in _maps(config, query, parameters)]
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    if is_causal:
        compute, tensors = _causal_plan(config, query, shape, scale, dropout_p, seed)
    else:
        rows, pairs = _count(mask, key), None
        if not same:
            whole = mask is None and query_mask is None
            pairs = _pair(config, rows, _count(query_mask, query), length, key.shape[1], whole)
        compute, tensors = _plan(config, query, key.shape[1], mask, rows, pairs, shape, scale, dropout_p, seed)
    order, query_order = (None if x is None else valid_first(x) for x in (mask, query_mask))
    masks = (x if x is None else x.repeat_interleave(shape[1], 0) for x in (order, query_order, query_mask))

    def some_heads(query, key, value, order, query_order, query_mask, map_query, map_key, *tensors):
        maps = map_query, map_key
        if order is not None:
            key, value = take(key, order), take(value, order)
        if query_order is None:
            return compute(query, key, value, maps, *tensors)
        query = take(query.masked_fill(~query_mask[:, :, None], 0.0), query_order)
        out = compute(query, key, value, maps, *tensors)
        return take(out, inverse(query_order)).masked_fill(~query_mask[:, :, None], 0.0)

    out = chunked_over_heads(some_heads, query, key, value, *masks, *maps, *tensors)
    return out.view(*shape, length, -1)


def _same_tokens(query: Tensor, key: Tensor, query_mask) -> bool:
    return isinstance(query_mask, str) and query.shape[2] == key.shape[2]


def _mask_of_queries(same: bool, mask, query_mask) -> Tensor | None:
    if same:
        return mask
    return None if isinstance(query_mask, str) else query_mask


def _count(mask: Tensor | None, x: Tensor) -> Tensor:
    """How many tokens of (A, N, .) are there, int64 (B, 1), or (1, 1) without a mask."""
    return torch.full((1, 1), x.shape[1], device=x.device) if mask is None else mask.sum(1, keepdim=True)


class _Pairs(NamedTuple):
    """Queries cut into blocks, each of the queries of one window of keys. R is B, or 1 where all rows are alike.

    size: rows of a block. tile: int64 (R, S), the window of each of S blocks. query: (R, S * size), what stands at each
    row; some are there for nothing. place: (R, Nq), the row of each query. count: (R, 1), how many queries are there.
    """

    size: int
    tile: Tensor
    query: Tensor
    place: Tensor
    count: Tensor


def _pair(config: EvaConfig, keys: Tensor, queries: Tensor, length: int, columns: int, whole: bool) -> _Pairs:
    """The blocks for (R, 1) keys and queries out of `columns` and `length`; `whole`: of all of them."""
    device, window = keys.device, min(config.window_size, columns)
    tiles = ceil_div(columns, window)
    first = _first_query(torch.arange(tiles + 1, device=device) * window, keys, queries, up=True)
    if whole:
        size = ceil_div(window * length, columns)
        blocks = tiles
    else:
        # Windows of any number of queries: at most an eighth of the rows for nothing where there are many queries, and
        # a third where blocks that small would spend their time on fetching keys.
        size = max(ceil_div(length, 8 * tiles), min(64, ceil_div(length, tiles)))
        blocks = ceil_div(length, size) + tiles - 1
    ends = ((first.diff(dim=1) + size - 1) // size).cumsum(1)
    starts = pad(ends, (1, 0))
    number = torch.arange(blocks, device=device).expand(ends.shape[0], -1).contiguous()
    tile = torch.searchsorted(ends, number, right=True).clamp(max=tiles - 1)
    at = first.gather(1, tile) + (number - starts.gather(1, tile)) * size
    at = (at[:, :, None] + torch.arange(size, device=device)).flatten(1).clamp(0, length - 1)
    query = torch.arange(length, device=device)
    own = (query * keys // queries.clamp(min=1) // window).clamp(max=tiles - 1)
    place = (starts.gather(1, own) * size + query - first.gather(1, own)).clamp(0, blocks * size - 1)
    return _Pairs(size, tile, at, place, queries)


def _first_query(place: Tensor, keys: Tensor, queries: Tensor, up: bool) -> Tensor:
    """Of m queries the one at a place of n keys, place m / n rounded down or up: at most m."""
    number, keys = torch.minimum(place, keys) * queries, keys.clamp(min=1)
    return (number + keys - 1) // keys if up else number // keys


def _mean_queries(prefix: Tensor, start: Tensor, stop: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    """Mean query of the chunks [start, stop) of keys, (A, C) each, from sums of the queries before: (A, C, D)."""
    first = _first_query(start, keys, queries, up=False)
    last = _first_query(stop, keys, queries, up=True)
    return (take(prefix, last) - take(prefix, first)) / (last - first).clamp(min=1).unsqueeze(2)


def _plan(config: EvaConfig, query, length: int, mask, rows, pairs: _Pairs | None, shape, scale, dropout_p, seed):
    """The bidirectional form: a function of some heads, and tensors (A, ...) that go with the heads.

    `rows` (R, 1) of the `length` keys are there; `pairs` is None where queries and keys are the same tokens.
    """
    device = query.device
    window, landmarks = min(config.window_size, length), config.num_landmarks
    tiles = ceil_div(length, window)
    levels = 0
    while ceil_div(tiles, 1 << levels) > landmarks:
        levels += 1
    pieces = min(window, max(1, landmarks // tiles))
    longest = ceil_div(window, pieces) << levels
    # Rows of fewer tokens have chunks of their own, counted from their own tokens.
    own_tiles = ((rows + window - 1) // window).clamp(min=1)
    own_level = torch.zeros_like(rows)
    for level in range(levels):
        own_level = own_level + ((own_tiles + (1 << level) - 1) >> level > landmarks)
    own_pieces = (landmarks // own_tiles).clamp(1, window)
    unit = window << own_level
    chunks = min(landmarks, tiles * window) if mask is not None else pieces * ceil_div(tiles, 1 << levels)
    slot = torch.arange(chunks, device=device)
    first, piece = slot // own_pieces * unit, slot % own_pieces
    start = torch.minimum(first + piece * unit // own_pieces, rows)
    stop = torch.minimum(first + (piece + 1) * unit // own_pieces, rows)
    place = torch.arange(longest, device=device)
    # What each tile of queries sees: its window, the chunks outside of it, and the runs beside it in its own chunk.
    tile = (torch.arange(tiles, device=device)[None] if pairs is None else pairs.tile)[:, :, None]
    near = tile * window + torch.arange(window, device=device)
    far = (length + slot).expand(*tile.shape[:2], -1)
    index, bias = [near.clamp(max=length - 1), far], [_log(near < rows[:, :, None])]
    outside = (slot // own_pieces)[:, None] != tile >> own_level[:, :, None]
    bias.append(_log(outside, (stop - start)[:, None]))
    at = length + chunks
    for level in range(levels):
        runs = ceil_div(tiles, 1 << level)
        beside = (tile >> level) ^ 1
        count = (rows[:, :, None] - beside * (window << level)).clamp(0, window << level)
        index.append(at + beside.clamp(max=runs - 1))
        bias.append(_log((own_level > level)[:, :, None], count))
        at += runs
    batch = max(x.shape[0] for x in bias)
    bias = torch.cat([x.expand(batch, -1, -1) for x in bias], 2)
    inside = (start[..., None] + place).clamp(max=length - 1)
    there = start[..., None] + place < stop[..., None]
    per_head = (torch.cat(index, 2), bias, inside, there, start, stop, rows)
    per_head += (None,) * 3 if pairs is None else (pairs.query, pairs.place, pairs.count)
    per_head = [x if x is None else _for_heads(x, shape) for x in per_head]
    counts = [chunks, *(ceil_div(tiles, 1 << level) for level in range(levels))]
    noises = [_noise(config, count, shape, seed, _CHUNKS + i, query) for i, count in enumerate(counts)]
    equal = mask is None and window % pieces == 0
    options = {"scale": scale, "dropout_p": dropout_p}

    def compute(query, key, value, maps, index, bias, inside, there, start, stop, rows, asked, place, queries, *noises):
        prefix = None
        if queries is not None:
            # In float64, since short runs are small differences of long sums.
            prefix = pad(query.cumsum(1, dtype=torch.float64), (0, 0, 1, 0))

        def summary(cut: Callable[[Tensor], Tensor], start, stop, there, noise):
            mean = cut(query) if prefix is None else _mean_queries(prefix, start, stop, rows, queries)
            return summarise(mean, cut(key), cut(value), there, noise, scale, maps)

        def summary_of_runs(runs: int, size: int, noise):
            number = torch.arange(runs * size, device=query.device).view(runs, size)
            start, stop = (torch.minimum(at, rows) for at in (number[:, 0], number[:, -1] + 1))
            return summary(lambda x: _runs(x, runs, size), start, stop, number < rows[..., None], noise)

        if equal:
            summaries = [summary_of_runs(chunks, window // pieces << levels, noises[0])]
        else:
            summaries = [summary(lambda x: take(x, inside), start, stop, there, noises[0])]
        for level in range(levels):
            summaries.append(summary_of_runs(counts[level + 1], window << level, noises[level + 1]))
        keys, values = zip(*summaries, strict=True)
        keys = torch.cat((key, *(x.to(key.dtype) for x in keys)), 1)
        values = torch.cat((value, *(x.to(value.dtype) for x in values)), 1)
        bias = bias[:, :, None].to(accumulation_dtype(key.dtype))
        if asked is None:
            return gathered_attention(query, keys, values, index, bias, window, **options)
        # Rows that FLuRKA contracts are of the accumulator's type, whatever that of the queries.
        query = take(query, asked).to(key.dtype)
        return take(gathered_attention(query, keys, values, index, bias, pairs.size, **options), place)

    return compute, (*per_head, *noises)


def _for_heads(x: Tensor, shape) -> Tensor:
    """(R, ...) for every head of (B, H): (B * H, ...); R is B, or 1 where all rows are alike."""
    return x.expand(shape[0] * shape[1], *x.shape[1:]) if x.shape[0] == 1 else x.repeat_interleave(shape[1], 0)


def _runs(x: Tensor, runs: int, size: int) -> Tensor:
    """(A, N, D) -> (A, runs, size, D), filled up with zeros."""
    return pad(x, (0, 0, 0, runs * size - x.shape[1])).view(x.shape[0], runs, size, -1)


def _log(seen: Tensor, count: Tensor | None = None) -> Tensor:
    """Log of `count` (of 1 without it) where it is positive and `seen`, else -inf."""
    weight = seen.double() if count is None else seen * count.double()
    return weight.log()


def _causal_plan(config: EvaConfig, query, shape, scale, dropout_p, seed):
    """The causal form, on tokens that are all there up to the last one; see `_plan`."""
    length, size = query.shape[1], max(1, config.window_size // 2)
    completed = max(0, ceil_div(length, size) - 2)
    grid = []
    for level in range(completed.bit_length()):
        span, pairs = size << level, ((completed >> level) + 1) >> 1
        chunk = ceil_div(span, min(span, max(1, config.num_landmarks // 2)))
        grid.append((pairs, span, chunk, ceil_div(span, chunk)))
    # A query sees one segment of a level, so that those of a level can share their draws.
    noises = [
        None if chunk == 1 else _noise(config, count, shape, seed, _LEVELS + level, query)
        for level, (_, _, chunk, count) in enumerate(grid)
    ]

    def compute(query, key, value, maps, *noises):
        options = {"scale": scale, "dropout_p": dropout_p}
        head = exact_attention(query[:, :size], key[:, :size], value[:, :size], is_causal=True, **options)
        if length <= size:
            return head
        parts = [(slice(None), causal_block_partial(query, key, value, size, **options))]
        for (pairs, span, chunk, count), noise in zip(grid, noises, strict=True):
            tokens = [left_intervals(x, pairs, span) for x in (query, key, value)]
            place = torch.arange(count * chunk, device=query.device).view(count, chunk)
            there = (place < span).expand(1, pairs, -1, -1).flatten(1, 2)
            tokens = [
                pad(x, (0, 0, 0, count * chunk - span)).reshape(x.shape[0], pairs * count, chunk, -1) for x in tokens
            ]
            if chunk == 1:
                keys, values = tokens[1][:, :, 0], tokens[2][:, :, 0]
            else:
                noise = None if noise is None else noise[:, None].expand(-1, pairs, -1, -1).flatten(1, 2)
                keys, values = summarise(*tokens, None if span == count * chunk else there, noise, scale, maps)
            keys, values = (x.to(like.dtype).unflatten(1, (pairs, count)) for x, like in ((keys, key), (values, value)))
            bias = (place < span).sum(1).to(accumulation_dtype(key.dtype)).log()[None, None, None]
            parts += interval_attention(query[:, size:], keys, values, bias, span, options)
        return torch.cat((head, merge_query_subsets(parts)), 1)

    return compute, tuple(noises)


def decode(config: EvaConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """A few last queries attend to all cached keys exactly: the queries of the chunks are not in a cache."""
    mask, scale, dropout_p = options.key_mask, options.scale, options.dropout_p
    return exact_decode(query, key, value, mask, scale=scale, dropout_p=dropout_p)


def naive(
    config: EvaConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    query_mask: Tensor | str | None = "keys",
) -> Tensor:
    """Readable form: one row of the batch at a time, on its tokens alone, chunk by chunk and with dense scores."""
    mask, is_causal, scale, seed, parameters = (
        options.key_mask,
        options.is_causal,
        options.scale,
        options.seed,
        options.parameters,
    )
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64, device=query.device)
    shape, maps = (1, query.shape[1]), [x if x is None else x.double() for x in _maps(config, query, parameters)]
    query_mask = _mask_of_queries(_same_tokens(query, key, query_mask), mask, query_mask)
    for b in range(query.shape[0]):
        asked, there = (
            torch.ones(x.shape[2], dtype=torch.bool) if of_it is None else of_it[b].cpu()
            for x, of_it in ((query, query_mask), (key, mask))
        )
        q, k, v = query[b][:, asked].double(), *(x[b][:, there].double() for x in (key, value))
        queries, count = q.shape[1], k.shape[1]
        if not queries or not count:
            continue
        place = torch.arange(queries) * count // queries
        near, chunks = (_causal_chunks if is_causal else _chunks)(config, count)
        seen, keys, values, bias = [near[place]], [k], [v], [torch.zeros(count, dtype=torch.float64)]
        for start, stop, rows, stream, number in chunks:
            noise = _noise(config, number + 1, shape, seed, stream, q)
            noise = 0.0 if noise is None else noise[:, -1]
            root = abs(scale) ** 0.5
            chunk = root * k[:, start:stop]
            means = q[:, start * queries // count : ceil_div(stop * queries, count)].mean(1), k[:, start:stop].mean(1)
            mu = [x if w is None else torch.einsum("hde,he->hd", w, x) for x, w in zip(means, maps, strict=True)]
            omega = root * (mu[0] * (1 if scale >= 0 else -1) + mu[1]) + noise
            xi = (torch.einsum("hd,hmd->hm", omega, chunk) - chunk.square().sum(-1) / 2).softmax(-1)
            keys.append(means[1][:, None])
            values.append(torch.einsum("hm,hmd->hd", xi, v[:, start:stop])[:, None])
            bias.append(torch.tensor([stop - start], dtype=torch.float64).log())
            seen.append(rows[place, None])
        scores = q @ torch.cat(keys, 1).transpose(1, 2) * scale + torch.cat(bias).to(q)
        weights = scores.masked_fill(~torch.cat(seen, 1).to(q.device), -torch.inf).softmax(-1)
        out[b, :, asked] = weights @ torch.cat(values, 1)
    return out.to(value.dtype)


def _chunks(config: EvaConfig, count: int):
    """The pairs that are near, and of each chunk its start, its stop, the queries that see it, and the draw it has."""
    window, landmarks = config.window_size, config.num_landmarks
    tile, tiles = torch.arange(count) // window, max(1, ceil_div(count, window))
    chunks, level = [], 0
    while ceil_div(tiles, 1 << level) > landmarks:
        span = window << level
        for number, start in enumerate(range(0, count, span)):
            # Seen by the other half of a run of two, where that run lies in the window's own chunk.
            chunks.append((start, min(start + span, count), tile >> level == number ^ 1, _LEVELS + level, number))
        level += 1
    unit, pieces = window << level, max(1, min(window, landmarks // tiles))
    for number, (run, piece) in enumerate((r, p) for r in range(ceil_div(count, unit)) for p in range(pieces)):
        start, stop = (min(count, run * unit + at * unit // pieces) for at in (piece, piece + 1))
        if start < stop:
            chunks.append((start, stop, tile >> level != run, _CHUNKS, number))
    return tile[:, None] == tile, chunks


def _causal_chunks(config: EvaConfig, count: int):
    """The same for the causal form."""
    size = max(1, config.window_size // 2)
    position = torch.arange(count)
    block = position // size
    chunks = []
    for level in range(count.bit_length()):
        span, done = size << level, (block - 1).clamp(min=0) >> level
        chunk = ceil_div(span, min(span, max(1, config.num_landmarks // 2)))
        each = ceil_div(span, chunk)
        for segment in range(0, count // span, 2):
            rows = (done & 1 == 1) & (done - 1 == segment)
            for number in range(each):
                start = segment * span + number * chunk
                stop = min(start + chunk, (segment + 1) * span)
                chunks.append((start, stop, rows, _LEVELS + level, number))
    return (position <= position[:, None]) & (block >= block[:, None] - 1), [c for c in chunks if c[2].any()]


register_method(EvaConfig, forward=forward, naive=naive, decode=decode, initial_parameters=initial_parameters)
