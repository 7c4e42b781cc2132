"""Which heads of a call to approximate, and with how many columns, so that the error of each stays below a forms.

Costs are relative to exact attention of the same head. An attempt costs the approximation and the exact rows that bound
its error. If the bound exceeds the limit, exact attention is added. So an attempt pays if the probability P that it
succeeds is above its cost. P is that of a normal distribution of the logarithm of the bound: at first around the error
of a small copy of the head (`hf_efficient_attn.ops.row_error`), and after an attempt around the bound that was found.
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

from hf_efficient_attn.ops.random import Seed
from hf_efficient_attn.ops.row_error import NUM_KEYS, NUM_LANDMARKS, held_back_bound, screening_error

# Rows that bound the error.
NUM_ROWS = 64
# The bound with c columns is about this multiple of the error of the copy times sqrt(landmarks of the copy / c), and
# the standard deviations of its logarithm, before and after an attempt. Measured on MiniLM with 4,096 tokens.
_COPY_FACTOR, _COPY_SPREAD, _SPREAD = 1.1, 0.65, 0.3
# The cost of c columns grows with this power of c. It falls with the same power of the length beyond that at which the
# approximation costs as much as exact attention. The power would be 1 if the time were in proportion to the length, and
# 2 if it were constant, as that of choosing landmarks is. With 3,072, 4,096 and 8,192 tokens the cost is .51, .31, .11.
COST_POWER = 1.5
# An approximation must cost at most this share of exact attention. With more, the heads that stay exact leave little to
# gain.
_LARGEST_COST = 0.75
# Share of exact attention that may be lost.
_LOSS = 0.02
# A head has at most this many columns, unless it begins with more.
_MAX_COLUMNS = 1024


class Forms(NamedTuple):
    """How the heads of a call are computed, from query, key and value (BH, N, .), and what they must keep.

    Attributes:
        approximate: approximate(query, key, value, columns) returns the output (BH, Nq, Dv) of some heads.
        exact: exact(query, key, value) returns their exact output.
        num_probes: queries that the weights are fitted to, evenly spaced. They are not used for the bound.
        max_error: the largest bound of a head's relative error in the operator norm.
        columns: columns of a head's first attempt.
        length: the number of keys from which on an approximation with these columns is worthwhile.
    """

    approximate: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    num_probes: int
    max_error: float
    columns: int
    length: int


def worthwhile_length(crossover: int) -> int:
    """The length from which on an approximation costs little enough, from that at which it costs as much as exact."""
    return math.ceil(crossover / math.pow(_LARGEST_COST, 1.0 / COST_POWER))


def attend_within_bound(
    heads: tuple[Tensor, Tensor, Tensor], forms: Forms, batch: int, scale: float, seed: Seed
) -> tuple[Tensor, Tensor]:
    """Attention of each head with as many columns as it needs, or exactly.

    Args:
        heads: query (BH, Nq, D), key (BH, Nk, D) and value (BH, Nk, Dv) of B sequences without padding.
        forms: how heads are computed, and what they must keep.
        batch: B.
        scale: factor of the scores.
        seed: of the rows that bound the error.

    Returns:
        The output (BH, Nq, Dv), and the columns of every head, int64 (BH,); 0 for an exact head.
    """
    (batch_heads, q_len, _), num_keys, device = heads[0].shape, heads[1].shape[1], heads[0].device
    shape = (batch, batch_heads // batch)
    levels = [forms.columns]
    while 2 * levels[-1] <= min(_MAX_COLUMNS, num_keys // 2):
        levels.append(2 * levels[-1])
    columns = torch.tensor(levels, device=device)
    growth = columns.double().view(-1, 1, 1) / forms.columns
    cost = _LARGEST_COST * (forms.length / num_keys * growth) ** COST_POWER + NUM_ROWS / num_keys
    cost = cost.expand(-1, *shape)
    possible = torch.ones_like(cost, dtype=torch.bool)
    log_bound, spread = _first_guess(heads, forms.columns, scale).view(shape), torch.full_like(cost[0], _COPY_SPREAD)
    budget = torch.full((batch, 1), _LOSS * shape[1], dtype=torch.float64, device=device)
    out = heads[2].new_empty(batch_heads, q_len, heads[2].shape[2])
    columns_of = torch.zeros(batch_heads, dtype=torch.int64, device=device)
    while True:
        probability = torch.special.ndtr((math.log(forms.max_error) - log_bound + 0.5 * growth.log()) / spread)
        gain, level = (probability - cost).masked_fill(~possible, -torch.inf).max(0)
        risk = ((1.0 - probability) * cost).gather(0, level.unsqueeze(0))[0].masked_fill(gain <= 0, 0.0)
        order = gain.argsort(dim=1, descending=True, stable=True)
        within = risk.gather(1, order).cumsum(1) <= budget
        chosen = (gain > 0) & within.gather(1, order.argsort(1))
        if not bool(chosen.any()):
            break
        for number, count in enumerate(levels):
            some = (chosen & (level == number)).flatten().nonzero()[:, 0]
            if not len(some):
                continue
            q, k, v = (x.index_select(0, some) for x in heads)
            part = forms.approximate(q, k, v, count)
            sizes = {"num_probes": forms.num_probes, "num_rows": NUM_ROWS}
            bound = held_back_bound(q, k, v, part, **sizes, scale=scale, seed=seed)
            good = bound <= forms.max_error
            out[some[good]], columns_of[some[good]] = part[good], count
            log_bound.view(-1)[some] = bound.double().log() + 0.5 * math.log(count / forms.columns)
            spread.view(-1)[some] = _SPREAD
        spent, done = cost.gather(0, level.unsqueeze(0))[0], (columns_of > 0).view(shape)
        budget += torch.where(chosen, done.double() - spent, 0.0).sum(1, keepdim=True)
        possible = possible & ~done & ~(chosen & (columns.view(-1, 1, 1) <= columns[level]))
    rest = (columns_of == 0).nonzero()[:, 0]
    if len(rest):
        out[rest] = forms.exact(*(x.index_select(0, rest) for x in heads))
    return out, columns_of


def _first_guess(heads: tuple[Tensor, Tensor, Tensor], columns: int, scale: float) -> Tensor:
    """The logarithm of the bound that is expected of each head: float64 (BH,)."""
    # In a sequence that is hardly longer than its copy, an attempt costs less than the copy tells.
    if heads[1].shape[1] <= 2 * NUM_KEYS:
        return heads[1].new_full(heads[1].shape[:1], -torch.inf, dtype=torch.float64)
    error = screening_error(*heads, scale=scale).double()
    log_bound: Tensor = (error * _COPY_FACTOR * (NUM_LANDMARKS / columns) ** 0.5).log()
    return log_bound
