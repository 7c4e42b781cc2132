"""Attention of each head with as many columns as it needs for an error bound, or exactly: the long form of `auto`.

`hf_efficient_attn.ops.row_error` defines the bound, and `hf_efficient_attn.ops.nearfar.attempts` the order of the
attempts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, widened
from hf_efficient_attn.ops.clusters import middle_positions
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.index import take
from hf_efficient_attn.ops.nearfar import attempts
from hf_efficient_attn.ops.nearfar.attempts import COPY_KEYS, screening_error
from hf_efficient_attn.ops.row_error import row_error, sample_rows

# A bound between the limit and `_CLOSE` times the limit is computed again from `_MORE_ROWS` times as many rows: with
# few rows it is up to five times the error if few rows have a large error.
_MORE_ROWS = 4
_CLOSE = 3.0


class Heads(NamedTuple):
    """Heads of sequences without padding: query (BH, Nq, D), key (BH, Nk, D) and value (BH, Nk, Dv)."""

    query: Tensor
    key: Tensor
    value: Tensor

    def select(self, index: Tensor) -> "Heads":
        """Return some of the heads."""
        return Heads(*(x.index_select(0, index) for x in self))


class Forms(NamedTuple):
    """The two forms of a call's heads, from query, key and value (BH, N, .), and the bound of their error."""

    # approximate(query, key, value, columns) returns the output (BH, Nq, Dv) of some heads.
    approximate: Callable[..., Tensor]
    exact: Callable[..., Tensor]  # exact(query, key, value) returns the exact output of some heads
    max_error: float  # the largest bound of a head's relative error in the operator norm
    columns: int  # number of columns of a head's first attempt
    length: int  # the number of keys from which on an approximation with these columns is worthwhile
    draws: Draws  # the random numbers of the rows that bound the error
    with_lse: bool = False  # whether both forms return the lse as well (`hf_efficient_attn.ops.attend.output_of`)


def attend_within_bound(heads: Heads, forms: Forms, num_heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention of each of the BH heads of some sequences with as many columns as it needs, or exactly.

    Returns:
        The output (BH, Nq, Dv or Dv + 1), and the columns of every head, int64 (BH,); 0 for an exact head.
    """
    batch_heads, q_len, _ = heads.query.shape
    kv_len = heads.key.shape[1]
    device = heads.query.device
    columns = torch.zeros(batch_heads, dtype=torch.int64, device=device)
    if q_len < attempts.NUM_PROBES + attempts.NUM_ROWS:  # too few rows would bound the error
        return forms.exact(*heads), columns
    shape = (batch_heads // num_heads, num_heads)
    schedule = attempts.Attempts(
        *shape, kv_len, columns=forms.columns, length=forms.length, max_error=forms.max_error, device=device
    )
    if kv_len > 2 * COPY_KEYS:  # in shorter sequences an attempt costs less than the copy
        schedule.expect(widened(screening_error(*heads, scale=scale)).view(shape))
    value_dim = heads.value.shape[2]
    dtype = accumulation_dtype(heads.value.dtype) if forms.with_lse else heads.value.dtype
    out = heads.value.new_empty(batch_heads, q_len, value_dim + forms.with_lse, dtype=dtype)
    choice = schedule.choose()
    while bool(choice.heads.any()):
        bounds = torch.full(shape, torch.inf, dtype=widened(heads.value[:0]).dtype, device=device)  # (B, H)
        for level, count in enumerate(schedule.columns):
            index = (choice.heads & (choice.level == level)).flatten().nonzero()[:, 0]
            if len(index):
                some = heads.select(index)
                part = forms.approximate(*some, count)
                bound = _bound(some, part[..., :value_dim], forms, scale, attempts.NUM_ROWS)
                bounds.view(-1)[index] = widened(bound)
                good = bound <= forms.max_error
                out[index[good]] = part[good]
                columns[index[good]] = count
        schedule.record(choice, bounds)
        choice = schedule.choose()
    rest = (columns == 0).nonzero()[:, 0]
    if len(rest):
        out[rest] = forms.exact(*heads.select(rest))
    return out, columns


def _bound(heads: Heads, approximate: Tensor, forms: Forms, scale: float, num_rows: int) -> Tensor:
    """Bound the error of an output (BH, Nq, Dv) of heads, by rows to which the output was not fitted: (BH,).

    It uses more rows where the bound is just too large.
    """
    query, key, value = heads
    q_len = query.shape[1]
    device = query.device
    probe = middle_positions(q_len, attempts.NUM_PROBES, device)
    available = torch.ones(1, q_len, dtype=torch.bool, device=device).index_fill(1, probe, False)
    rows = sample_rows(1, q_len, num_rows, available, num_heads=1, draws=forms.draws)
    index, valid, population = (x.expand(len(query), -1) for x in rows)  # (BH, R), (BH, R), (BH, 1)
    exact = attend(take(query, index)[:, None], key[:, None], value[:, None], scale=scale).out[:, 0]  # (BH, R, Dv)
    bound = row_error(take(approximate, index), exact, valid, population).bound
    if num_rows > attempts.NUM_ROWS:
        return bound
    close = ((bound > forms.max_error) & (bound < _CLOSE * forms.max_error)).nonzero()[:, 0]
    if not len(close):
        return bound
    more = _bound(heads.select(close), approximate[close], forms, scale, _MORE_ROWS * num_rows)
    return bound.index_copy(0, close, more)
