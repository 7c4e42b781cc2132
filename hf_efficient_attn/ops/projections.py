"""Learned projections along the sequence: tables (P, M) that contract up to M tokens to P projected keys or values.

The tables are those of Linformer (Wang et al. 2020, arXiv 2006.04768, Eq. 7), in which all sequences have M tokens. For
other sequences:

- Masked tokens have no weight, and the valid ones are counted from the first. With n of them, they use the first n
  columns of a table, wherever the padding is.
- If n < M, each row of a table is multiplied with a factor for the missing columns. A row e of one sign is a weighted
  average of tokens, so it is divided by the share of its weight that remains, |e|_1 of the n columns over that of all M
  columns. A row of mixed signs, such as a Gaussian one, sums terms that behave like random ones, so its Euclidean norm
  is preserved. In between, the factor is (the first)^c (the second)^(1-c) with c = |sum e| / |e|_1, which is 1 for rows
  of one sign and close to 0 for Gaussian ones. With n = M the factor is 1 and the product is that of the paper.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.blocks import chunked_over_heads, take, valid_first
from hf_efficient_attn.ops.constants import integers
from hf_efficient_attn.ops.export import is_compiling
from hf_efficient_attn.ops.landmarks import segment_sizes
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import normal

# Names of the tables of keys and of values as learned parameters.
NAMES = ("key_projection", "value_projection")
# If a checkpoint shares one table, that of the keys also becomes that of the values.
STARTS_FROM = {NAMES[1]: NAMES[0]}


def start_tables(
    projection_dim: int, max_length: int, init: str, seed: int, streams: Sequence[int]
) -> dict[str, Tensor]:
    """The initial tables of keys and, with a second stream of random numbers, of values; see `start_table`."""
    names = NAMES[: len(streams)]
    if init == "means":  # the same for both
        return dict.fromkeys(names, start_table(projection_dim, max_length, init, 0, 0))
    return {
        name: start_table(projection_dim, max_length, init, seed, stream)
        for name, stream in zip(names, streams, strict=True)
    }


def projection_tables(method: str, projection_dim: int, kv_len: int, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The tables (P, M) of keys and of values. The second is the first unless it is given.

    Raises:
        UnsupportedAttentionError: a table has another shape, or M is less than `kv_len`.
    """
    tables = {NAMES[0]: parameters[NAMES[0]], NAMES[1]: parameters.get(NAMES[1], parameters[NAMES[0]])}
    return [check_table(method, name, table, projection_dim, kv_len) for name, table in tables.items()]


def start_table(projection_dim: int, max_length: int, init: str, seed: int, stream: int) -> Tensor:
    """The initial values of a table: float32 (P, M).

    Args:
        projection_dim: P.
        max_length: M.
        init: "means": averages of P segments of the tokens. "gaussian": normal numbers of variance 1 / P, in which
            column j is the same for every M.
        seed: seed of the Gaussian numbers.
        stream: distinguishes the uses of one seed.
    """
    if init == "gaussian":
        numbers = normal((max_length, projection_dim), seed, stream, torch.device("cpu"))
        return torch.mul(numbers.t(), projection_dim**-0.5).to(torch.float32).contiguous()
    sizes = segment_sizes(torch.tensor(max_length), projection_dim)
    ends = sizes.cumsum(0)[:, None]
    position = torch.arange(max_length)
    inside = (position < ends) & (position >= ends - sizes[:, None])
    return torch.div(inside, sizes.clamp(min=1)[:, None])


def check_table(method: str, name: str, table: Tensor, projection_dim: int, kv_len: int) -> Tensor:
    """Return the table if its shape is (projection_dim, kv_len or more).

    Raises:
        UnsupportedAttentionError: it is not.
    """
    if table.ndim != 2 or table.shape[0] != projection_dim:
        raise UnsupportedAttentionError(
            f"{method}: {name} {tuple(table.shape)} does not suit projection_dim={projection_dim}; give a tensor "
            "(projection_dim, max_length)"
        )
    if table.shape[1] < kv_len:
        raise UnsupportedAttentionError(
            f"{method}: {kv_len} keys are more than the {table.shape[1]} that {name} has columns for; make the "
            f"tables with max_length={kv_len} or more, or cut the input"
        )
    return table


class Contraction(NamedTuple):
    """A table, applied to the valid tokens of a batch.

    Attributes:
        table: (P, N), the columns that tokens may use, in the dtype of products.
        order: int64 (B, N), the order in which tokens use the columns, or None for the order of the positions.
        num_tokens: int64 (B or 1,), the number of valid tokens, or None if it is M.
        factor: (B or 1, P), with which the rows are multiplied, in the accumulation dtype, or None for 1.
        valid: bool (B or 1, P), whether a row has weight at any valid token.
    """

    table: Tensor
    order: Tensor | None
    num_tokens: Tensor | None
    factor: Tensor | None
    valid: Tensor

    def project(self, x: Tensor) -> Tensor:
        """E x: (B, H, N, D) -> (B, H, P, D) in the dtype of the table. x must be 0 at masked tokens."""
        batch, num_heads = x.shape[:2]
        order = None if self.order is None else self.order.repeat_interleave(num_heads, 0)

        def some_heads(x: Tensor, order: Tensor | None) -> Tensor:
            x = (x if order is None else take(x, order)).to(self.table.dtype)
            if is_compiling() and x.device.type == "cpu":
                # One product: as a product for each head it takes four times as long in bfloat16.
                product = self.table @ x.transpose(0, 1).flatten(1)
                return product.view(len(product), *x.shape[::2]).transpose(0, 1).contiguous()
            return self.table @ x

        projected: Tensor = chunked_over_heads(some_heads, x.flatten(0, 1), order).unflatten(0, (batch, num_heads))
        return self.scale(projected).to(self.table.dtype)

    def scale(self, projected: Tensor) -> Tensor:
        """Multiply the rows of products (B, H, P, D) with their factors."""
        return projected if self.factor is None else projected * self.factor[:, None, :, None]

    def project_some(self, x: Tensor, mask: Tensor | None, some: slice) -> Tensor:
        """The part of E x of the tokens `some`, without the factors: (B, H, n, D) -> (B, H, P, D).

        Args:
            x: these tokens, 0 where they are masked.
            mask: bool (B, N), that of all tokens, or None.
            some: the positions of these tokens.

        Returns:
            In the accumulation dtype, to be added to the other parts and scaled.
        """
        if mask is None or self.order is None:
            return (self.table[:, some] @ x.to(self.table.dtype)).to(accumulation_dtype(x.dtype))
        # The valid ones of these tokens use consecutive columns.
        order, before = valid_first(mask[:, some]), mask[:, : some.start].sum(1).tolist()
        columns = pad(self.table, (0, x.shape[2]))
        parts = [
            columns[:, first : first + x.shape[2]] @ row[:, index].to(columns.dtype)
            for row, index, first in zip(x, order, before, strict=True)
        ]
        return torch.stack(parts).to(accumulation_dtype(x.dtype))

    def sums(self) -> Tensor:
        """E 1, the factor of a constant that is added to all tokens: (B or 1, P)."""
        if self.num_tokens is None or self.factor is None:
            return self.table.sum(1, dtype=accumulation_dtype(self.table.dtype))[None]
        rank = torch.arange(self.table.shape[1], device=self.table.device)
        valid = (rank[:, None] < self.num_tokens).to(self.factor.dtype)
        return (self.table.to(valid.dtype) @ valid).t() * self.factor


def contractions(
    tables: Sequence[Tensor], key_mask: Tensor | None, kv_len: int, dtype: torch.dtype
) -> list[Contraction]:
    """`contraction` of both tables. It is one object if both are the same table."""
    first = contraction(tables[0], key_mask, kv_len, dtype)
    return [first, first if tables[1] is tables[0] else contraction(tables[1], key_mask, kv_len, dtype)]


def projected_key_mask(both: Sequence[Contraction], batch: int) -> Tensor:
    """Bool (B, P): the projected keys that have weight in both tables."""
    return (both[0].valid & both[1].valid).expand(batch, -1)


def contraction(table: Tensor, key_mask: Tensor | None, kv_len: int, dtype: torch.dtype) -> Contraction:
    """Apply a table (P, M) to the valid tokens of a mask, bool (B, Nk) or None, in products of `dtype`."""
    if key_mask is None and table.shape[1] == kv_len:
        return Contraction(table.to(dtype), None, None, None, table.any(1)[None])
    order = None if key_mask is None else valid_first(key_mask)
    num_tokens = torch.full((1,), kv_len, device=table.device) if key_mask is None else key_mask.sum(1)
    factor, valid = _factors(table.to(accumulation_dtype(dtype)), num_tokens)
    return Contraction(table[:, :kv_len].to(dtype), order, num_tokens, factor, valid)


def _factors(table: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of the rows for n tokens, and whether they have weight: (P, M), (B,) -> (B, P) each."""
    used = (integers(table.shape[1], table.device)[:, None] < num_tokens).to(table.dtype)
    if torch.is_grad_enabled() and table.requires_grad:
        result: tuple[Tensor, Tensor] = _Factors.apply(table, used)  # type: ignore[no-untyped-call]
        return result
    return _factors_of(_Sums.of(table, used))


class _Sums(NamedTuple):
    """Sums over all columns of a table, (P,), and over those that are used, (B, P).

    Attributes:
        row: (P,), of the entries.
        total: (P,), of their absolute values.
        total_square: (P,), of their squares.
        part: (B, P), of the absolute values that are used.
        part_square: (B, P), of their squares.
    """

    row: Tensor
    total: Tensor
    total_square: Tensor
    part: Tensor
    part_square: Tensor

    @staticmethod
    def of(table: Tensor, used: Tensor) -> "_Sums":
        """The sums of a table (P, M) for used columns (M, B)."""
        size, square = table.abs(), table.square()
        return _Sums(table.sum(1), size.sum(1), square.sum(1), (size @ used).t(), (square @ used).t())


def _factors_of(sums: _Sums) -> tuple[Tensor, Tensor]:
    valid, one_sign = sums.part > 0, sums.row.abs() / sums.total
    by_weight, by_norm = sums.total / sums.part, sums.total_square / sums.part_square
    return torch.where(valid, by_weight**one_sign * by_norm ** (0.5 - 0.5 * one_sign), 1.0), valid


class _Factors(torch.autograd.Function):
    """`_factors_of` with a gradient in few operations."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
        sums = _Sums.of(table, used)
        factor, valid = _factors_of(sums)
        ctx.save_for_backward(table, used, factor, valid, *sums)
        ctx.mark_non_differentiable(valid)
        return factor, valid

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        table, used, factor, valid, *sums = ctx.saved_tensors
        # Rows without weight have no gradient. Their quotients by 0 are replaced.
        grad = (grads[0] * factor).masked_fill(~valid, 0.0)
        row, (total, total_square, part, part_square) = (
            sums[0],
            (x.clamp(min=torch.finfo(x.dtype).tiny) for x in sums[1:]),
        )
        one_sign = row.abs() / total
        # The gradient of the log of the factor for that of `one_sign`.
        of_one_sign = grad * ((total / part).log() - 0.5 * (total_square / part_square).log())
        summed, of_one_sign = grad.sum(0), of_one_sign.masked_fill(~valid, 0.0).sum(0)
        of_size, of_square = (summed - of_one_sign) * one_sign / total, summed * (1.0 - one_sign) / total_square
        of_part, of_part_square = grad * one_sign / part, grad * (1.0 - one_sign) / part_square
        of_size = torch.addmm(of_size[:, None], of_part.t(), used.t(), alpha=-1)
        of_square = torch.addmm(of_square[:, None], of_part_square.t(), used.t(), alpha=-1)
        of_row = torch.addcmul((of_one_sign * row.sign() / total)[:, None], table.sign(), of_size)
        return of_row.addcmul_(table, of_square), None


def naive_projection(table: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The readable form for the valid tokens of one sequence: x (H, n, D) -> (H, P, D), and bool (P,), valid."""
    part = table[:, : x.shape[1]]
    valid = (part != 0).any(1)
    whole, part = table[valid], part[valid]
    weight = whole.abs().sum(1) / part.abs().sum(1)
    norm = torch.linalg.vector_norm(whole, dim=1) / torch.linalg.vector_norm(part, dim=1)
    one_sign = whole.sum(1).abs() / whole.abs().sum(1)
    projected = x.new_zeros(x.shape[0], table.shape[0], x.shape[2])
    projected[:, valid] = part * (weight**one_sign * norm ** (1 - one_sign))[:, None] @ x
    return projected, valid
