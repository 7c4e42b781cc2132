"""Learned projections along the sequence: tables (P, M) that contract up to M tokens to P projected keys or values.

Linformer (Wang et al. 2020, arXiv 2006.04768, Eq. 7) uses such tables for sequences of M tokens. For other sequences:

- Masked tokens have no weight. The n valid tokens use the first n columns of a table, wherever the padding is.
- If n < M, each row of a table is multiplied by a factor for the missing columns. A row e of one sign is a weighted
  average of tokens, so it is divided by the share of its weight in the first n columns: their |e|_1 over |e|_1 of all M
  columns. A row of mixed signs, such as a Gaussian one, sums terms that behave like random ones, so its Euclidean norm
  is preserved. In between, the factor is (the first)^c (the second)^(1-c) with c = |sum e| / |e|_1, which is 1 for rows
  of one sign and close to 0 for Gaussian rows. With n = M the factor is 1, as in the paper.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.attend import accumulation_dtype, product_dtype, sum_dtype
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.landmarks import attention_to_few_keys, segment_sizes
from hf_efficient_attn.ops.shards import Shards, total
from hf_efficient_attn.ops.tokens import integers, normal, slice_size, sliced

# Names of the tables of keys and of values as learned parameters.
NAMES = ("key_projection", "value_projection")
# If a checkpoint shares one table, the table of the keys also becomes the table of the values.
STARTS_FROM = {NAMES[1]: NAMES[0]}


def start_tables(
    projection_dim: int, max_length: int, init: str, seed: int, streams: Sequence[int]
) -> dict[str, Tensor]:
    """Make the initial table of keys and, with a second stream of random numbers, of values: float32 (P, M) each.

    Args:
        projection_dim: P.
        max_length: M.
        init: "means": averages of P segments of the tokens. "gaussian": normal numbers of variance 1 / P, in which
            column j is the same for every M.
        seed: seed of the Gaussian numbers.
        streams: one stream for each table. They distinguish the uses of one seed.
    """
    names, shape = NAMES[: len(streams)], (max_length, projection_dim)
    if init == "gaussian":
        numbers = [normal(shape, seed, stream, torch.device("cpu")).t() * projection_dim**-0.5 for stream in streams]
        return {name: x.to(torch.float32).contiguous() for name, x in zip(names, numbers, strict=True)}
    sizes = segment_sizes(torch.tensor(max_length), projection_dim)
    ends, position = sizes.cumsum(0)[:, None], torch.arange(max_length)
    inside = (position < ends) & (position >= ends - sizes[:, None])  # (P, M)
    return dict.fromkeys(names, inside / sizes.clamp(min=1)[:, None])


def projection_tables(method: str, projection_dim: int, kv_len: int, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """Check and return the tables (P, M) of keys and of values. The second is the first unless it is given.

    Raises:
        UnsupportedAttentionError: a table has another shape, or M is less than `kv_len`.
    """
    tables = {NAMES[0]: parameters[NAMES[0]], NAMES[1]: parameters.get(NAMES[1], parameters[NAMES[0]])}
    for name, table in tables.items():
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
    return list(tables.values())


class Contraction(NamedTuple):
    """A table, applied to the valid tokens of a batch.

    Attributes:
        table: (P, N), the columns that tokens may use, in the dtype of products.
        column: int64 (B, N), the column of each token, or None if it is its position.
        num_tokens: int64 (B or 1,), the number of valid tokens, or None if it is M.
        factor: (B or 1, P), the factors of the rows, in the accumulation dtype, or None for 1.
        valid: bool (B or 1, P), whether a row has weight at any valid token.
    """

    table: Tensor
    column: Tensor | None
    num_tokens: Tensor | None
    factor: Tensor | None
    valid: Tensor

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
        table, acc_dtype = self.table, accumulation_dtype(x.dtype)
        if self.column is None:
            return (table[:, some] @ x.to(table.dtype)).to(acc_dtype)  # (P, n) @ (B, H, n, D) -> (B, H, P, D)

        columns = table.t().contiguous()  # (N, P)

        def some_rows(x: Tensor, column: Tensor) -> Tensor:
            # Gather the columns and not the tokens: one product serves all heads of a batch row, side by side.
            tokens = x.to(table.dtype).transpose(1, 2).flatten(2)  # (B, n, H D)
            product = embedding(column, columns).mT @ tokens  # (B, P, n) @ (B, n, H D) -> (B, P, H D)
            of_heads: Tensor = product.to(acc_dtype).unflatten(2, x.shape[1::2])
            return of_heads.transpose(1, 2)

        size = slice_size(x.shape[2] * max(len(table), x.shape[1] * x.shape[3]), x.device)
        return sliced(some_rows, x, self.column[:, some], size=size)

    def sums(self) -> Tensor:
        """Compute E 1, the factor of a constant that is added to all tokens: (B or 1, P)."""
        if self.num_tokens is None or self.factor is None:
            return self.table.sum(1, dtype=accumulation_dtype(self.table.dtype))[None]
        used = integers(self.table.shape[1], self.table.device)[:, None] < self.num_tokens  # (N, B)
        return (self.table.to(self.factor.dtype) @ used.to(self.factor.dtype)).t() * self.factor


def contractions(
    tables: Sequence[Tensor], key_mask: Tensor | None, kv_len: int, dtype: torch.dtype
) -> list[Contraction]:
    """Make the `contraction` of both tables, one object if both are the same table."""
    first = contraction(tables[0], key_mask, kv_len, dtype)
    return [first, first if tables[1] is tables[0] else contraction(tables[1], key_mask, kv_len, dtype)]


def projected_key_mask(both: Sequence[Contraction], batch: int) -> Tensor:
    """Mark the projected keys that have weight in both tables: bool (B, P)."""
    return (both[0].valid & both[1].valid).expand(batch, -1)


def contraction(table: Tensor, key_mask: Tensor | None, kv_len: int, dtype: torch.dtype) -> Contraction:
    """Apply a table (P, M) to the valid tokens of a mask, bool (B, Nk) or None, in products of `dtype`."""
    if key_mask is None and table.shape[1] == kv_len:
        return Contraction(table.to(dtype), None, None, None, table.any(1)[None])
    column = None if key_mask is None else (key_mask.cumsum(1) - 1).clamp(min=0)
    num_tokens = torch.full((1,), kv_len, device=table.device) if key_mask is None else key_mask.sum(1)
    factor, valid = _factors(table.to(accumulation_dtype(dtype)), num_tokens)
    return Contraction(table[:, :kv_len].to(dtype), column, num_tokens, factor, valid)


def _factors(table: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the factors of the rows for n tokens, and whether rows have weight: (P, M), (B,) -> (B, P) each."""
    used = (integers(table.shape[1], table.device)[:, None] < num_tokens).to(table.dtype)  # (M, B)
    size, square = table.abs(), table.square()  # (P, M)
    whole, whole_square = size.sum(1), square.sum(1)  # (P,), of all columns
    part, part_square = (size @ used).t(), (square @ used).t()  # (B, P), of the columns that are used
    valid = part > 0
    # A row without weight has the factor 1. Its quotients are replaced, because the gradient of 0 / 0 is NaN.
    of_tokens = [x.masked_fill(~valid, 1.0) for x in (whole.expand_as(part), whole_square.expand_as(part))]
    part, part_square = (x.masked_fill(~valid, 1.0) for x in (part, part_square))
    one_sign = table.sum(1).abs() / whole.masked_fill(whole == 0, 1.0)  # (P,)
    by_weight, by_norm = of_tokens[0] / part, of_tokens[1] / part_square
    return by_weight**one_sign * by_norm ** (0.5 - 0.5 * one_sign), valid


def naive_projection(table: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Project the valid tokens of one sequence, the readable form: x (H, n, D) -> (H, P, D), and bool (P,), valid."""
    part = table[:, : x.shape[1]]
    valid = (part != 0).any(1)
    whole, part = table[valid], part[valid]
    weight = whole.abs().sum(1) / part.abs().sum(1)
    norm = torch.linalg.vector_norm(whole, dim=1) / torch.linalg.vector_norm(part, dim=1)
    one_sign = whole.sum(1).abs() / whole.abs().sum(1)
    projected = x.new_zeros(x.shape[0], table.shape[0], x.shape[2])
    projected[:, valid] = part * (weight**one_sign * norm ** (1 - one_sign))[:, None] @ x
    return projected, valid


def naive_contraction(
    tables: Sequence[Tensor], key: Tensor, value: Tensor, key_mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield contracted keys (H, P', D) and values (H, P', Dv) in float64 for each batch row, the readable form.

    Padding is removed first, and so are contracted keys without a weight: P' is at most P.
    """
    for b in range(key.shape[0]):
        valid = slice(None) if key_mask is None else key_mask[b]
        keys, keys_weigh = naive_projection(tables[0].double(), key[b, :, valid].double())
        values, values_weigh = naive_projection(tables[1].double(), value[b, :, valid].double())
        yield keys[:, keys_weigh & values_weigh], values[:, keys_weigh & values_weigh]


def contract_hidden_states(
    both: Sequence[Contraction],
    hidden_states: Tensor,
    projections: Sequence[Callable[[Tensor], Tensor]],
    num_heads: int,
) -> list[Tensor]:
    """Contract hidden states (B, N, W), 0 where masked, and project them to keys and values (B, H, P, D).

    `projections` are affine maps (B, P, W) -> (B, P, H * D), under the autocast of the caller.
    """
    contracted: list[Tensor] = []
    with torch.autocast(hidden_states.device.type, enabled=False):
        for i, table in enumerate(both):
            same = i > 0 and table is both[0]
            x = contracted[0] if same else table.project(hidden_states[:, None])[:, 0].to(hidden_states.dtype)
            contracted.append(x)  # (B, P, W)
    keys_and_values = []
    for table, x, project in zip(both, contracted, projections, strict=True):
        # This projection adds its bias once. The contraction of projected tokens would contain the bias E 1 times.
        bias, excess = project(x.new_zeros(1, 1, x.shape[2])), (table.sums() - 1.0).unsqueeze(2)
        x = project(x)
        x = (x + (excess * bias).to(x.dtype)).unflatten(2, (num_heads, -1)).transpose(1, 2)
        keys_and_values.append(x.to(accumulation_dtype(x.dtype)))
    return keys_and_values


def projection_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    tables: Sequence[Tensor],
    *,
    scale: float,
    dropout_p: float,
    shards: Shards | None = None,
) -> Tensor:
    """Compute attention of queries (B, H, Nq, D) to contracted keys and values (B, H_kv, Nk, .): (B, H, Nq, Dv).

    With `shards` the tokens belong to one process, and the sums of all processes are added up.
    """
    dtype, groups, kv_len, own = product_dtype(query), query.shape[1] // key.shape[1], key.shape[2], slice(None)
    if shards is not None:
        kv_len, key_mask, own = shards.total, shards.key_mask, shards.own
    both = contractions(tables, key_mask, kv_len, sum_dtype(query))
    parts = [table.project_some(x, own) for table, x in zip(both, (key, value), strict=True)]  # (B, H_kv, P, .)
    parts = parts if shards is None else total(parts, shards.group)
    keys, values = (
        table.scale(x).to(dtype).repeat_interleave(groups, 1).flatten(0, 1)
        for table, x in zip(both, parts, strict=True)
    )
    bias = mask_bias(projected_key_mask(both, query.shape[0]), dtype).repeat_interleave(query.shape[1], 0)
    out = attention_to_few_keys(
        query.flatten(0, 1), keys, values, bias, scale=scale, dropout_p=dropout_p, dtype=value.dtype
    )
    result: Tensor = out.unflatten(0, query.shape[:2])  # (B, H, Nq, Dv)
    return result
