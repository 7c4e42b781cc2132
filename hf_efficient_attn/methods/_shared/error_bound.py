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

from hf_efficient_attn.methods._shared.config import MethodConfig
from hf_efficient_attn.methods._shared.exact import exact_form
from hf_efficient_attn.methods._shared.heads import FlatHeads
from hf_efficient_attn.methods._shared.registry import AttentionOptions, get_method
from hf_efficient_attn.ops.random import Seed
from hf_efficient_attn.ops.row_error import held_back_bound
from hf_efficient_attn.ops.screening import NUM_KEYS, NUM_LANDMARKS, screening_error

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
# Numbers of keys that are copied at a time when some heads are computed: 4 MiB of float32.
_CHUNK_NUMEL = 1 << 20


class Limit(NamedTuple):
    """What the heads of a call must keep.

    Attributes:
        max_error: the largest bound of a head's relative error in the operator norm.
        columns: columns of a head's first attempt.
        length: the number of keys from which on an approximation with these columns is worthwhile.
        batch: B, the number of sequences.
    """

    max_error: float
    columns: int
    length: int
    batch: int


class Forms(NamedTuple):
    """How heads are computed.

    Attributes:
        approximate: approximate(heads, columns) returns the output (BH, Nq, Dv) of some heads.
        exact: exact(heads) returns their exact output.
        num_probes: queries that the weights are fitted to, evenly spaced. They are not used for the bound.
    """

    approximate: Callable[[FlatHeads, int], Tensor]
    exact: Callable[[FlatHeads], Tensor]
    num_probes: int


def worthwhile_length(crossover: int) -> int:
    """The length from which on an approximation costs little enough, from that at which it costs as much as exact."""
    return math.ceil(crossover / math.pow(_LARGEST_COST, 1.0 / COST_POWER))


def bounded_attention(
    method: Callable[[int], MethodConfig], heads: FlatHeads, limit: Limit, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attention of each head by a method with as many columns as it needs, or exactly.

    Args:
        method: method(columns) returns the config of the method with a budget.
        heads: of all sequences.
        limit: what they must keep.
        options: of the call; the mask of `heads` is taken.

    Returns:
        As `attend_within_bound`.
    """

    def approximate(some: FlatHeads, columns: int) -> Tensor:
        config, own = method(columns), options._replace(key_mask=some.key_mask)
        query, key, value = (x.unsqueeze(1) for x in some[:3])  # heads as sequences have the same random numbers
        return get_method(config.method).forward(config, query, key, value, own)[:, 0]

    def exact(some: FlatHeads) -> Tensor:
        query, key, value = (x.unsqueeze(1) for x in some[:3])
        return exact_form(query, key, value, options._replace(key_mask=some.key_mask))[:, 0]

    forms = Forms(approximate, exact, getattr(method(limit.columns), "num_probes", 0))
    return attend_within_bound(heads, limit, forms, options.scale, options.seed)


def attend_within_bound(
    heads: FlatHeads, limit: Limit, forms: Forms, scale: float, seed: Seed
) -> tuple[Tensor, Tensor]:
    """Attention of each head with as many columns as it needs, or exactly.

    Args:
        heads: of B sequences.
        limit: what they must keep.
        forms: how heads are computed.
        scale: factor of the scores.
        seed: of the rows that bound the error.

    Returns:
        The output (BH, Nq, Dv), and the columns of every head, int64 (BH,); 0 for an exact head.
    """
    batch_heads, q_len, _ = heads.query.shape
    device, batch = heads.query.device, limit.batch
    shape = (batch, batch_heads // batch)
    num_keys = _num_keys(heads)
    levels = [limit.columns]
    while 2 * levels[-1] <= _MAX_COLUMNS:
        levels.append(2 * levels[-1])
    growth = torch.tensor(levels, dtype=torch.float64, device=device).view(-1, 1, 1) / limit.columns
    keys = num_keys.double().view(shape)
    cost = _LARGEST_COST * (limit.length / keys * growth) ** COST_POWER + NUM_ROWS / keys
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
                part = forms.approximate(own, count)
                bound = held_back_bound(
                    *own, part, num_probes=forms.num_probes, num_rows=NUM_ROWS, scale=scale, seed=seed
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
        return forms.exact(heads), columns_of
    for some in rest.split(step) if len(rest) else ():
        out[some] = forms.exact(_select(heads, some))
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
