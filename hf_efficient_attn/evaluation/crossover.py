"""Measures from which length on a method is faster than exact attention on this machine.

`hf_efficient_attn.methods._shared.crossover` describes what the lengths depend on, and looks them up.
`evaluation.crossover_file` stores them.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import Work, time_calls, use_device
from hf_efficient_attn.methods import (
    MethodConfig,
    attention,
    available_methods,
    crossover,
    learns,
    make_config,
    method_info,
)

_HEAD_DIM = 64
# Lengths between which is searched. The search begins at a length beyond which attention is quadratic for certain.
_SHORTEST, _FIRST, _LONGEST = 256, 4096, 1 << 17
# Exact attention is not measured at longer sequences: its time grows with the square of the length.
_QUADRATIC = 2048
# Calls are repeated until they take this time in seconds, in so many rounds that their number is odd.
_MIN_SECONDS, _MAX_ROUNDS = 0.02, 5
# A call of a method that takes longer is not followed by one at twice the length: the ratio is taken to grow in
# proportion to the length.
_MAX_SECONDS = 2.0
# A ratio that is large enough for a search to stop there; a ratio just above 1 may be due to chance.
_CLEAR = 1.1
# The result is interpolated between lengths with at most this ratio, and new lengths are at least the other ratio away.
_RANGE, _LEAST_STEP = 1.5, 1.15


def measure_crossover(method: str, device: torch.device, *, progress: bool = False) -> dict[str, crossover.Crossover]:
    """Measure the lengths of a method with its default hyperparameters, which takes some seconds.

    On an otherwise idle machine two measurements of a length differ by up to a tenth.

    Args:
        method: its name.
        device: where to measure.
        progress: whether to show a bar on stderr if that is a terminal.

    Returns:
        row of the table -> lengths, for float32 and bfloat16, and causal if the method has a causal form.

    Raises:
        UnsupportedAttentionError: an unknown method, one with learned parameters, or one that switches to another.
    """
    config = make_config(method)
    if config.switches_to:
        raise UnsupportedAttentionError(
            f"{method} replaces exact attention from the length on that is measured for {config.switches_to}: name "
            f"{config.switches_to}, or leave --method out"
        )
    if learns(config):
        raise UnsupportedAttentionError(
            f"{method} has learned parameters and does not approximate exact attention before training, so that it "
            "replaces exact attention at no length: name another method"
        )
    dims = (crossover.SMALL_DIM, crossover.LARGE_DIM)
    cases = [
        (dtype, causal, dim)
        for dtype in (torch.float32, torch.bfloat16)
        for causal in (False, True)[: 1 + config.causal]
        for dim in dims
    ]
    lengths: dict[str, list[int]] = {}
    with torch.no_grad(), use_device(device), tqdm(cases, leave=False, disable=None if progress else True) as bar:
        for dtype, is_causal, dim in bar:
            row, num_heads = crossover.table_key(dtype, is_causal), dim // _HEAD_DIM
            bar.set_description(f"{method}, {row}, {num_heads} heads")
            ratio = Ratio(config, num_heads, dtype, device, is_causal)
            lengths.setdefault(row, []).append(find_crossover(ratio, max(_SHORTEST, config.exact_length + 1)))
    return {row: crossover.Crossover(*found) for row, found in lengths.items()}


def default_method() -> str:
    """The method that another one switches to, whose lengths therefore matter."""
    targets = (method_info(name).config_class.switches_to for name in available_methods())
    return next(name for name in targets if name)


class Ratio:
    """Time of exact attention divided by that of a method, at any length.

    Args:
        config: of the method.
        num_heads: of one sequence, with head_dim 64.
        dtype: of the inputs.
        device: of the inputs.
        is_causal: whether the attention is causal.

    Attributes:
        seconds: time of the method in the last measurement.
    """

    def __init__(
        self, config: MethodConfig, num_heads: int, dtype: torch.dtype, device: torch.device, is_causal: bool
    ) -> None:
        self._config, self._num_heads, self._is_causal = config, num_heads, is_causal
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.seconds = 0.0

    def __call__(self, length: int) -> float:
        """The median over rounds in which both are measured in turn."""
        generator = torch.Generator().manual_seed(0)
        shape = (3, 1, self._num_heads, length, _HEAD_DIM)
        query, key, value = torch.randn(shape, generator=generator).to(**self._options)
        short = min(length, _QUADRATIC)

        def exact() -> None:
            q, k, v = (x[:, :, :short] for x in (query, key, value))
            scaled_dot_product_attention(q, k, v, is_causal=self._is_causal)

        def method() -> None:
            attention(self._config, query, key, value, is_causal=self._is_causal)

        ratio, self.seconds = paired_ratio(exact, method)
        return ratio * (length / short) ** 2


def paired_ratio(first: Work, second: Work) -> tuple[float, float]:
    """The median over rounds of time of `first` / time of `second`, measured in turn, and the median time of `second`.

    A call before the first round fills memory and caches, and determines how often each is called in a round. There are
    fewer rounds of long calls, which other work of the machine disturbs less.
    """
    seconds = [max(1e-6, time_calls(work)) for work in (first, second)]
    numbers = [math.ceil(_MIN_SECONDS / _MAX_ROUNDS / one) for one in seconds]
    rounds = min(_MAX_ROUNDS, math.ceil(_MIN_SECONDS * _MAX_ROUNDS / max(seconds)) | 1)
    pairs = [(time_calls(first, numbers[0]), time_calls(second, numbers[1])) for _ in range(rounds)]
    return statistics.median(a / b for a, b in pairs), statistics.median(b for _, b in pairs)


def find_crossover(ratio: Callable[[int], float], shortest: int) -> int:
    """The largest length at which a noisy ratio that grows with the length reaches 1.

    The search begins at a long sequence and goes by factors of two: up until the ratio is clearly above 1, then down
    until it is below 1. So a method that is fast at lengths that it computes exactly is not taken to be fast in
    between. The enclosed length is found by taking the logarithm of the ratio as linear in that of the length.

    Args:
        ratio: ratio(length); its attribute `seconds` is the duration of a call of the method.
        shortest: where to end.

    Returns:
        The length, at least `shortest` and at most `NEVER`.
    """
    length = max(shortest, _FIRST)
    measured = {length: ratio(length)}
    while measured[length] < _CLEAR:
        if 2 * length > _LONGEST or 2.0 * getattr(ratio, "seconds", 0.0) > _MAX_SECONDS:
            return min(crossover.NEVER, round(length / measured[length]))
        length *= 2
        measured[length] = ratio(length)
    high = min(measured)
    while measured[high] >= 1.0 and high > shortest:
        high = max(shortest, high // 2)
        measured[high] = ratio(high)
    if measured[high] >= 1.0:
        return shortest
    low = max(length for length, value in measured.items() if value < 1.0)
    high = min(length for length in measured if length > low)
    while high > _RANGE * low:
        # Not near the ends, where a jump of the ratio between them would leave nearly the same range.
        middle = round(min(max(_between(low, high, measured), low * _LEAST_STEP), high / _LEAST_STEP))
        measured[middle] = ratio(middle)
        low, high = (middle, high) if measured[middle] < 1.0 else (low, middle)
    return _between(low, high, measured)


def _between(low: int, high: int, ratios: Mapping[int, float]) -> int:
    """Where the ratio reaches 1 between two lengths, one with a ratio below 1 and one with a ratio not below 1."""
    share = -math.log(ratios[low]) / max(1e-9, math.log(ratios[high]) - math.log(ratios[low]))
    return round(low * math.exp(min(1.0, share) * math.log(high / low)))
