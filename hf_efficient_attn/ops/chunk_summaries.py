"""Attention to a few keys exactly and to one summary of each chunk of the other keys, in one softmax (EVA).

The method and its departures from the paper are described in `hf_efficient_attn.methods.eva`. In this module a window
is a set of consecutive keys that a query sees exactly, a group is 2**level consecutive windows, and a chunk is what one
summary stands for: a part of a window, or a group.

Shapes: BH is B * H, and R is B, or 1 if all batch rows are alike because nothing is masked.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import ceil_div, take
from hf_efficient_attn.ops.causal import causal_block_partial, interval_attention, left_intervals, merge_query_subsets
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.exact import exact_attention
from hf_efficient_attn.ops.gather_attend import GatheredKeys, gathered_attention
from hf_efficient_attn.ops.partial import accumulation_dtype

# The logit of padding. It is finite, so that the softmax over a part that is all padding is defined.
_NO_TOKEN = -1e30


class Heads(NamedTuple):
    """Query (BH, Nq, D), key (BH, Nk, D), value (BH, Nk, Dv), and the proposal's W_q and W_k (BH, D, D) or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_map: Tensor | None
    key_map: Tensor | None


class Chunks(NamedTuple):
    """The tokens of chunks, cut out of the sequence.

    Attributes:
        query: (BH, C, P, D), the queries of each chunk, or (BH, C, D), their means.
        key: (BH, C, P, D).
        value: (BH, C, P, Dv).
        valid: bool (BH or 1, C, P), False for padding; None if there is no padding.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor | None


def summarize(chunks: Chunks, heads: Heads, noise: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The mean key and the estimated value beta_c(omega_c) of each chunk.

    Args:
        chunks: the tokens of C chunks.
        heads: gives the maps of the mean query and the mean key in mu.
        noise: (BH, C, D), standard normal, or None for omega = mu.
        scale: factor of the scores.

    Returns:
        (BH, C, D) and (BH, C, Dv) in the accumulation dtype; 0 for an empty chunk.
    """
    valid, acc_dtype, root = chunks.valid, accumulation_dtype(chunks.key.dtype), abs(scale) ** 0.5
    query, key, value = (x.to(acc_dtype) for x in chunks[:3])
    mean_query, mean_key = query if query.ndim == 3 else _mean(query, valid), _mean(key, valid)
    mu_query = mean_query if heads.query_map is None else mean_query @ heads.query_map.mT
    mu_key = mean_key if heads.key_map is None else mean_key @ heads.key_map.mT
    omega = ((-mu_query if scale < 0 else mu_query) + mu_key) * root
    omega = omega if noise is None else omega + noise.to(acc_dtype)
    # log xi(sqrt(scale) k, omega), both terms in one product.
    logits = (key * (omega.unsqueeze(2) * root - key * (0.5 * root * root))).sum(-1)
    if valid is not None:
        # The bias of an empty chunk is -inf. Equal logits keep its softmax and the gradient finite.
        logits = logits.masked_fill(~valid, torch.finfo(acc_dtype).min)
        value = value.masked_fill(~valid.unsqueeze(-1), 0.0)
    return mean_key, (logits.softmax(-1).unsqueeze(2) @ value).squeeze(2)


def _mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """Means over the valid tokens of chunks: (BH, C, P, D) -> (BH, C, D)."""
    if valid is None:
        return x.mean(2)
    return x.masked_fill(~valid.unsqueeze(-1), 0.0).sum(2) / valid.sum(2).clamp(min=1).unsqueeze(-1)


class WindowSizes(NamedTuple):
    """How the keys are cut into windows and chunks, as far as this depends on shapes alone.

    Attributes:
        kv_len: number of keys.
        window: keys of a window.
        num_windows: windows of the sequence.
        num_landmarks: largest number of chunks.
        level: a chunk is a group of 2**level windows if there are more windows than landmarks. Otherwise this is 0.
        per_window: chunks of a window; 1 if there are more windows than landmarks.
        num_chunks: chunks of the sequence. In a padded batch it is an upper bound.
        masked: whether there is a key mask, so that batch rows have different numbers of keys.
    """

    kv_len: int
    window: int
    num_windows: int
    num_landmarks: int
    level: int
    per_window: int
    num_chunks: int
    masked: bool

    def num_groups(self, level: int) -> int:
        """Number of groups of 2**level windows."""
        return ceil_div(self.num_windows, 1 << level)

    @property
    def summaries(self) -> list[int]:
        """Number of summaries: of the chunks, then of the groups of each level below theirs."""
        return [self.num_chunks, *(self.num_groups(level) for level in range(self.level))]


def window_sizes(kv_len: int, window_size: int, num_landmarks: int, masked: bool) -> WindowSizes:
    """The cut of `kv_len` keys into windows and at most `num_landmarks` chunks."""
    window, level = min(window_size, kv_len), 0
    num_windows = ceil_div(kv_len, window)
    while ceil_div(num_windows, 1 << level) > num_landmarks:
        level += 1
    per_window = min(window, max(1, num_landmarks // num_windows))
    num_chunks = min(num_landmarks, num_windows * window) if masked else per_window * ceil_div(num_windows, 1 << level)
    return WindowSizes(kv_len, window, num_windows, num_landmarks, level, per_window, num_chunks, masked)


class QueryBlocks(NamedTuple):
    """Queries cut into blocks, each of queries of one window of keys; for queries that are not the keys' own tokens.

    Attributes:
        block_q: queries of a block.
        window: int64 (R, S), the window of each of S blocks.
        query: int64 (R, S * block_q), the query in each slot. Slots that no query needs hold some other query.
        slot: int64 (R, Nq), the slot of each query.
        num_queries: int64 (R, 1), the number of valid queries.
    """

    block_q: int
    window: Tensor
    query: Tensor
    slot: Tensor
    num_queries: Tensor


def query_blocks(sizes: WindowSizes, num_keys: Tensor, num_queries: Tensor, q_len: int, masked: bool) -> QueryBlocks:
    """The blocks for `num_keys` (R, 1) valid keys and `num_queries` (R, 1) valid ones of `q_len` queries.

    `masked` tells whether there is a mask of the keys or of the queries.
    """
    device, window, num_windows = num_keys.device, sizes.window, sizes.num_windows
    first = _first_query(torch.arange(num_windows + 1, device=device) * window, num_keys, num_queries, up=True)
    if masked:
        # A window may have any number of queries. At most an eighth of the slots are unused if there are many queries,
        # and a third if smaller blocks would be slow because each of them gathers its keys.
        block_q = max(ceil_div(q_len, 8 * num_windows), min(64, ceil_div(q_len, num_windows)))
        num_blocks = ceil_div(q_len, block_q) + num_windows - 1
    else:
        block_q, num_blocks = ceil_div(window * q_len, sizes.kv_len), num_windows
    ends = ((first.diff(dim=1) + block_q - 1) // block_q).cumsum(1)  # of the blocks of each window
    starts = pad(ends, (1, 0))
    block = torch.arange(num_blocks, device=device).expand(ends.shape[0], -1).contiguous()
    block_window = torch.searchsorted(ends, block, right=True).clamp(max=num_windows - 1)
    index = first.gather(1, block_window) + (block - starts.gather(1, block_window)) * block_q
    index = (index[:, :, None] + torch.arange(block_q, device=device)).flatten(1).clamp(0, q_len - 1)
    query = torch.arange(q_len, device=device)
    own = (query * num_keys // num_queries.clamp(min=1) // window).clamp(max=num_windows - 1)
    slot = (starts.gather(1, own) * block_q + query - first.gather(1, own)).clamp(0, num_blocks * block_q - 1)
    return QueryBlocks(block_q, block_window, index, slot, num_queries)


def _first_query(position: Tensor, num_keys: Tensor, num_queries: Tensor, up: bool) -> Tensor:
    """Of m queries the one at a position p among n keys, p m / n rounded down or up: at most m."""
    product, num_keys = torch.minimum(position, num_keys) * num_queries, num_keys.clamp(min=1)
    return (product + num_keys - 1) // num_keys if up else product // num_keys


class WindowPlan(NamedTuple):
    """What each query sees and which tokens each chunk has. The first dimension is R, or BH in `window_attention`.

    Attributes:
        visible: int64 (R, S, K), the keys and summaries of each block of queries. Index Nk + c is summary c.
        bias: (R, S, K), added to the scores: 0 for a key, the log of the number of keys for a summary, -inf for what
            the block does not see.
        token: int64 (R, C, P), the tokens of each chunk.
        valid: bool (R, C, P), which of them are tokens of the chunk.
        start: int64 (R, C), first token of each chunk.
        stop: int64 (R, C), first token after each chunk.
        num_keys: int64 (R, 1), the number of valid keys.
        query: as in `QueryBlocks`. This and the following are None if the queries are the keys' own tokens.
        slot: as in `QueryBlocks`.
        num_queries: as in `QueryBlocks`.
    """

    visible: Tensor
    bias: Tensor
    token: Tensor
    valid: Tensor
    start: Tensor
    stop: Tensor
    num_keys: Tensor
    query: Tensor | None
    slot: Tensor | None
    num_queries: Tensor | None


def plan_windows(sizes: WindowSizes, num_keys: Tensor, blocks: QueryBlocks | None) -> WindowPlan:
    """The plan of the bidirectional form for `num_keys` (R, 1); the blocks are the windows unless they are given."""
    device, kv_len, window, level = num_keys.device, sizes.kv_len, sizes.window, sizes.level
    # A batch row with fewer keys is cut by its own number of keys.
    own_windows = ((num_keys + window - 1) // window).clamp(min=1)
    own_level = torch.zeros_like(num_keys)
    for i in range(level):
        own_level = own_level + ((own_windows + (1 << i) - 1) >> i > sizes.num_landmarks)
    per_window = (sizes.num_landmarks // own_windows).clamp(1, window)
    group_size = window << own_level
    chunk = torch.arange(sizes.num_chunks, device=device)
    first, part = chunk // per_window * group_size, chunk % per_window
    start = torch.minimum(first + part * group_size // per_window, num_keys)
    stop = torch.minimum(first + (part + 1) * group_size // per_window, num_keys)
    longest = ceil_div(window, sizes.per_window) << level
    position = start[..., None] + torch.arange(longest, device=device)
    # A block sees its own window, and the chunks outside its own group.
    own = (torch.arange(sizes.num_windows, device=device)[None] if blocks is None else blocks.window)[:, :, None]
    near = own * window + torch.arange(window, device=device)
    far = (kv_len + chunk).expand(*own.shape[:2], -1)
    outside = (chunk // per_window)[:, None] != own >> own_level[:, :, None]
    index = [near.clamp(max=kv_len - 1), far]
    bias = [_log(near < num_keys[:, :, None]), _log(outside, (stop - start)[:, None])]
    # Of its own group, it sees at each level the other half of the group of 2**(i + 1) windows.
    offset = kv_len + sizes.num_chunks
    for i in range(level):
        sibling = (own >> i) ^ 1
        count = (num_keys[:, :, None] - sibling * (window << i)).clamp(0, window << i)
        index.append(offset + sibling.clamp(max=sizes.num_groups(i) - 1))
        bias.append(_log((own_level > i)[:, :, None], count))
        offset += sizes.num_groups(i)
    batch = max(x.shape[0] for x in bias)
    return WindowPlan(
        torch.cat(index, 2),
        torch.cat([x.expand(batch, -1, -1) for x in bias], 2),
        position.clamp(max=kv_len - 1),
        position < stop[..., None],
        start,
        stop,
        num_keys,
        *((None,) * 3 if blocks is None else blocks[2:]),
    )


def kept_plan(sizes: WindowSizes, q_len: int | None, dtype: torch.dtype, device: torch.device) -> WindowPlan:
    """`plan_windows` without masks, made once; `q_len` is the number of queries that are not the keys' own tokens."""
    parts = [constant(_plan_part, i, sizes, q_len, dtype, device=device) for i in range(10 if q_len else 7)]
    return WindowPlan(*parts, *(() if q_len else (None,) * 3))


def _plan_part(part: int, sizes: WindowSizes, q_len: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    num_keys = torch.full((1, 1), sizes.kv_len, device=device)
    blocks = None if q_len is None else query_blocks(sizes, num_keys, torch.full_like(num_keys, q_len), q_len, False)
    found = plan_windows(sizes, num_keys, blocks)[part]
    assert found is not None
    return found.to(dtype) if found.is_floating_point() else found


def _log(seen: Tensor, count: Tensor | None = None) -> Tensor:
    """Log of `count`, by default 1, where it is positive and `seen`, else -inf."""
    weight = seen.double() if count is None else seen * count.double()
    return weight.log()


def window_attention(
    heads: Heads,
    tensors: Sequence[Tensor | None],
    *,
    sizes: WindowSizes,
    block_q: int,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """The bidirectional form: (BH, Nq, Dv).

    Args:
        heads: BH heads.
        tensors: the `WindowPlan` of these heads, then for each of `sizes.summaries` the standard normal numbers
            (BH, C, D), or None.
        sizes: the sizes of windows and chunks.
        block_q: queries of a block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
    """
    size = len(WindowPlan._fields)
    plan, noises = WindowPlan._make(tensors[:size]), tensors[size:]
    query, key, value = heads[:3]
    prefix = None
    if plan.num_queries is not None:
        # Sums of queries in float64, because the sum over a short chunk is a small difference of two long sums.
        prefix = pad(query.cumsum(1, dtype=torch.float64), (0, 0, 1, 0))

    def summary(
        cut: Callable[[Tensor], Tensor], start: Tensor, stop: Tensor, valid: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if prefix is None or plan.num_queries is None:
            queries = cut(query)
        else:
            first = _first_query(start, plan.num_keys, plan.num_queries, up=False)
            last = _first_query(stop, plan.num_keys, plan.num_queries, up=True)
            queries = (take(prefix, last) - take(prefix, first)) / (last - first).clamp(min=1).unsqueeze(2)
        return summarize(Chunks(queries, cut(key), cut(value), valid), heads, noise, scale)

    def summary_of_equal_parts(count: int, size: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        position = torch.arange(count * size, device=query.device).view(count, size)
        start, stop = (torch.minimum(x, plan.num_keys) for x in (position[:, 0], position[:, -1] + 1))
        return summary(lambda x: _equal_parts(x, count, size), start, stop, position < plan.num_keys[..., None], noise)

    has_equal_parts = not sizes.masked and sizes.window % sizes.per_window == 0
    if has_equal_parts and prefix is None and backend(query) != "cpu":
        summaries = [_summaries_by_window(heads, noises, sizes, scale)]
    else:
        if has_equal_parts:
            chunk_size = sizes.window // sizes.per_window << sizes.level
            summaries = [summary_of_equal_parts(sizes.num_chunks, chunk_size, noises[0])]
        else:
            summaries = [summary(lambda x: take(x, plan.token), plan.start, plan.stop, plan.valid, noises[0])]
        for level in range(sizes.level):
            summaries.append(summary_of_equal_parts(sizes.num_groups(level), sizes.window << level, noises[level + 1]))
    mean_keys, betas = zip(*summaries, strict=True)
    key = torch.cat((key, *(x.to(key.dtype) for x in mean_keys)), 1)
    value = torch.cat((value, *(x.to(value.dtype) for x in betas)), 1)
    bias = plan.bias[:, :, None].to(accumulation_dtype(key.dtype))
    gathered = GatheredKeys(plan.visible, bias, block_q)
    if plan.query is not None:
        # The keys that FLuRKA contracts have the accumulation dtype, whatever the dtype of the queries.
        query = take(query, plan.query).to(key.dtype)
    out = gathered_attention(query, key, value, gathered, scale=scale, dropout_p=dropout_p)
    return out if plan.slot is None else take(out, plan.slot)


def _equal_parts(x: Tensor, count: int, size: int) -> Tensor:
    """(BH, N, D) -> (BH, count, size, D), padded with zeros."""
    missing = count * size - x.shape[1]
    return (pad(x, (0, 0, 0, missing)) if missing else x).reshape(x.shape[0], count, size, -1)


def _summaries_by_window(
    heads: Heads, noises: Sequence[Tensor | None], sizes: WindowSizes, scale: float
) -> tuple[Tensor, Tensor]:
    """`summarize` for the chunks and the groups of all levels, in an order like `sizes.summaries`, in few operations.

    The keys are read once. The xi of a group is the merge of those of its windows, each relative to omega of the group.
    """
    acc_dtype, root, level = accumulation_dtype(heads.key.dtype), abs(scale) ** 0.5, sizes.level
    count, size = sizes.num_windows * sizes.per_window, sizes.window // sizes.per_window
    query, key, value = (_equal_parts(x, count, size) for x in heads[:3])
    sums = [torch.cat((query.sum(2, dtype=acc_dtype), key.sum(2, dtype=acc_dtype)))]
    for _ in range(level):
        sums.append(_groups(sums[-1], 2, 0.0).sum(2))
    share, of_part, padding = (
        constant(make, sizes, acc_dtype, device=key.device)
        for make in (_shares_of_means, _summaries_of_parts, _padding)
    )
    mean_query, mean_key = (torch.cat((sums[level], *sums[:level]), 1) * share).chunk(2)
    mu_query = mean_query if heads.query_map is None else mean_query @ heads.query_map.mT
    mu_key = mean_key if heads.key_map is None else mean_key @ heads.key_map.mT
    mu = mu_key - mu_query if scale < 0 else mu_key + mu_query
    noise = [x.to(acc_dtype) for x in noises if x is not None]
    omega = torch.add(torch.cat(noise, 1) if level else noise[0], mu, alpha=root) if noise else mu * root
    own = omega.index_select(1, of_part) if level else omega
    key = key.to(acc_dtype).flatten(0, 1)
    squares = torch.linalg.vector_norm(key, dim=2).square()
    if count * size > sizes.kv_len:
        squares = (squares.view(-1, count, size) + padding).flatten(0, 1)
    omega = own.reshape(len(key), level + 1, -1)
    logits = torch.baddbmm(squares.unsqueeze(1), omega, key.mT, beta=-0.5 * abs(scale), alpha=root)
    out = torch.bmm(logits.softmax(2).to(value.dtype), value.flatten(0, 1))
    if not level:
        return mean_key, out.view(-1, count, value.shape[3])
    lse, out = (x.unflatten(0, (-1, count)) for x in (logits.logsumexp(2), out))
    betas = [out[:, :, 0]]
    for i in range(1, level + 1):
        weights = _groups(lse[:, :, i, None], 1 << i, _NO_TOKEN).softmax(2)
        betas.append((weights * _groups(out[:, :, i], 1 << i, 0.0)).sum(2))
    return mean_key, torch.cat((betas[level], *betas[:level]), 1)


def _groups(x: Tensor, size: int, fill: float) -> Tensor:
    """(BH, T, D) -> (BH, G, size, D), padded with `fill`."""
    missing = -x.shape[1] % size
    x = pad(x, (0, 0, 0, missing), value=fill) if missing else x
    groups: Tensor = x.unflatten(1, (-1, size))
    return groups


def _shares_of_means(sizes: WindowSizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 / (number of tokens) of the chunks and of the groups of each level: (C, 1)."""
    size = sizes.window // sizes.per_window
    counts = []
    for number, tokens in [(sizes.num_chunks, size << sizes.level)] + [
        (sizes.num_groups(i), sizes.window << i) for i in range(sizes.level)
    ]:
        counts.append((sizes.kv_len - torch.arange(number, device=device) * tokens).clamp(1, tokens))
    return 1.0 / torch.cat(counts).to(dtype).unsqueeze(1)


def _summaries_of_parts(sizes: WindowSizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each window its group of level 0, 1, ..., as an index of all summaries: int64 (T * levels,)."""
    window = torch.arange(sizes.num_windows * sizes.per_window, device=device)
    first, index = sizes.num_chunks, []
    for level in range(sizes.level):
        index.append(first + (window >> level))
        first += sizes.num_groups(level)
    return torch.stack([*index, window >> sizes.level], 1).flatten()


def _padding(sizes: WindowSizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to the squared norms of tokens: 0, or a very large number for padding: (T, P)."""
    count, size = sizes.num_windows * sizes.per_window, sizes.window // sizes.per_window
    padded = torch.arange(count * size, device=device).view(count, size) >= sizes.kv_len
    return torch.zeros(count, size, dtype=dtype, device=device).masked_fill_(padded, -_NO_TOKEN)


class IntervalChunks(NamedTuple):
    """The chunks of the causal form on one level of intervals; see `hf_efficient_attn.ops.causal`.

    Attributes:
        num_intervals: intervals of this level.
        interval: tokens of an interval.
        chunk: tokens of a chunk; the last one of an interval may have fewer.
    """

    num_intervals: int
    interval: int
    chunk: int

    @property
    def num_chunks(self) -> int:
        """Chunks of an interval."""
        return ceil_div(self.interval, self.chunk)


def plan_interval_chunks(length: int, block: int, max_chunks: int) -> list[IntervalChunks]:
    """The intervals of 1, 2, 4, ... blocks of `block` tokens, each cut into at most `max_chunks` equal chunks."""
    completed = max(0, ceil_div(length, block) - 2)
    plan = []
    for level in range(completed.bit_length()):
        interval = block << level
        chunk = ceil_div(interval, min(interval, max_chunks))
        plan.append(IntervalChunks(((completed >> level) + 1) >> 1, interval, chunk))
    return plan


def causal_summary_attention(
    heads: Heads,
    noises: Sequence[Tensor | None],
    *,
    plan: Sequence[IntervalChunks],
    block: int,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """The causal form for sequences of valid tokens: (BH, N, Dv).

    Args:
        heads: BH heads with Nq = Nk = N.
        noises: for each level the standard normal numbers (BH, C, D), or None. A query sees one interval per level, so
            the intervals of a level share their numbers.
        plan: the levels of intervals.
        block: tokens of a block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
    """
    query, key, value = heads[:3]
    first_block = exact_attention(
        query[:, :block], key[:, :block], value[:, :block], is_causal=True, scale=scale, dropout_p=dropout_p
    )
    if query.shape[1] <= block:
        return first_block
    parts = [(slice(None), causal_block_partial(query, key, value, block, scale=scale, dropout_p=dropout_p))]
    for level, noise in zip(plan, noises, strict=True):
        (count, interval, chunk), num_chunks = level, level.num_chunks
        position = torch.arange(num_chunks * chunk, device=query.device).view(num_chunks, chunk)
        padding = num_chunks * chunk - interval
        valid = (position < interval).expand(1, count, -1, -1).flatten(1, 2) if padding else None
        queries, keys, values = (
            pad(left_intervals(x, count, interval), (0, 0, 0, padding)).reshape(
                x.shape[0], count * num_chunks, chunk, -1
            )
            for x in (query, key, value)
        )
        if chunk == 1:
            keys, values = keys[:, :, 0], values[:, :, 0]
        else:
            noise = None if noise is None else noise[:, None].expand(-1, count, -1, -1).flatten(1, 2)
            keys, values = summarize(Chunks(queries, keys, values, valid), heads, noise, scale)
        keys, values = (x.to(y.dtype).unflatten(1, (count, num_chunks)) for x, y in ((keys, key), (values, value)))
        bias = (position < interval).sum(1).to(accumulation_dtype(key.dtype)).log()[None, None, None]
        parts += interval_attention(query[:, block:], keys, values, bias, interval, scale=scale, dropout_p=dropout_p)
    return torch.cat((first_block, merge_query_subsets(parts)), 1)
