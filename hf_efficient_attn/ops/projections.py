"""Learned projections along the sequence: tables (P, M) that contract up to M tokens to P projected keys or values.

Linformer (Wang et al. 2020, arXiv 2006.04768, Eq. 7) uses such tables for sequences of M tokens. For other sequences:

- Masked tokens have no weight. The n valid tokens use the first n columns of a table, wherever the padding is.
- If n < M, each row of a table is multiplied by a factor for the missing columns. A row e of one sign is a weighted
  average of tokens, so it is divided by the share of its weight in the first n columns: their |e|_1 over |e|_1 of all M
  columns. A row of mixed signs, such as a Gaussian one, sums terms that behave like random ones, so its Euclidean norm
  is preserved. In between, the factor is (the first)^c (the second)^(1-c) with c = |sum e| / |e|_1, which is 1 for rows
  of one sign and close to 0 for Gaussian rows. With n = M the factor is 1, as in the paper.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.index import integers
from hf_efficient_attn.ops.nystrom import segment_sizes
from hf_efficient_attn.ops.slices import slice_size, sliced


def start_tables(projection_dim: int, max_length: int, init: str, seed: int, streams: Sequence[int]) -> list[Tensor]:
    """Make an initial table for each stream of random numbers: float32 (P, M) each.

    The tables are averages of P segments of the tokens ("means"), or normal numbers of variance 1 / P ("gaussian"), in
    which column j is the same for every M.
    """
    if init == "gaussian":
        shape = (max_length, projection_dim)
        draws = Draws(seed, torch.device("cpu"))
        numbers = [draws.normal(shape, stream).t() * projection_dim**-0.5 for stream in streams]  # (P, M) each
        return [x.to(torch.float32).contiguous() for x in numbers]
    sizes = segment_sizes(torch.tensor(max_length), projection_dim)
    ends = sizes.cumsum(0)[:, None]  # (P, 1)
    position = torch.arange(max_length)
    inside = (position < ends) & (position >= ends - sizes[:, None])  # (P, M)
    return [inside.to(torch.float32) / sizes.clamp(min=1)[:, None]] * len(streams)


class Contraction(NamedTuple):
    """A table, applied to the valid tokens of a batch."""

    table: Tensor  # (P, N), the columns that tokens may use, in the dtype of products
    column: Tensor | None  # int64 (B, N), the column of each token, or None if it is its position
    num_tokens: Tensor | None  # int64 (B or 1,), the number of valid tokens, or None if it is M
    factor: Tensor | None  # (B or 1, P), the factors of the rows, in the accumulation dtype, or None for 1
    valid: Tensor  # bool (B or 1, P), whether a row has weight at any valid token

    def project(self, x: Tensor) -> Tensor:
        """Compute E x: (B, H, N, D) -> (B, H, P, D) in the accumulation dtype. x must be 0 at masked tokens."""
        return self.scale(self.project_some(x))

    def scale(self, projected: Tensor) -> Tensor:
        """Multiply the rows of products (B, H, P, D) by their factors."""
        return projected if self.factor is None else projected * self.factor[:, None, :, None]

    def project_some(self, x: Tensor, some: slice = slice(None)) -> Tensor:
        """Compute the part of E x for the tokens `some`, without the factors: (B, H, n, D) -> (B, H, P, D).

        Args:
            x: these tokens, 0 where they are masked.
            some: the positions of these tokens among all N.

        Returns:
            In the accumulation dtype, to be added to the other parts and scaled.
        """
        table = self.table
        acc_dtype = accumulation_dtype(x.dtype)
        if self.column is None:
            return (table[:, some] @ x.to(table.dtype)).to(acc_dtype)  # (P, n) @ (B, H, n, D) -> (B, H, P, D)

        columns = table.t().contiguous()  # (N, P)

        def some_rows(x: Tensor, column: Tensor) -> Tensor:
            # Gather the columns and not the tokens: one product serves all heads of a batch row, side by side.
            tokens = x.to(table.dtype).transpose(1, 2).flatten(2)  # (B, n, H D)
            product = embedding(column, columns).mT @ tokens  # (B, P, n) @ (B, n, H D) -> (B, P, H D)
            return torch.unflatten(product.to(acc_dtype), 2, x.shape[1::2]).transpose(1, 2)  # (B, H, P, D)

        size = slice_size(x.shape[2] * max(len(table), x.shape[1] * x.shape[3]), x.device)
        return sliced(some_rows, x, self.column[:, some], size=size)

    def sums(self) -> Tensor:
        """Compute E 1, the factor of a constant that is added to all tokens: (B or 1, P)."""
        if self.num_tokens is None or self.factor is None:
            return self.table.sum(1, dtype=accumulation_dtype(self.table.dtype))[None]
        used = integers(self.table.shape[1], self.table.device)[:, None] < self.num_tokens  # (N, B)
        # A copy, because a product with a vector may round by where its matrix lies in memory, and a table that was
        # loaded from a file begins anywhere.
        table = self.table.to(self.factor.dtype, copy=True)
        return (table @ used.to(self.factor.dtype)).t() * self.factor


def contractions(
    tables: Sequence[Tensor], key_mask: Tensor | None, kv_len: int, dtype: torch.dtype
) -> list[Contraction]:
    """Apply both tables (P, M) to the valid tokens of a mask, bool (B, Nk) or None, in products of `dtype`.

    The results are one object if both are the same table.
    """
    first = _contraction(tables[0], key_mask, kv_len, dtype)
    return [first, first if tables[1] is tables[0] else _contraction(tables[1], key_mask, kv_len, dtype)]


def projected_key_mask(both: Sequence[Contraction], batch: int) -> Tensor:
    """Mark the projected keys that have weight in both tables: bool (B, P)."""
    return (both[0].valid & both[1].valid).expand(batch, -1)


def _contraction(table: Tensor, key_mask: Tensor | None, kv_len: int, dtype: torch.dtype) -> Contraction:
    if key_mask is None and table.shape[1] == kv_len:
        return Contraction(table.to(dtype), None, None, None, table.any(1)[None])
    column = None if key_mask is None else (key_mask.cumsum(1) - 1).clamp(min=0)
    num_tokens = torch.full((1,), kv_len, device=table.device) if key_mask is None else key_mask.sum(1)  # (B or 1,)
    factor, valid = _factors(table.to(accumulation_dtype(dtype)), num_tokens)  # (B or 1, P) each
    return Contraction(table[:, :kv_len].to(dtype), column, num_tokens, factor, valid)


def _factors(table: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the factors of the rows for n tokens, and whether rows have weight: (P, M), (B,) -> (B, P) each."""
    used = (integers(table.shape[1], table.device)[:, None] < num_tokens).to(table.dtype)  # (M, B)
    size = table.abs()  # (P, M)
    square = table.square()
    whole = size.sum(1)  # (P,), of all columns
    whole_square = square.sum(1)
    part = (size @ used).t()  # (B, P), of the columns that are used
    part_square = (square @ used).t()
    valid = part > 0
    # A row without weight has the factor 1. Its quotients are replaced, because the gradient of 0 / 0 is NaN.
    of_tokens = [x.masked_fill(~valid, 1.0) for x in (whole.expand_as(part), whole_square.expand_as(part))]
    part, part_square = (x.masked_fill(~valid, 1.0) for x in (part, part_square))
    one_sign = table.sum(1).abs() / whole.masked_fill(whole == 0, 1.0)  # (P,)
    by_weight = of_tokens[0] / part
    by_norm = of_tokens[1] / part_square
    return by_weight**one_sign * by_norm ** (0.5 - 0.5 * one_sign), valid


def naive_contraction(
    tables: Sequence[Tensor], key: Tensor, value: Tensor, key_mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield contracted keys (H, P', D) and values (H, P', Dv) in float64 for each batch row, the readable form.

    Padding is removed first, and so are contracted keys without a weight: P' is at most P.
    """
    for b in range(key.shape[0]):
        valid = slice(None) if key_mask is None else key_mask[b]
        tokens = [x[b, :, valid].double() for x in (key, value)]  # (H, n, .)
        parts = [table[:, : tokens[0].shape[1]].double() for table in tables]  # (P, n)
        weigh = (parts[0] != 0).any(1) & (parts[1] != 0).any(1)  # (P,)
        contracted = []
        for table, part, x in zip(tables, parts, tokens, strict=True):
            whole = table[weigh].double()
            part = part[weigh]
            weight = whole.abs().sum(1) / part.abs().sum(1)  # (P',)
            norm = torch.linalg.vector_norm(whole, dim=1) / torch.linalg.vector_norm(part, dim=1)
            one_sign = whole.sum(1).abs() / whole.abs().sum(1)
            contracted.append(part * (weight**one_sign * norm ** (1 - one_sign))[:, None] @ x)
        yield contracted[0], contracted[1]


def contract_hidden_states(
    both: Sequence[Contraction],
    hidden_states: Tensor,
    projections: Sequence[Callable[[Tensor], Tensor]],
    num_heads: int,
) -> list[Tensor]:
    """Contract hidden states (B, N, W), 0 where masked, and project them to keys and values (B, H, P, D).

    `projections` are affine maps (B, P, W) -> (B, P, H * D), under the autocast of the caller.
    """
    contracted = list[Tensor]()
    keys_and_values = []
    for table, project in zip(both, projections, strict=True):
        with torch.autocast(hidden_states.device.type, enabled=False):
            same = contracted and table is both[0]
            x = contracted[0] if same else table.project(hidden_states[:, None])[:, 0].to(hidden_states.dtype)
            contracted.append(x)  # (B, P, W)
        # This projection adds its bias once. The contraction of projected tokens would contain the bias E 1 times.
        bias = project(x.new_zeros(1, 1, x.shape[2]))  # (1, 1, H D)
        excess = (table.sums() - 1.0).unsqueeze(2)  # (B or 1, P, 1)
        x = project(x)
        x = (x + (excess * bias).to(x.dtype)).unflatten(2, (num_heads, -1)).transpose(1, 2)  # (B, H, P, D)
        keys_and_values.append(x.to(accumulation_dtype(x.dtype)))
    return keys_and_values
