"""Measures from which length on a method is faster than exact attention on this machine, and stores it.

`hf_efficient_attn.methods._shared.crossover` describes what the lengths depend on, and looks them up.
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
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.methods import MethodConfig, attention, crossover, learns, make_config

_HEAD_DIM = 64
_SHORTEST, _LONGEST = 256, 1 << 17
# A ratio is the median over so many rounds: fewer while the range is searched, more within it.
_ROUNDS, _FINAL_ROUNDS = 1, 5
# Shorter calls are repeated until they take this time in seconds.
_MIN_SECONDS = 4e-3
# Longer calls of exact attention are not measured: beyond them the ratio is taken to grow in proportion to the length.
_MAX_SECONDS = 2.0
# A ratio that is large enough for a search to stop there; a ratio just above 1 may be due to chance.
_CLEAR = 1.3
# Steps within the range in which the ratio reaches 1.
_REFINEMENTS = 3


def measure_crossover(method: str, device: torch.device, *, progress: bool = False) -> dict[str, crossover.Crossover]:
    """Measure the lengths of a method with its default hyperparameters, which takes a few seconds.

    Args:
        method: its name.
        device: where to measure.
        progress: whether to show a bar on stderr if that is a terminal.

    Returns:
        row of the table -> lengths, for float32 and bfloat16, and causal if the method has a causal form.

    Raises:
        UnsupportedAttentionError: an unknown method, or one with learned parameters, or auto.
    """
    config = make_config(method)
    if method == "auto":
        raise UnsupportedAttentionError(
            "auto replaces exact attention from the length on that is measured for nearfar: name nearfar, or leave "
            "--method out"
        )
    if learns(config):
        raise UnsupportedAttentionError(
            f"{method} has learned parameters and does not approximate exact attention before training, so that it "
            "replaces exact attention at no length: name another method"
        )
    cases = [
        (dtype, causal) for dtype in (torch.float32, torch.bfloat16) for causal in (False, True)[: 1 + config.causal]
    ]
    found = {}
    with (
        torch.no_grad(),
        use_device(device),
        tqdm(total=2 * len(cases), desc=f"measuring {method}", leave=False, disable=None if progress else True) as bar,
    ):
        for dtype, is_causal in cases:
            lengths = []
            for total_dim in (crossover.SMALL_DIM, crossover.LARGE_DIM):
                ratio = Ratio(config, total_dim // _HEAD_DIM, dtype, device, is_causal)
                lengths.append(find_crossover(ratio, max(_SHORTEST, config.exact_length + 1)))
                bar.update()
            found[crossover.table_key(dtype, is_causal)] = crossover.Crossover(*lengths)
    return found


class Ratio:
    """Time of exact attention divided by that of a method, at any length.

    Args:
        config: of the method.
        num_heads: of one sequence, with head_dim 64.
        dtype: of the inputs.
        device: of the inputs.
        is_causal: whether the attention is causal.

    Attributes:
        exact_seconds: time of exact attention in the last measurement.
    """

    def __init__(
        self, config: MethodConfig, num_heads: int, dtype: torch.dtype, device: torch.device, is_causal: bool
    ) -> None:
        self._config, self._num_heads, self._is_causal = config, num_heads, is_causal
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.exact_seconds = 0.0

    def __call__(self, length: int, rounds: int) -> float:
        """The median over rounds in which both are measured in turn."""
        generator = torch.Generator().manual_seed(0)
        shape = (3, 1, self._num_heads, length, _HEAD_DIM)
        query, key, value = torch.randn(shape, generator=generator).to(**self._options)

        def exact() -> None:
            scaled_dot_product_attention(query, key, value, is_causal=self._is_causal)

        def method() -> None:
            attention(self._config, query, key, value, is_causal=self._is_causal)

        ratio, self.exact_seconds = paired_ratio(exact, method, rounds)
        return ratio


def paired_ratio(first: Work, second: Work, rounds: int) -> tuple[float, float]:
    """The median over rounds of time of `first` / time of `second`, measured in turn, and the median time of `first`.

    A call before the first round fills memory and caches, and determines how often each is called in a round.
    """
    numbers = [math.ceil(_MIN_SECONDS / max(1e-6, time_calls(work))) for work in (first, second)]
    pairs = [(time_calls(first, numbers[0]), time_calls(second, numbers[1])) for _ in range(rounds)]
    return statistics.median(a / b for a, b in pairs), statistics.median(a for a, _ in pairs)


def find_crossover(ratio: Callable[..., float], shortest: int) -> int:
    """The length at which a noisy ratio that grows with the length reaches 1.

    The length is doubled until the ratio is clearly above 1. The last length with a ratio below 1 and the one after it
    enclose the result, so that a method that is fast at lengths that it computes exactly is not taken to be fast in
    between. Within them, the logarithm of the ratio is taken to be linear in that of the length.

    Args:
        ratio: ratio(length, rounds); its attribute `exact_seconds` is the duration of one of its calls.
        shortest: where to begin.

    Returns:
        The length, at least `shortest` and at most `NEVER`.
    """
    measured: list[tuple[int, float]] = []
    length = shortest
    while True:
        measured.append((length, ratio(length, _ROUNDS)))
        is_clear = measured[-1][1] >= _CLEAR
        if is_clear or 2 * length > _LONGEST or 4.0 * getattr(ratio, "exact_seconds", 0.0) > _MAX_SECONDS:
            break
        length *= 2
    below = [index for index, (_, value) in enumerate(measured) if value < 1.0]
    if not below:
        return shortest
    if below[-1] == len(measured) - 1:
        length, value = measured[-1]
        return min(crossover.NEVER, round(length / value))
    low, high = measured[below[-1]], measured[below[-1] + 1]
    for _ in range(_REFINEMENTS):
        middle = _between(low, high)
        if not low[0] < middle < high[0]:
            break
        value = ratio(middle, _FINAL_ROUNDS)
        low, high = ((middle, value), high) if value < 1.0 else (low, (middle, value))
    return _between(low, high)


def _between(low: tuple[int, float], high: tuple[int, float]) -> int:
    """Where the ratio of two measurements (length, ratio), one below and one not below 1, reaches 1."""
    share = -math.log(low[1]) / max(1e-9, math.log(high[1]) - math.log(low[1]))
    return round(low[0] * math.exp(min(1.0, share) * math.log(high[0] / low[0])))


def store_crossover(method: str, device: torch.device, found: Mapping[str, crossover.Crossover]) -> None:
    """Write the lengths of a method on this machine into the user's cache folder. Those of others are kept.

    Raises:
        OSError: the file cannot be written.
    """
    path = crossover.cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        machines = crossover.read_cache(path)
    except ValueError:  # `measured_table` has warned of it
        machines = {}
    methods = machines.get(crossover.machine_name(device))
    methods = methods if isinstance(methods, dict) else {}
    rows = {name: list(lengths) for name, lengths in found.items()}
    machines[crossover.machine_name(device)] = {**methods, method: rows}
    with replacing(path) as draft:
        write_json(draft, {"format": crossover.FORMAT, "machines": machines})
    crossover.forget()
