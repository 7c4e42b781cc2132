"""The length from which on a method is faster than exact attention on this machine.

`hf-efficient-attn crossover` measures it and writes it to a file in the user's cache folder
(`hf_efficient_attn.evaluation.crossover`); until then a built-in table serves. Nothing is measured here.

In a call with B sequences, H heads and head_dim D, exact attention of N tokens takes a time proportional to N^2 B H D.
A method takes a + b N B H D: the time a, of its many small operations, does not depend on the size of the call. So
both times are equal for N^2 = s N + o / (B H D), and the length depends on B H D (`total_dim`) as well. s and o follow
from measurements at two values of B H D.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from hf_efficient_attn.methods._shared.config import MethodConfig
from hf_efficient_attn.methods._shared.registry import make_config

# The values of B * H * D at which lengths are measured: 2 and 16 heads of 64.
SMALL_DIM = 128
LARGE_DIM = 1024
# Their head_dim. With a smaller one methods gain later: some of their work, such as choosing landmarks, does not depend
# on it. On a Xeon with AMX nearfar gains 1.28 times as late with 32, and 1.12 times with 128; kdeformer 1.11 and .97
# times; longformer .94 and 1.15 times (one thread, float32).
_HEAD_DIM = 64
_HEAD_POWER = 0.4
# A length that no sequence has: the method is not faster at any length.
NEVER = 2**31 - 1


class Crossover(NamedTuple):
    """Lengths from which on a method is faster than exact attention."""

    small: int  # the length in calls with a total_dim of `SMALL_DIM`
    large: int  # the length in calls with a total_dim of `LARGE_DIM`

    @functools.lru_cache(maxsize=256)  # noqa: B019 (only numbers are kept)
    def at(self, total_dim: int, relative_cost: float = 1.0) -> int:
        """Compute the length for calls with total_dim = B * H * D; see `crossover_length` for `relative_cost`."""
        if self.small < self.large:  # large calls leave the cache earlier than they pay for small operations
            share = min(1.0, max(0.0, math.log(total_dim / SMALL_DIM) / math.log(LARGE_DIM / SMALL_DIM)))
            return min(NEVER, round(relative_cost * self.small * math.pow(self.large / self.small, share)))
        # With s = 0 the lengths differ by the root of the ratio of the dimensions; a larger difference is noise.
        small = min(self.small, self.large * math.sqrt(LARGE_DIM / SMALL_DIM))
        overhead = (small - self.large) / (1.0 / (SMALL_DIM * small) - 1.0 / (LARGE_DIM * self.large))
        slope = relative_cost * (self.large - overhead / (LARGE_DIM * self.large))
        return min(NEVER, round((slope + math.sqrt(slope * slope + 4.0 * overhead / total_dim)) / 2.0))


# Maps names of dtype and causality to lengths.
Table = Mapping[str, Crossover]

# The lengths of nearfar; those of others follow from `MethodConfig.cost`. On processors they are rounded from two cores
# of a Zen 5, as measured by `hf-efficient-attn crossover`, and the causal ones from a Xeon with AMX. At those of other
# devices a failed attempt costs little on an NVIDIA H100, where exact attention is very fast.
_BUILT_IN = {
    "cpu": {
        "float32": Crossover(2688, 2688),
        "float32 causal": Crossover(8320, 8064),
        "bfloat16": Crossover(2624, 2496),
        "bfloat16 causal": Crossover(8320, 8064),
    },
    "": {
        "float32": Crossover(65536, 32768),
        "float32 causal": Crossover(65536, 65536),
        "bfloat16": Crossover(262144, 262144),
        "bfloat16 causal": Crossover(262144, 262144),
    },
}


# measured(method, device) returns the table of this machine, or None.
_MEASURED: list[Callable[[str, torch.device], Table | None]] = []


def use_measured(measured: Callable[[str, torch.device], Table | None]) -> None:
    """Take lengths from the tables that `measured(method, device)` returns. Another call asks for them again."""
    _MEASURED[:] = [measured]
    _find_row.cache_clear()


def table_key(dtype: torch.dtype, is_causal: bool) -> str:
    """Return the name of a row of a table. Half precision has one row, and float64 uses the row of float32."""
    name = "bfloat16" if dtype in (torch.bfloat16, torch.float16) else "float32"
    return f"{name} causal" if is_causal else name


def built_in_table(device_type: str) -> Table:
    """Return the table that serves until a machine has been measured."""
    return _BUILT_IN.get(device_type, _BUILT_IN[""])


def crossover_length(
    method: str,
    total_dim: int,
    *,
    dtype: torch.dtype,
    is_causal: bool,
    device: torch.device,
    relative_cost: float = 1.0,
) -> int:
    """Compute the number of tokens from which on a method is faster than exact attention on this machine.

    `total_dim` is B * H * D of the call, and `relative_cost` the cost of the method per token, relative to its cost
    with the default hyperparameters.
    """
    row, _ = _find_row(method, device, table_key(dtype, is_causal), torch.get_num_threads())
    return row.at(total_dim, relative_cost)


def crossover_of(
    config: MethodConfig, num_heads: int, head_dim: int, *, dtype: torch.dtype, is_causal: bool, device: torch.device
) -> int:
    """Compute `crossover_length` for a config and its hyperparameters, in calls with `num_heads` heads of a sequence.

    The number of sequences does not matter, so that a sequence has the same output in any batch.
    """
    row, cost = _find_row(config, device, table_key(dtype, is_causal), torch.get_num_threads())
    return row.at(num_heads * head_dim, cost * max(1.0, _HEAD_DIM / max(1, head_dim)) ** _HEAD_POWER)


@functools.lru_cache(maxsize=256)
def _find_row(method: str | MethodConfig, device: torch.device, key: str, num_threads: int) -> tuple[Crossover, float]:
    """Find the lengths of a method, and the cost of its hyperparameters relative to the measured ones.

    Both are cached, because the search takes a large part of the time of a short exact attention.
    """
    config = make_config(method)
    config = make_config(config.switches_to or config)
    cost = config.relative_cost
    table = _MEASURED[0](config.method, device) if _MEASURED else None
    if table is not None and key in table:  # with the default hyperparameters
        return table[key], cost / make_config(config.method).relative_cost
    # `cost` is that on processors.
    return built_in_table(device.type)[key], cost if device.type == "cpu" else max(1.0, cost)
