"""The windows and chunks of EVA: which keys a query sees exactly, and which tokens a summary represents.

A window is a set of consecutive keys that a query sees exactly, a group is 2**level consecutive windows, and a chunk is
what one summary represents: a part of a window, or a group. Shapes: R is B, or 1 if all batch rows are alike because
nothing is masked.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.constants import constant


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
    first = first_query(torch.arange(num_windows + 1, device=device) * window, num_keys, num_queries, up=True)
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


def first_query(position: Tensor, num_keys: Tensor, num_queries: Tensor, up: bool) -> Tensor:
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
