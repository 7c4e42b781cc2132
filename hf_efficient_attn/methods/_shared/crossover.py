"""The length from which on a method is faster than exact attention on this machine.

`hf-efficient-attn crossover` measures it and writes it to a file in the user's cache folder; until then a built-in
table serves. Nothing is measured here.

In a call with B sequences, H heads and head_dim D, exact attention of N tokens takes a time proportional to N^2 B H D.
A method takes a + b N B H D: the time a, of its many small operations, does not depend on the size of the call. So
the two are equal for N^2 = s N + o / (B H D), and the length depends on B H D (`total_dim`) as well. s and o follow
from measurements at two values of it.
"""

import functools
import json
import math
import os
import pathlib
import platform
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hf_efficient_attn.version import __version__

FORMAT = 1
# The values of B * H * D at which lengths are measured: 2 and 16 heads of 64.
SMALL_DIM, LARGE_DIM = 128, 1024
# A length that no sequence has: the method is not faster at any length.
NEVER = 2**31 - 1
_COMMAND = "hf-efficient-attn crossover --renew"
_MAX_BYTES = 1 << 20


class Crossover(NamedTuple):
    """Lengths from which on a method is faster than exact attention.

    Attributes:
        small: in calls with a total_dim of `SMALL_DIM`.
        large: in calls with a total_dim of `LARGE_DIM`.
    """

    small: int
    large: int

    def at(self, total_dim: int, relative_cost: float = 1.0) -> int:
        """The length for any size of a call.

        Args:
            total_dim: B * H * D.
            relative_cost: cost of the method per token, divided by that with its default hyperparameters.
        """
        if self.small < self.large:  # large calls leave the cache earlier than they pay for small operations
            share = min(1.0, max(0.0, math.log(total_dim / SMALL_DIM) / math.log(LARGE_DIM / SMALL_DIM)))
            return min(NEVER, round(relative_cost * self.small * math.pow(self.large / self.small, share)))
        # With s = 0 the lengths differ by the root of the ratio of the dimensions; a larger difference is noise.
        small = min(self.small, self.large * math.sqrt(LARGE_DIM / SMALL_DIM))
        overhead = (small - self.large) / (1.0 / (SMALL_DIM * small) - 1.0 / (LARGE_DIM * self.large))
        slope = relative_cost * (self.large - overhead / (LARGE_DIM * self.large))
        return min(NEVER, round((slope + math.sqrt(slope * slope + 4.0 * overhead / total_dim)) / 2.0))


# Names of dtype and causality -> lengths.
Table = Mapping[str, Crossover]

# Those of a processor are rounded from nearfar on two cores of a Zen 5, with two threads and without other work, by
# `hf-efficient-attn crossover`. Of other devices nothing is known, and exact attention is very fast there.
_BUILT_IN = {
    "cpu": {
        "float32": Crossover(2688, 2560),
        "float32 causal": Crossover(5632, 4608),
        "bfloat16": Crossover(2560, 2432),
        "bfloat16 causal": Crossover(5632, 4864),
    },
    "": {
        "float32": Crossover(16384, 8192),
        "float32 causal": Crossover(32768, 16384),
        "bfloat16": Crossover(32768, 16384),
        "bfloat16 causal": Crossover(65536, 32768),
    },
}


def table_key(dtype: torch.dtype, is_causal: bool) -> str:
    """The name of a row of a table. Half precision has one row, and float64 that of float32."""
    name = "bfloat16" if dtype in (torch.bfloat16, torch.float16) else "float32"
    return f"{name} causal" if is_causal else name


def built_in_table(device_type: str) -> Table:
    """The table that serves until a machine has been measured."""
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
    """The number of tokens from which on a method is faster than exact attention on this machine.

    The file is read once in a process.

    Args:
        method: the name of the method.
        total_dim: B * H * D of the call.
        dtype: of query, key and value.
        is_causal: whether the attention is causal.
        device: of the tensors.
        relative_cost: cost of the method per token, divided by that with its default hyperparameters.
    """
    key = table_key(dtype, is_causal)
    return _kept_length(method, device, key, total_dim, relative_cost, torch.get_num_threads())


@functools.lru_cache(maxsize=256)
def _kept_length(
    method: str, device: torch.device, key: str, total_dim: int, relative_cost: float, num_threads: int
) -> int:
    """The length, kept because to find it takes a sizable part of exact attention of a short sequence."""
    table = measured_table(str(cache_file()), machine_name(device), method) or {}
    return (table.get(key) or built_in_table(device.type)[key]).at(total_dim, relative_cost)


def cache_file() -> pathlib.Path:
    """Where the lengths are stored.

    `crossover.json` in the folder $HEA_CACHE, or else in `hf_efficient_attn` in $XDG_CACHE_HOME or ~/.cache.
    """
    own, general = os.environ.get("HEA_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return pathlib.Path(own) / "crossover.json"
    return (pathlib.Path(general) if general else pathlib.Path.home() / ".cache") / "hf_efficient_attn/crossover.json"


def machine_name(device: torch.device) -> str:
    """What the measured lengths depend on: processor, device, threads, and the versions of PyTorch and this package."""
    where = _device_name(device.type, device.index)
    threads = torch.get_num_threads()
    return f"{where}, {threads} thread{'s' * (threads != 1)}, torch {torch.__version__}, version {__version__}"


@functools.cache
def _device_name(device_type: str, index: int | None) -> str:
    if device_type == "cpu":
        return processor_name()
    name = torch.cuda.get_device_name(index) if device_type == "cuda" else device_type
    return f"{name} and {processor_name()}"


@functools.cache
def processor_name() -> str:
    """The processor's name according to the operating system."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.lru_cache(maxsize=64)
def measured_table(path: str, machine: str, method: str) -> Table | None:
    """The lengths in a file for a machine and a method; None if it has none. Read once per process, see `forget`.

    Warns:
        UserWarning: the file cannot be read, or is not of this package. Then there are none.
    """
    try:
        return parse(read_cache(pathlib.Path(path)), machine, method)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        warnings.warn(
            f"{path} holds no lengths that can be used ({reason}), so that built-in lengths decide where {method} "
            f"replaces exact attention. `{_COMMAND}` writes the file again",
            stacklevel=2,
        )
        return None


def forget() -> None:
    """Read the file again at the next call, because it has been written."""
    measured_table.cache_clear()
    _kept_length.cache_clear()


def read_cache(path: pathlib.Path) -> dict[str, Any]:
    """The machines in a file: name -> method -> row -> [small, large]. Empty if there is no file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a file of this package.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(content) > _MAX_BYTES:
        raise ValueError("it is too large")
    try:
        values = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT or not isinstance(values.get("machines"), dict):
        raise ValueError("it has another format")
    return dict(values["machines"])


def parse(machines: Mapping[str, Any], machine: str, method: str) -> Table | None:
    """The table of a machine and a method, with every value checked; raises `ValueError`."""
    methods = machines.get(machine, {})
    rows = methods.get(method) if isinstance(methods, dict) else methods
    if rows is None:
        return None
    known = _BUILT_IN["cpu"]
    if not isinstance(rows, dict) or not rows or not all(name in known and _is_pair(x) for name, x in rows.items()):
        raise ValueError(f"the lengths of {method} are damaged")
    return {name: Crossover(*pair) for name, pair in rows.items()}


def _is_pair(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) == 2
    return is_list and all(type(x) is int and 1 <= x <= NEVER for x in value)
