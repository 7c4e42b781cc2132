"""Which heads of a call `auto` attempts to approximate, and with how many columns.

Costs are relative to exact attention of the same head. An attempt costs the approximation and the exact rows that bound
its error. If the bound exceeds the limit, exact attention is added. So an attempt pays if the probability P that it
succeeds is above its cost. P assumes that the logarithm of the bound is normally distributed: at first around the error
of a small copy of the head (`screening_error`), and after an attempt around the bound of that attempt. Twice as many
columns are expected to leave .6 of the bound.

The heads of a sequence are attempted in the order of P - cost, as long as the expected loss, the sum of (1 - P) cost,
is within a budget: a small share of exact attention, plus what earlier attempts have saved. The first attempts are few.
So a sequence in which all heads need exact attention loses hardly any time. Nothing depends on other sequences or
earlier calls.
"""

import bisect
import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends.devices import accumulation_dtype, wide_dtype, widened
from hf_efficient_attn.ops.clusters import (
    RIDGE,
    even_positions,
    gaussian_kernel,
    lloyd_step,
    regularized_solve,
    with_ones,
)
from hf_efficient_attn.ops.exact import scaled_dot_product_attention
from hf_efficient_attn.ops.nearfar.landmarks import LEAST_LOG_WEIGHT, TEMPERATURE
from hf_efficient_attn.ops.row_error import row_error

# Sizes of the copy of a head, and steps of Lloyd's algorithm.
COPY_KEYS = 256
_COPY_QUERIES = 64
_COPY_LANDMARKS = 32
_COPY_STEPS = 2
# A denominator of the copy must be this share of the sum of the sizes of its terms.
_LEAST_DENOMINATOR = 0.01
# The number of evenly spaced queries that correct an output, and of others that bound its error.
NUM_PROBES = 384
NUM_ROWS = 64
# The bound with c columns is about `_COPY_FACTOR` (error of the copy * landmarks of the copy / c)^_GROWTH.
_COPY_FACTOR = 0.37
_GROWTH = 0.7
# Standard deviations of the logarithm of the bound: of a head in a sequence without attempts, of another head after the
# first attempts in its sequence, and of an attempted head. The first attempt tells most.
_COPY_SPREAD = 0.7
_NEXT_SPREAD = 0.55
_SPREAD = 0.4
# The share of the first attempts' news that also holds for the other heads of a sequence.
_SHARED = 0.8
# The cost of an approximation falls with the power `_COST_POWER` of the length and grows with a power of the columns.
# Without near keys it is `_FAR_COST` of the cost with the mean number of near keys. Up to `_NEAR_COST` is added for
# near keys where more than a fifth of the largest error is expected.
_COST_POWER = 1.2
_COLUMNS_POWER = 0.7
_FAR_COST = 0.65
_NEAR_COST = 1.5
# An approximation must cost at most this share of exact attention. Otherwise exact heads leave little to gain.
_LARGEST_COST = 0.85
# The share of exact attention that may be lost, and the cost of the first attempts in a sequence. The heads of
# a sequence are alike, so if one attempt fails, all of them may fail.
_LOSS = 0.02
_FIRST_COST = 0.65
# A head has at most this many columns, unless it begins with more.
_MAX_COLUMNS = 1024


def worthwhile_length(crossover: int) -> int:
    """Compute the length from which on approximation costs little enough, from the crossover with exact attention."""
    return math.ceil(crossover * math.pow(_FAR_COST / _LARGEST_COST, 1.0 / _COST_POWER))


def attempt_length(length: int) -> int:
    """Compute the number of keys up to which no head is attempted, whatever the data, from `worthwhile_length`."""
    lengths = range(1, 2 * length + 4 * NUM_ROWS)
    return bisect.bisect_left(lengths, True, key=lambda kv_len: _least_cost(length, kv_len) <= _FIRST_COST)


def _least_cost(length: int, kv_len: int) -> float:
    """The cost of an attempt with the first number of columns and without near keys."""
    return float(_LARGEST_COST * (length / kv_len) ** _COST_POWER + NUM_ROWS / kv_len)


class Choice(NamedTuple):
    """The next attempts."""

    heads: Tensor  # bool (B, H), the heads to attempt. If there is none, all other heads are exact.
    level: Tensor  # int64 (B, H), the number of columns of each head, as an index of `Attempts.columns`


class Attempts:
    """The heads of B sequences that may be approximated, and what is known about their errors.

    Attributes:
        columns: the numbers of columns that a head may have, ascending.
    """

    def __init__(
        self,
        batch: int,
        num_heads: int,
        kv_len: int,
        *,
        columns: int,
        length: int,
        max_error: float,
        device: torch.device,
    ) -> None:
        """Begin without attempts.

        Args:
            batch: B.
            num_heads: H.
            kv_len: number of keys.
            columns: number of columns of a head's first attempt.
            length: the number of keys from which on an approximation with these columns is worthwhile.
            max_error: the largest bound of a head's error.
            device: device of the heads.
        """
        self.columns = [columns]
        while 2 * self.columns[-1] <= min(_MAX_COLUMNS, kv_len // 2):
            self.columns.append(2 * self.columns[-1])
        self._max_error = max_error
        self._growth = widened(torch.tensor(self.columns, device=device).view(-1, 1, 1)) / columns  # (L, 1, 1)
        approximation = _LARGEST_COST * (length / kv_len) ** _COST_POWER * self._growth**_COLUMNS_POWER
        dtype = wide_dtype(device)
        self._cost = (approximation + NUM_ROWS / kv_len).expand(-1, batch, num_heads)  # (L, B, H)
        # The expected logarithm of the bound with the first number of columns.
        self._log_bound = torch.full((batch, num_heads), -torch.inf, dtype=dtype, device=device)
        self._attempted = torch.zeros(batch, num_heads, dtype=torch.bool, device=device)
        self._possible = torch.ones_like(self._cost, dtype=torch.bool)
        # What may be lost in each sequence, in units of exact attention of a head.
        self._budget = torch.full((batch, 1), _LOSS * num_heads, dtype=dtype, device=device)

    def expect(self, copy_error: Tensor) -> None:
        """Expect bounds that follow from the errors of small copies of the heads, (B, H)."""
        self._log_bound = torch.log(_COPY_FACTOR * (copy_error * _COPY_LANDMARKS / self.columns[0]) ** _GROWTH)
        near = (5.0 * self._log_bound.exp() / self._max_error - 1.0).clamp(0.0, 1.0)
        self._cost = self._cost * (1.0 + _NEAR_COST * near)

    def choose(self) -> Choice:
        """Choose the heads to attempt next."""
        spread = torch.full_like(self._log_bound, _COPY_SPREAD)
        spread = spread.masked_fill(self._attempted.any(1, keepdim=True), _NEXT_SPREAD)
        spread = spread.masked_fill(self._attempted, _SPREAD)
        margin = math.log(self._max_error) - self._log_bound + _GROWTH * self._growth.log()  # (L, B, H)
        probability = torch.special.ndtr(margin / spread)  # of success
        gain, level = (probability - self._cost).masked_fill(~self._possible, -torch.inf).max(0)  # (B, H) each
        chance = probability.gather(0, level.unsqueeze(0))[0]  # (B, H)
        price = self._price(level).masked_fill(gain <= 0, 0.0)
        order = gain.argsort(dim=1, descending=True, stable=True)  # (B, H)
        is_first = ~self._attempted.any(1, keepdim=True)  # (B, 1)
        # Sums over the heads with a larger gain, and the head itself.
        risk, first = (x.gather(1, order).cumsum(1) for x in ((1.0 - chance) * price, price * is_first))
        affordable = ((risk <= self._budget) & (first <= _FIRST_COST)).gather(1, order.argsort(1))
        return Choice((gain > 0) & affordable, level)

    def record(self, choice: Choice, bound: Tensor) -> None:
        """Take the bounds (B, H) of the errors of the chosen heads."""
        expected = self._log_bound
        growth = self._growth.view(-1)[choice.level]  # (B, H)
        self._log_bound = torch.where(choice.heads, bound.log() + _GROWTH * growth.log(), expected)
        first = choice.heads & ~self._attempted.any(1, keepdim=True)
        self._attempted = self._attempted | choice.heads
        if bool(first.any()):  # tells something about the other heads of the sequence
            news = ((self._log_bound - expected).masked_fill(~first, 0.0)).sum(1, keepdim=True)
            news = news / first.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
            others = first.any(1, keepdim=True) & ~self._attempted
            # Where nothing was expected, nothing follows for them, and they stay exact.
            self._possible = self._possible & ~(others & expected.isinf())
            others = others & ~expected.isinf()
            self._log_bound = torch.where(others, self._log_bound + _SHARED * news, self._log_bound)
        good = choice.heads & (bound <= self._max_error)
        saved = good.to(self._budget.dtype) - self._price(choice.level)
        self._budget = self._budget + torch.where(choice.heads, saved, 0.0).sum(1, keepdim=True)
        too_few = choice.heads & (self._growth <= growth)  # (L, B, H)
        self._possible = self._possible & ~good & ~too_few

    def _price(self, level: Tensor) -> Tensor:
        """Look up the cost of each head with its number of columns: (B, H)."""
        price: Tensor = self._cost.gather(0, level.unsqueeze(0))[0]
        return price


@torch.no_grad()
def screening_error(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Guess cheaply how well landmarks approximate the attention of a head, before computing any of it.

    The guess is the error of a copy of the head with a few evenly spaced keys and queries. A few landmarks represent
    its keys: means of clusters with Nystrom weights, without near keys and probes. The error of the copy is larger than
    the error of the head, but the order of heads is similar.

    It takes (BH, Nq, D), (BH, Nk, D) and (BH, Nk, Dv), and returns (BH,) in the accumulation dtype, not negative.
    """
    dtype = accumulation_dtype(query.dtype)
    queries, keys, values = (
        x.index_select(1, even_positions(x.shape[1], min(x.shape[1], count), x.device)).to(dtype)
        for x, count in ((query, _COPY_QUERIES), (key, COPY_KEYS), (value, COPY_KEYS))
    )
    keys = keys - keys.mean(1, keepdim=True)
    rough = _copy_attention(queries, keys, values, scale)
    exact = scaled_dot_product_attention(queries, keys, values, scale=scale)
    return row_error(rough, exact).estimate.nan_to_num(nan=torch.inf)


def _copy_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute attention to the landmarks of centered keys: (BH, p, Dv)."""
    root = TEMPERATURE * abs(scale) ** 0.5
    points = key * root  # (BH, n, D)
    count = min(_COPY_LANDMARKS, key.shape[1])
    log_weight = 0.5 * points.square().sum(2, keepdim=True)  # (BH, n, 1)
    weight = (log_weight - log_weight.amax(1, keepdim=True)).clamp(min=LEAST_LOG_WEIGHT).exp()
    terms = torch.cat((points * weight, weight), 2)  # (BH, n, D + 1)
    centers = points.index_select(1, even_positions(key.shape[1], count, key.device))  # (BH, m, D)
    for _ in range(_COPY_STEPS):
        centers = lloyd_step(points, terms, centers)
    own = 0.5 * centers.square().sum(2)  # (BH, m)
    # exp(<c, x> - |c|^2 / 2) for a landmark c and a key x, relative to the largest one of the head: (BH, m, Nk).
    similarity = torch.baddbmm(-own.unsqueeze(2), centers, points.mT)
    similarity = (similarity - similarity.amax((1, 2), keepdim=True)).exp()
    sums = similarity @ with_ones(value)  # (BH, m, Dv + 1)
    weights = regularized_solve(widened(gaussian_kernel(centers)), widened(sums), RIDGE)  # (BH, m, Dv + 1)
    scores = scale / root * query @ centers.mT if root else torch.zeros_like(query @ centers.mT)  # (BH, p, m)
    logits = widened(scores) - own.unsqueeze(1)  # (BH, p, m)
    basis = (logits - logits.amax(2, keepdim=True)).exp()
    out = basis @ weights  # (BH, p, Dv + 1)
    size = basis @ weights[..., -1:].abs()  # (BH, p, 1)
    positive = out[..., -1:] > _LEAST_DENOMINATOR * size
    ratio = out[..., :-1] / torch.where(positive, out[..., -1:], 1.0)
    means = sums[..., :-1] / sums[..., -1:].clamp(min=torch.finfo(sums.dtype).tiny)  # (BH, m, Dv)
    return torch.where(positive, ratio, widened(scores.softmax(2) @ means)).to(query.dtype)
