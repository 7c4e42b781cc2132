"""The causal form of EVA on accelerators, in a number of launches that does not grow with the length.

It computes what `hf_efficient_attn.ops.interval_summaries` describes, in other steps:

- Summaries of several levels of intervals are one call of attention: omega of every chunk in a range of tokens attends
  to these tokens, with a constant mask of the pairs in which the chunk contains the token. -|k|^2 / 2 is a dimension of
  the keys (see `hf_efficient_attn.ops.bias_columns`), and so is the log of the number of keys of a summary.
- Levels l, l + 1, ... have queries in blocks of 2**l blocks, which see the same intervals of all these levels. Each
  block gathers its summaries. A level that a block does not see is replaced by a key without weight.
- The own block and the block before it are attended to by pairs of blocks 2 i - 1 and 2 i, whose three blocks of keys
  are a view. The interval of one block that block 2 i also sees is among them.

The queries begin with so many blocks of padding that the blocks of all levels begin at multiples of their size.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.bias_columns import most_negative, padded_dim, with_square
from hf_efficient_attn.ops.blocks import ceil_div, take
from hf_efficient_attn.ops.chunk_summaries import Heads
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.fused_attention import bias_columns, column_unit
from hf_efficient_attn.ops.merged_attention import Part, empty_score, merged_attention, needs_gradient
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention

# Two dimensions for -|k|^2 / 2 and two for the log-weight of a key.
_COLUMNS = 4
# Levels whose summaries are one call: its queries are up to 2**7 - 1 chunks of a range of tokens, and each has a score
# for every token of the range. A range has at least so many tokens, if the sequence has.
_MAX_LEVELS, _LEAST_RANGE = 7, 64
# Blocks of queries of a level from which on it begins a new group of levels, because the padding is one such block.
_LEAST_BLOCKS = 16


class Levels(NamedTuple):
    """Levels of intervals that queries see together, in blocks of 2**first blocks.

    Attributes:
        first: the lowest level.
        stop: the level after the highest.
        chunk: tokens of a chunk on the lowest level. It doubles from level to level.
    """

    first: int
    stop: int
    chunk: int


class IntervalSizes(NamedTuple):
    """How a sequence is cut, as far as this depends on shapes alone.

    Attributes:
        length: N.
        block: tokens of a block.
        chunks: summaries of an interval.
        groups: the levels with summaries.
        with_level_0: whether the intervals of one block have no summaries, but are seen exactly.
        front: blocks of padding before the first block of keys; the queries have one less.
        num_blocks: blocks of queries with padding.
    """

    length: int
    block: int
    chunks: int
    groups: tuple[Levels, ...]
    with_level_0: bool
    front: int
    num_blocks: int

    @property
    def padded(self) -> int:
        """Tokens with padding at the end, a multiple of the largest range of `_stages`."""
        largest = max(stage.size for levels in self.groups for stage in _stages(self, levels))
        return ceil_div(self.length, largest) * largest


def interval_sizes(length: int, block: int, chunks: int) -> IntervalSizes | None:
    """The sizes, or None if chunks have different sizes or there are none: then `causal_summary_attention` is needed.

    This form needs blocks of 1, 2, 4, ... times `chunks` tokens, and more than two of them.
    """
    total, ratio = ceil_div(length, block), block // chunks
    if total < 4 or block % chunks or ratio & (ratio - 1):
        return None
    levels = (total - 2).bit_length()
    first, groups = int(ratio == 1), []
    while first < levels:
        # About as many summaries for each block of queries as it has queries.
        stop = first + max(1, (block << first) // chunks)
        if levels - stop > _MAX_LEVELS and (levels - stop) % _MAX_LEVELS == 1:
            stop += 1  # the rest is one call less
        stop = levels if stop > levels or _LEAST_BLOCKS << stop > total else stop
        groups.append(Levels(first, stop, ratio << first))
        first = stop
    front = 1 << max(1, groups[-1].first)
    num_blocks = -(-(total + front - 1) // front) * front
    return IntervalSizes(length, block, chunks, tuple(groups), ratio == 1, front, num_blocks)


class _Stage(NamedTuple):
    """Chunks of `sizes` sizes from `chunk` on, in ranges of `size` tokens."""

    chunk: int
    sizes: int
    size: int

    @property
    def rows(self) -> list[int]:
        """The chunks of each size in a range."""
        return [self.size // (self.chunk << i) for i in range(self.sizes)]


def _stages(sizes: IntervalSizes, levels: Levels) -> list[_Stage]:
    stages = []
    for first in range(levels.first, levels.stop, _MAX_LEVELS):
        count, chunk = min(_MAX_LEVELS, levels.stop - first), levels.chunk << (first - levels.first)
        least = 1 << (min(_LEAST_RANGE, sizes.length).bit_length() - 1)
        stages.append(_Stage(chunk, count, max(chunk << (count - 1), least // chunk * chunk)))
    return stages


def interval_level_attention(
    heads: Heads, noises: Sequence[Tensor | None], *, sizes: IntervalSizes, scale: float, dropout_p: float
) -> Tensor:
    """The causal form for sequences of valid tokens: (BH, N, Dv).

    Args:
        heads: BH heads with Nq = Nk = N.
        noises: for each level the standard normal numbers (BH, C, D), or None.
        sizes: from `interval_sizes`.
        scale: factor of the scores, not 0.
        dropout_p: probability of dropping a weight.
    """
    query, key, value = heads[:3]
    (_, length, head_dim), value_dim, dtype, device = key.shape, value.shape[2], key.dtype, key.device
    block, dim = sizes.block, padded_dim(key.shape[2], value.shape[2], _COLUMNS)
    start, padded = sizes.front * block, sizes.padded
    stop = max(start + padded, (sizes.num_blocks + 1) * block)
    padding = start, stop - start - length
    exclusion = constant(_excluded_front, start, dim - head_dim - 2, dtype, device=device)
    exclusion = pad(exclusion, (0, 0, 0, stop - start))
    root = abs(scale) ** 0.5
    factor = -0.5 * root / column_unit(dtype, root)
    keys = with_square(pad(key, (0, 0, *padding)), factor, 0.0, exclusion[0, 0, :0], exclusion)
    tokens = [pad(x, (0, 0, 0, padded - length)) if padded > length else x for x in (query, key)]
    columns = constant(_query_columns, dim - head_dim, dtype, scale, device=device)
    front = (sizes.front - 1) * block
    queries = pad(query, (0, 0, front, sizes.num_blocks * block - length - front))
    queries = torch.cat((queries, columns.expand(*queries.shape[:2], -1)), 2)

    def padded_values() -> Tensor:
        return pad(value, (0, dim - value_dim, *padding))

    def parts() -> Iterator[Part]:
        for levels in sizes.groups:
            table = _Table(sizes, levels, dim, scale)
            own = *tokens, *(x[:, start : start + padded] for x in (keys, padded_values()))
            rows = table.rows(heads, own, noises)
            del own
            index = constant(_seen_rows, sizes, levels, device=device).expand(len(query), -1, -1)
            size = block << levels.first
            yield Part(queries.unflatten(1, (-1, size)), take(rows[0], index), take(rows[1], index))
            del rows
        bias = constant(_near_bias, block, sizes.with_level_0, dtype, device=device)
        count = sizes.num_blocks // 2
        near = [x.unfold(1, 3 * block, 2 * block)[:, :count].transpose(2, 3) for x in (keys, padded_values())]
        yield Part(queries.unflatten(1, (-1, 2 * block)), near[0], near[1], bias)

    needs_grad = needs_gradient(*(x for x in heads if x is not None))
    out = merged_attention(parts(), scale=scale, needs_grad=needs_grad, dropout_p=dropout_p)
    return out[:, front : front + length, :value_dim]


class _Table(NamedTuple):
    """The summaries of some levels, as keys and values with further dimensions."""

    sizes: IntervalSizes
    levels: Levels
    dim: int
    scale: float

    def rows(self, heads: Heads, tokens: tuple[Tensor, ...], noises: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Keys and values (BH, C + 1, dim); the last key has no weight.

        Args:
            heads: gives the maps of the mean query and the mean key.
            tokens: queries and keys (BH, N', D), and keys and values (BH, N', dim), with padding at the end.
            noises: of all levels.
        """
        key = tokens[2]
        keys, values, first = [], [], self.levels.first
        for stage in _stages(self.sizes, self.levels):
            own = noises[first : first + stage.sizes]
            mean, beta = self._stage(stage, heads, tokens, own)
            keys.append(mean)
            values.append(beta)
            first += stage.sizes
        nothing = constant(_nothing, heads.key.shape[2], self.dim, key.dtype, device=key.device)
        nothing = nothing.expand(len(key), -1, -1)
        return torch.cat((*keys, nothing), 1), torch.cat((*values, nothing.new_zeros(()).expand(nothing.shape)), 1)

    def _stage(
        self, stage: _Stage, heads: Heads, tokens: tuple[Tensor, ...], noises: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        head_dim, dtype, device = heads.key.shape[2], tokens[0].dtype, tokens[0].device
        root, count = abs(self.scale) ** 0.5, self.sizes.padded // stage.size
        query, plain_key, key, value = (x.unflatten(1, (count, stage.size)) for x in tokens)
        shares = constant(_shares, stage, dtype, device=device)
        mean_key = shares @ plain_key  # (BH, T, rows, D)
        omega = self._omega(stage, heads, shares @ query, mean_key, noises).to(dtype)
        columns = constant(_omega_columns, self.dim - head_dim, dtype, root, device=device)
        omega = torch.cat((omega, columns.expand(*omega.shape[:3], -1)), 3)
        bias = constant(_chunk_bias, stage, dtype, device=device)
        beta = partial_attention(omega, key, value, bias, scale=root, finite_bias=True).out
        del omega
        counts = constant(_count_columns, stage, self.dim - head_dim, dtype, self.scale, device=device)
        mean_key = torch.cat((mean_key, counts.expand(*mean_key.shape[:2], -1, -1)), 3)
        return mean_key.flatten(1, 2), beta.flatten(1, 2)

    def _omega(
        self, stage: _Stage, heads: Heads, query: Tensor, key: Tensor, noises: Sequence[Tensor | None]
    ) -> Tensor:
        """Omega of the chunks with mean queries and keys (BH, T, rows, D) each: the same shape."""
        root, chunks = abs(self.scale) ** 0.5, self.sizes.chunks
        query = query if heads.query_map is None else _mapped(query, heads.query_map)
        key = key if heads.key_map is None else _mapped(key, heads.key_map)
        mu: Tensor = key - query if self.scale < 0 else key + query
        if noises[0] is None:
            omega: Tensor = mu * root
            return omega
        # A chunk has the draw of its index in its interval. So the draws repeat after at most `chunks` ranges.
        count, period = mu.shape[1], min(mu.shape[1], chunks)
        period = count if count % period else period
        index = constant(_draws, stage, period, chunks, device=mu.device)
        noise = torch.cat([x for x in noises if x is not None], 1).index_select(1, index)
        noise = noise.view(len(mu), 1, period, -1, mu.shape[3])
        omega = torch.add(noise, mu.unflatten(1, (-1, period)), alpha=root).flatten(1, 2)
        return omega


def _mapped(x: Tensor, weight: Tensor) -> Tensor:
    """X (BH, T, rows, D) times the transpose of a matrix (BH, D, D) in the accumulation dtype."""
    mapped: Tensor = x.flatten(1, 2).to(weight.dtype) @ weight.mT
    return mapped.view(x.shape)


def _chunk_of_tokens(stage: _Stage, device: torch.device) -> Tensor:
    """Whether each chunk of a range contains each of its tokens: bool (rows, size)."""
    token, inside = torch.arange(stage.size, device=device), []
    for i, rows in enumerate(stage.rows):
        inside.append(token // (stage.chunk << i) == torch.arange(rows, device=device)[:, None])
    return torch.cat(inside)


def _shares(stage: _Stage, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The weights of the means: (rows, size)."""
    inside = _chunk_of_tokens(stage, device).double()
    return (inside / inside.sum(1, keepdim=True)).to(dtype)


def _chunk_bias(stage: _Stage, dtype: torch.dtype, device: torch.device) -> Tensor:
    excluded = ~_chunk_of_tokens(stage, device)[None, None]
    return torch.zeros(excluded.shape, dtype=dtype, device=device).masked_fill_(excluded, empty_score(dtype))


def _draws(stage: _Stage, ranges: int, chunks: int, device: torch.device) -> Tensor:
    """For each chunk of some ranges the index of its draw among those of all levels: int64 (ranges * rows,)."""
    index = [
        torch.arange(ranges * rows, device=device).view(ranges, rows) % chunks + i * chunks
        for i, rows in enumerate(stage.rows)
    ]
    return torch.cat(index, 1).flatten()


def _seen_rows(sizes: IntervalSizes, levels: Levels, device: torch.device) -> Tensor:
    """The summaries that each block of queries sees, as rows of the table of the levels: int64 (1, T, K)."""
    stages = _stages(sizes, levels)
    ranges = [sizes.padded // stage.size for stage in stages]
    nothing = sum(n * sum(stage.rows) for n, stage in zip(ranges, stages, strict=True))
    block = torch.arange(sizes.num_blocks >> levels.first, device=device) - (sizes.front >> levels.first)
    part, seen, before, level = torch.arange(sizes.chunks, device=device), [], 0, levels.first
    for stage, count in zip(stages, ranges, strict=True):
        offset = before
        for rows in stage.rows:
            completed = block >> (level - levels.first)
            chunk = (completed - 1)[:, None] * sizes.chunks + part
            row = chunk // rows * sum(stage.rows) + chunk % rows + offset
            # Blocks of padding at the end would see intervals of padding.
            is_inside = completed * (sizes.block << level) <= sizes.length
            is_seen = ((block >= 0) & (completed % 2 == 1) & is_inside)[:, None]
            seen.append(torch.where(is_seen, row, nothing))
            offset, level = offset + rows, level + 1
        before += count * sum(stage.rows)
    return torch.cat(seen, 1)[None]


def _nothing(head_dim: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A key without weight: (1, 1, dim)."""
    row = torch.zeros(1, 1, dim, dtype=dtype, device=device)
    row[..., head_dim + 2] = most_negative(dtype)
    return row


def _excluded_front(count: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The log-weights of the padding before the tokens: (1, count, columns)."""
    found = torch.zeros(1, count, columns, dtype=dtype, device=device)
    found[..., 0] = most_negative(dtype)
    return found


def _query_columns(columns: int, dtype: torch.dtype, scale: float, device: torch.device) -> Tensor:
    found = torch.zeros(columns, dtype=dtype, device=device)
    found[2:4] = column_unit(dtype, scale)
    return found


def _omega_columns(columns: int, dtype: torch.dtype, root: float, device: torch.device) -> Tensor:
    found = torch.zeros(columns, dtype=dtype, device=device)
    found[:2] = column_unit(dtype, root)
    return found


def _count_columns(stage: _Stage, columns: int, dtype: torch.dtype, scale: float, device: torch.device) -> Tensor:
    """The log of the number of keys of each chunk of a range: (1, rows, columns)."""
    counts = torch.cat([torch.full((n,), stage.chunk << i, device=device) for i, n in enumerate(stage.rows)])
    found = bias_columns(counts.to(accumulation_dtype(dtype)).log()[None], dtype, scale)[0]
    return pad(found, (2, columns - 4))


def _near_bias(block: int, with_level_0: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The bias of two blocks of queries for the block before them and their own: (1, 1, 2 S, 3 S)."""
    query = torch.arange(2 * block, device=device)[:, None] + block
    key = torch.arange(3 * block, device=device)
    excluded = key > query
    if not with_level_0:
        excluded = excluded | (key // block < query // block - 1)
    return torch.zeros(1, 1, *excluded.shape, dtype=dtype, device=device).masked_fill_(excluded, empty_score(dtype))
