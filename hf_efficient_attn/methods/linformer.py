"""Linformer (Wang, Li, Khabsa, Fang, Ma 2020, arXiv 2006.04768): attention to learned projections of keys and values.

Eq. 7: out = softmax(Q (E K)^T / sqrt(D)) F V with E and F (P x M) for sequences of up to M tokens, the same for all
heads; `share="kv"` is the paper's key-value sharing, E = F (section 4). Here the keys are projected after W_K, which is
the same product. An attention of its own: it never switches by length.

Departures from the paper, whose sequences all have M tokens:

- Tokens that are not there carry no weight, and those that are there are counted from the first one: n of them take the
  first n columns of E and F, wherever the padding stands.
- n < M: the projections are scaled up for the columns that are missing. A row e of one sign is a weighted average of
  tokens, and is divided by the part of its weight that is left, |e|_1 of the n columns over that of all M. A row of
  mixed signs, as drawn from a Gaussian, has terms that add up like random ones; what is kept is its Euclidean norm. In
  between, the factor is (the first)^c (the second)^(1-c) with c = |sum e| / |e|_1, which is 1 for rows of one sign and
  near 0 for a Gaussian's. With n = M it is 1: the paper's product.
- A projection with no weight at any token that is there (of E or of F) is left out of the softmax.
- Conversion starts from means of P segments rather than a Gaussian, so that a checkpoint that was not trained further
  attends to averages of keys and values; where a segment is not full, the average is that of its tokens. With M <= P
  every token is a segment of its own and the output is exact.

There is no causal form: a projection holds tokens of the future.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods.base import Method, MethodConfig, MethodInfo, option, register
from hf_efficient_attn.ops.blocks import over_heads, take, valid_first
from hf_efficient_attn.ops.landmarks import attend_columns, segment_sizes
from hf_efficient_attn.ops.partial import accumulator
from hf_efficient_attn.ops.random import normal

_STREAMS = {"key_projection": 41, "value_projection": 42}


@dataclass(frozen=True, kw_only=True)
class LinformerConfig(MethodConfig):
    """Hyperparameters of the Linformer."""

    method: ClassVar[str] = "linformer"

    projection_dim: int = option(256, "Projections that each query attends to, P.", minimum=1)
    max_length: int = option(
        0, "Tokens that the tables have columns for, M. 0: as many as there are when they are made.", minimum=0
    )
    share: str = option("kv", "'kv': one table for keys and values. 'none': one for each.", choices=("kv", "none"))
    init: str = option(
        "means",
        "Where the tables start. 'means': averages of segments. 'gaussian': normal numbers of variance 1/P.",
        choices=("means", "gaussian"),
    )
    seed: int = option(0, "Seed of the Gaussian tables; that of a call has no effect on them.", minimum=0)

    def with_budget(self, columns: int) -> "LinformerConfig":
        """As many projections as columns.

        That is the attention to them. To project keys and values takes as many multiplications again where there are as
        many queries as keys, without an exponential.
        """
        return replace(self, projection_dim=self.check_budget(columns))


def start_parameters(config: LinformerConfig, *, heads: int, width: int, value_width: int, length: int) -> dict:
    """`key_projection` (P, M) and, unless it is shared, `value_projection`."""
    names = ("key_projection",) if config.share == "kv" else tuple(_STREAMS)
    return {name: _start(config, config.max_length or length, _STREAMS[name]) for name in names}


def _start(config: LinformerConfig, length: int, stream: int) -> Tensor:
    """A table (P, length), float32. Column j of a Gaussian one is the same for every length."""
    count = config.projection_dim
    if config.init == "gaussian":
        numbers = normal((length, count), config.seed, stream, torch.device("cpu"))
        return (numbers.t() * count**-0.5).to(torch.float32).contiguous()
    sizes = segment_sizes(torch.tensor(length), count)
    ends = sizes.cumsum(0)[:, None]
    place = torch.arange(length)
    inside = (place < ends) & (place >= ends - sizes[:, None])
    return inside / sizes.clamp(min=1)[:, None]


def _tables(config: LinformerConfig, columns: int, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """E and F (P, M); where they are shared, F is E unless it is given."""
    key_table = parameters["key_projection"]
    value_table = parameters.get("value_projection", key_table)
    for name, table in (("key_projection", key_table), ("value_projection", value_table)):
        if table.ndim != 2 or table.shape[0] != config.projection_dim:
            raise UnsupportedAttentionError(
                f"linformer: {name} {tuple(table.shape)} does not suit projection_dim={config.projection_dim}; give a "
                f"tensor (projection_dim, max_length)"
            )
        if table.shape[1] < columns:
            raise UnsupportedAttentionError(
                f"linformer: {columns} keys are more than the {table.shape[1]} that {name} has columns for; make the "
                f"tables with max_length={columns} or more, or cut the input"
            )
    return key_table, value_table


def _factors(table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the projections of n tokens are multiplied with, and whether they have weight: (P, M), (B,) -> (B, P)."""
    first = (torch.arange(table.shape[1], device=table.device)[:, None] < tokens).to(table.dtype)
    size, square = table.abs(), table.square()
    part, part_square = (size @ first).t(), (square @ first).t()
    any_weight = part > 0

    def ratio(all_of_it: Tensor, left: Tensor) -> Tensor:
        return torch.where(any_weight, all_of_it, 1.0) / torch.where(any_weight, left, 1.0)

    total = size.sum(1)
    one_sign = table.sum(1).abs() / total.masked_fill(total == 0, 1.0)
    factor = ratio(total, part) ** one_sign * ratio(square.sum(1), part_square) ** (0.5 - 0.5 * one_sign)
    return factor, any_weight


def attend(config, query, key, value, *, mask, is_causal, scale, dropout_p, seed, parameters) -> Tensor:
    """Fast form; arguments as in `hf_efficient_attn.methods.call`."""
    (batch, heads, columns), wide = key.shape[:3], accumulator(query.dtype)
    tables = [x.to(wide) for x in _tables(config, columns, parameters)]
    order = None if mask is None else valid_first(mask).repeat_interleave(heads, 0)
    if mask is None and tables[0].shape[1] == tables[1].shape[1] == columns:
        factors, shown = None, ((tables[0] != 0).any(1) & (tables[1] != 0).any(1))[None]
    else:
        tokens = torch.tensor([columns], device=key.device) if mask is None else mask.sum(1)
        factors, has_weight = zip(*(_factors(x, tokens) for x in tables), strict=True)
        shown = has_weight[0] & has_weight[1]
    # One row for every head; without a mask there is one for all.
    repeats = batch * heads // shown.shape[0]
    bias = torch.where(shown, 0.0, -torch.inf).to(wide).repeat_interleave(repeats, 0)

    def project(key, value, order):
        """(A, N, D) and (A, N, Dv) -> (A, P, D + Dv)."""
        if order is not None:
            key, value = take(key, order), take(value, order)
        return torch.cat([table[:, :columns] @ x.to(wide) for table, x in zip(tables, (key, value), strict=True)], 2)

    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    projected = over_heads(project, key, value, order).split((key.shape[2], value.shape[2]), 2)
    if factors is not None:
        projected = [x * f.repeat_interleave(repeats, 0).unsqueeze(2) for x, f in zip(projected, factors, strict=True)]
    keys, values = projected
    out = attend_columns(query, keys, values, bias, scale=scale, dropout_p=dropout_p, dtype=value.dtype)
    return out.unflatten(0, (batch, heads))


def naive(config, query, key, value, *, mask, is_causal, scale, dropout_p, seed, parameters) -> Tensor:
    """Readable form: row by row with the tokens that are not there taken out."""
    tables, outs = [x.double() for x in _tables(config, key.shape[2], parameters)], []
    for b in range(key.shape[0]):
        there = slice(None) if mask is None else mask[b]
        tokens = [x[b, :, there].double() for x in (key, value)]
        count, shown, projected = tokens[0].shape[1], [], []
        for table, x in zip(tables, tokens, strict=True):
            part = table[:, :count]
            shown.append((part != 0).any(1))
            whole_table, part = table[shown[-1]], part[shown[-1]]
            weight = whole_table.abs().sum(1) / part.abs().sum(1)
            square = (whole_table.square().sum(1) / part.square().sum(1)).sqrt()
            one_sign = whole_table.sum(1).abs() / whole_table.abs().sum(1)
            rows = part * (weight**one_sign * square ** (1 - one_sign))[:, None]
            full = torch.zeros(x.shape[0], table.shape[0], x.shape[2], dtype=torch.float64)
            projected.append(full.index_copy(1, shown[-1].nonzero()[:, 0], rows @ x))
        keys, values = (x[:, shown[0] & shown[1]] for x in projected)
        outs.append((scale * query[b].double() @ keys.mT).softmax(-1) @ values)
    return torch.stack(outs).to(value.dtype)


register(
    Method(
        info=MethodInfo(
            name="linformer",
            title="Linformer",
            paper="Wang, Li, Khabsa, Fang, Ma 2020",
            year=2020,
            causal=False,
            rectangular=True,
            recurrent=False,
            learned_parameters=("key_projection", "value_projection"),
            config_class=LinformerConfig,
            summary="attention to learned projections of keys and values along the sequence",
        ),
        attend=attend,
        naive=naive,
        parameters=start_parameters,
    )
)
