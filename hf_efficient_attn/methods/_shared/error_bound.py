"""Which heads of a call to approximate, and with how many columns, so that the error of each stays below a limit.

Costs are relative to exact attention of the same head. An attempt costs the approximation and the exact rows that bound
its error. If the bound exceeds the limit, exact attention is added. So an attempt pays if the probability P that it
succeeds is above its cost. P is that of a normal distribution of the logarithm of the bound: at first around the error
of a small copy of the head (`hf_efficient_attn.ops.screening`), and after an attempt around the bound that was found.
Twice as many columns leave a share of sqrt(1/2) of it.

The heads of a sequence are attempted in the order of P - cost, as long as the expected loss, the sum of (1 - P) cost,
is within a budget: a small share of exact attention, plus what earlier attempts have saved. So hardly any time is lost
in a sequence in which all heads turn out to need exact attention. Nothing depends on other sequences or earlier calls.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.heads import FlatHeads
from hf_efficient_attn.ops.row_error import held_back_bound
from hf_efficient_attn.ops.screening import NUM_KEYS, NUM_LANDMARKS, screening_error

# Rows that bound the error.
NUM_ROWS = 64
# The bound with c columns is about this multiple of the error of the copy times sqrt(landmarks of the copy / c), and
# the standard deviations of its logarithm, before and after an attempt. Measured on MiniLM with 4,096 tokens.
_COPY_FACTOR, _COPY_SPREAD, _SPREAD = 1.1, 0.65, 0.3
# The cost of c columns grows with this power of c.
_COST_POWER = 1.5
# Share of exact attention that may be lost.
_LOSS = 0.02
# A head has at most this many columns, unless it begins with more.
_MAX_COLUMNS = 1024
# Numbers of keys that are copied at a time when some heads are computed: 4 MiB of float32.
_CHUNK_NUMEL = 1 << 20


class Limit(NamedTuple):
    """What the heads of a call must keep.

    Attributes:
        max_error: the largest bound of a head's relative error in the operator norm.
        columns: columns of a head's first attempt.
        cost: float64 (B,), cost of `columns` columns in each sequence, relative to exact attention.
        num_probes: queries that the weights are fitted to, evenly spaced. They are not used for the bound.
    """

    max_error: float
    columns: int
    cost: Tensor
    num_probes: int


def attend_within_bound(
    heads: FlatHeads,
    limit: Limit,
    scale: float,
    seed: int | Tensor,
    *,
    approximate: Callable[[FlatHeads, int], Tensor],
    exact: Callable[[FlatHeads], Tensor],
) -> tuple[Tensor, Tensor]:
    """Attention of each head with as many columns as it needs, or exactly.

    Args:
        heads: of B sequences.
        limit: what they must keep.
        scale: factor of the scores.
        seed: of the rows that bound the error.
        approximate: returns the output (BH, Nq, Dv) of some heads with a number of columns.
        exact: returns their exact output.

    Returns:
        The output (BH, Nq, Dv), and the columns of every head, int64 (BH,); 0 for an exact head.
    """
    batch_heads, q_len, _ = heads.query.shape
    batch, device = len(limit.cost), heads.query.device
    shape = (batch, batch_heads // batch)
    num_keys = _num_keys(heads)
    levels = [limit.columns]
    while 2 * levels[-1] <= _MAX_COLUMNS:
        levels.append(2 * levels[-1])
    growth = torch.tensor(levels, dtype=torch.float64, device=device).view(-1, 1, 1) / limit.columns
    cost = limit.cost[:, None] * growth**_COST_POWER + (NUM_ROWS / num_keys.double()).view(shape)
    cost = cost.expand(-1, *shape)
    columns = torch.tensor(levels, device=device).view(-1, 1, 1)
    possible = (columns <= num_keys.view(shape) // 2) | (columns == limit.columns)
    log_bound, spread = (x.view(shape) for x in _first_guess(heads, num_keys, limit.columns, scale))
    budget = torch.full((batch, 1), _LOSS * shape[1], dtype=torch.float64, device=device)
    out = heads.value.new_empty(batch_heads, q_len, heads.value.shape[2])
    columns_of = torch.zeros(batch_heads, dtype=torch.int64, device=device)
    step = max(1, _CHUNK_NUMEL // heads.key[0].numel())
    while True:
        probability = torch.special.ndtr((math.log(limit.max_error) - log_bound + 0.5 * growth.log()) / spread)
        gain, level = (probability - cost).masked_fill(~possible, -torch.inf).max(0)
        risk = ((1.0 - probability) * cost).gather(0, level.unsqueeze(0))[0].masked_fill(gain <= 0, 0.0)
        order = gain.argsort(dim=1, descending=True, stable=True)
        within = risk.gather(1, order).cumsum(1) <= budget
        chosen = (gain > 0) & within.gather(1, order.argsort(1))
        if not bool(chosen.any()):
            break
        for number, count in enumerate(levels):
            some_heads = (chosen & (level == number)).flatten().nonzero()[:, 0]
            for some in some_heads.split(step) if len(some_heads) else ():
                own = _select(heads, some)
                part = approximate(own, count)
                bound = held_back_bound(
                    *own, part, num_probes=limit.num_probes, num_rows=NUM_ROWS, scale=scale, seed=seed
                )
                good = bound <= limit.max_error
                out[some[good]], columns_of[some[good]] = part[good], count
                at_first = bound.double().log() + 0.5 * math.log(count / limit.columns)
                log_bound.view(-1)[some], spread.view(-1)[some] = at_first, _SPREAD
        spent = cost.gather(0, level.unsqueeze(0))[0]
        done = (columns_of > 0).view(shape)
        budget += torch.where(chosen, done.double() - spent, 0.0).sum(1, keepdim=True)
        possible = possible & ~done & ~(chosen & (columns <= columns.flatten()[level]))
    rest = (columns_of == 0).nonzero()[:, 0]
    if len(rest) == batch_heads:
        return exact(heads), columns_of
    for some in rest.split(step) if len(rest) else ():
        out[some] = exact(_select(heads, some))
    return out, columns_of


def _first_guess(heads: FlatHeads, num_keys: Tensor, columns: int, scale: float) -> tuple[Tensor, Tensor]:
    """The logarithm of the bound that is expected of each head, and its standard deviation: float64 (BH,)."""
    spread = torch.full(num_keys.shape, _COPY_SPREAD, dtype=torch.float64, device=num_keys.device)
    if heads.key.shape[1] <= 2 * NUM_KEYS:
        return torch.full_like(spread, -torch.inf), spread
    error = screening_error(*heads, scale=scale).double() * _COPY_FACTOR * (NUM_LANDMARKS / columns) ** 0.5
    # In a sequence that is hardly longer than its copy, an attempt costs less than the copy tells.
    return error.log().masked_fill(num_keys <= 2 * NUM_KEYS, -torch.inf), spread


def _num_keys(heads: FlatHeads) -> Tensor:
    """The number of valid keys of every head, int64 (BH,)."""
    batch_heads, kv_len, _ = heads.key.shape
    if heads.key_mask is None:
        return torch.full((batch_heads,), kv_len, device=heads.key.device)
    return heads.key_mask.sum(1)


def _select(heads: FlatHeads, index: Tensor) -> FlatHeads:
    """Some of the heads, all of them without a copy."""
    if len(index) == heads.query.shape[0]:
        return heads
    return FlatHeads(*(None if x is None else x[index] for x in heads))  # type: ignore[arg-type]
