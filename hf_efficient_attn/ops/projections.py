"""Learned projections along the sequence: tables (P, M) that contract up to M tokens to P rows.

The tables are those of the Linformer (Wang et al. 2020, arXiv 2006.04768, Eq. 7), whose sequences all have M tokens.
For others:

- Tokens that are not there carry no weight, and those that are there are counted from the first one: n of them take the
  first n columns, wherever the padding stands.
- n < M: rows are scaled up for the columns that are missing. A row e of one sign is a weighted average of tokens, and
  is divided by the part of its weight that is left, |e|_1 of the n columns over that of all M. A row of mixed signs, as
  drawn from a Gaussian, has terms that add up like random ones; what is kept is its Euclidean norm. In between, the
  factor is (the first)^c (the second)^(1-c) with c = |sum e| / |e|_1, which is 1 for rows of one sign and near 0 for a
  Gaussian's. With n = M it is 1: the paper's product.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.blocks import chunked_over_heads, take, valid_first
from hf_efficient_attn.ops.landmarks import segment_sizes
from hf_efficient_attn.ops.random import normal

# Of keys and of values, as learned parameters.
NAMES = ("key_projection", "value_projection")
# Where both have one table, that of the keys is also the values'.
STARTS_FROM = {NAMES[1]: NAMES[0]}


def start_tables(count: int, length: int, init: str, seed: int, streams: Sequence[int]) -> dict[str, Tensor]:
    """The tables for keys and, with a second stream of random numbers, for values; see `start_table`."""
    names = NAMES[: len(streams)]
    if init == "means":  # the same for both
        return dict.fromkeys(names, start_table(count, length, init, 0, 0))
    return {name: start_table(count, length, init, seed, s) for name, s in zip(names, streams, strict=True)}


def projection_tables(method: str, count: int, columns: int, parameters: dict[str, Tensor]) -> list[Tensor]:
    """The tables (count, M) for keys and for values, M at least `columns`; the second is the first unless it is given.

    Raises:
        UnsupportedAttentionError: one of another shape.
    """
    found = {NAMES[0]: parameters[NAMES[0]], NAMES[1]: parameters.get(NAMES[1], parameters[NAMES[0]])}
    return [check_table(method, name, x, count, columns) for name, x in found.items()]


def start_table(count: int, length: int, init: str, seed: int, stream: int) -> Tensor:
    """Where a table starts: float32 (count, length).

    Args:
        init: "means": averages of `count` segments of the tokens. "gaussian": normal numbers of variance 1 / count, of
            which column j is the same for every length.
    """
    if init == "gaussian":
        numbers = normal((length, count), seed, stream, torch.device("cpu"))
        return (numbers.t() * count**-0.5).to(torch.float32).contiguous()
    sizes = segment_sizes(torch.tensor(length), count)
    ends = sizes.cumsum(0)[:, None]
    place = torch.arange(length)
    inside = (place < ends) & (place >= ends - sizes[:, None])
    return inside / sizes.clamp(min=1)[:, None]


def check_table(method: str, name: str, table: Tensor, count: int, columns: int) -> Tensor:
    """`table`, if it is (count, columns or more).

    Raises:
        UnsupportedAttentionError: it is not.
    """
    if table.ndim != 2 or table.shape[0] != count:
        raise UnsupportedAttentionError(
            f"{method}: {name} {tuple(table.shape)} does not suit projection_dim={count}; give a tensor "
            "(projection_dim, max_length)"
        )
    if table.shape[1] < columns:
        raise UnsupportedAttentionError(
            f"{method}: {columns} keys are more than the {table.shape[1]} that {name} has columns for; make the "
            f"tables with max_length={columns} or more, or cut the input"
        )
    return table


class Contraction(NamedTuple):
    """One table at work on the tokens that are there.

    table: (P, N), the columns that tokens may take.
    order: int64 (B, N), which tokens take the columns one after the other; None where all do in their own order.
    tokens: int64 (B or 1,), how many there are.
    factor: (B or 1, P), what the rows are multiplied with.
    shown: bool (B or 1, P), whether the rows have weight at any token that is there.
    """

    table: Tensor
    order: Tensor | None
    tokens: Tensor
    factor: Tensor
    shown: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """E x: x (B, H, N, D) -> (B, H, P, D) in the table's type; x is 0 at tokens that are not there."""
        batch, heads = x.shape[:2]
        order = None if self.order is None else self.order.repeat_interleave(heads, 0)

        def some_heads(x, order):
            x = x if order is None else take(x, order)
            return self.table @ x.to(self.table.dtype)

        rows = chunked_over_heads(some_heads, x.flatten(0, 1), order).unflatten(0, (batch, heads))
        return rows * self.factor[:, None, :, None]

    def sums(self) -> Tensor:
        """E 1: what a constant that all tokens have is multiplied with in the rows: (B or 1, P)."""
        place = torch.arange(self.table.shape[1], device=self.table.device)
        there = (place[:, None] < self.tokens).to(self.table.dtype)
        return (self.table @ there).t() * self.factor


def contractions(tables: Sequence[Tensor], mask: Tensor | None, columns: int, dtype: torch.dtype) -> list[Contraction]:
    """`contraction` of both tables, one and the same object where they are."""
    first = contraction(tables[0], mask, columns, dtype)
    return [first, first if tables[1] is tables[0] else contraction(tables[1], mask, columns, dtype)]


def projected_key_mask(both: Sequence[Contraction], batch: int) -> Tensor:
    """Bool (batch, P): the rows that have weight in both tables."""
    return (both[0].shown & both[1].shown).expand(batch, -1)


def contraction(table: Tensor, mask: Tensor | None, columns: int, dtype: torch.dtype) -> Contraction:
    """What the tokens that are there make of a table (P, M): mask bool (B, columns), or None where all are there.

    Args:
        dtype: type of the products.
    """
    table = table.to(dtype)
    order = None if mask is None else valid_first(mask)
    tokens = torch.tensor([columns], device=table.device) if mask is None else mask.sum(1)
    if mask is None and table.shape[1] == columns:
        factor, shown = table.new_ones(1, table.shape[0]), (table != 0).any(1)[None]
    else:
        factor, shown = _factors(table, tokens)
    return Contraction(table[:, :columns], order, tokens, factor, shown)


def _factors(table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the rows of n tokens are multiplied with, and whether they have weight: (P, M), (B,) -> (B, P)."""
    first = (torch.arange(table.shape[1], device=table.device)[:, None] < tokens).to(table.dtype)
    size = table.abs()
    total, part = size.sum(1), (size @ first).t()
    square = table.square()
    total_square, part_square = square.sum(1), (square @ first).t()
    shown = part > 0

    def ratio(whole: Tensor, left: Tensor) -> Tensor:
        return torch.where(shown, whole, 1.0) / torch.where(shown, left, 1.0)

    one_sign = table.sum(1).abs() / total.masked_fill(total == 0, 1.0)
    return ratio(total, part) ** one_sign * ratio(total_square, part_square) ** (0.5 - 0.5 * one_sign), shown


def naive_projection(table: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Readable form for one row of a batch, of tokens that are all there: x (H, n, D) -> (H, P, D), bool (P,)."""
    part = table[:, : x.shape[1]]
    shown = (part != 0).any(1)
    whole, part = table[shown], part[shown]
    weight = whole.abs().sum(1) / part.abs().sum(1)
    norm = whole.norm(dim=1) / part.norm(dim=1)
    one_sign = whole.sum(1).abs() / whole.abs().sum(1)
    rows = x.new_zeros(x.shape[0], table.shape[0], x.shape[2])
    rows[:, shown] = part * (weight**one_sign * norm ** (1 - one_sign))[:, None] @ x
    return rows, shown
