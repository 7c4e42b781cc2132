"""The choice among methods and budgets for the layers of a model, by their errors and times.

Of the candidates whose error stays below a limit on unseen sequences, the fastest on this machine is chosen. "Keys per
query" are no cost: methods differ in what they do besides.
"""

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from torch import nn

from hf_efficient_attn.evaluation import timing
from hf_efficient_attn.evaluation.capture import Batch, Call, capture_attention, forward
from hf_efficient_attn.evaluation.defaults import Candidate
from hf_efficient_attn.integration.layers import Layer, in_order
from hf_efficient_attn.methods import MethodConfig

T = TypeVar("T")

# An unseen sequence stays below mean + 2 deviations with probability .977, if log errors are normal.
_DEVIATIONS = 2.0
# Standard deviation between sequences of the logarithm of the error, pooled over layers, as far as sequences do not say
# more: of pictures, and of texts with up to `_SHORT` tokens. The errors of longer texts are means over more queries.
_UNKNOWN_SPREAD, _SHORT, _SPREAD_POWER = 0.25, 512, 0.25

# Measurements of each time from which the saving is computed.
ROUNDS = 3
# The first measurement of a time is a single call. Choices that take up to this times as long as the fastest are
# measured again, in turn.
_CLOSE = 1.5

# (number of the batch, index in the batch) -> error of one sequence in a layer, a mean over heads.
Errors = dict[tuple[int, int], float]
ErrorTable = dict[tuple[Layer, Candidate], Errors]
# Seconds of all calls in a layer, with a candidate or exact (None).
Seconds = dict[tuple[Layer, Candidate | None], float]
# Measures the seconds again of some candidates in each layer.
Measure = Callable[[Mapping[Layer, Sequence[Candidate | None]]], Seconds]


class Choice(NamedTuple):
    """A candidate that keeps the limit in a layer."""

    candidate: Candidate
    config: MethodConfig  # which the settings of the model contain
    error: float  # averaged over the sequences
    bound: float  # upper bound of the error on an unseen sequence


def assumed_spread(tokens: int, *, is_text: bool) -> float:
    """The deviation of log errors to assume between sequences of at least `tokens` tokens before they are measured."""
    return _UNKNOWN_SPREAD * (min(1.0, _SHORT / max(1, tokens)) ** _SPREAD_POWER if is_text else 1.0)


def accept(
    table: ErrorTable, candidates: Sequence[Candidate], max_error: float, assumed: float
) -> dict[Layer, list[Choice]]:
    """For every layer the candidates whose bound keeps the limit; layers without one are left out.

    `assumed` is the deviation that is assumed between sequences (`assumed_spread`).
    """
    pooled = {one: spread(table, one, max_error, assumed) for one in candidates}
    accepted: dict[Layer, list[Choice]] = {}
    for layer in in_order(layer for layer, _ in table):
        for candidate in candidates:
            errors = table.get((layer, candidate), {})
            limit = bound(errors, pooled[candidate], max_error)
            stored = candidate.config.calibrated(max_error, accepted=True)
            if limit <= max_error and stored is not None:
                found = Choice(candidate, stored, statistics.fmean(errors.values()), limit)
                accepted.setdefault(layer, []).append(found)
    return accepted


def choose_each(
    accepted: Mapping[Layer, Sequence[Choice]], seconds: Seconds, measure: Measure | None = None
) -> dict[Layer, Choice]:
    """The fastest choice for each layer; layers in which exact attention is faster are left out, unless all are.

    `measure` is asked for those that take about as long as the fastest. None: it is not.
    """

    def taken(layer: Layer, one: Choice | None) -> float:
        return seconds[layer, one and one.candidate]

    near = {layer: _close([*some, None], functools.partial(taken, layer)) for layer, some in accepted.items()}
    open_ones = {layer: [one and one.candidate for one in some] for layer, some in near.items() if len(some) > 1}
    if measure is not None and open_ones:
        seconds = seconds | measure(open_ones)
    fastest = {layer: min(some, key=functools.partial(taken, layer)) for layer, some in near.items()}
    chosen = {layer: one for layer, one in fastest.items() if one is not None}
    return chosen or {layer: min(some, key=functools.partial(taken, layer)) for layer, some in accepted.items()}


def choose_one(
    accepted: Mapping[Layer, Sequence[Choice]], seconds: Seconds, measure: Measure | None = None
) -> dict[Layer, Choice]:
    """One candidate for all layers that keep the limit with it, so that the model is fastest; the others are exact."""
    choices: dict[Candidate, dict[Layer, Choice]] = {}
    for layer, some in accepted.items():
        for one in some:
            choices.setdefault(one.candidate, {})[layer] = one

    def total(candidate: Candidate) -> float:
        return sum(seconds[layer, candidate if layer in choices[candidate] else None] for layer in accepted)

    near = _close([*choices], total)
    if measure is not None and len(near) > 1:
        open_ones = {layer: [None, *(one for one in near if layer in choices[one])] for layer in accepted}
        seconds = seconds | measure(open_ones)
    return choices[min(near, key=total)] if near else {}


def _close(some: Sequence[T], seconds: Callable[[T], float]) -> list[T]:
    """Those that take about as long as the fastest."""
    limit = _CLOSE * min(map(seconds, some), default=0.0)
    return [one for one in some if seconds(one) <= limit]


def times_of(works: Sequence[timing.Work]) -> list[list[float]]:
    """The seconds of each work in each round, measured in turn."""
    numbers = [timing.calls_to_time(work) for work in works]
    return [[*map(timing.time_calls, works, numbers)] for _ in range(ROUNDS)]


def work_of(call: Call, config: MethodConfig | None) -> timing.Work:
    """The call with a method, or exact."""
    config = call.chosen(config)
    return call.compute_exact if config is None else functools.partial(call.compute, config)


def measure_seconds(model: nn.Module, batch: Batch, candidates: Mapping[Layer, Sequence[Candidate | None]]) -> Seconds:
    """The seconds of candidates in their layers, medians of rounds, on the longest sequence of a batch."""
    seconds: Seconds = defaultdict(float)

    def visit(call: Call) -> None:
        if call.layer is None:
            return
        some, one = candidates.get(call.layer, ()), call.longest()
        rounds = times_of([work_of(one, candidate and candidate.config.to_measure()) for candidate in some])
        for candidate, times in zip(some, zip(*rounds, strict=True), strict=True):
            seconds[call.layer, candidate] += statistics.median(times)

    with capture_attention(model, visit):
        forward(model, batch)
    return seconds


def _logs(errors: Errors, max_error: float) -> list[float]:
    """Logarithms of errors. Errors are bounded below, since the logarithm of 0 is not finite."""
    return [math.log(max(error, max_error / 100)) for error in errors.values()]


def spread(table: ErrorTable, candidate: Candidate, max_error: float, assumed: float) -> float:
    """Standard deviation between sequences of a candidate's log errors, pooled over the layers.

    `assumed` counts as one more observation. The candidates that are chosen are those whose few sequences
    happen to be alike, and later sequences differ more.
    """
    squares, count = assumed**2, 1
    for (_, other), errors in table.items():
        if other == candidate and len(errors) > 1:
            squares += statistics.variance(_logs(errors, max_error)) * (len(errors) - 1)
            count += len(errors) - 1
    return math.sqrt(squares / count)


def bound(errors: Errors, pooled: float, max_error: float) -> float:
    """Upper bound of the error on an unseen sequence, as `calibrate` defines it; inf if it is unknown.

    `errors` are those of a candidate in one layer, and `pooled` is the deviation of its log errors in all (`spread`).
    """
    if not errors or not all(map(math.isfinite, errors.values())):
        return math.inf
    logs = _logs(errors, max_error)
    deviation = max(statistics.stdev(logs) if len(logs) > 1 else 0.0, pooled)
    margin = _DEVIATIONS * deviation * math.sqrt(1 + 1 / len(logs))
    return max(math.exp(statistics.fmean(logs) + margin), *errors.values())
